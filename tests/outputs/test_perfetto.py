"""Chrome trace JSON against the rules of the format."""

import json
from typing import Any

import pytest

from stepcast.forecast.simulate import simulate
from stepcast.hardware import load_cluster
from stepcast.inputs.table import read
from stepcast.ir.group import Group
from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.outputs.perfetto import write
from tests.shared import ROOT


def events_of(timeline: Timeline) -> list[dict[str, Any]]:
    trace = json.loads(write(timeline))
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
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
    builder.add(
        "ncclé\n",
        lane,
        1.5,
        0.25,
        kind=SpanKind.COMMUNICATION,
        work=work,
        micro_batch=3,
        details=[("a", "b")],
    )
    events = events_of(builder.build(measured=True, rebase=False))
    check_rules(events)
    (span,) = [event for event in events if event["ph"] == "X"]
    assert (span["name"], span["cat"], span["ts"], span["dur"]) == ("ncclé\n", "communication", 1.5e6, 0.25e6)
    assert span["args"] == {
        "micro_batch": 3,
        "a": "b",
        "collective": "all-reduce",
        "group": "dp",
        "bytes": 4096,
    }


def test_messages_between_stages_are_arrows_that_start_and_end_inside_slices() -> None:
    workload = read(ROOT / "examples" / "simai-llama-405b.txt")
    timeline = simulate(workload, load_cluster("dgx-h100")).timeline
    events = events_of(timeline)
    check_rules(events)
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append(
                (event["ts"], event["ts"] + event["dur"])
            )
    arrows = [event for event in events if event["ph"] in "sf"]
    # Each of 16 micro-batches crosses 15 boundaries forward and backward.
    assert len(arrows) == 2 * 2 * 16 * 15
    for event in arrows[::40]:
        inside = slices[event["pid"], event["tid"]]
        assert any(start - 0.01 <= event["ts"] <= end + 0.01 for start, end in inside)
    ends = {event["id"]: event["ts"] for event in arrows if event["ph"] == "f"}
    assert all(ends[event["id"]] >= event["ts"] - 0.01 for event in arrows if event["ph"] == "s")
