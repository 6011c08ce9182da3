"""``K=V`` texts as changes of a run, several at once."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean

from stepcast.analyze.changes import (
    assuming,
    bus_factor,
    change_layers,
    heal_rank,
    scale_compute,
    scale_rank,
    scale_transfers,
    set_bandwidth,
)
from stepcast.analyze.megatron.stragglers import find_stragglers
from stepcast.analyze.parts import rank_parts
from stepcast.analyze.play import measured
from stepcast.analyze.recording import (
    BlockKind,
    Join,
    Local,
    Meeting,
    Piece,
    RankRecord,
    RecordedBlock,
    Recording,
    TimePart,
)
from stepcast.cost.collectives import price, route_of
from stepcast.hardware import Cluster, group_path, load_gpu
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import grid_of, place_of, rank_at
from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.ir.work import CollectiveKind
from stepcast.simulation.schedule import ChunkPlace, Schedule, Slot, SlotAction
from stepcast.simulation.schedules import kind_named, make_schedule
from stepcast.units import parse_size_bytes

# A Recording with other replicas: its ranks copied or left out, the gradients reduced over all of them.

AllReduceTime = Callable[[int, int], float]
"""(bytes, ranks) -> seconds of an all-reduce between replicas."""


def change_replicas(recording: Recording, dp: int, all_reduce_s: AllReduceTime | None = None) -> Recording:
    """*dp* replicas in place of those measured; each keeps its micro-batches, so the global batch grows.

    A ring all-reduce moves 2 (n - 1) / n of the buffer over each link (Patarasuk and Yuan, 2009), so its time
    follows that factor where it was measured. Where there was one replica only, *all_reduce_s* prices it.
    """
    if dp < 1:
        raise ValueError(f"dp must be at least 1, not {dp}")
    if not recording.whole:
        raise ValueError("changing dp needs every rank of the run")
    if recording.layout.dp == dp:
        return recording
    if recording.layout.dp == 1 and all_reduce_s is None:
        raise ValueError(
            "the run has one replica, so how fast replicas reduce gradients was not measured; name the "
            "cluster with --cluster, or state it as --what-if bandwidth.dp=50GB/s"
        )
    if recording.layout.ep > 1:
        raise ValueError("changing dp of a run with expert parallelism is not supported")
    return _Replicas(recording, dp, all_reduce_s).recording()


class _Replicas:
    def __init__(self, recording: Recording, dp: int, all_reduce_s: AllReduceTime | None) -> None:
        self.old, self.dp, self.all_reduce_s = recording, dp, all_reduce_s
        self.layout = replace(recording.layout, dp=dp)
        self.meetings: list[Meeting] = []
        self.numbers: dict[tuple[object, ...], int] = {}
        self.between: dict[int, bool] = {
            number: meeting.group in (Group.DP, Group.EXPERT_DP) for number, meeting in enumerate(recording.meetings)
        }

    def recording(self) -> Recording:
        by_place = {place_of(record.rank, self.old.layout): record for record in self.old.ranks}
        records = []
        for stage in range(self.layout.pp):
            for replica in range(self.dp):
                for tensor in range(self.layout.tp):
                    source = by_place[stage, replica % self.old.layout.dp, tensor]
                    rank = rank_at(stage, replica, tensor, self.layout)
                    records.append(self._record(source, rank, stage, replica, tensor))
        changed = replace(self.old, layout=self.layout, ranks=tuple(records), meetings=tuple(self.meetings))
        text = f"{self.dp} replicas, each with as many micro-batches as measured: the global batch changes"
        return assuming(changed, text)

    def _record(self, source: RankRecord, rank: int, stage: int, replica: int, tensor: int) -> RankRecord:
        blocks = []
        for block in source.blocks:
            pieces: list[Piece] = []
            for piece in block.pieces:
                pieces += self._piece(piece, stage, replica, tensor)
            blocks.append(replace(block, pieces=tuple(pieces)))
        return RankRecord(rank, stage, tuple(blocks))

    def _piece(self, piece: Piece, stage: int, replica: int, tensor: int) -> list[Piece]:
        if isinstance(piece, Local):
            if piece.part is TimePart.DP and self.old.layout.dp == 1 and piece.operation == "dp_allreduce":
                return [piece, self._gradients(piece, stage, tensor)]
            return [piece]
        number = {old: self._meeting(old, replica) for old in piece.meetings}
        kept = [old for old in piece.meetings if number[old] is not None]
        if not kept:
            return [Local(TimePart.COMPUTE, piece.operation, piece.role, piece.micro_batch, 0.0, piece.own_s)]
        return [
            replace(
                piece,
                meetings=tuple(self._kept(number[old]) for old in kept),
                waits=tuple(self._kept(number[old]) for old in piece.waits if old in kept),
            )
        ]

    @staticmethod
    def _kept(number: int | None) -> int:
        assert number is not None
        return number

    def _meeting(self, old: int, replica: int) -> int | None:
        meeting = self.old.meetings[old]
        if self.between[old]:
            if self.dp == 1:
                return None
            key: tuple[object, ...] = ("replicas", old)
            before = len(meeting.members)
            factor = ((self.dp - 1) / self.dp) / ((before - 1) / before)
            changed = replace(meeting, transfer_s=meeting.transfer_s * factor)
        else:
            key = ("copy", old, replica)
            changed = meeting
        if key not in self.numbers:
            self.numbers[key] = len(self.meetings)
            self.meetings.append(changed)
        return self.numbers[key]

    def _gradients(self, piece: Local, stage: int, tensor: int) -> Join:
        """The all-reduce that one replica did not need."""
        assert self.all_reduce_s is not None
        size_bytes = self._gradient_bytes(stage)
        key = ("gradients", stage, tensor)
        if key not in self.numbers:
            self.numbers[key] = len(self.meetings)
            transfer_s = self.all_reduce_s(size_bytes, self.dp)
            members = tuple(rank_at(stage, other, tensor, self.layout) for other in range(self.dp))
            self.meetings.append(Meeting(Group.DP, "all-reduce", piece.operation, members, size_bytes, transfer_s))
        number = self.numbers[key]
        return Join(TimePart.DP, piece.operation, piece.role, piece.micro_batch, 0.0, 0.0, (number,), (number,))

    def _gradient_bytes(self, stage: int) -> int:
        known = self.old.facts.get("gradient_bytes")
        if not isinstance(known, dict) or stage not in known:
            raise ValueError(f"the size of the gradients of stage {stage} is not known")
        return int(known[stage])


# A Recording laid out anew: other micro-batches, another schedule.
#
# What was measured becomes a template: each forward and backward of a stage, each message between two stages,
# and what finishes the step. The schedule says in which order they run.

INTERLEAVED_CHUNKS = 2


class _Messages:
    """Typical messages: the transfer between two stages, and what a rank adds before and after it."""

    def __init__(self, recording: Recording) -> None:
        stage_of = {record.rank: record.stage for record in recording.ranks}
        times: dict[tuple[str, int], list[float]] = {}
        for meeting in recording.meetings:
            if meeting.kind == "message":
                source = min(stage_of[rank] for rank in meeting.members)
                times.setdefault((meeting.name, source), []).append(meeting.transfer_s)
        self.transfer_s = {key: mean(listed) for key, listed in times.items()}
        gaps: dict[int, list[float]] = {}
        tails: dict[int, list[float]] = {}
        for record in recording.ranks:
            for block in record.blocks:
                if block.kind is not BlockKind.MESSAGE:
                    continue
                for piece in block.pieces:
                    if isinstance(piece, Join):
                        tails.setdefault(record.rank, []).append(piece.tail_s)
                    elif piece.part is TimePart.HOST:
                        gaps.setdefault(record.rank, []).append(piece.duration_s)
        self.gap_s = {rank: mean(listed) for rank, listed in gaps.items()}
        self.tail_s = {rank: mean(listed) for rank, listed in tails.items()}

    def between(self, way: str, one: int, two: int) -> float:
        """The transfer between two stages; where none was measured, the mean of the direction."""
        key = way, min(one, two)
        if abs(one - two) == 1 and key in self.transfer_s:
            return self.transfer_s[key]
        same = [time_s for (name, _), time_s in self.transfer_s.items() if name == way]
        return mean(same or self.transfer_s.values()) if self.transfer_s else 0.0


def reschedule(recording: Recording, micro_batches: int | None = None, schedule: str | None = None) -> Recording:
    """The same stages with other *micro_batches* or in another *schedule*."""
    if not recording.whole:
        raise ValueError("laying a run out anew needs every rank of it")
    kind = kind_named(schedule) if schedule else ScheduleKind.ONE_F_ONE_B
    facts = SCHEDULES[kind]
    if facts.splits_backward:
        whole = ", ".join(each for each, other in SCHEDULES.items() if not other.splits_backward)
        raise ValueError(f"schedule={kind}: a trace times whole backwards, not their halves; choose {whole}")
    name, count = str(kind), micro_batches or recording.micro_batches
    pieces = 1 if facts.stops else INTERLEAVED_CHUNKS
    plan = make_schedule(name, recording.layout.pp, count, pieces)
    built = _Build(recording, plan).recording()
    texts = [f"{name} with {count} micro-batches, each as long as the measured one of its turn"]
    if plan.chunks > 1:
        texts.append(f"the work of a stage is spread evenly over {plan.chunks} chunks; messages do not stop the sender")
    return assuming(built, *texts)


class _Build:
    def __init__(self, recording: Recording, plan: Schedule) -> None:
        self.old, self.plan = recording, plan
        self.messages = _Messages(recording)
        self.meetings: list[Meeting] = []
        self.numbers: dict[tuple[object, ...], int] = {}
        # As Megatron-LM does without overlapped messages.
        self.blocking = SCHEDULES[kind_named(plan.name)].stops

    def recording(self) -> Recording:
        ranks = tuple(self._record(record) for record in self.old.ranks)
        return replace(self.old, ranks=ranks, meetings=tuple(self.meetings), micro_batches=self.plan.micro_batches)

    def _number(self, key: tuple[object, ...], meeting: Callable[[], Meeting]) -> int:
        if key not in self.numbers:
            self.numbers[key] = len(self.meetings)
            self.meetings.append(meeting())
        return self.numbers[key]

    def _record(self, record: RankRecord) -> RankRecord:
        blocks = [block for block in record.blocks if block.kind is BlockKind.START]
        slots = self.plan.orders[record.stage]
        pending: Slot | None = None
        for slot in slots:
            blocks += self._passing(record, pending, slot)
            blocks.append(self._slot(record, slot))
            pending = slot
        blocks += self._passing(record, pending, None)
        for block in record.blocks:
            if block.kind is BlockKind.FINISH:
                blocks.append(self._copied(block, ("finish",), 1.0))
        return replace(record, blocks=tuple(blocks))

    def _slot(self, record: RankRecord, slot: Slot) -> RecordedBlock:
        """The measured forward or backward of the same turn, a chunk of it where there are several."""
        kind = BlockKind.FORWARD if slot.kind is SlotAction.FORWARD else BlockKind.BACKWARD
        measured = [block for block in record.blocks if block.kind is kind]
        if not measured:
            raise ValueError(f"rank {record.rank} has no {kind} to repeat")
        block = measured[slot.micro_batch % len(measured)]
        copied = self._copied(block, (slot.micro_batch, slot.chunk), 1 / self.plan.chunks)
        return replace(copied, micro_batch=slot.micro_batch)

    def _copied(self, block: RecordedBlock, instance: tuple[object, ...], share: float) -> RecordedBlock:
        pieces: list[Piece] = []
        for piece in block.pieces:
            if isinstance(piece, Local):
                pieces.append(replace(piece, duration_s=piece.duration_s * share))
                continue
            number = {old: self._meeting(old, instance, share) for old in piece.meetings}
            pieces.append(
                replace(
                    piece,
                    meetings=tuple(number[old] for old in piece.meetings),
                    waits=tuple(number[old] for old in piece.waits),
                    own_s=piece.own_s * share,
                    tail_s=piece.tail_s * share,
                )
            )
        return replace(block, pieces=tuple(pieces))

    def _meeting(self, old: int, instance: tuple[object, ...], share: float) -> int:
        meeting = self.old.meetings[old]
        return self._number(("copy", old, *instance), lambda: replace(meeting, transfer_s=meeting.transfer_s * share))

    def _passing(self, record: RankRecord, before: Slot | None, after: Slot | None) -> list[RecordedBlock]:
        """The messages between two slots: what *before* made and what *after* needs."""
        sent = None if before is None else self._message(record, before, outbound=True)
        needed = None if after is None else self._message(record, after, outbound=False)
        if self.blocking:
            both = [one for one in (sent, needed) if one is not None]
            numbers = tuple(number for number, _ in both)
            return [self._joins(record, both[-1][1], numbers, numbers)] if both else []
        blocks = []
        if sent is not None:
            blocks.append(self._joins(record, sent[1], (sent[0],), ()))
        if needed is not None:
            blocks.append(self._joins(record, needed[1], (needed[0],), (needed[0],)))
        return blocks

    def _joins(self, record: RankRecord, way: str, numbers: tuple[int, ...], waits: tuple[int, ...]) -> RecordedBlock:
        name = f"{way} message"
        gap = Local(TimePart.HOST, "gap", f"before {name}", -1, 0.0, self.messages.gap_s.get(record.rank, 0.0))
        tail_s = self.messages.tail_s.get(record.rank, 0.0) if waits else 0.0
        join = Join(TimePart.PP, name, name, -1, 0.0, 0.0, numbers, waits, 0.0, tail_s)
        return RecordedBlock(BlockKind.MESSAGE, -1, (gap, join))

    def _message(self, record: RankRecord, slot: Slot, outbound: bool) -> tuple[int, str] | None:
        """(meeting, direction) of what *slot* makes or needs."""
        here = ChunkPlace(record.stage, slot.chunk)
        forward = slot.kind is SlotAction.FORWARD
        other = self.plan.following(here) if forward == outbound else self.plan.previous(here)
        if other is None or other.stage == record.stage:
            return None
        way = "forward" if forward else "backward"
        source, target = (here, other) if outbound else (other, here)
        _, replica, tensor = place_of(record.rank, self.old.layout)
        ends = tuple(rank_at(place.stage, replica, tensor, self.old.layout) for place in (source, target))
        key = ("message", way, *ends, source.chunk, slot.micro_batch)
        transfer_s = self.messages.between(way, source.stage, target.stage)
        number = self._number(key, lambda: Meeting(Group.PP, "message", way, tuple(sorted(ends)), None, transfer_s))
        return number, way


# What the catalogue knows of the hardware around a trace: another GPU, and communication never measured.

ASSUMED_GPU = "a100-sxm-80gb"


def surroundings(dtype: str, tp: int, gpu: str | None = None, cluster: Cluster | None = None) -> "Surroundings":
    """Of a run in *dtype* with *tp* tensor ranks, on *gpu* or on that of *cluster*."""
    if cluster is None:
        return Surroundings(lambda name: gpu_change(gpu, name, dtype))
    own = gpu or cluster.gpu.name
    return Surroundings(lambda name: gpu_change(own, name, dtype), _all_reduce(cluster, tp))


def gpu_change(measured: str | None, other: str, dtype: str) -> "GpuChange":
    """Ratios of the published peaks: matrix multiply in the run's number format, and memory bandwidth."""
    old, new = load_gpu(measured or ASSUMED_GPU), load_gpu(other)
    known = "" if measured else " (the trace does not name its GPU; say it with --gpu)"
    if dtype == "fp32" and "tf32" in old.matrix_flops:
        dtype = "tf32"  # the shared fp32 traces run at 67 TFLOP/s, three times what an A100 has in fp32
    return GpuChange(
        f"{new.name} in place of {old.name}{known}, in {dtype}",
        old.matrix_peak_flops(dtype) / new.matrix_peak_flops(dtype),
        old.memory_bandwidth_bytes_per_s / new.memory_bandwidth_bytes_per_s,
    )


