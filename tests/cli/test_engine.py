"""``--engine fluid`` from outside."""

import json

import pytest

import stepcast
from stepcast.cli.main import main
from stepcast.forecast.options import Engine
from stepcast.questions.question import ENGINES
from tests.shared import ROOT

pytestmark = pytest.mark.slow

LLAMA = str(ROOT / "examples" / "simai-llama-405b.txt")
SHORT = ["--set", "network.kind=fat-tree", "--set", "network.leaf_nodes=4", "--set", "network.oversubscription=4"]
RUN = ["--model", "llama-3-8b", "--cluster", "dgx-h100", "--gpus", "64", "--tp", "4", "--global-batch", "64"]


def test_the_engines_of_the_help_are_those_there_are() -> None:
    assert tuple(Engine) == ENGINES


def told(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert main([*words, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_simulate_says_which_engine_ran_and_who_was_slowed(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", LLAMA, "--cluster", "dgx-h100", *SHORT]
    fluid, fast = told(capsys, *words, "--engine", "fluid"), told(capsys, *words)
    assert fluid["step_s"] == pytest.approx(fast["step_s"], rel=0.01)
    assert fluid["step_s"] != fast["step_s"]
    assert "engine fluid" in str(fluid["assumptions"])
    assert "engine fluid" not in str(fast["assumptions"])


def test_predict_and_the_library_give_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "predict", *RUN, *SHORT, "--engine", "fluid")
    changes = SHORT[1::2]
    same = stepcast.predict("llama-3-8b", "dgx-h100", gpus=64, tp=4, global_batch=64, set=changes, engine="fluid")
    assert found["step_s"] == same.step_s
    assert same.fluid is not None
    assert same.fluid.observed.hottest(1)


def test_an_engine_nobody_knows_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["predict", *RUN, "--engine", "liquid"])
    assert "did you mean fluid" in capsys.readouterr().err
