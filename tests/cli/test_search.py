"""``stepcast search`` from outside."""

import csv
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest

from stepcast.forecast.predict import predict_many
from stepcast.frameworks.catalog import load_framework
from stepcast.models.catalog import load_model
from stepcast.searching.space import useful_recomputes
from tests.cli.test_main import run, run_json

NARROW = ("--fix", "sharding=zero-1", "--allow", "micro-batch=1,2", "--allow", "pp=1,2", "--allow", "tp=1,2,4")
QUESTION = ("--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "16")
SMALL = (*QUESTION, *NARROW, "--allow", "recompute=none,full")
# For tests of how an answer is written, whatever was searched.
TINY = (*QUESTION, *NARROW, "--fix", "recompute=none", "--fix", "schedule=1f1b", "--fix", "cp=1")


def test_every_row_is_what_its_command_predicts(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "search", *SMALL, "--top", "4")
    assert [row["rank"] for row in found["rows"]] == [1, 2, 3, 4]
    for row in found["rows"]:
        predicted = run_json(capsys, *shlex.split(row["command"])[1:])
        assert predicted["step_s"] == row["step_s"]
        assert predicted["memory_bytes"]["total"] == row["memory_bytes"]
        assert predicted["mfu"] == row["mfu"]
        ends = predicted["uncertainty"]
        assert (ends["low_s"], ends["high_s"]) == (row["low_s"], row["high_s"])


def test_recipes_of_a_framework_hold_of_the_layouts_they_name(capsys: pytest.CaptureFixture[str]) -> None:
    question = ("--model", "qwen3-30b-a3b", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "16")
    narrow = ("--fix", "cp=1", "--allow", "tp=1,2", "--fix", "sharding=zero-1", "--fix", "micro-batch=1")
    few = ("--allow", "ep=1,8", "--allow", "pp=1,2", "--allow", "vpp=1,2", "--fix", "expert-tp=1")
    recipes = ("--framework", "megatron-bridge-26.06", "--seq", "4096", "--top", "40")
    found = run_json(capsys, "search", *question, *narrow, *few, *recipes)
    rows = found["rows"]
    assert len(rows) > 1
    for row in (rows[0], rows[-1]):
        assert run_json(capsys, *shlex.split(row["command"])[1:])["step_s"] == row["step_s"]


def test_text_tells_ranks_reasons_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    status, printed, _ = run(capsys, "search", *SMALL, "--top", "2", "--tokens", "1T", "--price", "2")
    assert status == 0
    for word in ("searched", "candidates", "illegal", "do not fit", "simulated", "bottleneck", "rank 2", "GPU-hours"):
        assert word in printed
    assert "stepcast predict --model llama-3.2-1b" in printed


def test_memory_is_the_bottleneck_where_more_of_it_gains(capsys: pytest.CaptureFixture[str]) -> None:
    """In 60 GiB a larger micro-batch may fit, too, and gains less than 3 %."""
    for memory, what in (("9GiB", "memory"), ("60GiB", "compute")):
        found = run_json(capsys, "search", *SMALL, "--max-memory", memory, "--top", "1")
        (roomier,) = [row for row in found["sensitivity"] if row["change"] == "+16.00 GiB"]
        assert (found["binds"]["what"], roomier["speed"] > 1.03) == (what, what == "memory")


def test_several_numbers_of_gpus_are_searched_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    question = [*TINY]
    question[question.index("8")] = "4..8"
    fastest = run_json(capsys, "search", *question, "--top", "3")
    assert fastest["rows"][0]["gpus"] == 8
    cheapest = run_json(capsys, "search", *question, "--top", "3", "--objective", "cost")
    best = cheapest["rows"][0]
    assert best["step_s"] * best["gpus"] <= fastest["rows"][0]["step_s"] * 8


def test_a_batch_of_tokens_is_so_many_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    question = [*TINY]
    at = question.index("--global-batch")
    question[at : at + 2] = ["--tokens-per-batch", "65536", "--seq", "4096"]
    assert run_json(capsys, "search", *question, "--top", "1")["global_batch"] == 16
    question[at + 1] = "4M"
    status, _, err = run(capsys, "search", *question)
    assert (status, "of 4,096 tokens; 4194304 is 1,024 and 4001792 is 977" in err) == (2, True)


def test_rows_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, document = tmp_path / "rows.csv", tmp_path / "rows.json"
    found = run_json(capsys, "search", *TINY, "--top", "2", "-o", str(table))
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [float(row["step_s"]) for row in rows] == [row["step_s"] for row in found["rows"]]
    run(capsys, "search", *TINY, "--top", "2", "-o", str(document))
    assert json.loads(document.read_text())["rows"] == found["rows"]


def test_numbers_come_first_where_a_strategy_is_too_long_for_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns, last in (("120", "free"), ("60", "strategy")):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = run(capsys, "search", *TINY, "--top", "2")
        head = next(line for line in out.splitlines() if line.startswith("rank "))
        assert head.split()[0] == "rank"
        assert head.split()[-1] == last


def test_where_nothing_fits_the_least_change_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    question = ("--model", "llama-3.1-70b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "64")
    few = ("--fix", "sharding=zero-1", "--fix", "schedule=1f1b", "--fix", "cp=1", "--fix", "micro-batch=1")
    status, printed, _ = run(capsys, "search", *question, *few, "--fix", "tp=8", "--fix", "recompute=full")
    assert status == 1
    assert "nothing fits" in printed
    assert "2 times the GPUs: --gpus 16" in printed or "4 times the GPUs: --gpus 32" in printed
    assert "stepcast predict --model llama-3.1-70b" in printed


def test_a_search_ends_when_its_time_is_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.html"
    words = ("search", *SMALL, "--workers", "1", "--time", "1e-9s", "--html", str(page))
    status, printed, _ = run(capsys, *words)
    assert status == 1
    assert "out of time" in page.read_text()
    assert "fits" not in page.read_text().partition("<script")[0].partition("<body")[2]
    assert "out of time" in printed
    assert "nothing yet" in printed
    from stepcast.searching import best

    # As if each simulation took a minute.
    clock = [0.0]

    def slow(model: Any, cluster: Any, strategies: Any, *given: Any) -> Any:
        clock[0] += 60.0 * len(strategies)
        return predict_many(model, cluster, strategies, *given)

    monkeypatch.setattr(best, "predict_many", slow)
    monkeypatch.setattr("stepcast.searching.best.time.monotonic", lambda: clock[0])
    found = run_json(capsys, "search", *SMALL, "--workers", "1", "--top", "2", "--time", "10m")
    assert found["counts"]["out_of_time"]
    # Each row of the answer is taken to need two minutes more, so that the search ends after six or less.
    assert 2 <= found["counts"]["simulated"] <= 7
    assert found["counts"]["unseen"] > 0
    assert found["least_s"] > 0
    assert len(found["rows"]) == 2


def test_a_search_whose_bounds_take_too_long_has_simulated_some(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if each simulation, and the price of each kind of layer for the bounds, took a second."""
    from stepcast.searching import best, layers
    from stepcast.searching import bounds as timing

    clock = [0.0]

    def lasting(call: Any) -> Any:
        def slow(*given: Any) -> Any:
            clock[0] += 1.0
            return call(*given)

        return slow

    monkeypatch.setattr(best, "predict_many", lasting(predict_many))
    monkeypatch.setattr(timing, "part_costs", lasting(layers.part_costs))
    monkeypatch.setattr("stepcast.searching.best.time.monotonic", lambda: clock[0])
    found = run_json(capsys, "search", *SMALL, "--workers", "1", "--top", "2", "--time", "20s")
    assert found["counts"]["out_of_time"]
    assert found["rows"]
    assert clock[0] <= 20 + 16  # prices between two looks at the clock
    step = run_json(capsys, *shlex.split(found["rows"][0]["command"])[1:])
    assert step["step_s"] == found["rows"][0]["step_s"]


def test_an_interrupt_prints_the_best_so_far(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepcast.searching import best

    # Whoever runs the tests in the background has them ignore interrupts.
    calls, before, usual = [], signal.default_int_handler, signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)

    def interrupted(*given: Any) -> Any:
        calls.append(given)
        if len(calls) == 4:  # the first is the layout that is shown before all are listed
            os.kill(os.getpid(), signal.SIGINT)
        return predict_many(*given)

    monkeypatch.setattr(best, "predict_many", interrupted)
    status, printed, _ = run(capsys, "search", *SMALL, "--workers", "1")
    assert status == 130
    assert "incomplete" in printed
    assert " 3 simulated" in " ".join(printed.split())
    assert "interrupted: " in printed
    assert "candidates left, which may be better" in " ".join(printed.split())
    assert "stepcast predict" in printed
    assert signal.getsignal(signal.SIGINT) is before
    signal.signal(signal.SIGINT, usual)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("--gpus", "64..8"), "ends before it begins; use 8..64"),
        (("--gpus", "none"), "expected a whole number"),
        (("--objective", "speed"), "unrecognised value 'speed'"),
        (("--fix", "pq=2"), "expected a value of base-weights, tp, cp"),
        (("--fix", "cp=1,2"), "several values; use --allow cp=1,2"),
        (("--fix", "cp=x"), "expected a whole number"),
        (("--fix", "tp=2"), "tp is given twice"),
        (("--allow", "recompute=some"), "expected one of none, selective, full"),
        (("--fix", "cp=3"), "no candidates: tp x cp x pp divides 8 GPUs for none"),
        (("--price", "2"), "use --tokens as well"),
        (("-o", "rows.txt"), "ends in .csv, .parquet or .json"),
    ],
)
def test_mistakes_are_told_in_one_line(
    changed: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, printed, error = run(capsys, "search", *QUESTION, *NARROW, *changed)
    assert status == 2
    assert not printed
    assert message in error
    assert error.count("\n") == 1


def test_two_kinds_of_gpus_share_the_layers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "both.toml"
    cluster.write_text('base = "dgx-h100"\nnodes = 1\n[other]\ncluster = "dgx-a100"\nnodes = 1\n')
    question = ["--model", "llama-3.2-1b", "--cluster", str(cluster), "--gpus", "16", "--global-batch", "16"]
    few = ("--fix", "schedule=1f1b", "--fix", "recompute=none", "--fix", "sequence-parallel=no", "--fix", "cp=1")
    found = run_json(capsys, "search", *question, *NARROW, *few, "--top", "2")
    best = found["rows"][0]
    assert "on h100-sxm" in best["kinds"]
    assert "on a100-sxm-80gb" in best["kinds"]
    assert sum(map(int, best["stage_layers"].split(","))) == 16
    again = run_json(capsys, *shlex.split(best["command"])[1:])
    assert again["rows"][0]["step_s"] == best["step_s"]
    question[question.index("16")] = "12"
    status, _, error = run(capsys, "search", *question, *NARROW)
    assert status == 2
    assert "has two kinds of GPUs; use all 16, or at most the 8 of the first kind" in error


def test_what_overlaps_can_be_searched(capsys: pytest.CaptureFixture[str]) -> None:
    question = ("--fix", "schedule=1f1b", "--fix", "cp=1", "--allow", "overlap=usual,none,tensor")
    found = run_json(capsys, "search", *SMALL, *question, "--top", "30")
    assert {each["overlap"] for row in found["rows"] for each in (row, *row["variants"])} >= {"none"}
    for row in found["rows"][:2]:
        assert run_json(capsys, *shlex.split(row["command"])[1:])["step_s"] == row["step_s"]


def test_parquet_without_its_library_is_told_before_the_search(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pyarrow", None)
    status, _, error = run(capsys, "search", *SMALL, "-o", "rows.parquet")
    assert status == 2
    assert "pip install 'stepcast[parquet]'" in error


def test_the_answer_says_what_would_change_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "search", *SMALL, "--top", "2")
    assert [each["change"] for each in found["sensitivity"]] == ["2 x network", "+16.00 GiB", "2 x batch"]
    assert all(each["speed"] > 0.9 for each in found["sensitivity"])


@pytest.mark.parametrize("objective", ["step", "energy"])
def test_numbers_of_gpus_are_not_compared_with_each_other(capsys: pytest.CaptureFixture[str], objective: str) -> None:
    """Twice the GPUs are neither a tie of rank 1 nor the effect of a faster network."""
    asked = ("--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "8,16", "--global-batch", "64")
    fixed = ("schedule=1f1b", "recompute=none", "cp=1", "sharding=zero-1")
    narrow = [word for each in fixed for word in ("--fix", each)]
    found = run_json(
        capsys,
        "search",
        *asked,
        *narrow,
        "--allow",
        "micro-batch=1,2",
        "--top",
        "6",
        "--seq",
        "4096",
        "--objective",
        objective,
    )
    best, rows = found["rows"][0], found["rows"]
    changes = {each["change"]: each for each in found["sensitivity"]}
    assert all(each["gpus"] == best["gpus"] for each in changes.values())
    faster = shlex.split(best["command"])[1:]
    step = run_json(capsys, *faster, "--set", "node.nic.bandwidth=800Gbps")  # twice those of a dgx-h100
    assert changes["2 x network"]["step_s"] <= step["step_s"]
    assert changes["2 x network"]["speed"] == pytest.approx(best["step_s"] / step["step_s"], rel=0.02)
    assert all(row["gpus"] == best["gpus"] for row in rows if row["equal"])
    if found["runner_up"]:
        assert rows[found["runner_up"]["rank"] - 1]["gpus"] == best["gpus"]


def test_cost_has_a_currency(capsys: pytest.CaptureFixture[str]) -> None:
    asked = (*TINY, "--top", "2", "--tokens", "1T", "--price", "2", "--currency", "EUR")
    row = run_json(capsys, "search", *asked)["rows"][0]
    assert row["currency"] == "EUR"
    assert f"{row['cost']:,.0f} EUR" in run(capsys, "search", *asked)[1]


@pytest.mark.parametrize(("framework", "useful"), [("megatron-core", False), ("megatron-deepspeed", True)])
def test_selective_recomputation_is_tried_where_it_saves_memory(
    capsys: pytest.CaptureFixture[str], framework: str, useful: bool
) -> None:
    """Fused attention stores no scores, so there are none to recompute."""
    searched = useful_recomputes(load_model("llama-3.2-1b"), load_framework(framework))
    assert ("selective" in searched) == useful
    saved = []
    for recompute in ("none", "selective"):
        words = ("--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "8", "--recompute", recompute)
        predicted = run_json(capsys, "predict", *words, "--framework", framework)
        saved.append(predicted["memory_bytes"]["activations"])
        warned = any("saves no memory" in text for text in predicted["warnings"])
        assert warned == (recompute == "selective" and not useful)
    assert (saved[1] < saved[0]) == useful


def test_a_gpu_is_a_single_one_as_in_predict(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("llama-3.2-1b", "--gpu", "h100-sxm", "--global-batch", "8", "--seq", "2048", "--framework", "transformers")
    found = run_json(capsys, "search", *words, "--recompute", "none", "--micro-batch", "1", "--workers", "1")
    assert found["gpus"] == [1]
    assert any("a single GPU" in note for note in found["assumptions"])
    assert found["rows"][0]["step_s"] == pytest.approx(run_json(capsys, "predict", *words)["step_s"])
    node = run_json(capsys, "search", words[0], "--cluster", "h100-sxm", *words[3:], "--workers", "1", "--top", "1")
    assert node["gpus"] == [8]


def test_a_search_leaves_a_reserve_of_memory_unless_told_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    """An H100 has 79.2 GiB: the fastest that fits takes more than 93 % of it, the fastest with a reserve not."""
    words = ("llama-3.1-8b", "--gpu", "h100-sxm", "--gpus", "8", "--global-batch", "64", "--seq", "4096")
    narrow = (*words, "--top", "1", "--fix", "tp=1", "--fix", "pp=1", "--fix", "cp=1", "--workers", "1")
    usual = run_json(capsys, "search", *narrow)
    gpu_bytes = usual["gpu_bytes"]
    assert usual["capacity_bytes"] == pytest.approx(0.93 * gpu_bytes)
    assert usual["rows"][0]["memory_bytes"] <= 0.93 * gpu_bytes
    assert any("a reserve of 7 %" in note for note in usual["assumptions"])
    full = run_json(capsys, "search", *narrow, "--memory-reserve", "0")
    assert 0.93 * gpu_bytes < full["rows"][0]["memory_bytes"] <= full["capacity_bytes"] == gpu_bytes
    assert full["rows"][0]["step_s"] < usual["rows"][0]["step_s"]
    assert not any("reserve" in note for note in full["assumptions"])
    limited = run_json(capsys, "search", *narrow, "--max-memory", "60GiB")
    assert limited["capacity_bytes"] == 60 * 2**30
    roomy = run_json(capsys, "search", *narrow, "--memory-reserve", "30%")
    assert roomy["rows"][0]["free_bytes"] >= 0.3 * gpu_bytes
    verdict = run_json(capsys, *shlex.split(usual["rows"][0]["command"])[1:])["memory_bytes"]["verdict"]
    assert verdict == "fits"


def test_rows_state_a_precision_that_is_not_the_default_of_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """A V100 has no bf16, so that fp16 is its default, where the framework's is bf16."""
    words = (
        "search llama-3.2-1b --cluster dgx-2 --gpus 8 --global-batch 16 --fix tp=2 --fix pp=1 --precision bf16 --top 1"
    )
    row = run_json(capsys, *words.split())["rows"][0]
    again = run_json(capsys, *row["command"].split()[1:])
    assert (again["step_s"], again["strategy"]["precision"]) == (row["step_s"], "bf16")


def test_modules_that_the_model_lacks_are_not_recomputed(capsys: pytest.CaptureFixture[str]) -> None:
    words = "search mamba2-1.3b --cluster dgx-h100 --gpus 2 --global-batch 8 --recompute none,selective:mlp"
    status, _, err = run(capsys, *words.split())
    assert (status, "mamba2-1.3b lacks one of these modules" in err) == (2, True)
