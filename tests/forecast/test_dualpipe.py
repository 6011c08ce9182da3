"""DualPipe: two copies of the model, and pairs of a forward and a backward."""

from itertools import product
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stepcast
from stepcast.simulation.schedules import PairPart, merge_parts

pytestmark = pytest.mark.slow

NIC_BYTES_PER_S = 50e9


def test_the_two_copies_of_each_layer_add_their_gradients() -> None:
    """Every GPU holds 2 / (tp x pp) of the model; ranks of one pair sit on different nodes."""
    choices: dict[str, Any] = {"gpus": 64, "tp": 8, "pp": 8, "global_batch": 32}
    report = stepcast.predict("llama-3.1-70b", "dgx-h100", schedule="dualpipe", **choices).report
    gradient_bytes = 2 * 70.55e9 / 64 * 4
    assert report.communication_s["mirror"].total_s == pytest.approx(gradient_bytes / NIC_BYTES_PER_S, rel=0.06)
    plain = stepcast.predict("llama-3.1-70b", "dgx-h100", **choices).report
    assert "mirror" not in plain.communication_s


def test_gradients_are_reduced_once_over_data_parallel_ranks() -> None:
    """A schedule of whole and of split backwards reduces after the last of either: twice what 1F1B does, for
    two copies.
    """
    choices: dict[str, Any] = {"gpus": 64, "tp": 4, "pp": 4, "global_batch": 64, "sharding": "none"}
    once, twice = (
        stepcast.predict("llama-3.1-8b", "dgx-h100", schedule=schedule, **choices).report.communication_s
        for schedule in ("1f1b", "dualpipe")
    )
    assert twice["dp"].total_s == pytest.approx(2 * once["dp"].total_s, rel=0.1)


def test_dense_dualpipe_hides_no_tensor_parallel_collectives() -> None:
    choices: dict[str, Any] = {
        "gpus": 32,
        "tp": 8,
        "pp": 4,
        "global_batch": 64,
        "overlap": "gradients,parameters,transfers",
    }
    report = stepcast.predict("llama-3.1-70b", "dgx-h100", schedule="dualpipe", **choices).report
    tensor = report.communication_s["tp"]
    assert tensor.exposed_s == pytest.approx(tensor.total_s, rel=1e-6)


def test_dualpipe_hides_the_exchanges_of_experts() -> None:
    choices: dict[str, Any] = {"gpus": 64, "ep": 8, "pp": 4, "global_batch": 512, "expert_tp": 1}
    shares = []
    for schedule in ("1f1b", "dualpipe"):
        report = stepcast.predict("qwen3-30b-a3b", "dgx-h100", schedule=schedule, **choices).report
        shares.append(report.communication_s["ep"].exposed_s / report.communication_s["ep"].total_s)
    assert shares[0] == pytest.approx(1.0, rel=1e-6)
    assert shares[1] < 0.5


@pytest.mark.parametrize("choices", [{"pp": 32, "schedule": "dualpipe"}, {"pp": 8, "vpp": 4, "overlap": "experts"}])
def test_recomputation_beside_exchanges_is_not_faster_than_none(choices: dict[str, Any]) -> None:
    common: dict[str, Any] = {"gpus": 1024, "tp": 2, "cp": 2, "ep": 16, "micro_batch": 2, "global_batch": 2048}
    times_s = [
        stepcast.predict("deepseek-v3", "dgx-h100", recompute=recompute, **common, **choices).step_s
        for recompute in ("none", "selective:norms", "selective:norms,core-attention", "full")
    ]
    assert times_s == sorted(times_s)


LENGTHS = st.lists(st.integers(0, 5).map(float), max_size=4)


def parts_of(lengths: list[float], exchanges_first: bool) -> list[PairPart]:
    return [PairPart((at % 2 == 0) == exchanges_first, length) for at, length in enumerate(lengths)]


def ends_s(jobs: tuple[list[PairPart], list[PairPart]], order: tuple[int, ...]) -> float:
    """Parts start in the order of issue when what they need is free and their slot has come to them."""
    ready_s, free_s, at = [0.0, 0.0], {False: 0.0, True: 0.0}, [0, 0]
    for number in order:
        exchanges, length_s = jobs[number][at[number]]
        end_s = max(ready_s[number], free_s[exchanges]) + length_s
        ready_s[number] = free_s[exchanges] = end_s
        at[number] += 1
    return max(ready_s)


@given(LENGTHS, LENGTHS, st.booleans(), st.booleans())
def test_pairs_run_in_the_best_of_all_orders(
    one: list[float], two: list[float], first_exchanges: bool, second_exchanges: bool
) -> None:
    jobs = parts_of(one, first_exchanges), parts_of(two, second_exchanges)
    count = len(one) + len(two)
    orders = [order for order in product((0, 1), repeat=count) if sum(order) == len(two)]
    best_s = min(ends_s(jobs, order) for order in orders)
    assert ends_s(jobs, tuple(merge_parts(*jobs))) == best_s


def test_the_last_bit_of_a_time_changes_no_order() -> None:
    """Equally fast orders are told apart in the same way on machines that round the last bit in theirs."""
    random = Random(1)
    for _ in range(300):
        jobs = [[PairPart(index % 2 == 1, random.choice((0.1, 0.2, 0.3))) for index in range(7)] for _ in range(2)]
        nudged = [
            [part._replace(seconds=part.seconds * (1 + random.choice((-1e-15, 1e-15)))) for part in job] for job in jobs
        ]
        assert merge_parts(*nudged) == merge_parts(*jobs)
