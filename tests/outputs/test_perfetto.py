"""Chrome trace JSON against the rules of the format."""

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.cli.main import main
from stepcast.forecast.options import Options
from stepcast.forecast.simulate import simulate
from stepcast.hardware import load_cluster
from stepcast.inputs.documents import communication_rows
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import read, read_sources, recognise
from stepcast.ir.layout import Group
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.outputs.perfetto import write
from stepcast.simulation.messages import Send
from stepcast.units import format_seconds
from stepcast.views.timeline import gantt
from tests.shared import ROOT


def events_of(timeline: Timeline) -> list[dict[str, Any]]:
    trace = json.loads(write(timeline))
    assert set(trace) == {"otherData", "displayTimeUnit", "traceEvents"}
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def check_rules(events: list[dict[str, Any]]) -> None:
    """What the trace event format asks of each event, and Perfetto of ids."""
    named_threads = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    for event in events:
        assert event["ph"] in ("X", "M", "s", "f")
        assert event["pid"] >= 1
        if event["ph"] == "M":
            continue
        if event["ph"] in "sf":
            assert event["id"] >= 1
            continue
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        assert (event["pid"], event["tid"]) in named_threads
        assert isinstance(event["name"], str)


def test_a_measured_run_follows_the_rules() -> None:
    timeline = read(ROOT / "examples" / "megatron-rank7.txt")
    events = events_of(timeline)
    check_rules(events)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == len(timeline)
    last = max(event["ts"] + event["dur"] for event in slices)
    assert last == pytest.approx(timeline.span_s * 1e6, abs=0.01)


def test_names_and_arguments_are_kept() -> None:
    builder = TimelineBuilder()
    lane = builder.lane(0, 'stream "7"')
    work = Collective(CollectiveKind.ALL_REDUCE, 4096, Group.DP)
    builder.add("ncclé\n", lane, 1.5, 0.25, kind=SpanKind.COMMUNICATION, work=work, micro_batch=3, details=[("a", "b")])
    events = events_of(builder.build(measured=True, rebase=False))
    check_rules(events)
    (span,) = [event for event in events if event["ph"] == "X"]
    assert (span["name"], span["cat"], span["ts"], span["dur"]) == ("ncclé\n", "communication", 1.5e6, 0.25e6)
    assert span["args"] == {"micro_batch": 3, "a": "b", "collective": "all-reduce", "group": "dp", "bytes": 4096}


