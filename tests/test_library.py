"""``import stepcast`` as a Python user meets it: the verbs with their words, defaults and checks."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

import stepcast
from stepcast.ir.strategy import Sharding, StrategyError
from stepcast.ir.types import DType
from tests.cli.test_main import EXAMPLES, run_json

pytestmark = pytest.mark.slow

NUMBER: Any = 5
NAMED: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "dgx-h100"}


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        ({"gpus": 64, "tp": 8}, ("--gpus", "64", "--tp", "8")),
        ({"gpus": 64}, ("--gpus", "64")),
        ({"nodes": 2, "seq": "8k", "zero": 3}, ("--nodes", "2", "--seq", "8k", "--zero", "3")),
        ({"gpus": 8, "framework": "pytorch"}, ("--gpus", "8", "--framework", "pytorch")),
        (
            {"gpus": 8, "tp": 2, "sequence_parallel": False, "overlap": ["gradients", "transfers"]},
            ("--gpus", "8", "--tp", "2", "--no-sequence-parallel", "--overlap", "gradients,transfers"),
        ),
        ({"gpus": 8, "set": ["node.nics=4"]}, ("--gpus", "8", "--set", "node.nics=4")),
        ({"gpus": 16, "pp": 2, "stage_layers": (15, 17)}, ("--gpus", "16", "--pp", "2", "--stage-layers", "15,17")),
    ],
)
def test_predict_answers_as_the_command_does(
    capsys: pytest.CaptureFixture[str], choices: dict[str, Any], words: tuple[str, ...]
) -> None:
    printed = run_json(capsys, "predict", "--model", NAMED["model"], "--cluster", NAMED["cluster"], *words)
    assert as_printed(stepcast.predict(**NAMED, **choices)) == printed


def as_printed(answer: Any) -> dict[str, Any]:
    """The JSON of an answer; a command and a version are the command line's own."""
    return {**json.loads(json.dumps(answer.to_dict())), "command": ANY, "version": ANY}


@pytest.mark.parametrize(
    ("verb", "choices"),
    [
        ("predict", {"gpus": 8, "tokens": "1T", "price": 2.5}),
        ("predict", {"gpus": 8, "micro_batch": 8, "sharding": "none"}),  # does not fit, so it has remedies
        ("predict", {"cluster": "gb200-nvl72", "gpus": 8, "framework": "trainer"}),  # whose hosts have a pace
        ("search", {"gpus": 8, "global_batch": 32, "tp": 2, "pp": 1, "top": 2}),
        ("plan", {"gpus": 8, "tp": 2, "tokens": "100B", "runs": 20, "price": 2}),
        ("generate", {"tp": 2}),
        ("rl", {"gpus": 8, "prompts": 8, "steps": 100}),
    ],
)
def test_to_dict_is_the_json_of_the_command(
    capsys: pytest.CaptureFixture[str], verb: str, choices: dict[str, Any]
) -> None:
    function = getattr(stepcast, {"generate": "predict_generation", "rl": "predict_rl"}.get(verb, verb))
    given = {**NAMED, **choices}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    answer, printed = function(**given), run_json(capsys, verb, *words)
    assert as_printed(answer) == printed
    assert as_printed(pickle.loads(pickle.dumps(answer))) == printed


