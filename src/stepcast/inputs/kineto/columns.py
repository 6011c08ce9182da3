"""Events of one rank as columns: which lane each belongs to, what kind it is, what it communicates."""

import math
import re
from array import array

import msgspec
import numpy as np

from stepcast.inputs.kineto.comm import Communicators, Details
from stepcast.inputs.kineto.roles import (
    CORRELATED,
    DEVICE,
    GAUDI,
    ON_HOST,
    Role,
    gaudi_category,
    role_of,
    role_of_kernel,
)
from stepcast.inputs.kineto.stream import Event
from stepcast.ir.timeline import NONE, Ints, SpanKind, TimelineBuilder
from stepcast.ir.work import Work
from stepcast.units import US

STEP_PREFIX = "ProfilerStep"
CPU_COMM = re.compile(r"(?:gloo|mpi|ucc):")
CORRELATION = re.compile(rb'"correlation"\s*:\s*(\d{1,18})(?!\d)')
KIND_OF_ROLE = {Role.COPY: SpanKind.COPY, Role.COMMUNICATION: SpanKind.COMMUNICATION}

LaneKey = tuple[str, int | str | None, int | str | None]


class RankColumns:
    """Collects the events of one file; `add_to` a builder once the rank is known."""

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        self.unpaired = 0
        self._names: dict[str, int] = {}
        # Of each name, what it is in a thread of the host and in a stream.
        self._kinds: list[tuple[SpanKind, SpanKind]] = []
        self._lanes: dict[str, int] = {}
        self._lane_of_key: dict[LaneKey, tuple[int, Role] | None] = {}
        self._device: int | str | None = None
        self._columns = {key: array("i") for key in ("name", "lane", "kind")}
        self._start_us = array("d")
        self._duration_us = array("d")
        # What a launch and the work it launched share.
        self._correlation = array("q")
        # Rows that communicate, with their arguments: few, so kept as they are until the rank is known.
        self._communications: dict[int, tuple[str, bytes | None]] = {}

    def __len__(self) -> int:
        return len(self._start_us)

    def add(self, events: list[Event]) -> None:
        names, lane_of_key, kinds = self._names, self._lane_of_key, self._kinds
        add_name, add_lane = self._columns["name"].append, self._columns["lane"].append
        add_kind, add_start = self._columns["kind"].append, self._start_us.append
        add_duration, isfinite = self._duration_us.append, math.isfinite
        add_correlation = self._correlation.append
        for event in events:
            if event.ph != "X":
                self.unpaired += event.ph in ("B", "E")
                continue
            start, duration = event.ts, event.dur
            if start is None or duration is None or not (duration >= 0 and isfinite(start + duration)):
                self.skipped += role_of(event.cat) is not Role.FRAME
                continue
            category = event.cat if event.cat != GAUDI else gaudi_category(event.args)
            key = (category, event.pid, event.tid)
            try:
                place = lane_of_key[key]
            except KeyError:
                place = lane_of_key[key] = self._place(*key)
            if place is None:
                continue
            lane, role = place
            name = event.name
            index = names.get(name)
            if index is None:
                index = names[name] = len(names)
                kinds.append((_kind_on_host(name), _kind_on_device(name)))
            if role in ON_HOST:
                kind = kinds[index][0]
                if kind is SpanKind.STEP:
                    self.steps += 1
                    lane = self._lane("steps")
            elif role is Role.KERNEL:
                kind = kinds[index][1]
                if kind is SpanKind.COMPUTE and event.args and b'"Collective name"' in bytes(event.args):
                    kind = SpanKind.COMMUNICATION
            else:
                kind = KIND_OF_ROLE.get(role, SpanKind.OTHER)
            if kind is SpanKind.COMMUNICATION:
                self._communications[len(self)] = name, _kept(event.args)
            add_name(index)
            add_lane(lane)
            add_kind(kind)
            add_start(start)
            add_duration(duration)
            add_correlation(_correlation(event.args) if role in CORRELATED else NONE)

    def _lane(self, name: str) -> int:
        return self._lanes.setdefault(name, len(self._lanes))

    def _place(self, category: str, pid: int | str | None, tid: int | str | None) -> tuple[int, Role] | None:
        """The lane of a category's events in one thread or stream, and their role."""
        role = role_of(category)
        if role is Role.FRAME:
            return None
        if role in ON_HOST:
            return self._lane(f"cpu thread {tid}"), role
        if role is Role.OVERHEAD:
            return self._lane("profiler overhead"), role
        if role in DEVICE:
            self._device = pid if self._device is None else self._device
            device = "" if pid == self._device else f"device {pid} "
            return self._lane(f"{device}stream {tid}"), role
        if role is Role.ANNOTATION:
            return self._lane(f"annotations of stream {tid}"), role
        # Other programs' traces: one lane for each thread of each process.
        return self._lane(f"{category or 'events'} of process {pid} thread {tid}"), role

    def add_to(self, builder: TimelineBuilder, communicators: Communicators, offset_s: float) -> None:
        """Append all rows as lanes of one rank, *offset_s* later than they say."""
        lanes = np.array(
            [builder.lane(communicators.rank, name) for name in self._lanes] or [0], dtype=np.int32
        )
        start_us, duration_us = np.frombuffer(self._start_us), np.frombuffer(self._duration_us)
        lane_of = np.frombuffer(self._columns["lane"], dtype=np.int32)
        works: dict[Work, int] = {}
        details: dict[Details, int] = {}
        work_of = np.full(len(self), NONE, dtype=np.int32)
        detail_of = np.full(len(self), NONE, dtype=np.int32)
        for row, (name, args) in self._communications.items():
            work, facts = communicators.communication(name, args)
            detail_of[row] = details.setdefault(facts, len(details))
            if work is not None:
                work_of[row] = works.setdefault(work, len(works))
        builder.add_columns(
            tuple(self._names),
            np.frombuffer(self._columns["name"], dtype=np.int32),
            lanes[lane_of],
            np.frombuffer(self._columns["kind"], dtype=np.int32),
            start_us * US + offset_s,
            duration_us * US,
            works=tuple(works),
            work_of=work_of,
            details=tuple(details),
            detail_of=detail_of,
            parent_of=self._parents(lane_of),
            flows=self._launches(),
        )

    def _launches(self) -> Ints:
        """Each launch with the work it launched: they carry the same correlation."""
        correlation = np.frombuffer(self._correlation, dtype=np.int64)
        kind = np.frombuffer(self._columns["kind"], dtype=np.int32)
        known = np.flatnonzero(correlation != NONE)
        calls = known[kind[known] == SpanKind.HOST]
        work = known[kind[known] != SpanKind.HOST]
        # The outermost call, where one call makes another.
        calls = calls[np.lexsort((np.frombuffer(self._start_us)[calls], correlation[calls]))]
        if not len(calls):
            return np.zeros((0, 2), np.int32)
        at = np.searchsorted(correlation[calls], correlation[work])
        found = calls[np.minimum(at, len(calls) - 1)]
        launched = correlation[found] == correlation[work]
        return np.stack([found[launched], work[launched]], axis=1).astype(np.int32)

    def _parents(self, lane_of: Ints) -> Ints:
        """For each host event the event it was called from: the innermost one around it in its thread."""
        parent_of = np.full(len(self), NONE, dtype=np.int32)
        start_us, duration_us = np.frombuffer(self._start_us), np.frombuffer(self._duration_us)
        for name, lane in self._lanes.items():
            if not name.startswith("cpu thread"):
                continue
            rows = np.flatnonzero(lane_of == lane)
            # Longer first where two start together: the caller encloses the callee.
            rows = rows[np.lexsort((-duration_us[rows], start_us[rows]))]
            starts = start_us[rows].tolist()
            ends = (start_us[rows] + duration_us[rows]).tolist()
            around: list[int] = []
            parents = []
            for index, start in enumerate(starts):
                while around and ends[around[-1]] <= start:
                    around.pop()
                # An event that outlasts the one before it only overlaps: the profiler's clock slipped.
                while around and ends[around[-1]] < ends[index]:
                    around.pop()
                parents.append(around[-1] if around else NONE)
                around.append(index)
            found = np.array(parents or [NONE], dtype=np.int32)
            if len(rows):
                parent_of[rows] = np.where(found == NONE, NONE, rows[found])
        return parent_of


def _kind_on_host(name: str) -> SpanKind:
    if name.startswith(STEP_PREFIX):
        return SpanKind.STEP
    return SpanKind.COMMUNICATION if CPU_COMM.match(name) else SpanKind.HOST


def _kind_on_device(name: str) -> SpanKind:
    return KIND_OF_ROLE.get(role_of_kernel(name), SpanKind.COMPUTE)


def _correlation(args: msgspec.Raw) -> int:
    found = CORRELATION.search(bytes(args)) if args else None
    return int(found[1]) if found else NONE


def _kept(args: msgspec.Raw) -> bytes | None:
    """A copy, so that the batch it points into can be freed."""
    return bytes(args) if args else None
