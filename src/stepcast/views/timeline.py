"""Timelines: the section of a page in which one can be looked into, and the columns its canvas draws from; and text."""

import base64
import zlib
from collections.abc import Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.step import PART_OF_GROUP
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.types import FactDict, dataclass
from stepcast.views.document import Section, data_block, load_asset, swatch
from stepcast.views.markup import fill_template, join, tag
from stepcast.views.text import fit, visible, wrap
from stepcast.views.view import NAMES

# A Timeline packed for the canvas of a page: columns of whole numbers, squeezed, as text.


# More would neither be seen nor be loaded quickly; the shortest are drawn together.
MOST_SLICES = 200_000
# Slices are drawn as one if the gap between them is at most that share of the span.
GAP_SHARE = 1 / 5000
TICKS = 2**31  # of the whole span
DEEPEST = 8
LONGEST_NAME = 200
SEVERAL = "several short operations"
# Colours in the order of their numbers, and what they mean; the style names each.
KINDS = NAMES["timeline_colours"]
FIRST = ("compute", "stream")
PHASES = {"F": "compute", "B": "backward", "I": "backward", "W": "weight"}
HELP = "Drag to move, Ctrl and wheel or + and - to zoom, arrows to move, / to search, Enter to fold a rank."
LEGEND = "F forward, B backward, W weight gradient, o once per step, - communication, . waiting"
SHORT = "f, b, w: shorter than its column"
SEVERAL_MARK = "*"
SEVERAL_WORDS = f"{SEVERAL_MARK} several in one column"
MARKS = {"F": "F", "B": "B", "I": "B", "W": "W"}
LONGEST_ROW_LIST = 64
# Less than that is bookkeeping, such as the single nanoseconds of SimAI's placeholders.
LEAST_COLUMNS = 1e-3


@dataclass(frozen=True, slots=True)
class Slices:
    """Rows of a timeline in the order of their rows on the canvas, and within these of their starts."""

    row: IntArray
    name: IntArray
    kind: IntArray
    detail: IntArray
    micro_batch: IntArray
    start_s: FloatArray
    end_s: FloatArray

    def __len__(self) -> int:
        return len(self.row)


