"""PyTorch profiler traces (Kineto's Chrome JSON, plain or gzip): one file per rank make one Timeline."""

import math
import re
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import field
from enum import IntEnum
from functools import cache, lru_cache
from pathlib import PurePath
from typing import TypeVar

import msgspec
import numpy as np

from stepcast.inputs.kineto.stream import EventStream, TraceEvent
from stepcast.inputs.source import FormatError, Source, expect, read_words
from stepcast.ir.arrays import FloatArray, Int32Array
from stepcast.ir.layout import Group
from stepcast.ir.timeline import NONE, SpanKind, Timeline, TimelineBuilder
from stepcast.ir.types import DType, FactDict, Facts, dataclass
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer, Work
from stepcast.units import NS, US

WORDS = read_words("traces")
FAMILY_OF_WORD = {word: Group(family) for family, words in WORDS["groups"].items() for word in words.split()}
FAMILY_OF_WORDS = {frozenset(map(Group, words.split())): Group(name) for words, name in WORDS["joint_groups"].items()}
KIND_OF_WORD: Mapping[str, CollectiveKind | Direction] = {
    word: Direction(kind) if kind in set(Direction) else CollectiveKind(kind)
    for word, kind in WORDS["collectives"].items()
}
DTYPE_OF_WORD = {word: DType(dtype) for dtype, words in WORDS["dtypes"].items() for word in words.split(",")}


def group_named(*names: str) -> Group:
    """Return the family of the first name that states one; the world where none does or it spans several."""
    for name in names:
        words = re.findall(r"[a-z]+", name.lower().replace("dataparallel", "data"))
        families = frozenset(FAMILY_OF_WORD[word] for word in words if word in FAMILY_OF_WORD)
        if len(families) == 1:
            return next(iter(families))
        if families:
            return FAMILY_OF_WORDS.get(families, Group.WORLD)
    return Group.WORLD


def collective_named(name: str) -> CollectiveKind | Direction | None:
    """Return the kind of ``_allgather_base``, ``ncclDevKernel_AllReduce_Sum_...`` and other names."""
    letters = re.sub(r"[_\- :]", "", name.lower())
    return next((kind for word, kind in KIND_OF_WORD.items() if word in letters), None)


def dtype_named(name: str) -> DType | None:
    return DTYPE_OF_WORD.get(name.removeprefix("c10::").lower())


# The role of an event follows from its category, and on a device from its name. A CALL of the host to a device's
# runtime or driver may launch work; a FRAME is the profiler's own, around all of a trace.
EventRole = IntEnum("EventRole", "HOST CALL KERNEL COPY COMMUNICATION ANNOTATION OVERHEAD FRAME OTHER")
DEVICE = frozenset({EventRole.KERNEL, EventRole.COPY, EventRole.COMMUNICATION})
ON_HOST = frozenset({EventRole.HOST, EventRole.CALL})
CORRELATED = DEVICE | {EventRole.CALL}

CATEGORIES = {EventRole[role.upper()]: pattern for role, pattern in WORDS["categories"].items()}
COMM_KERNEL = re.compile(WORDS["kernels"]["communication"], re.IGNORECASE)
COPY_NAME = re.compile(WORDS["kernels"]["copy"])
GAUDI = "hpu_op"  # calls and engines; an engine's event names itself in its arguments
GAUDI_ENGINE = re.compile(rb'"HW event name"\s*:\s*"[^"]*?(TPC|MME|DMA|NIC)', re.IGNORECASE)


@cache
def role_of(category: str) -> EventRole:
    lower = category.lower()
    return next((role for role, pattern in CATEGORIES.items() if re.fullmatch(pattern, lower)), EventRole.OTHER)


def role_of_kernel(name: str) -> EventRole:
    """Return the role of a device's work by its name: a kernel unless that names a copy or communication."""
    if COMM_KERNEL.search(name):
        return EventRole.COMMUNICATION
    return EventRole.COPY if COPY_NAME.match(name) else EventRole.KERNEL