def test_a_saved_run_asks_about_the_same_training(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["--model=llama-3.1-8b", "--cluster=dgx-h100", "--gpus=8", "--samples=50k", "--epochs=2", "--price=3"]
    saved = str(tmp_path / "run.toml")
    asked = run_json(capsys, "predict", *words, "--save", saved)
    again = run_json(capsys, "predict", saved)
    assert (again["training"], again["step_s"]) == (asked["training"], asked["step_s"])
    assert run_json(capsys, "predict", saved, "--steps", "10")["training"]["steps"] == 10
    assert stepcast.predict(config=saved).to_dict()["training"] == asked["training"]


def test_compare_answers_as_the_command_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = str(EXAMPLES / "megatron-rank7.txt")
    assert stepcast.compare(run, run).to_dict() == run_json(capsys, "compare", run, run)
    printed = tmp_path / "step.json"
    printed.write_text(json.dumps(stepcast.predict(**NAMED, gpus=8).to_dict()))
    assert stepcast.compare(printed, run).to_dict()["sides"][0]["file"] == str(printed)


@pytest.mark.parametrize(
    ("choices", "problem"),
    [
        ({"model": "lama-3.1-8b"}, "did you mean llama-3.1-8b"),
        ({"cluster": "dgx-h10"}, "did you mean dgx-h100"),
        ({"precision": "bf15"}, "did you mean bf16"),
        ({"sharding": "zero-4"}, "did you mean zero-"),
        ({"tp": "two"}, "expected a whole number"),
        ({"tp": 3}, "64 GPUs are not a multiple"),
        ({"framework": "torch-tytan"}, "did you mean torchtitan"),
        ({"recompute": "ful"}, "expected none, selective, full"),
    ],
)
def test_words_are_checked_at_once(choices: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        stepcast.predict(**{**NAMED, "gpus": 64, **choices})


@pytest.mark.parametrize(
    ("ask", "kind", "problem"),
    [
        (lambda: stepcast.predict("llama-3.1-8b", NUMBER, gpus=8), TypeError, "cluster must be a name, .* not int"),
        (lambda: stepcast.predict("llama-3.1-8b"), ValueError, "use cluster=NAME or gpu=NAME"),
        (lambda: stepcast.predict(**NAMED, gpus=8, set="x"), ValueError, "^set: 'x' is not of the form key=value"),
        (lambda: stepcast.plan(**NAMED, gpus=8, tokens="1T"), ValueError, "or: tp=2 global_batch=64: .*; allow_oom"),
        (lambda: stepcast.alternatives("predict", **NAMED, gpus=8), ValueError, "give a list of clusters"),
        (lambda: stepcast.compare(NUMBER, NUMBER), TypeError, "takes answers, their facts or files, not int"),
        (stepcast.analyze, TypeError, "no file given"),
    ],
)
def test_mistakes_are_stated_in_words_of_python(ask: Any, kind: type[Exception], problem: str) -> None:
    with pytest.raises(kind, match=problem):
        ask()


def test_nouns_and_names_mix() -> None:
    model, cluster = stepcast.load_model("llama-3.1-8b"), stepcast.load_cluster("dgx-h100")
    named = stepcast.predict(**NAMED, gpus=16, tp=2).step_s
    assert stepcast.predict(model, cluster, gpus=16, tp=2).step_s == named
    strategy = stepcast.Strategy(
        stepcast.Layout(tp=2, dp=8), 1, 64, 4096, sharding=Sharding.ZERO_1, sequence_parallel=True
    )
    assert stepcast.predict("llama-3.1-8b", "dgx-h100", strategy).step_s == named
    with pytest.raises(TypeError, match="both a strategy and 'tp'"):
        stepcast.predict("llama-3.1-8b", "dgx-h100", strategy, tp=2)


def test_strategies_take_words_and_refuse_what_is_none() -> None:
    layout = stepcast.Layout(dp=8)
    assert stepcast.Strategy(layout, 1, 8, 4096, sharding="zero-3").sharding is Sharding.ZERO_3  # type: ignore[arg-type]
    with pytest.raises(StrategyError, match="did you mean zero-3"):
        stepcast.Strategy(layout, 1, 8, 4096, sharding="zero3")  # type: ignore[arg-type]


def test_rows_are_flat() -> None:
    predictions = [stepcast.predict(**NAMED, gpus=8, tp=tp) for tp in (1, 2)]
    rows = stepcast.rows(predictions)
    assert [row["tp"] for row in rows] == [1, 2]
    assert all(isinstance(value, str | int | float | bool | None) for row in rows for value in row.values())
    parts = sum(
        value
        for name, value in rows[0].items()
        if name in {f"{part}_s" for part in ("compute", "tp", "cp", "ep", "dp", "pp", "bubble", "optimizer", "other")}
    )
    assert parts == pytest.approx(rows[0]["step_s"])


def test_search_and_plan_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--gpus", "8", "--global-batch", "32", "--seq", "2k")
    fixed: dict[str, Any] = {"tp": 2, "pp": 1, "sharding": "zero-1", "precision": "bf16"}
    typed = [word for name, value in fixed.items() for word in (f"--{name}", str(value))]
    printed = run_json(capsys, "search", "--model", "llama-3.2-1b", "--cluster", "h100", *words, *typed, "--top", "3")
    found = stepcast.search("llama-3.2-1b", "h100", 8, global_batch=32, seq="2k", top=3, **fixed)
    assert [row["step_s"] for row in stepcast.rows(found)] == [row["step_s"] for row in printed["rows"]]
    made = stepcast.plan(**NAMED, gpus=64, tokens="100B", runs=20)
    assert made.fits is True
    large: dict[str, Any] = {"model": "llama-3.1-405b", "cluster": "dgx-h100", "gpus": 128, "tokens": "1T"}
    with pytest.raises(ValueError, match=r"does not fit into GPU memory .* to fit: "):
        stepcast.plan(**large)
    assert stepcast.plan(**large, allow_oom=True, runs=20).fits is False
    days = run_json(
        capsys,
        "plan",
        "--model",
        NAMED["model"],
        "--cluster",
        NAMED["cluster"],
        "--gpus",
        "64",
        "--tokens",
        "100B",
        "--runs",
        "20",
    )["days"]
    assert stepcast.rows(made)[0]["days_median"] == days["median"]


@pytest.mark.parametrize("name", ["pytorch", "megatron-core", "torchtitan", "megatron-bridge"])
def test_a_loaded_framework_predicts_as_its_name_does(name: str) -> None:
    """With its defaults too: ZeRO of Megatron-Core, FSDP of torchtitan, presets of Megatron-Bridge."""
    by_name = stepcast.predict(**NAMED, gpus=16, framework=name)
    by_value = stepcast.predict(**NAMED, gpus=16, framework=stepcast.load_framework(name))
    assert by_value.facts() == by_name.facts()


def test_a_changed_framework_stays_as_it_was_changed() -> None:
    """Gradients and the buckets of DDP have the format of the weights, here 4 bytes, unless a Framework says so."""
    usual = stepcast.load_framework("pytorch")
    changed = replace(usual, gradient_dtype=DType.BF16)
    before, after = (stepcast.predict(**NAMED, gpus=8, precision="tf32", framework=each) for each in (usual, changed))
    less = before.memory[0].gradients - after.memory[0].gradients
    assert less == pytest.approx(2 * 2 * 8.03e9, rel=0.01)
    own = stepcast.predict(**NAMED, gpus=8, framework=replace(usual, name="ours"))
    assert any("'ours' is not in the catalogue" in note for note in own.report.assumptions)


def test_functions_stay_functions_whatever_is_imported() -> None:
    from stepcast.analyze import compare as room

    assert room.compare.__module__ == "stepcast.analyze.compare"
    assert callable(stepcast.analyze)


def test_measured_runs(capsys: pytest.CaptureFixture[str]) -> None:
    trace = EXAMPLES / "megatron-rank7.txt"
    assert json.loads(json.dumps(stepcast.analyze(trace).facts())) == run_json(capsys, "analyze", str(trace))
    with pytest.raises(ValueError, match="replay needs Megatron or Kineto traces"):
        stepcast.replay(EXAMPLES / "optimus-llama-1b.txt")
    same = stepcast.compare(trace, stepcast.analyze(trace))
    assert same.facts()["error"] == 0
    prediction = stepcast.predict(**NAMED, gpus=8)
    assert stepcast.compare(prediction, prediction).facts()["error"] == 0


def test_nothing_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    stepcast.predict(**NAMED, gpus=1, sharding="zero-3")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_several_clusters_are_compared_by_another_function() -> None:
    with pytest.raises(ValueError, match=r"cluster has several values: .*, in Python stepcast\.alternatives"):
        stepcast.predict(model="llama-3.1-8b", cluster="dgx-h100,hgx-h200", gpus=8)


def test_a_gpu_and_a_cluster_of_a_saved_run_replace_one_another(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A GPU is written once, not as a cluster too; the one of the command line counts."""
    small = ("--model", "llama-3.2-1b", "--gpus", "1", "--micro-batch", "1")
    for name, place, other in (("a", ("--gpu", "h200"), "--cluster"), ("b", ("--cluster", "hgx-h200"), "--gpu")):
        saved = tmp_path / f"{name}.toml"
        run_json(capsys, "predict", *small, *place, "--save", str(saved))
        assert ("cluster" in saved.read_text()) == (place[0] == "--cluster")
        where = "dgx-h100" if other == "--cluster" else "h100-sxm"
        again = run_json(capsys, "predict", str(saved), other, where)
        assert again["step_s"] == run_json(capsys, "predict", *small, other, where)["step_s"]


def test_search_explains_switches_in_words() -> None:
    """By the words that --sequence-parallel takes."""
    found = stepcast.search("llama-3.2-1b", "h100", gpus=8, global_batch=8, tp=2, pp=1, top=1, explain=True)
    (row,) = (row for row in found.to_dict()["explained"] if row["choice"] == "sequence-parallel")
    assert row["other"] in ("yes", "no")


@pytest.mark.parametrize("names", [("w.txt", "dgx-h100"), (None, None)])
def test_simulate_takes_values_not_names(names: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match=r"stepcast\.read\(FILE\)"):
        stepcast.simulate(*names)