@pytest.mark.parametrize(
    "words", ["--tp 2 --pp 2 --global-batch 4", "--framework fsdp --accumulation 1"], ids=["pipeline", "eager"]
)
def test_the_trace_of_a_prediction_is_read_back(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, again = str(tmp_path / "trace.json.gz"), str(tmp_path / "again.json.gz")
    command = ["predict", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "8", *words.split(), "--trace", trace]
    assert main([*command, "--json"]) == 0
    step_s = json.loads(capsys.readouterr().out)["step_s"]
    assert main(["show", trace, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["measured"], shown["step_s"], shown["gpus"]) == (False, step_s, 8)
    assert shown["command"].startswith("stepcast predict llama-3.2-1b")
    assert len(shown["stage_of_rank"]) == shown["pp"]
    assert {row["kind"] for row in shown["operations"]} <= {"compute", "communication", "host"}
    assert all(row["kind"] == "host" for row in shown["operations"] if row["name"] == "issue")
    assert main(["show", trace]) == 0
    out = capsys.readouterr().out
    assert "Perfetto / Chrome JSON of stepcast" in out
    assert "Kineto" not in out
    assert f"predicted step  {format_seconds(step_s)}" in out
    assert main(["convert", trace, again, "--to", "perfetto"]) == 0
    first, second = read(trace), read(again)
    assert first.facts == second.facts
    assert (first.names, first.lanes, first.details) == (second.names, second.lanes, second.details)
    assert (first.start_s == second.start_s).all()


def test_a_measured_run_is_read_back_as_measured() -> None:
    timeline = read(ROOT / "examples" / "megatron-rank7.txt")
    again = read_sources([source := Source("t.json", write(timeline))], recognise(source))
    assert (again.measured, again.layout, again.stage_of_rank) == (True, timeline.layout, timeline.stage_of_rank)
    first, second = communication_rows(timeline), communication_rows(again)
    assert [row["total_bytes"] for row in first] == [row["total_bytes"] for row in second]
    assert again.facts["hidden"] == timeline.facts["hidden"]
    assert again.micro_batch_of.tolist() == timeline.micro_batch_of[np.argsort(timeline.start_s)].tolist()


def test_a_damaged_timeline_is_refused() -> None:
    data = write(read(ROOT / "examples" / "megatron-rank7.txt")).replace(b'"cat":"compute"', b'"cat":"x"')
    with pytest.raises(FormatError, match="no complete timeline of stepcast"):
        read_sources([source := Source("t.json", data)], recognise(source))


def test_messages_between_stages_are_arrows_that_start_and_end_inside_slices() -> None:
    workload = read(ROOT / "examples" / "simai-llama-405b.txt")
    timeline = simulate(workload, load_cluster("dgx-h100")).timeline
    events = events_of(timeline)
    check_rules(events)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    arrows = [event for event in events if event["ph"] in "sf"]
    # Each of 16 micro-batches crosses 15 boundaries forward and backward.
    assert len(arrows) == 2 * 2 * 16 * 15
    for event in arrows[::40]:
        inside = slices[event["pid"], event["tid"]]
        assert any(start - 0.01 <= event["ts"] <= end + 0.01 for start, end in inside)
    ends = {event["id"]: event["ts"] for event in arrows if event["ph"] == "f"}
    assert all(ends[event["id"]] >= event["ts"] - 0.01 for event in arrows if event["ph"] == "s")


def tracks(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """Start and end of the slices of each thread, in whole nanoseconds."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for event in events:
        if event["ph"] == "X":
            start, duration = (Decimal(str(event[key])) * 1000 for key in ("ts", "dur"))
            assert start == int(start)
            assert duration == int(duration)
            found.setdefault((event["pid"], event["tid"]), []).append((int(start), int(start + duration)))
    return found


def dropped(slices: list[tuple[int, int]]) -> int:
    """As Perfetto's SliceTracker reads a thread, in order of start: what outlasts the slice around it is
    dropped."""
    around: list[int] = []
    count = 0
    for start, end in sorted(slices, key=lambda one: one[0]):
        while around and around[-1] <= start:
            around.pop()
        if around and around[-1] < end:
            count += 1
        else:
            around.append(end)
    return count


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.floats(0, 3e-6), st.one_of(st.just(0.0), st.floats(0, 2e-6)), st.booleans()),
        max_size=40,
    )
)
@settings(deadline=None)
def test_slices_of_a_thread_nest_or_lie_apart(rows: list[tuple[int, float, float, bool]]) -> None:
    """Spans at random places, or each right behind the one before it, of any length and of none."""
    builder = TimelineBuilder()
    lanes = [builder.lane(0, f"stream {number}") for number in range(3)]
    ends_s = [0.0, 0.0, 0.0]
    for lane, start_s, duration_s, behind in rows:
        start_s = ends_s[lane] if behind else start_s
        builder.add("work", lanes[lane], start_s, duration_s)
        ends_s[lane] = start_s + duration_s
    timeline = builder.build(measured=True, rebase=False)
    events = events_of(timeline)
    check_rules(events)
    drawn = tracks(events)
    assert sum(map(len, drawn.values())) == len(rows)
    for slices in drawn.values():
        assert not dropped(slices)
        for start, end in slices:
            assert not any(start < other < end < last for other, last in slices)
    written = sorted(one for slices in drawn.values() for one in slices)
    expected = [(round(span.start_s * 1e9), round(span.end_s * 1e9)) for span in timeline.spans()]
    assert written == sorted(expected)


def test_work_that_follows_itself_stays_in_one_thread(tmp_path: Path) -> None:
    """A simulated step: no slice is dropped, and no lane needs a second thread."""
    timeline = simulate(read(ROOT / "examples" / "simai-llama-405b.txt"), load_cluster("dgx-h100")).timeline
    drawn = tracks(events_of(timeline))
    assert len(drawn) == len(timeline.lanes)
    assert not any(map(dropped, drawn.values()))
    trace, out = ROOT / "examples" / "kineto-llama-1b.json.gz", tmp_path / "out.json"
    assert main(["convert", str(trace), str(out), "--to", "perfetto"]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    assert not any(map(dropped, tracks(events).values()))
    arrows = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    assert len(arrows) == 1366  # each kernel and memset with its launch
    assert {event["name"] for event in events if event["ph"] in "sf"} == {"launch"}
    assert all(event["ts"] >= arrows[event["id"]] for event in events if event["ph"] == "f")


@pytest.mark.parametrize("send", Send)
@pytest.mark.parametrize(("slow", "place"), [({}, 0), ({38: 2.0, 50: 1.5}, 6)])
def test_a_simulated_rank_is_called_by_its_number_in_the_world(send: Send, slow: dict[int, float], place: int) -> None:
    """Of tp 8, dp 2 and 16 stages, stage s is ranks 16 s and on; the slowest is simulated, or else the
    first."""
    workload = read(ROOT / "examples" / "simai-llama-405b.txt")
    options = Options(send=send, gpus=256)
    timeline = simulate(workload, load_cluster("dgx-h100"), options, slow_ranks=slow).timeline
    ranks = {16 * stage + place: stage for stage in range(16)}
    assert timeline.stage_of_rank == ranks
    assert set(timeline.ranks) == set(ranks)
    names = [event["args"]["name"] for event in events_of(timeline) if event["name"] == "process_name"]
    assert names == [f"rank {rank} (stage {stage})" for rank, stage in ranks.items()]
    rows = gantt(timeline, 100).splitlines()[:16]
    assert [row.split()[:2] for row in rows] == [["stage", str(stage)] for stage in range(16)]
    waiting = {(lane.rank, lane.name) for lane in timeline.lanes if " to " in lane.name}
    assert ((16 + place, "activations 1 to 2") in waiting) == (send is Send.RENDEZVOUS)