KIND_OF_ROLE = {EventRole.COPY: SpanKind.COPY, EventRole.COMMUNICATION: SpanKind.COMMUNICATION}


@lru_cache(maxsize=100_000)
def kind_of_kernel(name: str) -> SpanKind:
    """Return the kind of a device's work by its name."""
    return KIND_OF_ROLE.get(role_of_kernel(name), SpanKind.COMPUTE)


# Communication: the arguments that PyTorch attaches to NCCL kernels, as Work and details. Their names are those
# of torch/csrc/profiler/util.cpp (PyTorch 2.1 to 2.13), checked on real traces.

Details = tuple[tuple[str, str], ...]


class ProcessGroup(msgspec.Struct, frozen=True):
    """One entry of ``distributedInfo.pg_config``."""

    pg_name: str | int = ""
    pg_desc: str = ""
    ranks: tuple[int, ...] = ()


class CommArgs(msgspec.Struct, frozen=True):
    """``args`` of an NCCL kernel or of a CPU collective. Sizes count elements."""

    collective: str = msgspec.field(name="Collective name", default="")
    in_elements: int = msgspec.field(name="In msg nelems", default=-1)
    out_elements: int = msgspec.field(name="Out msg nelems", default=-1)
    dtype: str = ""
    group_size: int = msgspec.field(name="Group size", default=0)
    group_name: str | int = msgspec.field(name="Process Group Name", default="")
    group_description: str = msgspec.field(name="Process Group Description", default="")
    group_ranks: str | list[int] = msgspec.field(name="Process Group Ranks", default="")
    source_rank: int | None = msgspec.field(name="Src Rank", default=None)
    destination_rank: int | None = msgspec.field(name="Dst Rank", default=None)
    sequence: int | None = msgspec.field(name="Seq", default=None)
    in_split: str | list[int] = msgspec.field(name="In split size", default="")
    out_split: str | list[int] = msgspec.field(name="Out split size", default="")
    # Of CPU collectives (gloo), which carry no counts.
    shapes: object = msgspec.field(name="Input Dims", default=None)
    types: object = msgspec.field(name="Input type", default=None)


DECODER = msgspec.json.Decoder(CommArgs)


@dataclass(frozen=True)
class Communicators:
    """The rank of a trace and the process groups it names."""

    rank: int
    world_size: int = 0
    groups: Mapping[str, ProcessGroup] = field(default_factory=dict)

    def communication(self, name: str, raw_args: bytes | msgspec.Raw | None) -> tuple[Work | None, Details]:
        """Return what a kernel or CPU op called *name* moves; no Work where the trace does not give its size."""
        args = decode_args(DECODER, raw_args, CommArgs())
        listed = self.groups.get(str(args.group_name)) if args.group_name != "" else None
        description, stated = args.group_description or (listed.pg_desc if listed else ""), args.group_ranks
        if isinstance(stated, str):  # the profiler cuts a long list short with dots
            stated = [] if "..." in stated else [int(word) for word in re.findall(r"\d{1,9}", stated)]
        ranks = tuple(stated) or (listed.ranks if listed else ())
        group = group_named(description, str(args.group_name))
        kind = collective_named(args.collective or name)
        values = {
            "collective": args.collective or name,
            "group": str(args.group_name),
            "description": description,
            "ranks": ",".join(map(str, ranks)),
            "group_size": str(args.group_size or len(ranks) or ""),
            "dtype": args.dtype,
            "in_elements": str(args.in_elements) if args.in_elements >= 0 else "",
            "out_elements": str(args.out_elements) if args.out_elements >= 0 else "",
            "in_split": "" if str(args.in_split) == "[]" else str(args.in_split),
            "out_split": "" if str(args.out_split) == "[]" else str(args.out_split),
            "sequence": "" if args.sequence is None else str(args.sequence),
        }
        details = tuple((key, value) for key, value in values.items() if value or key == "collective")
        # The complete buffer is the larger of the two sides for every kind.
        elements, dtype = max(args.in_elements, args.out_elements), dtype_named(args.dtype)
        if elements < 0:
            elements, dtype = _first_input(args)
            # Gloo shows the part that one rank brings.
            if kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER):
                elements *= max(1, self.world_size)
        if kind is None or elements < 0 or dtype is None:
            return None, details
        size_bytes = round(elements * dtype.bytes)
        if not isinstance(kind, Direction):
            return Collective(kind, size_bytes, group), details
        peer = args.destination_rank if kind is Direction.SEND else args.source_rank
        offset = 1 if kind is Direction.SEND else -1
        if peer is not None and peer != self.rank:
            offset = peer - self.rank
            if peer in ranks and self.rank in ranks:
                offset = ranks.index(peer) - ranks.index(self.rank)
        return Transfer(kind, size_bytes, group, offset), details


