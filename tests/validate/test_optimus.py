"""OptimusPrime runs left out and predicted; the command that calibrates on them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.hardware import load_cluster
from stepcast.inputs.optimus_log import read_logs
from stepcast.inputs.source import FormatError
from stepcast.inputs.table import read
from stepcast.ir.layout import Layout
from stepcast.ir.measured import RunLog
from stepcast.optimus.calibration import fit, lengths_of, load_shipped, model_with, observe_run, read_calibrated
from stepcast.optimus.step import machine_of, step_s
from stepcast.validate.scoreboard import ScoredRow
from stepcast.validate.traced_runs import measure_optimus, predict_runs
from tests.shared import DATA, ROOT, needs_data

SWEEP = DATA / "optimus-sweep"
DATA_PARALLEL = DATA / "optimus-dp"
SEED = ROOT / "examples" / "optimus-llama-1b.txt"


def rows(folder: Path) -> tuple[list[ScoredRow], dict[str, int]]:
    found = measure_optimus(str(folder))
    return [found.columns.row(at) for at in range(len(found.columns))], dict(found.skipped)


@needs_data("optimus-sweep")
def test_left_out_runs_are_predicted() -> None:
    skipped: list[str] = []
    logs = read_logs([str(path) for path in sorted(SWEEP.glob("*_log.txt"))], lambda *told: skipped.append(str(told)))
    found, not_predicted = predict_runs(logs)
    assert (len(found), skipped, dict(not_predicted)) == (8, [], {})
    assert {row.tags["constants"] for row in found} == {"fitted to the other runs"}
    errors = [abs(row.error) for row in found]
    assert sum(errors) / len(errors) < 0.05
    assert max(errors) < 0.10
    seed = next(row for row in found if row.measured_s == pytest.approx(1.61334))
    assert abs(seed.error) < 0.05


@needs_data("optimus-dp")
def test_data_parallel_runs_are_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    """No constant saw them; their samples were shuffled, so that even the lengths are an estimate."""
    assert main(["validate", "--set", "optimus", "--data", str(DATA_PARALLEL), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["sets"]["optimus"]
    assert (found["rows"], found["skipped"]) == (2, 0)
    assert found["worst_abs_error"] < 0.17
    assert found["mean_abs_error"] < 0.12
    assert any("a step took 128 samples: read as 2 micro-batches of 16" in note for note in found["notes"])


@needs_data("optimus-sweep")
def test_shipped_constants_are_those_of_the_sweep(tmp_path: Path) -> None:
    written = tmp_path / "c.toml"
    assert main(["calibrate", str(SWEEP), "-o", str(written)]) == 0
    again = read_calibrated(written.read_text(), "c.toml")
    assert again.runs == load_shipped().runs
    assert again.sequences == load_shipped().sequences
    for name in load_shipped().constants.__slots__:
        assert getattr(again.constants, name) == pytest.approx(getattr(load_shipped().constants, name), rel=1e-3)


def test_the_seed_alone_cannot_be_left_out(tmp_path: Path) -> None:
    shutil.copy(SEED, tmp_path / "log.txt")
    (tmp_path / "notes.md").write_text("nothing to see\n")
    assert rows(tmp_path) == ([], {"fewer than 4 other runs to fit to": 1})


def test_an_unseen_run_is_predicted_with_shipped_constants(tmp_path: Path) -> None:
    text = SEED.read_text(errors="replace").replace("ms/batch 16", "ms/batch 17")
    (tmp_path / "log.txt").write_text(text)
    found, skipped = rows(tmp_path)
    assert skipped == {}
    assert [row.tags["constants"] for row in found] == ["shipped"]
    assert found[0].predicted_s == pytest.approx(1.613, rel=0.05), "the seed's configuration"


def test_calibrating_on_the_seed_warns(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "c.toml"
    assert main(["calibrate", str(SEED), "-o", str(written), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["warnings"][0].startswith("1 run cannot split message latency from fixed step overhead")
    assert found["runs"][0]["measured_s"] == pytest.approx(1.61334)
    assert set(found["constants"]) == {"matmul_efficiency", "backward_factor", "message_s", "host_op_s", "fixed_s"}
    assert read_calibrated(written.read_text(), "c.toml").constants.message_s == pytest.approx(
        found["constants"]["message_s"], rel=1e-4
    )


def test_analyze_explains_the_seed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(SEED), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_s"] == pytest.approx(1.61334)
    assert abs(found["error"]) < 0.05
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"])
    assert {"operations_s", "bubble_s", "exposed_comm_s", "stragglers", "critical_path", "warnings"} <= set(found)


def test_analyze_takes_constants_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "c.toml"
    assert main(["calibrate", str(SEED), "-o", str(written), "--json"]) == 0
    own = json.loads(capsys.readouterr().out)["constants"]
    assert main(["analyze", str(SEED), "--calibration", str(written), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["constants"] == pytest.approx(own, rel=1e-4)
    assert abs(found["error"]) < 0.01, "the one run that they were fitted to"


def _fail(path: str, reason: str) -> None:
    raise AssertionError(f"{path}: {reason}")


@needs_data("optimus-sweep")
@pytest.mark.parametrize(("tp", "worst"), [(4, 0.07), (2, 0.10)])
def test_a_whole_layout_left_out(tp: int, worst: float) -> None:
    """The model carries over to tensor-parallel sizes that it was never fitted to."""
    machine = machine_of(load_cluster("a40-pcie"))
    logs = read_logs([str(path) for path in sorted(SWEEP.glob("*_log.txt"))], _fail)
    seen = [observe_run(log, machine) for log in logs]
    constants = fit([one for one in seen if one.plan.layout.tp != tp], machine).constants
    left_out = [one for one in seen if one.plan.layout.tp == tp]
    errors = [step_s(one.plan, machine, constants) / one.measured_s - 1 for one in left_out]
    assert len(errors) in (3, 4)
    assert max(map(abs, errors)) < worst


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["calibrate", str(ROOT / "examples" / "simai-gpt-13b.txt")],
            "calibrate needs runs of one of: op-times, kineto",
        ),
        (["calibrate", str(SEED), "--sequence", "a,b"], "expected lengths such as"),
        (["calibrate", str(SEED), "--sequence", "0"], "above zero"),
        (["calibrate", str(SEED), "--model", "llama-3.2-3b"], "has 1,235,814,400 parameters"),
        (["calibrate", "nowhere.txt"], "nowhere.txt"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("stepcast: ")
    assert said in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("text", ["not toml [", "a = 1", "[constants]\nfixed_s = 1", "sequences = 3\n[constants]"])
def test_a_calibration_that_is_none(text: str) -> None:
    with pytest.raises(FormatError, match=r"c\.toml"):
        read_calibrated(text, "c.toml")


def test_lengths_beside_a_log(tmp_path: Path) -> None:
    found = read(SEED)
    assert isinstance(found, RunLog)
    log = replace(found, source=str(tmp_path / "log.txt"))
    assert lengths_of(log) == load_shipped().sequences
    (drawn,) = set(lengths_of(replace(log, layout=Layout(dp=4, pp=2))))
    assert max(load_shipped().sequences) > drawn > sum(load_shipped().sequences) / len(load_shipped().sequences)
    (tmp_path / "seqlen_per_step.json").write_text('{"S": [10, 20]}')
    assert lengths_of(log) == (10.0, 20.0)
    for bad in ("{}", "[", '{"S": ["x"]}', '{"S": [-1]}'):
        (tmp_path / "seqlen_per_step.json").write_text(bad)
        with pytest.raises(FormatError, match="seqlen_per_step"):
            lengths_of(log)


def test_machine_and_model() -> None:
    machine = machine_of(load_cluster("a40-pcie"))
    assert machine.all_reduce_s(range(1), 1e6) == 0
    assert machine.all_reduce_s(range(2), 28.6e6) == pytest.approx(28.6e6 / 40e9, rel=0.1), "bridged pairs"
    assert machine.all_reduce_s(range(0, 8, 2), 1e8) > machine.all_reduce_s(range(4), 1e8), "across sockets"
    assert machine.hop_bytes_per_s(0, 1) > machine.hop_bytes_per_s(1, 2) > machine.hop_bytes_per_s(3, 4)
    assert model_with(1_235_814_400).name == "llama-3.2-1b"
    with pytest.raises(ValueError, match="no Llama"):
        model_with(7)