def pack_timeline(timeline: Timeline, most: int = MOST_SLICES) -> FactDict:
    """Return the data from which the program of a page draws a timeline."""
    used, row_of = np.unique(timeline.lane_of.astype(np.int64) * DEEPEST + _depths(timeline), return_inverse=True)

    def key(index: int) -> tuple[int, bool, int]:
        lane = timeline.lanes[int(used[index]) // DEEPEST]
        return lane.rank, not lane.name.startswith(FIRST), int(used[index])

    order = np.array(sorted(range(len(used)), key=key), np.int64)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    rows = place[row_of]
    sort = np.lexsort((timeline.start_s, rows))
    numbers = (rows, timeline.name_of, _kinds(timeline), timeline.detail_of, timeline.micro_batch_of)
    row, name, kind, detail, micro_batch = (column[sort].astype(np.int64) for column in numbers)
    slices = Slices(row, name, kind, detail, micro_batch, timeline.start_s[sort], timeline.end_s[sort])
    shown = merge_slices(slices, most, len(timeline.names))
    origin_s = float(slices.start_s.min()) if len(slices) else 0.0
    tick_s = (timeline.span_s or 1.0) / TICKS
    start = np.rint((shown.start_s - origin_s) / tick_s).astype(np.int64)
    length = np.maximum(1, np.rint((shown.end_s - origin_s) / tick_s).astype(np.int64) - start)
    columns = (np.diff(start, prepend=0), length, shown.row, shown.name, shown.kind, shown.detail, shown.micro_batch)
    return {
        "count": len(shown),
        "of": len(timeline),
        "tick_s": tick_s,
        "span_s": timeline.span_s,
        "names": [*(fit(visible(name), LONGEST_NAME) for name in timeline.names), SEVERAL],
        "details": [", ".join(map(visible, detail.values()))[:LONGEST_NAME] for detail in timeline.details],
        "rows": [_row(timeline, int(used[index])) for index in order],
        "kinds": list(KINDS),
        "measured": timeline.measured,
        "data": _compress(columns),
    }


def merge_slices(slices: Slices, most: int, several: int) -> Slices:
    """Return about *most* slices: the longest unchanged, runs of others between them as one named *several*."""
    if len(slices) <= most:
        return slices
    lengths = slices.end_s - slices.start_s
    is_long = np.zeros(len(slices), bool)
    is_long[np.argpartition(-lengths, most // 2)[: most // 2]] = True
    before = np.maximum.accumulate(slices.end_s)
    span_s = float(slices.end_s.max() - slices.start_s.min())
    first = np.ones(len(slices), bool)
    first[1:] = is_long[1:] | is_long[:-1] | (slices.row[1:] != slices.row[:-1])
    first[1:] |= slices.start_s[1:] - before[:-1] > span_s * GAP_SHARE
    index = np.flatnonzero(first)
    runs = np.diff(np.append(index, len(slices))) > 1
    first_slices = Slices(*(getattr(slices, name)[index] for name in slices.__slots__))
    return replace(
        first_slices,
        end_s=np.maximum.reduceat(slices.end_s, index),
        name=np.where(runs, several, first_slices.name),
        detail=np.where(runs, NONE, first_slices.detail),
        micro_batch=np.where(runs, NONE, first_slices.micro_batch),
    )


def _depths(timeline: Timeline) -> IntArray:
    """Return how many other rows each row is part of."""
    depth, parent = np.zeros(len(timeline), np.int64), timeline.parent_of.astype(np.int64)
    for _ in range(DEEPEST - 1):
        inside = parent != NONE
        if not inside.any():
            break
        depth += inside
        parent = np.where(inside, timeline.parent_of[parent], NONE)
    return depth


def _row(timeline: Timeline, key: int) -> FactDict:
    lane = timeline.lanes[key // DEEPEST]
    return {
        "rank": lane.rank,
        "stage": timeline.stage_of_rank.get(lane.rank),
        "name": fit(visible(lane.name), LONGEST_NAME),
        "depth": key % DEEPEST,
    }


def _kinds(timeline: Timeline) -> IntArray:
    """Return the colour of every row: computation by its phase, communication by its group."""
    number = {kind: index for index, kind in enumerate(KINDS)}
    by_kind = np.full(len(SpanKind), number["other"])
    by_kind[SpanKind.COMPUTE], by_kind[SpanKind.COMMUNICATION] = number["compute"], number["comm"]
    by_kind[SpanKind.COPY], by_kind[SpanKind.HOST] = number["copy"], number["host"]
    kinds: IntArray = by_kind[timeline.kind_of].astype(np.int64)
    phases = [number[PHASES.get(detail.get("slot", "")[:1], "optimizer")] for detail in timeline.details]
    slotted = ["slot" in detail for detail in timeline.details]
    computing = timeline.kind_of == SpanKind.COMPUTE
    if any(slotted):
        has = np.array([*slotted, False])[timeline.detail_of]
        kinds = np.where(computing & has, np.array([*phases, 0])[timeline.detail_of], kinds)
    words = [lane.name.partition(" ")[0] for lane in timeline.lanes]
    lanes = np.array([number.get(PART_OF_GROUP.get(word, word), NONE) for word in words])[timeline.lane_of]
    kinds = np.where(~computing & (lanes != NONE), lanes, kinds)
    waits = np.array([name.startswith("wait") for name in timeline.names])[timeline.name_of]
    return np.where(waits & ~computing, number["bubble"], kinds)


def _compress(columns: tuple[IntArray, ...]) -> str:
    """Return columns of 32 bits, compressed; the first bytes of all values come first, which compresses well."""
    bytes_of = (np.ascontiguousarray(column.astype("<i4")).view(np.uint8).reshape(-1, 4) for column in columns)
    return base64.b64encode(zlib.compress(b"".join(column.T.tobytes() for column in bytes_of), 6)).decode()


def timeline_section(timeline: Timeline, links: Sequence[tuple[str, str]] = (), what: str = "") -> Section:
    """Return the section that shows every span on a canvas; *what* says whose they are."""
    data = pack_timeline(timeline)
    usual = "as it was measured" if timeline.measured else "as simulated, one rank for all that do the same"
    lead = f"{data['of']:,} spans, {what or usual}."
    if data["count"] < data["of"]:
        lead += f" More than {MOST_SLICES:,}: runs of the shortest are merged; --trace writes them all."
    legend = [swatch(kind, words, data_kind=index) for index, (kind, words) in enumerate(KINDS.items())]
    kinds = tag("ul", legend, class_="legend", id="kinds")  # the program hides colours that no slice has
    files = join(tag("a", words, href=name) for words, name in links)
    chart = fill_template(load_asset("timeline.html"), links=files, legend=kinds, spans=f"{data['of']:,}", help=HELP)
    return Section("Timeline", join((chart, data_block("timeline-data", data))), lead, wide=True)


# ---- as text: one row for each rank, one character for each slice of time -----------------------------------


def gantt(timeline: Timeline, width: int) -> str:
    """Return a row for each rank: its main activity in each slice of the step."""
    ranks, stage_of = timeline.ranks, timeline.stage_of_rank
    names = [f"stage {stage_of[rank]}" if rank in stage_of else f"rank {rank}" for rank in ranks]
    label = max(map(len, names), default=0)
    columns = max(10, width - label - 1)
    span_s = timeline.span_s or 1.0
    rank_of, lines = timeline.rank_of, []
    for rank, name in list(zip(ranks, names, strict=True))[:LONGEST_ROW_LIST]:
        lines.append(name.ljust(label) + " " + _line(timeline, np.flatnonzero(rank_of == rank), columns, span_s))
    if len(ranks) > LONGEST_ROW_LIST:
        lines.append(f"... and {len(ranks) - LONGEST_ROW_LIST} more")
    marks_used = "".join(line[label:] for line in lines)
    parts = [LEGEND]
    if any(mark in marks_used for mark in "fbw"):
        parts.append(SHORT)
    if SEVERAL_MARK in marks_used:
        parts.append(SEVERAL_WORDS)
    return "\n".join([*lines, "", *wrap("; ".join(parts), width)])


def _line(timeline: Timeline, rows: IntArray, columns: int, span_s: float) -> str:
    """Return the character of each slice: the activity that fills most of it."""
    marks = ["F", "B", "W", "o", "-"]
    filled = np.zeros((len(marks), columns))
    slots = [detail.get("slot", "") for detail in timeline.details]
    slot_mark = [MARKS.get(slot[:1], "o") if "." in slot else "o" for slot in slots]
    kinds, details = timeline.kind_of[rows], timeline.detail_of[rows]
    computing = np.array([*map(marks.index, slot_mark), marks.index("o")], np.int64)[details]
    mark_of = np.where(kinds == SpanKind.COMPUTE, computing, marks.index("-"))
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


def _phases(begin: FloatArray, end: FloatArray, mark_of: IntArray) -> list[tuple[float, float, int]]:
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
    cells = list(row)
    for column, phases_here in middles.items():
        marks = {mark for mark, _ in phases_here}
        if not all(seen for _, seen in phases_here):
            cells[column] = marks.pop().lower() if len(marks) == 1 else SEVERAL_MARK
    return "".join(cells)


def _busy_until(edges: FloatArray, begin: FloatArray, end: FloatArray) -> FloatArray:
    """Return the summed length of the spans before each edge."""
    order_b, order_e = np.sort(begin), np.sort(end)
    sum_b, sum_e = np.concatenate([[0], np.cumsum(order_b)]), np.concatenate([[0], np.cumsum(order_e)])
    started, ended = np.searchsorted(order_b, edges), np.searchsorted(order_e, edges)
    total: FloatArray = (edges * started - sum_b[started]) - (edges * ended - sum_e[ended])
    return total
