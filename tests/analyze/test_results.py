"""The JSON of an analysis is its typed result: the same keys, and values of the declared types."""

import json
from pathlib import Path

import msgspec
import pytest

import stepcast
from stepcast.analyze.kineto.analysis import KinetoAnalysis
from stepcast.analyze.megatron.analysis import MegatronResult
from stepcast.analyze.result import AnalysisResult
from stepcast.analyze.sweeps import SweepResult
from stepcast.cli.main import main
from stepcast.optimus.analysis import OptimusAnalysis

EXAMPLES = Path(__file__).parents[2] / "examples"
RESULTS: dict[str, tuple[type[AnalysisResult], list[str]]] = {
    "megatron-rank7.txt": (MegatronResult, []),
    "kineto-llama-1b.json.gz": (KinetoAnalysis, []),
    "optimus-llama-1b.txt": (OptimusAnalysis, []),
    "nccl-one-nic.txt": (SweepResult, ["--cluster", "dgx-h100"]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_json_is_the_result_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind, options = RESULTS[name]
    assert main(["analyze", str(EXAMPLES / name), *options, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    result = msgspec.convert(printed, kind)
    assert result.facts() == printed
    assert list(printed) == [field for field in kind.__struct_fields__ if field in printed]


def test_a_result_has_attributes_and_keys() -> None:
    result = stepcast.analyze(EXAMPLES / "megatron-rank7.txt")
    assert isinstance(result, MegatronResult)
    assert result.step_s == result["step_s"]
    replayed = stepcast.replay(EXAMPLES / "megatron-rank7.txt", what_if="compute=0.5x")
    assert isinstance(replayed, stepcast.ReplayResult)
    assert replayed.step_s < replayed.before.step_s == replayed["before"]["step_s"]
