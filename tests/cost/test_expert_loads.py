"""Loads of experts: the busiest rank of a power law or a histogram, and what copies of hot experts save."""

import json
from pathlib import Path

import numpy as np
import pytest

import stepcast
from stepcast.cost.experts import balanced_load, busiest_share, fill_smallest, power_law_draws, power_law_load, skew_of


def test_equal_loads_have_no_busiest_rank() -> None:
    assert busiest_share([3.0] * 64, 8) == 1.0
    load = balanced_load(4096, 64, 8, 8)
    assert (load.rows, load.active) == (4096, 8)
    assert load.padded == (4096, 4096, 4096)


def test_a_hot_expert_is_halved_by_a_copy() -> None:
    loads = [1.0] * 7 + [9.0]
    assert busiest_share(loads, 8) == 4.5
    assert busiest_share(loads, 8, replicas=1) == pytest.approx(5.5 / 2)


def test_a_power_law_costs_more_the_fewer_experts_a_rank_has() -> None:
    draw = power_law_draws(128, 8, 1.2, 32768)[0]
    shares = [busiest_share(draw, ranks) for ranks in (2, 8, 32, 128)]
    assert shares == sorted(shares)
    assert 1.0 < shares[0] < 1.5 < shares[2]
    assert busiest_share(draw, 8, replicas=4) < shares[1]
    assert power_law_load(4096, 128, 8, 1, 1.2).rows == pytest.approx(4096 * 8, rel=1e-3)


def test_rows_that_full_experts_cannot_take_go_to_the_smallest() -> None:
    one_by_one = np.array([5.0, 0.0, 2.0, 9.0])
    for _ in range(8):
        one_by_one[one_by_one.argmin()] += 1.0
    filled = fill_smallest(np.array([5.0, 0.0, 2.0, 9.0]), 8, 10)
    assert sorted(filled) == sorted(one_by_one)
    assert power_law_load(2, 128, 8, 1, 1.2).rows == 16


def test_unequal_experts_of_one_rank_fill_more_blocks() -> None:
    assert skew_of([5.0] * 64, 8, 1, 4096) == (1.0, 1.0)
    largest, blocks = skew_of([1000.0] * 2 + [1.0] * 62, 8, 1, 4096)
    assert largest == 8.0
    assert blocks == (2 * 16 + 62 * 2) / 128
    assert skew_of([1000.0] * 2 + [1.0] * 62, 8, 1, 4096, replicas=2)[0] == 4.0


def test_loads_that_do_not_fit_the_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="10 loads cannot be spread evenly over 4"):
        busiest_share([1.0] * 10, 4)


def predict(**choices: object) -> stepcast.Prediction:
    sizes = {"gpus": 8, "ep": 8, "micro_batch": 1, "global_batch": 16, "seq": 4096}
    return stepcast.predict("qwen3-30b-a3b", "dgx-h100", **sizes, **choices)  # type: ignore[arg-type]


def test_a_histogram_slows_the_step(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    file.write_text(json.dumps({"tokens_per_expert": [100] * 112 + [200] * 16}))
    even, skewed = predict(expert_load="balanced"), predict(expert_load=str(file))
    assert skewed.step_s > even.step_s
    assert skewed.step_s == predict(expert_imbalance=2 / 1.125).step_s
    assert predict(expert_load=str(file), expert_replicas=16).step_s < skewed.step_s


@pytest.mark.parametrize("model", ["gpt-oss-20b", "qwen3-30b-a3b"])
def test_skew_on_one_rank_slows_the_step(tmp_path: Path, model: str) -> None:
    def step_s(load: str | None = None) -> float:
        choices = {"gpus": 1, "framework": "transformers", "micro_batch": 2, "global_batch": 2, "seq": 4096}
        return stepcast.predict(model, "hgx-h200", expert_load=load, **choices).step_s  # type: ignore[arg-type]

    def hottest(count: int) -> str:
        file = tmp_path / f"{count}.json"
        file.write_text(json.dumps([count] + [100] * (31 if model == "gpt-oss-20b" else 127)))
        return str(file)

    times = [step_s(load) for load in (None, "balanced", hottest(100), hottest(200), hottest(400), hottest(600))]
    assert times[0] == times[1] == times[2]
    assert times == sorted(times)
    assert step_s("power-law:1.2") > times[0]
    if model == "gpt-oss-20b":  # the gradient of biases adds rows of the largest expert in turn
        assert times[2] < times[3] < times[4] < times[5]


@pytest.mark.parametrize(
    ("load", "message"),
    [("power-law:none", "power-law:ALPHA"), ("nowhere.json", "nowhere.json"), ("power-law:9", "0.1 to 5")],
)
def test_unknown_loads_are_refused(load: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(expert_load=load)


@pytest.mark.parametrize("text", ["[1, true]", '{"a": 1}', "1 two", "[1e400, 2]", "[0, 0]", "{", "[1]"])
def test_damaged_files_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "load.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"tokens|experts"):
        predict(expert_load=str(file))


def test_no_rank_gets_more_than_its_experts_can() -> None:
    """A token takes 2 of 8 experts, so an expert that gets every token has 4 times the mean; no rank has more."""
    tokens = 32768
    for draw in power_law_draws(8, 2, 1.2, tokens):
        assert sum(draw) == pytest.approx(2 * tokens, rel=0.02)
        assert busiest_share(draw, 8) == pytest.approx(skew_of(draw, 2, 8, tokens)[0], rel=0.02)
        assert busiest_share(draw, 8) <= 4.02
