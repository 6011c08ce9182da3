"""Changes of a Recording: each function returns a changed copy with its assumptions."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from statistics import mean, median

from stepcast.analyze.recording import BlockKind, Meeting, RankPiece, RankRecord, RecordedBlock, Recording, TimePart
from stepcast.ir.layout import Group, place_of, rank_at
from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.ir.types import Key, group_by_key, require
from stepcast.ir.work import bus_factor
from stepcast.simulation.schedule import ChunkPlace, Schedule, Slot, SlotAction
from stepcast.simulation.schedules import kind_named, make_schedule

INTERLEAVED_CHUNKS = 2


def seconds_per_token(records: Iterable[RankRecord]) -> dict[str, float]:
    """Return by role the seconds of one more token, for experts, whose work depends on the tokens they receive.

    Theil's incomplete method (1950): of the pieces in the order of their tokens, each of the lower half has a slope
    with its partner in the upper half; the median slope counts. A slow rank does not change it.
    """
    points_of = group_by_key(
        (piece.role, (piece.tokens, piece.own_s))
        for record in records
        for piece in record.pieces()
        if piece.tokens is not None
    )
    seconds = {}
    for role, points in points_of.items():
        points.sort()
        half = len(points) // 2
        slopes = [
            (upper_s - lower_s) / (upper - lower)
            for (lower, lower_s), (upper, upper_s) in zip(points[:half], points[-half:], strict=True)
            if upper > lower
        ]
        # No tokens cannot take less than no time, so the slope is at most proportional.
        steepest = median([duration_s / tokens for tokens, duration_s in points if tokens] or [0.0])
        seconds[role] = min(max(0.0, median(slopes)), steepest) if slopes else 0.0
    return seconds


def scale_to_tokens(duration_s: float, tokens: float, wanted: float, slope_s: float) -> float:
    """Return the time for *wanted* tokens of work that took *duration_s* for *tokens*."""
    return max(0.0, duration_s + slope_s * (wanted - tokens))


def map_pieces(recording: Recording, change: Callable[[RankRecord, RecordedBlock, RankPiece], RankPiece]) -> Recording:
    """Apply *change* to every piece."""
    ranks = tuple(
        record.with_pieces(change(record, block, piece) for block in record.blocks for piece in block.pieces)
        for record in recording.ranks
    )
    return replace(recording, ranks=ranks)


def assuming(recording: Recording, *texts: str) -> Recording:
    """Add assumptions to *recording*."""
    return replace(recording, assumptions=(*recording.assumptions, *texts))


def change_bandwidth(
    recording: Recording, group: str, factor: float = 1.0, bytes_per_s: float | None = None
) -> Recording:
    """Make the links of *group* this many times as fast, or run its collectives at a bus bandwidth and its messages at
    this rate; unknown sizes keep their time.
    """
    groups = {meeting.group for meeting in recording.meetings}
    if group not in groups:
        raise ValueError(
            f"no matched communication over {group} in the traces; they have {', '.join(sorted(groups)) or 'none'}"
            f"{'' if recording.is_complete else ': give the traces of all ranks'}"
        )
    text = f"transfers over {group} take 1/{factor:g} of the time; launch delays stay as they are"
    if bytes_per_s is not None:
        text = f"transfers over {group} run at {bytes_per_s / 1e9:g} GB/s (bus bandwidth), without latency"
    meetings = list(recording.meetings)
    for number, meeting in enumerate(meetings):
        transfer_s = meeting.transfer_s / factor
        if bytes_per_s is not None and meeting.size_bytes is not None:
            transfer_s = meeting.size_bytes * bus_factor(meeting.kind, len(meeting.members)) / bytes_per_s
        if meeting.group == group:
            meetings[number] = replace(meeting, transfer_s=transfer_s)
    return assuming(replace(recording, meetings=tuple(meetings)), text)


def scale_rank(recording: Recording, rank: int, factor: float) -> Recording:
    """Make all work of *rank* take *factor* times as long."""
    recording.record_of(rank)
    return map_pieces(recording, lambda record, _, piece: _scale_piece(piece, factor) if record.rank == rank else piece)


def scale_compute(recording: Recording, compute: float, memory: float) -> Recording:
    """Make computation take *compute* times as long, and memory-bound work *memory* times."""

    def change(_: RankRecord, __: RecordedBlock, piece: RankPiece) -> RankPiece:
        if piece.meetings:
            return replace(piece, own_s=piece.own_s * compute) if piece.waits else piece
        if piece.part is TimePart.COMPUTE:
            return _scale_piece(piece, compute)
        return _scale_piece(piece, memory) if piece.part is TimePart.OPTIMIZER else piece

    return map_pieces(recording, change)


def _scale_piece(piece: RankPiece, factor: float) -> RankPiece:
    return replace(piece, own_s=piece.own_s * factor, tail_s=piece.tail_s * factor)


def heal_rank(recording: Recording, rank: int, slow: frozenset[int] = frozenset()) -> Recording:
    """Give *rank* the pace of its peers: ranks of its stage piece by piece, or else pieces with the same role."""
    record = recording.record_of(rank)
    pieces, others = list(record.pieces()), [other for other in recording.ranks if other.rank not in {rank, *slow}]
    slopes_s = seconds_per_token(recording.ranks)
    roles = [piece.role for piece in pieces]
    peers = [list(other.pieces()) for other in others if other.stage == record.stage]
    peers = [peer for peer in peers if [piece.role for piece in peer] == roles]
    if peers:
        healed = (_set_pace(piece, [peer[index] for peer in peers], slopes_s) for index, piece in enumerate(pieces))
        text = f"rank {rank} works at the pace of the other ranks of stage {record.stage}"
    else:
        by_role = group_by_key((piece.role, piece) for other in others for piece in other.pieces())
        healed = (_set_pace(piece, by_role.get(piece.role, []), slopes_s) for piece in pieces)
        text = f"rank {rank} works at the pace of ranks of other stages that do the same"
        if not any(piece.role in by_role for piece in pieces):
            raise ValueError(f"no healthy rank does the work of rank {rank}, so its healthy pace is not known")
    own = record.with_pieces(healed)
    ranks = tuple(own if other.rank == rank else other for other in recording.ranks)
    return assuming(replace(recording, ranks=ranks), text)


def _set_pace(piece: RankPiece, others: list[RankPiece], slopes_s: Mapping[str, float]) -> RankPiece:
    """Return *piece* with the median times of *others*, which have its role."""
    same = [other for other in others if bool(other.meetings) == bool(piece.meetings)]
    if not same:
        return piece
    slope_s, times_s = slopes_s.get(piece.role, 0.0), [other.own_s for other in same]
    if piece.tokens is not None:
        tokens = [piece.tokens if other.tokens is None else other.tokens for other in same]
        times_s = [scale_to_tokens(*time, piece.tokens, slope_s) for time in zip(times_s, tokens, strict=True)]
    return replace(piece, own_s=median(times_s), tail_s=median(other.tail_s for other in same))


def change_layers(recording: Recording, stage: int, layers: int) -> Recording:
    """Add (or remove) *layers* on *stage*.

    A layer takes as long as on the stage that needs least per layer: the rest of other stages is their embedding or
    loss.
    """
    by_stage = group_by_key((record.stage, record) for record in sorted(recording.ranks, key=lambda rank: rank.stage))
    known = ((number, recording.layers_on(number)) for number in by_stage)
    counts = {number: count for number, count in known if count is not None}
    require(len(counts) == len(by_stage), "the number of layers of this run is not known")
    require(stage in counts, f"stage {stage} is not in this run; it has {', '.join(map(str, counts))}")
    require(counts[stage] + layers >= 1, f"stage {stage} has {counts[stage]} layers; {layers:+d} leaves none")
    share = (counts[stage] + layers) / counts[stage]
    layer_s, factors = {}, {}
    for kind in (BlockKind.FORWARD, BlockKind.BACKWARD):
        compute_s = {}  # of one micro-batch, the mean of the ranks
        for number, records in by_stage.items():
            total_s = sum(recording.compute_s(record, kind) for record in records)
            compute_s[number] = total_s / len(records) / max(1, recording.micro_batches)
        layer_s[kind] = min(compute_s[number] / count for number, count in counts.items())
        before_s = compute_s[stage]
        factors[kind] = max(0.0, 1 + layers * layer_s[kind] / before_s) if before_s else 1.0

    def change(record: RankRecord, block: RecordedBlock, piece: RankPiece) -> RankPiece:
        if record.stage != stage:
            return piece
        if block.kind in factors:
            computes = piece.meetings or piece.part is TimePart.COMPUTE
            return _scale_piece(piece, factors[block.kind]) if computes else piece
        if not piece.meetings and piece.part in (TimePart.OPTIMIZER, TimePart.DP):
            return _scale_piece(piece, share)
        return piece

    changed = map_pieces(recording, change)
    ranks, meetings = {record.rank for record in recording.ranks if record.stage == stage}, []
    for meeting in changed.meetings:
        is_own = meeting.group in ("tp", "cp", "ep", "dp") and ranks.issuperset(meeting.members)
        meetings.append(replace(meeting, transfer_s=meeting.transfer_s * share) if is_own else meeting)
    facts = {**recording.facts, "layers_on": {**counts, stage: counts[stage] + layers}}
    if recording.layers is not None:
        facts["layers"] = recording.layers + layers
    forward, backward = (f"{seconds * 1e3:.2f} ms" for seconds in layer_s.values())
    text = f"a layer takes {forward} forward and {backward} backward, as on the stage that needs least; collectives, "
    text += f"gradients and optimizer of stage {stage} follow its layers"
    return assuming(replace(changed, meetings=tuple(meetings), facts=facts), text)


AllReduceTime = Callable[[int, int], float]
"""Return the seconds of an all-reduce between replicas from its bytes and ranks."""


def change_replicas(recording: Recording, dp: int, all_reduce_s: AllReduceTime | None = None) -> Recording:
    """Run *dp* replicas instead of those measured; each keeps its micro-batches, so the global batch changes.

    A ring all-reduce moves 2 (n - 1) / n of the buffer over each link (Patarasuk and Yuan, 2009), so its measured
    time is scaled by that. If there was only one replica, *all_reduce_s* estimates it.
    """
    require(dp >= 1, f"dp must be at least 1, not {dp}")
    require(recording.is_complete, "changing dp needs every rank of the run")
    if recording.layout.dp == dp:
        return recording
    if recording.layout.dp == 1 and all_reduce_s is None:
        raise ValueError(
            "the run has one replica, so how fast replicas reduce gradients was not measured; name the "
            "cluster with --cluster, or state it as --what-if bandwidth.dp=50GB/s"
        )
    require(recording.layout.ep == 1, "changing dp of a run with expert parallelism is not supported")
    return _ReplicaBuilder(recording, dp, all_reduce_s).build()


class _Rebuilder:
    """Builds a recording with other meetings, numbered by keys."""

    def __init__(self, recording: Recording) -> None:
        self.old = recording
        self._meetings: dict[tuple[object, ...], tuple[int, Meeting]] = {}

    @property
    def meetings(self) -> tuple[Meeting, ...]:
        return tuple(meeting for _, meeting in self._meetings.values())

    def number(self, key: tuple[object, ...], meeting: Meeting) -> int:
        """Return the number of the meeting with this key, which is *meeting* if it is new."""
        return self._meetings.setdefault(key, (len(self._meetings), meeting))[0]

    def attend(self, piece: RankPiece, copies: Iterable[tuple[int, tuple[object, ...], float]]) -> RankPiece:
        """Return the piece in *copies* of its meetings: the old number of each, its key, and the factor of its time."""
        numbers = {}
        for old, key, factor in copies:
            meeting = self.old.meetings[old]
            numbers[old] = self.number(key, replace(meeting, transfer_s=meeting.transfer_s * factor))
        waits = tuple(numbers[old] for old in piece.waits if old in numbers)
        return replace(piece, meetings=tuple(numbers[old] for old in piece.meetings if old in numbers), waits=waits)


def _mean_by_key(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    return {key: mean(values) for key, values in group_by_key(pairs).items()}


class _ReplicaBuilder(_Rebuilder):
    def __init__(self, recording: Recording, dp: int, all_reduce_s: AllReduceTime | None) -> None:
        super().__init__(recording)
        self.dp, self.all_reduce_s = dp, all_reduce_s
        self.layout = replace(recording.layout, dp=dp)

    def build(self) -> Recording:
        by_place = {place_of(record.rank, self.old.layout): record for record in self.old.ranks}
        records = []
        for stage, replica, tensor in product(*map(range, (self.layout.pp, self.dp, self.layout.tp))):
            source = by_place[stage, replica % self.old.layout.dp, tensor]
            blocks = tuple(
                replace(block, pieces=tuple(self._pieces(block, stage, replica, tensor))) for block in source.blocks
            )
            records.append(RankRecord(rank_at(stage, replica, tensor, self.layout), stage, blocks))
        changed = replace(self.old, layout=self.layout, ranks=tuple(records), meetings=self.meetings)
        text = f"{self.dp} replicas, each with as many micro-batches as measured: the global batch changes"
        return assuming(changed, text)

    def _pieces(self, block: RecordedBlock, stage: int, replica: int, tensor: int) -> Iterator[RankPiece]:
        for piece in block.pieces:
            copies: list[tuple[int, tuple[object, ...], float]] = []
            for old in piece.meetings:
                meeting = self.old.meetings[old]
                if meeting.group not in (Group.DP, Group.EXPERT_DP):
                    copies.append((old, ("copy", old, replica), 1.0))
                elif self.dp > 1:
                    before = len(meeting.members)
                    copies.append((old, ("replicas", old), ((self.dp - 1) / self.dp) / ((before - 1) / before)))
            attending = self.attend(piece, copies)
            is_left = piece.meetings and not copies  # alone, with the work that the meeting overlapped
            yield replace(attending, part=TimePart.COMPUTE, tail_s=0.0) if is_left else attending
            if self.old.layout.dp == 1 and piece.operation == "dp_allreduce" and not piece.meetings:
                yield self._gradients(piece, stage, tensor)

    def _gradients(self, piece: RankPiece, stage: int, tensor: int) -> RankPiece:
        """Return the all-reduce that one replica did not need."""
        assert self.all_reduce_s is not None
        known = self.old.facts.get("gradient_bytes")
        if not isinstance(known, dict) or stage not in known:
            raise ValueError(f"the size of the gradients of stage {stage} is not known")
        size_bytes = int(known[stage])
        transfer_s = self.all_reduce_s(size_bytes, self.dp)
        ranks = tuple(rank_at(stage, other, tensor, self.layout) for other in range(self.dp))
        meeting = Meeting(Group.DP, "all-reduce", piece.operation, ranks, size_bytes, transfer_s)
        number = self.number(("gradients", stage, tensor), meeting)
        return replace(piece, part=TimePart.DP, own_s=0.0, meetings=(number,), waits=(number,))


def reschedule(recording: Recording, micro_batches: int | None = None, schedule: str | None = None) -> Recording:
    """Run the same stages with other *micro_batches* or in another *schedule*.

    The measured forwards, backwards, messages and final operations of each stage are templates; the schedule orders
    them.
    """
    require(recording.is_complete, "laying a run out anew needs every rank of it")
    kind = kind_named(schedule) if schedule else ScheduleKind.ONE_F_ONE_B
    facts = SCHEDULES[kind]
    if facts.splits_backward:
        others = ", ".join(name for name, other in SCHEDULES.items() if not other.splits_backward)
        raise ValueError(f"schedule={kind}: a trace times whole backwards, not their halves; choose {others}")
    name, count = str(kind), micro_batches or recording.micro_batches
    plan = make_schedule(name, recording.layout.pp, count, 1 if facts.stops else INTERLEAVED_CHUNKS)
    kinds = {SlotAction.FORWARD: BlockKind.FORWARD, SlotAction.BACKWARD: BlockKind.BACKWARD}
    orders = [[(kinds.get(slot.kind), slot.micro_batch) for slot in order] for order in plan.orders]
    if plan.chunks == 1 and all(
        orders[record.stage]
        == [(block.kind, block.micro_batch) for block in record.blocks if block.kind in kinds.values()]
        for record in recording.ranks
    ):
        return assuming(recording, f"the run was measured in the order of {name} with {count} micro-batches")
    texts = [f"{name} with {count} micro-batches, each as long as the measured one of its turn"]
    if plan.chunks > 1:
        texts.append(f"the work of a stage is spread evenly over {plan.chunks} chunks; messages do not stop the sender")
    return assuming(lay_out(recording, plan), *texts)


def lay_out(recording: Recording, plan: Schedule) -> Recording:
    """Run the stages in the order of *plan*, with the measured passes and a typical message of each stage."""
    return _ScheduleBuilder(recording, plan).build()


class _ScheduleBuilder(_Rebuilder):
    def __init__(self, recording: Recording, plan: Schedule) -> None:
        super().__init__(recording)
        self.plan = plan
        # As in Megatron-LM without overlapped messages.
        self.blocking = SCHEDULES[kind_named(plan.name)].stops
        # Mean messages: the transfer between two stages, and the time of a rank before and after it.
        stage_of = {record.rank: record.stage for record in recording.ranks}
        sent = [meeting for meeting in recording.meetings if meeting.kind == "message"]
        self.transfer_s = _mean_by_key(
            ((meeting.name, min(stage_of[rank] for rank in meeting.members)), meeting.transfer_s) for meeting in sent
        )
        pieces = [
            (record.rank, piece)
            for record in recording.ranks
            for block in record.blocks
            if block.kind is BlockKind.MESSAGE
            for piece in block.pieces
        ]
        self.gap_s = _mean_by_key(
            (rank, piece.own_s) for rank, piece in pieces if not piece.meetings and piece.part is TimePart.HOST
        )
        self.tail_s = _mean_by_key((rank, piece.tail_s) for rank, piece in pieces if piece.meetings)

    def build(self) -> Recording:
        ranks = []
        for record in self.old.ranks:
            blocks = [block for block in record.blocks if block.kind is BlockKind.START]
            for before, slot in pairwise([None, *self.plan.orders[record.stage], None]):
                blocks += self._passing(record, before, slot)
                if slot is not None:
                    blocks.append(self._slot(record, slot))
            finish = (block for block in record.blocks if block.kind is BlockKind.FINISH)
            blocks += [self._copy(block, ("finish",), 1.0) for block in finish]
            ranks.append(replace(record, blocks=tuple(blocks)))
        return replace(self.old, ranks=tuple(ranks), meetings=self.meetings, micro_batches=self.plan.micro_batches)

    def _slot(self, record: RankRecord, slot: Slot) -> RecordedBlock:
        """Return the measured forward or backward of the same turn, or a chunk of it."""
        kind = BlockKind.FORWARD if slot.kind is SlotAction.FORWARD else BlockKind.BACKWARD
        measured = [block for block in record.blocks if block.kind is kind]
        require(bool(measured), f"rank {record.rank} has no {kind} to repeat")
        block = measured[slot.micro_batch % len(measured)]
        copied = self._copy(block, (slot.micro_batch, slot.chunk), 1 / self.plan.chunks)
        return replace(copied, micro_batch=slot.micro_batch)

    def _copy(self, block: RecordedBlock, instance: tuple[object, ...], share: float) -> RecordedBlock:
        pieces = []
        for piece in block.pieces:
            copies = ((old, ("copy", old, *instance), share) for old in piece.meetings)
            pieces.append(_scale_piece(self.attend(piece, copies), share))
        return replace(block, pieces=tuple(pieces))

    def _passing(self, record: RankRecord, before: Slot | None, after: Slot | None) -> list[RecordedBlock]:
        """Return the messages between two slots: the output of *before* and the input of *after*."""
        sent = None if before is None else self._message(record, before, outbound=True)
        needed = None if after is None else self._message(record, after, outbound=False)
        both = [message for message in (sent, needed) if message is not None]
        if self.blocking:
            numbers = tuple(number for number, _ in both)
            return [self._joins(record, both[-1][1], numbers, numbers)] if both else []
        return [self._joins(record, way, (number,), () if (number, way) == sent else (number,)) for number, way in both]

    def _joins(self, record: RankRecord, way: str, numbers: tuple[int, ...], waits: tuple[int, ...]) -> RecordedBlock:
        name = f"{way} message"
        gap = RankPiece(TimePart.HOST, "gap", f"before {name}", -1, 0.0, 0.0, self.gap_s.get(record.rank, 0.0))
        tail_s = self.tail_s.get(record.rank, 0.0) if waits else 0.0
        join = RankPiece(TimePart.PP, name, name, -1, 0.0, 0.0, 0.0, numbers, waits, tail_s)
        return RecordedBlock(BlockKind.MESSAGE, -1, (gap, join))

    def _message(self, record: RankRecord, slot: Slot, outbound: bool) -> tuple[int, str] | None:
        """Return the meeting and direction of the output or input of *slot*."""
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
        transfer_s = self.transfer_s.get((way, min(source.stage, target.stage)))
        if transfer_s is None or abs(source.stage - target.stage) != 1:  # not measured: the mean of the direction
            same = [seconds for (name, _), seconds in self.transfer_s.items() if name == way]
            transfer_s = mean(same or self.transfer_s.values()) if self.transfer_s else 0.0
        meeting = Meeting(Group.PP, "message", way, tuple(sorted(ends)), None, transfer_s)
        return self.number(key, meeting), way
