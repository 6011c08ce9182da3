"""Events of one rank as columns: which lane each belongs to, what kind it is, what it communicates."""

import math
import re
from array import array

import msgspec
import numpy as np

from stepcast.inputs.kineto.comm import Communicators, Details
from stepcast.inputs.kineto.stream import Event
from stepcast.ir.timeline import NONE, Ints, SpanKind, TimelineBuilder
from stepcast.ir.work import Work
from stepcast.units import US

STEP_PREFIX = "ProfilerStep"
COMM_KERNEL = re.compile(r"nccl|rccl|hccl|nvshmem|deep_?ep", re.IGNORECASE)
CPU_COMM = re.compile(r"(?:gloo|mpi|ucc):")

# Categories of Kineto's output_json.cpp; the capitalised ones are of PyTorch 1.8 to 1.11.
HOST_CATEGORIES = frozenset(
    {
        "cpu_op",
        "user_annotation",
        "python_function",
        "cuda_runtime",
        "cuda_driver",
        "hip_runtime",
        "xpu_runtime",
        "xpu_driver",
        "mtia_runtime",
        "privateuse1_runtime",
        "privateuse1_driver",
        "Operator",
        "Runtime",
    }
)
KERNEL_CATEGORIES = frozenset({"kernel", "Kernel", "mtia_ccp_events", "collective_comm"})
COPY_CATEGORIES = frozenset({"gpu_memcpy", "gpu_memset", "Memcpy", "Memset"})
# The profiler's own frame around the whole trace.
UNUSED_CATEGORIES = frozenset({"Trace"})

LaneKey = tuple[str, int | str | None, int | str | None]


class RankColumns:
    """Collects the events of one file; `add_to` a builder once the rank is known."""

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        self.unpaired = 0
        self._names: dict[str, int] = {}
        self._communicates: list[bool] = []
        self._lanes: dict[str, int] = {}
        self._lane_of_key: dict[LaneKey, tuple[int, SpanKind] | None] = {}
        self._device: int | str | None = None
        self._columns = {key: array("i") for key in ("name", "lane", "kind")}
        self._start_us = array("d")
        self._duration_us = array("d")
        # Rows that communicate, with their arguments: few, so kept as they are until the rank is known.
        self._communications: dict[int, tuple[str, bytes | None]] = {}

    def __len__(self) -> int:
        return len(self._start_us)

    def add(self, events: list[Event]) -> None:
        names, lane_of_key, communicates = self._names, self._lane_of_key, self._communicates
        add_name, add_lane = self._columns["name"].append, self._columns["lane"].append
        add_kind, add_start = self._columns["kind"].append, self._start_us.append
        add_duration, isfinite = self._duration_us.append, math.isfinite
        for event in events:
            if event.ph != "X":
                self.unpaired += event.ph in ("B", "E")
                continue
            start, duration = event.ts, event.dur
            if start is None or duration is None or not (duration >= 0 and isfinite(start + duration)):
                self.skipped += event.cat not in UNUSED_CATEGORIES
                continue
            key = (event.cat, event.pid, event.tid)
            try:
                place = lane_of_key[key]
            except KeyError:
                place = lane_of_key[key] = self._place(*key)
            if place is None:
                continue
            lane, kind = place
            name = event.name
            index = names.get(name)
            if index is None:
                index = names[name] = len(names)
                communicates.append(COMM_KERNEL.search(name) is not None or CPU_COMM.match(name) is not None)
            if kind is SpanKind.HOST and name.startswith(STEP_PREFIX):
                self.steps += 1
                lane, kind = self._lane("steps"), SpanKind.STEP
            elif kind is SpanKind.COMPUTE:
                if communicates[index] or (event.args and b'"Collective name"' in bytes(event.args)):
                    kind = SpanKind.COMMUNICATION
                    self._communications[len(self)] = name, _kept(event.args)
            elif kind is SpanKind.HOST and communicates[index] and CPU_COMM.match(name):
                kind = SpanKind.COMMUNICATION
                self._communications[len(self)] = name, _kept(event.args)
            add_name(index)
            add_lane(lane)
            add_kind(kind)
            add_start(start)
            add_duration(duration)

    def _lane(self, name: str) -> int:
        return self._lanes.setdefault(name, len(self._lanes))

    def _place(
        self, category: str, pid: int | str | None, tid: int | str | None
    ) -> tuple[int, SpanKind] | None:
        """The lane of a category's events in one thread or stream, and their kind."""
        if category in UNUSED_CATEGORIES:
            return None
        if category in HOST_CATEGORIES:
            return self._lane(f"cpu thread {tid}"), SpanKind.HOST
        if category == "overhead":
            return self._lane("profiler overhead"), SpanKind.OTHER
        if category in KERNEL_CATEGORIES or category in COPY_CATEGORIES:
            self._device = pid if self._device is None else self._device
            device = "" if pid == self._device else f"device {pid} "
            kind = SpanKind.COPY if category in COPY_CATEGORIES else SpanKind.COMPUTE
            return self._lane(f"{device}stream {tid}"), kind
        if category == "gpu_user_annotation":
            return self._lane(f"annotations of stream {tid}"), SpanKind.OTHER
        # Other programs' traces: one lane for each thread of each process.
        return self._lane(f"{category or 'events'} of process {pid} thread {tid}"), SpanKind.OTHER

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
        )

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


def _kept(args: msgspec.Raw) -> bytes | None:
    """A copy, so that the batch it points into can be freed."""
    return bytes(args) if args else None
