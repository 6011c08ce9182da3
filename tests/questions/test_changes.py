"""Changes that make a run fit, and its neighbours: each is what a user gets who types it."""

import json
import shlex

import pytest

from stepcast.cli.main import build_parser, main
from stepcast.cli.options import read_question
from stepcast.forecast.prediction import Prediction
from stepcast.ir.limits import TASKS
from stepcast.questions.changes import find_neighbours, find_remedies
from stepcast.questions.question import PredictQuestion
from stepcast.questions.settle import SettledRun, settle
from stepcast.views.step import remedy_pairs

QLORA = "predict llama-3.1-8b --gpu rtx-4090 --qlora --lora 16 --seq 2048"
TOO_LARGE = [
    "--micro-batch 2 --samples 10000 --epochs 3",
    "--micro-batch 2 --steps 100",
    "--micro-batch 4 --task dpo --gradient-accumulation-steps 4",
    "--micro-batch 8 --lengths mean=600,max=4096 --samples 50k",
    "--micro-batch-size=16 --gradient-checkpointing --tokens 1B",
]


def settle_words(words: str) -> SettledRun:
    return settle(read_question(build_parser().parse_args(shlex.split(words)))[0])


@pytest.mark.parametrize("options", TOO_LARGE)
def test_a_settled_question_asks_for_the_same_run(options: str) -> None:
    run = settle_words(f"{QLORA} {options}")
    again = settle(run.question)
    assert (again.strategy, again.framework, again.question) == (run.strategy, run.framework, run.question)


@pytest.mark.parametrize("options", TOO_LARGE)
def test_typing_a_remedy_gives_its_step(options: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([*shlex.split(f"{QLORA} {options}"), "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert answer["remedies"]
    for remedy in answer["remedies"]:
        run = settle_words(f"{QLORA} {options} {remedy['options']}")
        assert run.prediction.step_s == remedy["step_s"]
        assert run.strategy.global_batch == answer["run"]["global_batch"]


@pytest.mark.parametrize("options", TOO_LARGE)
def test_commands_of_neighbours_give_their_steps(options: str) -> None:
    command = f"stepcast {QLORA} {options}"
    run = settle_words(f"{QLORA} {options}")
    neighbours = find_neighbours(run, command)
    assert len(neighbours) >= 3
    for neighbour in neighbours:
        changed = settle_words(neighbour["command"].removeprefix("stepcast "))
        assert changed.prediction.step_s == neighbour["step_s"]
        assert changed.strategy.global_batch == run.strategy.global_batch


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("llama-3.1-8b --gpu a100-sxm-40gb --gpus 4 --global-batch 8 --sharding fsdp", "8bit"),
        ("llama-3.1-405b --cluster dgx-h100 --gpus 8 --global-batch 8 --seq 2048", "--qlora"),
    ],
)
def test_remedies_are_what_the_software_has(words: str, remedy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan has no 8-bit AdamW (components/optimizer.py) and no QLoRA (components/lora.py), transformers those of
    bitsandbytes.
    """
    found = {}
    for framework in ("torchtitan", "transformers"):
        main(["predict", *words.split(), "--json", "--framework", framework])
        remedies = json.loads(capsys.readouterr().out)["remedies"]
        found[framework] = any(remedy in each["options"] for each in remedies)
    assert found == {"torchtitan": False, "transformers": True}


def test_a_remedy_that_cannot_be_simulated_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change may have more tasks than the fluid engine takes, where the run that was asked for has not."""
    run = settle(PredictQuestion(model="llama-3.1-8b", cluster="dgx-h100", gpus=8, micro_batch=8))
    step_s, predict_run = run.prediction.step_s, SettledRun.__dict__["prediction"].func
    first = find_remedies(run, step_s)["remedies"][0]

    def refuse(self: SettledRun) -> Prediction:
        prediction: Prediction = predict_run(self)
        if prediction.step_s == first["step_s"]:
            TASKS.check(TASKS.most + 1)
        return prediction

    monkeypatch.setattr(SettledRun, "prediction", property(refuse))
    found = find_remedies(run, step_s)
    others = [row["options"] for row in found["remedies"]]
    assert others
    assert first["options"] not in others
    assert found["remedies_left_out"] == f"1 change that fits ({TASKS.message})"
    assert remedy_pairs(found)[-1] == ("left out", found["remedies_left_out"])
    assert remedy_pairs({**found, "remedies": []}) == [("left out", found["remedies_left_out"])]


def test_a_model_that_peft_cannot_split_is_split_under_the_default_framework() -> None:
    """LoRA without ``--framework`` is trained with peft, which has no tensor parallelism; Megatron-Core has."""
    asked = PredictQuestion(model="llama-3.1-70b", cluster="dgx-h100", gpus=8, lora_rank=16)
    for framework, splits in ((None, True), ("peft", False)):
        run = settle(asked.change({"framework": framework}))
        assert run.framework.name == "peft"
        remedies = find_remedies(run, run.prediction.step_s)["remedies"]
        typed = [row["options"] for row in remedies if "--tp" in row["options"]]
        assert bool(typed) is splits
        assert all("--framework megatron-core" in options for options in typed)
        for row in remedies:
            words = "predict llama-3.1-70b --cluster dgx-h100 --gpus 8 --lora 16 --framework peft "
            again = settle_words(words + row["options"]).prediction
            assert again.fits
            assert again.step_s == row["step_s"]
