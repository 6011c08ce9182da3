"""Timelines: spans on lanes of ranks, simulated or measured.

Millions of spans are ordinary, so a Timeline keeps columns, not objects; a Span is a view of one row.
"""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import IntEnum
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from stepcast.ir.arrays import FloatArray, Int32Array
from stepcast.ir.layout import Layout
from stepcast.ir.types import Facts, dataclass, require
from stepcast.ir.work import Work

Value = TypeVar("Value")
NONE = -1
INDEXED = ("name", "lane", "kind", "work", "detail", "micro_batch", "parent")  # the ``*_of`` columns of a Timeline


class SpanKind(IntEnum):
    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2
    HOST = 3
    STEP = 4
    OTHER = 5


@dataclass(frozen=True, slots=True)
class Lane:
    """One in-order stream of one rank."""

    rank: int
    name: str


@dataclass(frozen=True, slots=True)
class Span:
    """One row of a Timeline. Times are seconds from the timeline's origin."""

    index: int
    name: str
    kind: SpanKind
    lane: Lane
    start_s: float
    duration_s: float
    work: Work | None
    micro_batch: int | None
    parent: int | None
    details: Mapping[str, str]

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans in columns. ``*_of`` columns hold indices into the tables above them; -1 means none."""

    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    works: tuple[Work, ...]
    details: tuple[Mapping[str, str], ...]
    name_of: Int32Array
    lane_of: Int32Array
    kind_of: Int32Array
    work_of: Int32Array
    detail_of: Int32Array
    micro_batch_of: Int32Array
    parent_of: Int32Array
    start_s: FloatArray
    duration_s: FloatArray
    measured: bool
    source: str = ""
    layout: Layout | None = None
    stage_of_rank: Mapping[int, int] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    # flows x 2: a row that sends or launches something, and the row that waits for it.
    flows: Int32Array = field(default_factory=lambda: np.zeros((0, 2), np.int32))

    def __post_init__(self) -> None:
        rows = len(self.start_s)
        columns = (*(f"{name}_of" for name in INDEXED), "duration_s")
        require(all(len(getattr(self, column)) == rows for column in columns), "all columns need the same length")
        if rows:
            require(bool(np.isfinite(self.start_s).all()), "start times must be finite")
            valid = bool(np.isfinite(self.duration_s).all() and (self.duration_s >= 0).all())
            require(valid, "durations must be finite, zero or more")

    def __len__(self) -> int:
        return len(self.start_s)

    def __repr__(self) -> str:
        kind = "measured" if self.measured else "simulated"
        return f"Timeline({len(self):,} spans of {len(self.ranks):,} rank(s), {self.span_s:.6g} s, {kind})"

    def span(self, index: int) -> Span:
        work, detail = int(self.work_of[index]), int(self.detail_of[index])
        micro_batch, parent = int(self.micro_batch_of[index]), int(self.parent_of[index])
        return Span(
            index=index,
            name=self.names[self.name_of[index]],
            kind=SpanKind(int(self.kind_of[index])),
            lane=self.lanes[self.lane_of[index]],
            start_s=float(self.start_s[index]),
            duration_s=float(self.duration_s[index]),
            work=None if work == NONE else self.works[work],
            micro_batch=None if micro_batch == NONE else micro_batch,
            parent=None if parent == NONE else parent,
            details={} if detail == NONE else self.details[detail],
        )

    def spans(self) -> Iterator[Span]:
        return (self.span(index) for index in range(len(self)))

    def only(self, selected: npt.NDArray[np.bool_]) -> "Timeline":
        """Return the *selected* rows; what belongs to or waits for a row left out loses that link."""
        rows = np.flatnonzero(selected)
        number = np.full(len(self) + 1, NONE, np.int32)
        number[rows] = np.arange(len(rows))
        flows = number[self.flows]
        columns = [f"{name}_of" for name in INDEXED if name != "parent"]
        return replace(
            self,
            **{name: getattr(self, name)[rows] for name in (*columns, "start_s", "duration_s")},
            parent_of=number[self.parent_of[rows]],
            flows=flows[(flows != NONE).all(axis=1)],
        )

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted({lane.rank for lane in self.lanes}))

    @property
    def top_level(self) -> npt.NDArray[np.bool_]:
        """Rows that are not part of another row."""
        return np.equal(self.parent_of, NONE)

    @property
    def rank_of(self) -> Int32Array:
        """Rank of every row."""
        lane_ranks = np.array([lane.rank for lane in self.lanes], dtype=np.int32)
        return lane_ranks[self.lane_of]

    @property
    def end_s(self) -> FloatArray:
        return self.start_s + self.duration_s

    @property
    def span_s(self) -> float:
        """From the first start to the last end."""
        return float(self.end_s.max() - self.start_s.min()) if len(self) else 0.0


class TimelineBuilder:
    """Collects rows; each distinct name, lane, work and detail is stored once."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._lanes: dict[Lane, int] = {}
        self._works: dict[Work, int] = {}
        self._details: dict[tuple[tuple[str, str], ...], int] = {}
        self._columns = {name: array("i") for name in INDEXED}
        self._start = array("d")
        self._duration = array("d")
        self._flows = [np.zeros((0, 2), np.int32)]

    def __len__(self) -> int:
        return len(self._start)

    def lane(self, rank: int, name: str) -> int:
        return self._lanes.setdefault(Lane(rank, name), len(self._lanes))

    def add(
        self,
        name: str,
        lane: int,
        start_s: float,
        duration_s: float,
        *,
        kind: SpanKind = SpanKind.COMPUTE,
        work: Work | None = None,
        details: Sequence[tuple[str, str]] = (),
        micro_batch: int = NONE,
        parent: int = NONE,
    ) -> int:
        """Append one row and return its index."""
        columns = self._columns
        columns["name"].append(self._names.setdefault(name, len(self._names)))
        columns["lane"].append(lane)
        columns["kind"].append(kind)
        columns["work"].append(NONE if work is None else self._works.setdefault(work, len(self._works)))
        detail = NONE if not details else self._details.setdefault(tuple(details), len(self._details))
        columns["detail"].append(detail)
        columns["micro_batch"].append(micro_batch)
        columns["parent"].append(parent)
        self._start.append(start_s)
        self._duration.append(duration_s)
        return len(self._start) - 1

    def flow(self, sender: int, waiter: int) -> None:
        """Note that row *waiter* waits for what row *sender* sends or launches."""
        self._flows.append(np.array([[sender, waiter]], np.int32))

    def add_columns(
        self,
        names: Sequence[str],
        name_of: Int32Array,
        lane_of: Int32Array,
        kind_of: Int32Array,
        start_s: FloatArray,
        duration_s: FloatArray,
        *,
        works: Sequence[Work] = (),
        work_of: Int32Array | None = None,
        details: Sequence[Sequence[tuple[str, str]]] = (),
        detail_of: Int32Array | None = None,
        parent_of: Int32Array | None = None,
        flows: Int32Array | None = None,
    ) -> None:
        """Append many rows. Lanes are indices of ``lane``; the other ``*_of`` columns index the tables given
        (-1 for none), and *parent_of* and *flows* the rows given.
        """
        first, none = len(self), np.full(len(start_s), NONE, dtype=np.int32)
        columns = {
            "name": _renumber(name_of, self._names, names),
            "lane": lane_of,
            "kind": kind_of,
            "work": none if work_of is None else _renumber(work_of, self._works, works),
            "detail": none if detail_of is None else _renumber(detail_of, self._details, map(tuple, details)),
            "micro_batch": none,
            "parent": none if parent_of is None else np.where(parent_of == NONE, NONE, parent_of + first),
        }
        if flows is not None:
            self._flows.append(flows + np.int32(first))
        for key, column in columns.items():
            self._columns[key].frombytes(np.ascontiguousarray(column, dtype=np.intc).tobytes())
        self._start.frombytes(np.ascontiguousarray(start_s, dtype=np.float64).tobytes())
        self._duration.frombytes(np.ascontiguousarray(duration_s, dtype=np.float64).tobytes())

    def build(
        self,
        *,
        measured: bool,
        source: str = "",
        layout: Layout | None = None,
        stage_of_rank: Mapping[int, int] | None = None,
        facts: Facts | None = None,
        warnings: Sequence[str] = (),
        rebase: bool = True,
    ) -> Timeline:
        """Return the finished Timeline; with *rebase* the first start becomes the origin."""
        start_s = np.array(self._start, dtype=np.float64)
        origin_s = float(start_s.min()) if rebase and len(start_s) else 0.0
        return Timeline(
            names=tuple(self._names),
            lanes=tuple(self._lanes),
            works=tuple(self._works),
            details=tuple(dict(detail) for detail in self._details),
            **{f"{key}_of": np.array(column, dtype=np.int32) for key, column in self._columns.items()},
            start_s=start_s - origin_s,
            duration_s=np.array(self._duration, dtype=np.float64),
            measured=measured,
            source=source,
            layout=layout,
            stage_of_rank=dict(stage_of_rank or {}),
            facts=dict(facts or {}),
            warnings=tuple(warnings),
            flows=np.concatenate(self._flows),
        )


def _renumber(column: Int32Array, known: dict[Value, int], values: Iterable[Value]) -> Int32Array:
    """Turn *column*'s indices of *values* into those of the builder, which *known* gains; -1 stays -1."""
    table = np.array([*(known.setdefault(value, len(known)) for value in values), NONE], dtype=np.int32)
    return table[column]