Args = TypeVar("Args")


def decode_args(decoder: "msgspec.json.Decoder[Args]", data: bytes | msgspec.Raw | None, default: Args) -> Args:
    """Return the arguments of an event; *default* without any, or where they are not what the profiler writes."""
    try:
        return decoder.decode(data) if data else default
    except (msgspec.DecodeError, UnicodeDecodeError):
        return default


def _first_input(args: CommArgs) -> tuple[int, DType | None]:
    """Return elements and type of the first input tensor; -1 where the trace has no shapes."""
    match args.shapes, args.types:
        case [[*lengths], *_], [str(name), *_]:
            counts = [length for length in lengths if type(length) is int]
            if len(counts) == len(lengths):
                return math.prod(counts), dtype_named(name)
    return -1, None


STEP_PREFIX, XLA_STEP = "ProfilerStep", "user_annotation of steps"
XLA = {name: re.compile(pattern) for name, pattern in WORDS["xla"].items()}
CPU_COMM = re.compile(r"(?:gloo|mpi|ucc):")
CORRELATION = re.compile(rb'"correlation"\s*:\s*(\d{1,18})(?!\d)')


class RankColumns:
    """Collects the events of one file; ``add_to`` a builder once the rank is known."""

    def __init__(self) -> None:
        self.steps = 0
        self.skipped = 0
        self.unpaired = 0
        self._names: dict[str, int] = {}
        # The kinds of each name: in a thread of the host, and in a stream.
        self._kinds: list[tuple[SpanKind, SpanKind]] = []
        self._lanes: dict[tuple[int, str], int] = {}  # by device, which is 0 but for traces of XLA, and name
        self._lane_of_key: dict[tuple[str, int | str | None, int | str | None], tuple[int, EventRole]] = {}
        self._device: int | str | None = None
        self._named: dict[tuple[int | str | None, int | str | None], str] = {}
        self._columns = {key: array("i") for key in ("name", "lane", "kind")}
        self._start_us = array("d")
        self._duration_us = array("d")
        # A launch and the work it launched share a number.
        self._correlation = array("q")
        # Rows that communicate, with their arguments: few, so held as they are until the rank is known.
        self._communications: dict[int, tuple[str, bytes | None]] = {}

    def __len__(self) -> int:
        return len(self._start_us)

    def add(self, events: list[TraceEvent]) -> None:
        names, lane_of_key, kinds = self._names, self._lane_of_key, self._kinds
        add_name, add_lane = self._columns["name"].append, self._columns["lane"].append
        add_kind, add_start = self._columns["kind"].append, self._start_us.append
        add_duration, isfinite = self._duration_us.append, math.isfinite
        add_correlation = self._correlation.append
        for event in events:
            if event.ph != "X":
                if event.ph == "M" and event.name in ("process_name", "thread_name"):
                    self._name_place(event)
                self.unpaired += event.ph in ("B", "E")
                continue
            start, duration = event.ts, event.dur
            if start is None or duration is None or not (duration >= 0 and isfinite(start + duration)):
                self.skipped += role_of(event.cat) is not EventRole.FRAME
                continue
            category = event.cat
            if category == GAUDI:  # what another device would call it
                engine = GAUDI_ENGINE.search(bytes(event.args)) if event.args else None
                category = WORDS["gaudi"][engine[1].decode().upper()] if engine else "hpu_runtime"
            if not category and self._named:
                category = self._xla_category(event)
            key = (category, event.pid, event.tid)
            try:
                lane, role = lane_of_key[key]
            except KeyError:
                lane, role = lane_of_key[key] = self._place(*key)
            if role is EventRole.FRAME:
                continue
            name = event.name if category != XLA_STEP else f"{STEP_PREFIX}#{event.name}"
            index = names.get(name)
            if index is None:
                index = names[name] = len(names)
                on_host = SpanKind.COMMUNICATION if CPU_COMM.match(name) else SpanKind.HOST
                kinds.append((SpanKind.STEP if name.startswith(STEP_PREFIX) else on_host, kind_of_kernel(name)))
            if role in ON_HOST:
                kind = kinds[index][0]
                if kind is SpanKind.STEP:
                    self.steps += 1
                    lane = self._lane("steps", event.pid)
            elif role is EventRole.KERNEL:
                kind = kinds[index][1]
                if kind is SpanKind.COMPUTE and event.args and b'"Collective name"' in bytes(event.args):
                    kind = SpanKind.COMMUNICATION
            else:
                kind = KIND_OF_ROLE.get(role, SpanKind.OTHER)
            if kind is SpanKind.COMMUNICATION:
                # A copy, so that the batch it points into can be freed.
                self._communications[len(self)] = name, bytes(event.args) if event.args else None
            add_name(index)
            add_lane(lane)
            add_kind(kind)
            add_start(start)
            add_duration(duration)
            match = CORRELATION.search(bytes(event.args)) if role in CORRELATED and event.args else None
            add_correlation(int(match[1]) if match else NONE)

    def _name_place(self, event: TraceEvent) -> None:
        """Note the name of a process or a thread, as XLA writes them."""
        try:
            name = msgspec.json.decode(event.args).get("name", "") if event.args else ""
        except (msgspec.DecodeError, AttributeError):
            return
        if isinstance(name, str):
            thread = event.tid if event.name == "thread_name" else None
            if thread is not None or XLA["device"].match(name):
                self._named[event.pid, thread] = name

    def _xla_category(self, event: TraceEvent) -> str:
        """Return the category that Kineto would give to an event of XLA; none in traces of other programs."""
        if (event.pid, None) not in self._named:
            return "cpu_op" if any(thread is None for _, thread in self._named) else ""
        thread = self._named.get((event.pid, event.tid), "")
        device = XLA["device"].match(self._named[event.pid, None])
        if device is None or not XLA[device[1].lower()].match(thread):
            return XLA_STEP if thread == "Steps" else "gpu_user_annotation"
        return "collective_comm" if XLA["collective"].match(event.name) else "kernel"

    def _lane(self, name: str, pid: int | str | None = None) -> int:
        devices = [process for process, thread in self._named if thread is None]
        device = devices.index(pid) if pid in devices else 0
        return self._lanes.setdefault((device, name), len(self._lanes))

    def _place(self, category: str, pid: int | str | None, tid: int | str | None) -> tuple[int, EventRole]:
        """Return the lane of a category's events in one thread or stream, and their role."""
        role = role_of(category)
        if role is EventRole.FRAME:
            return NONE, role
        if role in ON_HOST:
            name = f"cpu thread {tid}"
        elif role is EventRole.OVERHEAD:
            name = "profiler overhead"
        elif role in DEVICE:
            self._device = pid if self._device is None or (pid, None) in self._named else self._device
            name = f"stream {tid}" if pid == self._device else f"device {pid} stream {tid}"
        elif role is EventRole.ANNOTATION:
            name = f"annotations of stream {tid}"
        else:
            # Other programs' traces: one lane for each thread of each process.
            name = f"{category or 'events'} of process {pid} thread {tid}"
        return self._lane(name, pid), role

    def add_to(self, builder: TimelineBuilder, communicators: Communicators, offset_s: float) -> None:
        """Append all rows as lanes of one rank, *offset_s* later than they state."""
        devices = 1 + max((device for device, _ in self._lanes), default=0)
        ranks = [communicators.rank * devices + device for device, _ in self._lanes]
        lanes = np.array(
            [builder.lane(rank, name) for rank, (_, name) in zip(ranks, self._lanes, strict=True)] or [0], np.int32
        )
        start_us, duration_us = np.frombuffer(self._start_us), np.frombuffer(self._duration_us)
        name_of, lane_of, kind_of = (np.frombuffer(column, dtype=np.int32) for column in self._columns.values())
        works, details = dict[Work, int](), dict[Details, int]()
        work_of, detail_of = (np.full(len(self), NONE, dtype=np.int32) for _ in range(2))
        for row, (name, args) in self._communications.items():
            work, facts = communicators.communication(name, args)
            detail_of[row] = details.setdefault(facts, len(details))
            if work is not None:
                work_of[row] = works.setdefault(work, len(works))
        builder.add_columns(
            tuple(self._names),
            name_of,
            lanes[lane_of],
            kind_of,
            start_us * US + offset_s,
            duration_us * US,
            works=tuple(works),
            work_of=work_of,
            details=tuple(details),
            detail_of=detail_of,
            parent_of=self._parents(lane_of, start_us, duration_us),
            flows=self._launches(kind_of, start_us),
        )

    def _launches(self, kind_of: Int32Array, start_us: FloatArray) -> Int32Array:
        """Return each launch with the work it launched: they carry the same correlation."""
        correlation = np.frombuffer(self._correlation, dtype=np.int64)
        known = np.flatnonzero(correlation != NONE)
        calls = known[kind_of[known] == SpanKind.HOST]
        work = known[kind_of[known] != SpanKind.HOST]
        # The outermost call, where one call makes another.
        calls = calls[np.lexsort((start_us[calls], correlation[calls]))]
        if not len(calls):
            return np.zeros((0, 2), np.int32)
        positions = np.searchsorted(correlation[calls], correlation[work])
        launch = calls[np.minimum(positions, len(calls) - 1)]
        is_launched = correlation[launch] == correlation[work]
        return np.stack([launch[is_launched], work[is_launched]], axis=1).astype(np.int32)

    def _parents(self, lane_of: Int32Array, start_us: FloatArray, duration_us: FloatArray) -> Int32Array:
        """Return for each host event its caller: the innermost event around it in its thread."""
        parent_of = np.full(len(self), NONE, dtype=np.int32)
        for (_, name), lane in self._lanes.items():
            if not name.startswith("cpu thread"):
                continue
            rows = np.flatnonzero(lane_of == lane)
            # Longer first where two start together: the caller encloses the callee.
            rows = rows[np.lexsort((-duration_us[rows], start_us[rows]))]
            ends = (start_us[rows] + duration_us[rows]).tolist()
            around: list[int] = []
            parents = []
            for index, start in enumerate(start_us[rows].tolist()):
                # An event that outlasts the one before it only overlaps: the profiler's clock slipped.
                while around and (ends[around[-1]] <= start or ends[around[-1]] < ends[index]):
                    around.pop()
                parents.append(around[-1] if around else NONE)
                around.append(index)
            indices = np.array(parents, dtype=np.int32)
            parent_of[rows] = np.where(indices == NONE, NONE, rows[indices])
        return parent_of


