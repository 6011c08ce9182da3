"""The gate on histories of runs: slow runs are found soon, noise is not, and the part that changed is named."""

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

import stepcast
from stepcast.analyze.compare import IMPROVED, PASSED, REGRESSION, SUSPECTED, GateResult, GateRun, advance, judge
from stepcast.cli.main import main
from stepcast.ir.arrays import FloatArray

pytestmark = pytest.mark.slow

# The noise of measured runs. Levels: of 118 MLPerf Training configurations (rounds 4.0 to 5.1), (p90 - p10) / 2.563 of
# the step over their three to ten runs, at the quantiles 5 %, 15 %, ... 95 %. Residuals: of the steps of two traced
# jobs of 64 and more GPUs (StragglerAnalysis), in units of their median absolute deviation.
LEVELS = [0.00063, 0.00094, 0.00119, 0.0017, 0.00248, 0.00315, 0.00486, 0.00607, 0.00964, 0.02134]
RESIDUALS = [
    -8.32, -5.99, -5.03, -3.06, -2.79, -1.59, -1.55, -1.27, -1.2, -1.08, -1.07, -1.05, -1.05, -1.02, -1.02, -0.97, -0.84, -0.82, -0.75,
    -0.72, -0.71, -0.64, -0.59, -0.53, -0.46, -0.41, -0.41, -0.31, -0.27, -0.21, -0.19, -0.17, -0.16, -0.07, -0.05, -0.04, -0.03, -0.02,
    0.02, 0.03, 0.05, 0.05, 0.06, 0.09, 0.12, 0.16, 0.2, 0.24, 0.28, 0.34, 0.49, 0.51, 0.53, 0.54, 0.55, 0.55, 0.56, 0.6, 0.66, 0.69,
    0.72, 0.75, 0.79, 0.87, 0.95, 0.96, 0.96, 1.01, 1.06, 1.14, 1.21, 1.34, 1.38, 1.53, 12.01, 12.47,
]  # fmt: skip


def play(steps_s: FloatArray) -> list[GateResult]:
    """Return the verdict on each run of a history."""
    history: list[GateRun] = []
    results = []
    for step_s in steps_s:
        run = GateRun({"step": float(step_s)})
        results.append(judge(history, run))
        history.append(advance(run, results[-1]))
    return results


@pytest.mark.slow
def test_regressions_of_3_percent_are_found_and_noise_is_not() -> None:
    rng = np.random.default_rng(41)
    found = alarms = runs = 0
    for index in range(100):
        steps_s = 1 + LEVELS[index % 10] * rng.choice(RESIDUALS, 43)
        steps_s[40:] *= 1.03
        results = play(steps_s)
        alarms += sum(result.status == REGRESSION for result in results[:40])
        runs += 40
        found += any(result.status == REGRESSION for result in results[40:])
    assert found >= 0.95 * 100
    assert alarms <= 0.01 * runs


NIGHTS = [str(Path("examples", "gate", f"night-{night}.log").resolve()) for night in range(1, 8)]


def test_a_regression_names_its_part_and_its_first_run() -> None:
    history: list[GateRun] = []
    for number in range(1, 61):
        slow = 1.38 if number >= 57 else 1.0
        parts = {"matmul": 1.0 + 0.002 * (number % 3), "tp all-reduce": 0.108 * slow}
        run = GateRun({"step": sum(parts.values()), **parts}, label=f"c{number}")
        result = judge(history, run)
        history.append(advance(run, result))
    assert result.status == REGRESSION
    assert result.since == 57
    assert "tp all-reduce +38.0 %" in result.verdict
    assert result.verdict.endswith("started with run 57")
    assert [history[56 - 1].status, history[57 - 1].status, history[58 - 1].status] == [PASSED, SUSPECTED, REGRESSION]


def test_a_part_that_became_faster_causes_no_regression() -> None:
    history: list[GateRun] = []
    for number in range(1, 16):
        slow = number >= 13
        parts = {"matmul": 1.0 + 0.001 * (number % 3), "copies": 0.3 if slow else 0.1, "norms": 0.1 if slow else 0.2}
        run = GateRun({"step": sum(parts.values()), **parts})
        result = judge(history, run)
        history.append(advance(run, result))
    assert result.status == REGRESSION
    assert "copies +200.0 %" in result.verdict
    assert "norms" not in result.verdict


def test_an_outlier_is_suspected_and_forgotten() -> None:
    steps_s = np.array([1.0, 1.001, 0.999, 1.0, 1.002, 1.2, 1.0, 1.001])
    assert [result.status for result in play(steps_s)][-3:] == [SUSPECTED, PASSED, PASSED]


def test_five_faster_runs_begin_a_new_baseline() -> None:
    results = play(np.array([1.0, 1.001, 0.999, 1.0, 1.001] + [0.9, 0.901, 0.899, 0.9, 0.9] + [0.9] * 3 + [1.0] * 2))
    assert results[9].status == IMPROVED
    assert results[-3].baseline_from == 6
    assert results[-1].status == REGRESSION


