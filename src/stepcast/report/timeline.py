"""What a Timeline holds: its span, time per operation, and each kind of communication."""

from typing import Any

import numpy as np

from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.work import Collective, Transfer

Facts = dict[str, Any]


def timeline_facts(timeline: Timeline) -> Facts:
    """Times of top-level spans, summed over the ranks present; parts of spans stand in *communication*."""
    facts: Facts = {
        "kind": "timeline",
        "measured": timeline.measured,
        "ranks": list(timeline.ranks),
        "spans": len(timeline),
        "lanes": len(timeline.lanes),
        "span_s": timeline.span_s,
        "rank_span_s": _rank_spans_s(timeline),
    }
    if timeline.layout is not None:
        facts |= timeline.layout.facts()
    facts |= timeline.facts
    if timeline.stage_of_rank:
        facts["stage_of_rank"] = {str(rank): stage for rank, stage in timeline.stage_of_rank.items()}
    operations = operation_rows(timeline)
    facts["operations_s"] = {row["name"]: row["total_s"] for row in operations}
    facts["operations"] = operations
    facts["communication"] = communication_rows(timeline)
    return facts


def _rank_spans_s(timeline: Timeline) -> dict[str, float]:
    """First start to last end of each rank. Clocks of two hosts may differ; a rank's own does not."""
    ranks, end_s = timeline.rank_of, timeline.end_s
    spans = {}
    for rank in timeline.ranks:
        rows = ranks == rank
        if rows.any():
            spans[str(rank)] = float(end_s[rows].max() - timeline.start_s[rows].min())
    return spans


def operation_rows(timeline: Timeline) -> list[Facts]:
    """Top-level operations by name, longest first; host activity is told apart from device work."""
    rows = np.flatnonzero(timeline.top_level)
    keys = timeline.name_of[rows].astype(np.int64) * len(SpanKind) + timeline.kind_of[rows]
    distinct, inverse = np.unique(keys, return_inverse=True)
    counts = np.bincount(inverse, minlength=len(distinct))
    totals = np.bincount(inverse, weights=timeline.duration_s[rows], minlength=len(distinct))
    longest = np.zeros(len(distinct))
    np.maximum.at(longest, inverse, timeline.duration_s[rows])
    listed = [
        {
            "name": timeline.names[int(key) // len(SpanKind)],
            "kind": SpanKind(int(key) % len(SpanKind)).name.lower(),
            "count": int(count),
            "total_s": float(total),
            "longest_s": float(high),
        }
        for key, count, total, high in zip(distinct, counts, totals, longest, strict=True)
    ]
    return sorted(listed, key=lambda row: (-row["total_s"], row["name"]))


def communication_rows(timeline: Timeline) -> list[Facts]:
    """Messages by kind, group and size, with the shortest time each took."""
    listed: list[Facts] = []
    order = np.argsort(timeline.work_of, kind="stable")
    works = timeline.work_of[order]
    starts = np.flatnonzero(np.diff(works, prepend=NONE - 1))
    ends = np.append(starts[1:], len(works))[: len(starts)]
    for start, end in zip(starts, ends, strict=True):
        if works[start] == NONE:
            continue
        work = timeline.works[works[start]]
        if not isinstance(work, Collective | Transfer):
            continue
        times_s = timeline.duration_s[order[start:end]]
        times = work.times if isinstance(work, Collective) else 1
        count = int(end - start) * times
        listed.append(
            {
                "kind": str(work.kind if isinstance(work, Collective) else work.direction),
                "group": str(work.group),
                "size_bytes": work.size_bytes,
                "count": count,
                "total_bytes": work.size_bytes * count,
                "total_s": float(times_s.sum()),
                "shortest_s": float(times_s.min()) / times,
            }
        )
    return sorted(listed, key=lambda row: -row["total_s"])