def _all_reduce(cluster: Cluster, tp: int) -> AllReduceTime:
    """An all-reduce between the replicas of a stage."""

    def seconds(size_bytes: int, ranks: int) -> float:
        path = group_path(cluster, grid_of(Layout(tp=tp, dp=ranks)), Group.DP)
        return float(price(CollectiveKind.ALL_REDUCE, size_bytes, route_of(path, cluster)).seconds)

    return seconds


GROUPS = ("tp", "cp", "ep", "dp", "pp", "embedding", "expert-dp")
KNOWN = (
    "micro-batches=16, schedule=interleaved|1f1b|gpipe, bandwidth.tp=2x (or 50GB/s; also dp, pp, embedding, "
    "ep), rank.7=healthy (or 1.5x as long), stage.3.layers=-1, dp=4, gpu=h100, compute=0.9x"
)
FACTOR = re.compile(r"([0-9]*\.?[0-9]+)x")


class WhatIfError(ValueError):
    """A change that cannot be understood or made."""


@dataclass(frozen=True, slots=True)
class GpuChange:
    """Another GPU: how much longer (below one: shorter) its computation and its memory traffic take."""

    name: str
    compute: float
    memory: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a trace does not say and a change may need; given by the caller."""

    gpu: Callable[[str], GpuChange] | None = None
    all_reduce_s: AllReduceTime | None = None


Apply = Callable[[Recording, str, str, "Surroundings"], Recording]


def apply_changes(recording: Recording, texts: Sequence[str], around: Surroundings | None = None) -> Recording:
    """*recording* under every change, in an order that lets each see what it needs."""
    around = around or Surroundings()
    pairs = [_split(text) for text in texts]
    values = dict(pairs)
    if len(values) < len(pairs):
        raise WhatIfError("a change is given twice; give each once")
    around = _with_stated_bandwidth(around, values)
    for key, value in pairs:
        if key in ("micro-batches", "schedule", "dp") or key.startswith("bandwidth."):
            continue
        recording = _apply_of(key)(recording, key, value, around)
    if "dp" in values:
        recording = change_replicas(recording, _count("dp", values["dp"]), around.all_reduce_s)
    if "micro-batches" in values or "schedule" in values:
        number = _count("micro-batches", values["micro-batches"]) if "micro-batches" in values else None
        recording = reschedule(recording, number, values.get("schedule"))
    for key, value in pairs:
        if key.startswith("bandwidth."):
            recording = _bandwidth(recording, key, value)
    return recording


def _split(text: str) -> tuple[str, str]:
    key, equals, value = (word.strip() for word in text.partition("="))
    if not equals or not key or not value:
        raise WhatIfError(f"{text!r} is no change; write K=V, one of: {KNOWN}")
    return key.replace("_", "-"), value


def _apply_of(key: str) -> Apply:
    for pattern, apply in CHANGES.items():
        if re.fullmatch(pattern, key):
            return apply
    raise WhatIfError(f"unknown change {key!r}; known: {KNOWN}")


def _count(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise WhatIfError(f"{key} must be a whole number from 1 to 999,999, not {text!r}")
    return int(text)


def _factor(key: str, text: str) -> float:
    match = FACTOR.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise WhatIfError(f"{key} must be a factor such as 2x or 0.5x, not {text!r}")
    return float(match[1])


def _rank(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    rank = int(key.split(".")[1])
    if value == "healthy":
        slow = find_stragglers(recording, rank_parts(measured(recording)))
        return heal_rank(recording, rank, frozenset(one.rank for one in slow))
    return assuming(scale_rank(recording, rank, _factor(key, value)), f"all work of rank {rank} takes {value} as long")


def _layers(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    if not re.fullmatch(r"[+-][0-9]{1,4}", value):
        raise WhatIfError(f"{key} must be a change such as -1 or +2, not {value!r}")
    return change_layers(recording, int(key.split(".")[1]), int(value))


def _gpu(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    if around.gpu is None:
        raise WhatIfError("gpu= scales by the GPU that ran, which a trace does not name; say it with --gpu")
    change = around.gpu(value)
    return assuming(
        scale_compute(recording, change.compute, change.memory),
        f"{change.name}: forward and backward take {change.compute:.3g} and memory-bound work "
        f"{change.memory:.3g} of the time, as the published peaks say; communication stays as it was",
    )


def _compute(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    factor = _factor(key, value)
    return assuming(scale_compute(recording, factor, 1.0), f"forward and backward take {value} as long")


CHANGES: Mapping[str, Apply] = {
    r"rank\.[0-9]{1,7}": _rank,
    r"stage\.[0-9]{1,5}\.layers": _layers,
    r"gpu": _gpu,
    r"compute": _compute,
}


def _group(key: str) -> str:
    group = key.split(".", 1)[1]
    if group not in GROUPS:
        raise WhatIfError(f"unknown group {group!r} in {key}; known: {', '.join(GROUPS)}")
    return group


def _rate(text: str) -> float | None:
    """``50GB/s`` as bytes per second; None where the text is a factor."""
    return float(parse_size_bytes(text[:-2])) if text.lower().endswith("/s") else None


def _bandwidth(recording: Recording, key: str, value: str) -> Recording:
    rate = _rate(value)
    if rate is None:
        return scale_transfers(recording, _group(key), _factor(key, value))
    if rate <= 0:
        raise WhatIfError(f"{key} must be above zero, not {value!r}")
    return set_bandwidth(recording, _group(key), rate)


def _with_stated_bandwidth(around: Surroundings, values: Mapping[str, str]) -> "Surroundings":
    """A stated bandwidth between replicas prices the all-reduce that one replica did not need."""
    rate = _rate(values.get("bandwidth.dp", ""))
    if not rate:
        return around
    return Surroundings(around.gpu, lambda size_bytes, ranks: size_bytes * bus_factor("all-reduce", ranks) / rate)