BARE_EVENT = re.compile(r'\[\s*\{[^{}]{0,2000}"ph"\s*:\s*"[A-Za-z]"')
FILE_RANK = re.compile(r"rank[-_.]?(\d{1,7})(?!\d)", re.IGNORECASE)
GROUPS = msgspec.json.Decoder(list[ProcessGroup])
MOST_RANKS = 10_000_000
RUN_KEYS = ("pytorch_version", "cuda_runtime_version", "cuda_driver_version", "host_name")


def looks_like(head: str) -> bool:
    """Return whether it is an object with traceEvents, or Kineto's header where that fills the head, or bare events."""
    start = head.lstrip("\ufeff \t\r\n")
    if start.startswith("{"):
        return '"traceEvents"' in start or (
            '"schemaVersion"' in start and ('"distributedInfo"' in start or '"deviceProperties"' in start)
        )
    return BARE_EVENT.match(start) is not None


def read_run(sources: Sequence[Source]) -> Timeline:
    """Return the traces of a run's ranks, on one clock where they state what their times count from."""
    builder, warnings = TimelineBuilder(), list[str]()
    facts, devices, files = dict[str, object](), dict[str, None](), dict[int, str]()
    steps = world_size = 0
    base_ns: int | None = None
    for order, source in enumerate(sources):
        stream, columns = EventStream(source), RankColumns()
        for events in stream:
            columns.add(events)
        metadata = stream.metadata
        info = metadata.get("distributedInfo")
        info = info if isinstance(info, dict) else {}
        communicators = _communicators(info, source, order)
        rank = communicators.rank
        if rank in files:
            raise FormatError(f"is of rank {rank}, as is {files[rank]}; expected one trace per rank", source.path)
        files[rank] = source.path
        own_base_ns = _count(metadata.get("baseTimeNanoseconds")) or 0
        base_ns = own_base_ns if base_ns is None else base_ns
        columns.add_to(builder, communicators, (own_base_ns - base_ns) * NS)
        where = f"{source.path}: " if len(sources) > 1 else ""
        odd = {"events without a usable start and duration were left out": stream.skipped + columns.skipped}
        odd["begin and end events were left out; only complete ones are read"] = columns.unpaired
        warnings += [where + warning for warning in stream.warnings]
        warnings += [f"{where}{count} {words}" for words, count in odd.items() if count]
        steps = max(steps, columns.steps)
        world_size = communicators.world_size or world_size
        devices |= dict.fromkeys(stream.device_names())
        facts |= _run_facts(metadata, info, communicators)
    expect(len(builder), "has no events with a start and a duration; expected a profiler trace", sources[0].path)
    facts = {"steps": steps} | facts
    if devices:
        facts["devices"] = list(devices)
    if world_size > len(files):
        facts["missing_ranks"] = world_size - len(files)
    return builder.build(
        measured=True,
        source=sources[0].path if len(sources) == 1 else str(PurePath(sources[0].path).parent),
        facts=facts,
        warnings=warnings,
    )


