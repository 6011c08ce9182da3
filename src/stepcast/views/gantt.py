"""A timeline as text: one row for each rank, one character for each slice of time."""

from math import ceil

import numpy as np
import numpy.typing as npt

from stepcast.ir.timeline import SpanKind, Timeline
from stepcast.views.text import wrap

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

LEGEND = "F forward, B backward, W weight gradient, o once per step, - communication, . waiting"
SHORT = "f, b, w: shorter than its column"
SEVERAL_MARK = "*"
SEVERAL = f"{SEVERAL_MARK} several in one column"
MARKS = {"F": "F", "B": "B", "I": "B", "W": "W"}
LONGEST_ROW_LIST = 64
# Less than that is bookkeeping, such as the single nanoseconds of SimAI's placeholders.
LEAST_COLUMNS = 1e-3


def gantt(timeline: Timeline, width: int) -> str:
    """Return a row for each rank: its main activity in each slice of the step."""
    ranks, stage_of = timeline.ranks, timeline.stage_of_rank
    names = [f"stage {stage_of[rank]}" if rank in stage_of else f"rank {rank}" for rank in ranks]
    label = max(map(len, names), default=0)
    columns = max(10, width - label - 1)
    span_s = timeline.span_s or 1.0
    rank_of = timeline.rank_of
    lines = []
    for rank, name in list(zip(ranks, names, strict=True))[:LONGEST_ROW_LIST]:
        rows = np.flatnonzero(rank_of == rank)
        lines.append(name.ljust(label) + " " + _row(timeline, rows, columns, span_s))
    if len(ranks) > LONGEST_ROW_LIST:
        lines.append(f"... and {len(ranks) - LONGEST_ROW_LIST} more")
    drawn = "".join(line[label:] for line in lines)
    parts = [LEGEND]
    if any(mark in drawn for mark in "fbw"):
        parts.append(SHORT)
    if SEVERAL_MARK in drawn:
        parts.append(SEVERAL)
    return "\n".join([*lines, "", *wrap("; ".join(parts), width)])


def _row(timeline: Timeline, rows: Ints, columns: int, span_s: float) -> str:
    """Return the character of each slice: the activity that fills most of it."""
    marks = ["F", "B", "W", "o", "-"]
    filled = np.zeros((len(marks), columns))
    slot_mark = [_mark(detail.get("slot", "")) for detail in timeline.details]
    kinds, details = timeline.kind_of[rows], timeline.detail_of[rows]
    mark_of = np.array(
        [
            marks.index("-" if kind != SpanKind.COMPUTE else slot_mark[detail] if detail >= 0 else "o")
            for kind, detail in zip(kinds.tolist(), details.tolist(), strict=True)
        ],
        dtype=np.int64,
    )
    scale = columns / span_s
    begin, end = timeline.start_s[rows] * scale, timeline.end_s[rows] * scale
    edges = np.arange(columns + 1, dtype=np.float64)
    for mark in range(len(marks)):
        mine = mark_of == mark
        if mine.any():
            filled[mark] = np.diff(_busy_until(edges, begin[mine], end[mine]))
    # Communication during computation is hidden: it shows only where nothing else runs.
    filled[marks.index("-")] = np.minimum(filled[-1], 1 - np.minimum(filled[:-1].sum(axis=0), 1)) * 0.999
    best = filled.argmax(axis=0)
    idle = 1 - filled.sum(axis=0)
    row = ["." if idle[column] > filled[best[column], column] else marks[best[column]] for column in range(columns)]
    computes = kinds == SpanKind.COMPUTE
    phases = _phases(begin[computes], end[computes], mark_of[computes])
    return _with_short(row, [(first, last, marks[mark]) for first, last, mark in phases])


def _phases(begin: Floats, end: Floats, mark_of: Ints) -> list[tuple[float, float, int]]:
    """Return runs of work with one mark: where each begins and ends, in columns."""
    if not len(begin):
        return []
    order = np.argsort(begin, kind="stable")
    marks = mark_of[order]
    first = np.flatnonzero(np.diff(marks, prepend=marks[0] - 1))
    last = np.append(first[1:], len(marks)) - 1
    return list(zip(begin[order][first].tolist(), end[order][last].tolist(), marks[first].tolist(), strict=True))


def _with_short(row: list[str], phases: list[tuple[float, float, str]]) -> str:
    """Return *row* with marks for phases that no column shows because another activity fills most of it."""
    middles: dict[int, list[tuple[str, bool]]] = {}
    for first, last, mark in phases:
        if last - first < LEAST_COLUMNS:
            continue
        seen = mark in row[int(first) : max(ceil(last), int(first) + 1)]
        middles.setdefault(min(int((first + last) / 2), len(row) - 1), []).append((mark, seen))
    drawn = list(row)
    for column, phases_here in middles.items():
        marks = {mark for mark, _ in phases_here}
        if not all(seen for _, seen in phases_here):
            drawn[column] = marks.pop().lower() if len(marks) == 1 else SEVERAL_MARK
    return "".join(drawn)


def _busy_until(edges: Floats, begin: Floats, end: Floats) -> Floats:
    """Return the summed length of the spans before each edge."""
    order_b, order_e = np.sort(begin), np.sort(end)
    sum_b, sum_e = np.concatenate([[0], np.cumsum(order_b)]), np.concatenate([[0], np.cumsum(order_e)])
    started, ended = np.searchsorted(order_b, edges), np.searchsorted(order_e, edges)
    total: Floats = (edges * started - sum_b[started]) - (edges * ended - sum_e[ended])
    return total


def _mark(slot: str) -> str:
    return MARKS.get(slot[:1], "o") if "." in slot else "o"
