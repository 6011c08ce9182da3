"""A packed timeline is the timeline: what the page decodes is what was there."""

import base64
import zlib

import numpy as np
import pytest

from stepcast.ir.timeline import NONE, SpanKind, Timeline, TimelineBuilder
from stepcast.views.timeline import KINDS, SEVERAL, Slices, merge_slices, pack_timeline

COLUMNS = ("start", "length", "row", "name", "kind", "detail", "batch")


def decoded(data: dict[str, object]) -> dict[str, np.ndarray]:
    """As the program of a page does it."""
    count = data["count"]
    assert isinstance(count, int)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(str(data["data"]))), np.uint8).reshape(
        len(COLUMNS), 4, count
    )
    found = {
        name: np.ascontiguousarray(planes[at].T).view("<i4").reshape(-1).astype(np.int64)
        for at, name in enumerate(COLUMNS)
    }
    found["start"] = np.cumsum(found["start"])
    return found


def timeline(count: int, seed: int = 0) -> Timeline:
    """Spans of two ranks, four lanes, with parts within parts on one of them."""
    chance = np.random.default_rng(seed)
    builder = TimelineBuilder()
    lanes = [builder.lane(rank, name) for rank in (3, 0) for name in ("tp", "compute")]
    ends = [0.0] * len(lanes)
    for _ in range(count):
        lane = int(chance.integers(len(lanes)))
        start = ends[lane] + float(chance.exponential(1e-4))
        length = float(chance.exponential(1e-3))
        outer = builder.add(
            f"op {int(chance.integers(50))}",
            lane,
            start,
            length,
            kind=(SpanKind.COMMUNICATION, SpanKind.COMPUTE)[lane % 2],
            micro_batch=int(chance.integers(4)),
        )
        if lane == 1:
            builder.add("within", lane, start, length / 2, parent=outer)
        ends[lane] = start + length
    return builder.build(measured=False, stage_of_rank={0: 0, 3: 1})


def test_every_span_comes_back_where_it_was() -> None:
    there = timeline(2_000)
    data = pack_timeline(there)
    found = decoded(data)
    assert data["count"] == data["of"] == len(there)
    rows, names, tick_s = data["rows"], data["names"], data["tick_s"]
    told = sorted(
        (rows[row]["rank"], rows[row]["name"], rows[row]["depth"], names[name], batch)
        for row, name, batch in zip(found["row"], found["name"], found["batch"], strict=True)
    )
    was = sorted(
        (
            span.lane.rank,
            span.lane.name,
            0 if span.parent is None else 1,
            span.name,
            -1 if span.micro_batch is None else span.micro_batch,
        )
        for span in there.spans()
    )
    assert told == was
    starts = np.sort(found["start"] * tick_s)
    assert starts == pytest.approx(np.sort(there.start_s), abs=there.span_s * 1e-8)
    ends = np.sort((found["start"] + found["length"]) * tick_s)
    assert ends == pytest.approx(np.sort(there.end_s), abs=there.span_s * 1e-8)


def test_rows_are_by_rank_computation_first_and_slices_in_order() -> None:
    data = pack_timeline(timeline(500))
    assert [(row["rank"], row["name"], row["depth"]) for row in data["rows"]] == [
        (0, "compute", 0),
        (0, "tp", 0),
        (3, "compute", 0),
        (3, "compute", 1),
        (3, "tp", 0),
    ]
    assert [row["stage"] for row in data["rows"]] == [0, 0, 1, 1, 1]
    found = decoded(data)
    order = np.lexsort((found["start"], found["row"]))
    assert (order == np.arange(len(order))).all()


def test_communication_has_the_colour_of_its_group() -> None:
    data = pack_timeline(timeline(200))
    found = decoded(data)
    for row, kind in zip(found["row"], found["kind"], strict=True):
        assert list(KINDS)[kind] == ("tp" if data["rows"][row]["name"] == "tp" else "compute")


def test_many_slices_are_drawn_together_without_losing_time() -> None:
    there = timeline(30_000)
    data = pack_timeline(there, most=2_000)
    found = decoded(data)
    assert data["of"] == len(there) == 30_000 + int((there.parent_of != NONE).sum())
    assert 1_000 <= data["count"] <= 4_000
    several = data["names"].index(SEVERAL)
    assert (found["name"] == several).any()
    # The longest are as they were.
    longest = np.sort(there.duration_s)[-500:]
    kept = np.sort(found["length"][found["name"] != several] * data["tick_s"])[-500:]
    assert kept == pytest.approx(longest, abs=there.span_s * 1e-8)
    assert (found["start"] + found["length"]).max() * data["tick_s"] == pytest.approx(there.span_s, rel=1e-6)


def test_what_lies_apart_is_not_drawn_together() -> None:
    far = np.array([0.0, 1e-4, 5.0, 5.0001, 10.0])
    none = np.zeros(5, np.int64)
    lengths = np.array([9e-5, 5e-5, 5e-5, 5e-5, 5e-5])
    found = merge_slices(Slices(none, none, none, none, none, far, far + lengths), 2, 7)
    assert found.start_s.tolist() == [0.0, 1e-4, 5.0, 10.0]
    assert found.name.tolist() == [0, 0, 7, 0]


def test_a_timeline_of_a_hundred_thousand_spans_is_small() -> None:
    assert len(str(pack_timeline(timeline(70_000))["data"])) < 1_500_000