def _communicators(info: Mapping[str, object], source: Source, order: int) -> Communicators:
    """Return rank and process groups: from distributedInfo, else the rank in the file's name, else its place."""
    rank = _count(info.get("rank"))
    if rank is None or rank >= MOST_RANKS:
        match = FILE_RANK.search(PurePath(source.path).name)
        rank = int(match[1]) if match else order
    groups = decode_args(GROUPS, msgspec.json.encode(info.get("pg_config") or []), [])
    world_size = min(_count(info.get("world_size")) or 0, MOST_RANKS)
    return Communicators(rank, world_size, {str(group.pg_name): group for group in groups})


def _run_facts(metadata: Facts, info: Facts, communicators: Communicators) -> FactDict:
    """Return the facts of the job in the trace's header and its *info*, in the words of the glossary."""
    facts: FactDict = {"world_size": communicators.world_size} if communicators.world_size else {}
    stated = {key: info.get(key) for key in ("backend", "nccl_version")}
    stated |= {key: metadata.get(key) for key in RUN_KEYS}
    facts |= {key: value for key, value in stated.items() if isinstance(value, str | int)}
    if groups := communicators.groups:
        facts["process_groups"] = {
            name: {"description": group.pg_desc, "ranks": len(group.ranks)} for name, group in groups.items()
        }
    return facts


def _count(value: object) -> int | None:
    return value if type(value) is int and value >= 0 else None
