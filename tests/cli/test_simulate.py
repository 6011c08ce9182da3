"""``stepcast simulate`` from outside."""

import json
import re
from pathlib import Path

import pytest

from stepcast.questions.question import SCHEDULES as SCHEDULE_NAMES
from stepcast.simulation.schedules import ORDERS
from stepcast.units import format_percent, format_seconds
from tests.cli.test_main import EXAMPLES, run, run_json
from tests.shared import DATA, needs_data

LLAMA = str(EXAMPLES / "simai-llama-405b.txt")
ON_H100 = ("--cluster", "dgx-h100")


def test_choices_are_those_of_the_engine() -> None:
    assert set(SCHEDULE_NAMES) == set(ORDERS)


def test_json_follows_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "simulate", LLAMA, *ON_H100)
    assert set(found["breakdown_s"]) == {"compute", "tp", "cp", "ep", "dp", "pp", "bubble", "optimizer", "other"}
    assert sum(found["breakdown_s"].values()) == pytest.approx(found["step_s"], rel=1e-12)
    assert set(found["communication_s"]["tp"]) == {"total", "exposed"}
    assert len(found["stages"]) == 16
    assert found["uncertainty"]["low_s"] <= found["step_s"] <= found["uncertainty"]["high_s"]
    assert {"tokens_per_s", "mfu", "memory_bytes", "sources", "warnings", "assumptions"} <= set(found)


def test_the_text_says_of_communication_what_the_json_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "simulate", LLAMA, *ON_H100)["communication_s"]
    _, out, _ = run(capsys, "simulate", LLAMA, *ON_H100)
    lines = out.splitlines()
    at = next(place for place, line in enumerate(lines) if line.startswith("communication"))
    names = lines[at].split()
    assert names == ["communication", "total", "exposed", "hidden"]
    assert found["pp"]["total"] > found["pp"]["exposed"] > 0
    for line in lines[at + 2 : at + 2 + len(found)]:
        group, *cells = re.split(r"\s{2,}", line)
        told = found[group]
        hidden = 1 - told["exposed"] / told["total"]
        assert cells[:2] == [format_seconds(told["total"]), format_seconds(told["exposed"])]
        assert cells[2] == format_percent(hidden)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1", "zb-h2", "zb-v"])
def test_every_schedule_runs(capsys: pytest.CaptureFixture[str], schedule: str) -> None:
    found = run_json(capsys, "simulate", LLAMA, *ON_H100, "--schedule", schedule)
    assert found["schedule"] == schedule


@pytest.mark.parametrize(
    ("path", "totals_us"),
    [
        (EXAMPLES / "simai-gpt-13b.txt", {"dp": 109168, "tp": 124302, "bubble": 940909, "compute": 951592, "total": 2125971}),
        (EXAMPLES / "simai-llama-405b.txt", {"dp": 322654, "tp": 290054, "bubble": 6946315, "compute": 7213232, "total": 14772256}),
        pytest.param(DATA / "simai" / "moe_9216gpus.txt", {"dp": 40332, "dp_ep": 1067010, "tp": 326686, "ep": 1222811, "bubble": 345984, "compute": 4542795, "total": 7545619}, marks=needs_data("simai")),
    ],
    ids=["gpt", "llama", "moe"],
)  # fmt: skip
def test_simai_engine_gives_simai_totals(
    capsys: pytest.CaptureFixture[str], path: Path, totals_us: dict[str, int]
) -> None:
    found = run_json(capsys, "simulate", str(path), "--engine", "simai")
    for part, expected in totals_us.items():
        assert found["simai_s"][part] * 1e6 == pytest.approx(expected, abs=2)


def test_trace_gantt_path_and_jitter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.json"
    arguments = ("--trace", str(trace), "--gantt", "--critical-path", "--jitter", "0.02", "--runs", "3")
    status, out, _ = run(capsys, "simulate", LLAMA, *ON_H100, *arguments)
    assert status == 0
    assert "on the critical path" in out
    assert "with jitter 0.02 over 3 runs" in out
    assert "stage 15 " in out
    assert len(json.loads(trace.read_bytes())["traceEvents"]) > 10_000


def test_a_schedule_file_is_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stepcast.simulation.schedules import make_schedule
    from tests.schedule_text import format_schedule

    path = tmp_path / "mine.txt"
    path.write_text(format_schedule(make_schedule("1f1b", 16, 16, 1)))
    own = run_json(capsys, "simulate", LLAMA, *ON_H100, "--schedule", str(path))
    known = run_json(capsys, "simulate", LLAMA, *ON_H100)
    assert own["step_s"] == known["step_s"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("simulate", LLAMA), "no cluster given: use --cluster"),
        (("simulate", LLAMA, "--cluster", "dgx-h10"), "did you mean dgx-h100"),
        (("simulate", str(EXAMPLES / "megatron-rank7.txt"), *ON_H100), "but simulate needs a workload"),
        (("simulate", LLAMA, *ON_H100, "--schedule", "nope"), "no such schedule or file"),
        (("simulate", LLAMA, *ON_H100, "--slow-stage", "x=2"), "expected a number"),
        (("simulate", LLAMA, *ON_H100, "--slow-rank", "4096=2"), "rank 4096 is outside the layout's 1024 GPUs"),
        (("simulate", LLAMA, *ON_H100, "--slow-group", "xp=2"), "expected one of tp"),
        (("simulate", LLAMA, *ON_H100, "--slow-group", "tp=-2"), "factor above zero"),
        (("simulate", LLAMA, *ON_H100, "--jitter", "-1"), "such as 5% or 0.05"),
        (("simulate", LLAMA, "--engine", "simai", "--overlap", "tp=2"), "between 0 and 1"),
        (("simulate", LLAMA, "--engine", "simai", "--gpus", "64"), "64 GPUs are fewer than tp x pp"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    status, _, err = run(capsys, *arguments)
    assert status == 2
    assert err.count("\n") == 1
    assert message in err


def test_a_slow_rank_slows_its_stage(capsys: pytest.CaptureFixture[str]) -> None:
    # Ranks are numbered tp fastest, then dp, then pp: 8 x 8 ranks to a stage.
    by_rank = run_json(capsys, "simulate", LLAMA, *ON_H100, "--slow-rank", "200=1.5")
    by_stage = run_json(capsys, "simulate", LLAMA, *ON_H100, "--slow-stage", "3=1.5")
    assert by_rank["step_s"] == by_stage["step_s"]
    both = run_json(capsys, "simulate", LLAMA, *ON_H100, "--slow-rank", "200=1.5", "--slow-rank", "400=1.5")
    assert any("upper bound" in note for note in both["assumptions"])