def test_history_verdict_reports_and_acceptance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    history, xml, markdown = (str(tmp_path / name) for name in ("gate.sqlite", "gate.xml", "gate.md"))
    assert main(["gate", *NIGHTS[:6], "--history", history]) == 0
    assert "run again" in capsys.readouterr().out
    words = ["gate", NIGHTS[6], "--history", history, "--junit", xml, "--markdown", markdown, "--json"]
    assert main(words) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["status"], facts["since"], len(facts["trend"])) == (REGRESSION, 6, 7)
    assert ElementTree.parse(xml).getroot().attrib["failures"] == "1"
    assert "started with run 6" in Path(markdown).read_text()
    assert stepcast.gate(NIGHTS[6], history=history).failed
    assert main([*words, "--accept"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["status"], facts["failed"]) == ("accepted", False)
    assert facts["verdict"].endswith("started with run 6; a new baseline begins with that run")
    assert ElementTree.parse(xml).getroot().attrib["failures"] == "0"
    assert ":white_check_mark:" in Path(markdown).read_text()
    assert not stepcast.gate(NIGHTS[6], history=history).failed


def test_a_faster_run_is_not_called_noise_and_accepting_nothing_is_said(tmp_path: Path) -> None:
    history, prediction, fast = (tmp_path / name for name in ("gate.sqlite", "prediction.json", "fast.json"))
    stepcast.gate(*NIGHTS[:5], history=history)
    fast.write_text(json.dumps({"step_s": 1.1, "format": "kineto"}))
    result = stepcast.gate(fast, history=history, accept=True)
    assert (result.status, result.since) == (PASSED, None)
    assert "faster; 5 such runs" in result.verdict
    assert [text.split(":")[0] for text in result.warnings] == [
        "--accept has no effect",
        "no common fact shows whether this is the same run as those before it",
    ]
    prediction.write_text(json.dumps({"step_s": 2.2, "uncertainty": {"low_s": 2.0, "high_s": 2.4}}))
    with pytest.raises(ValueError, match="is a prediction"):
        stepcast.gate(prediction, history=history)


@pytest.mark.parametrize("step", ["null", '"2 s"', "0", "-1.5"])
def test_a_run_without_the_seconds_of_a_step_is_refused(step: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(f'{{"format": "kineto", "step_s": {step}}}')
    with pytest.raises(ValueError, match="does not say how long a step takes"):
        stepcast.gate(file, history=tmp_path / "gate.sqlite")


def test_a_saved_baseline_judges_one_run_at_once(tmp_path: Path) -> None:
    baseline = tmp_path / "baseline.json"
    stepcast.gate(*NIGHTS[:5], save=baseline)
    assert not stepcast.gate(NIGHTS[1], baseline=baseline).failed
    assert stepcast.gate(NIGHTS[5], baseline=baseline).status == REGRESSION
    assert stepcast.gate(NIGHTS[5], baseline=baseline, min_change=0.2).status == PASSED


@pytest.mark.parametrize("verb", ["analyze", "compare", "gate"])
def test_a_forecast_is_predicted(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nights = [str(path) for path in NIGHTS[:2]]
    words = {"analyze": nights[:1], "compare": nights, "gate": [nights[0], "--baseline", nights[1]]}
    assert main([verb, *words[verb], "--json"]) == 0
    answer = tmp_path / "answer.json"
    answer.write_text(capsys.readouterr().out)
    assert main(["gate", nights[0], "--forecast", str(answer)]) == 2
    assert ("states no step of its own" if verb == "compare" else "is a measured run") in capsys.readouterr().err


def test_a_forecast_fails_slower_runs(tmp_path: Path) -> None:
    forecast = tmp_path / "forecast.json"
    forecast.write_text(json.dumps({"step_s": 2.0, "uncertainty": {"low_s": 1.9, "high_s": 2.25}}))
    assert not stepcast.gate(NIGHTS[0], forecast=forecast).failed
    result = stepcast.gate(NIGHTS[6], forecast=forecast)
    assert result.failed
    assert "slower than the forecast of 2.000 s" in result.verdict
    assert not result.warnings


def test_a_forecast_of_another_run_is_a_warning(tmp_path: Path) -> None:
    forecast = tmp_path / "forecast.json"
    forecast.write_text(json.dumps({"step_s": 2.2, "global_batch": 64}))
    assert stepcast.gate(NIGHTS[0], forecast=forecast).warnings == [
        "the forecast is of another run: global_batch 64 vs 128"
    ]


def test_warnings_of_logs_are_passed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log of two runs mixes their steps; a baseline made of it says so again when it is used."""
    both, baseline = tmp_path / "both.log", tmp_path / "baseline.json"
    both.write_text("".join(Path(night).read_text() for night in (NIGHTS[0], NIGHTS[5])))
    mixed = f"{both}: step 12 is followed by step 1: the log holds 2 runs or starts of one, which these figures mix"
    assert stepcast.gate(both, save=baseline).warnings[0] == mixed
    files = [tmp_path / "comment.md", tmp_path / "junit.xml"]
    main(["gate", NIGHTS[1], "--baseline", str(baseline), "--markdown", str(files[0]), "--junit", str(files[1])])
    assert "the log holds 2 runs" in capsys.readouterr().err
    assert all("the log holds 2 runs" in file.read_text() for file in files)


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.sqlite"
    other.write_bytes(b"SQLite format 3\0 but not really")
    damaged = tmp_path / "baseline.json"
    damaged.write_text('{"format": "stepcast baseline", "runs": [{"measures"')
    for words, said in (
        ([NIGHTS[0]], "nothing to compare with"),
        ([NIGHTS[0], "--history", str(other)], "cannot be used as a history"),
        ([NIGHTS[0], "--baseline", str(damaged)], "is not a complete baseline"),
        ([NIGHTS[0], "--forecast", NIGHTS[0]], "is no forecast"),
        ([NIGHTS[0], "--save", str(tmp_path / "b.json"), "--accept"], "no effect without --history"),
        (["examples/nccl-8-h100.txt", "--save", str(tmp_path / "b.json")], "cluster"),
    ):
        assert main(["gate", *words]) == 2
        assert said in capsys.readouterr().err
