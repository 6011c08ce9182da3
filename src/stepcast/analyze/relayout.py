"""A Recording laid out anew: other micro-batches, another schedule.

What was measured becomes a template: each forward and backward of a stage, each message between two stages,
and what finishes the step. The schedule says in which order they run.
"""

from collections.abc import Callable
from dataclasses import replace
from statistics import mean

from stepcast.analyze.changes import assuming
from stepcast.analyze.recording import (
    Block,
    BlockKind,
    Join,
    Local,
    Meeting,
    Part,
    Piece,
    RankRecord,
    Recording,
)
from stepcast.ir.group import Group
from stepcast.ir.ranks import place_of, rank_at
from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.simulation.schedule import Kind, Place, Schedule, Slot
from stepcast.simulation.schedules.table import kind_named, make_schedule

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
                    elif piece.part is Part.HOST:
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


def reschedule(
    recording: Recording, micro_batches: int | None = None, schedule: str | None = None
) -> Recording:
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
        texts.append(
            f"the work of a stage is spread evenly over {plan.chunks} chunks; messages do not stop the sender"
        )
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
        return replace(
            self.old, ranks=ranks, meetings=tuple(self.meetings), micro_batches=self.plan.micro_batches
        )

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

    def _slot(self, record: RankRecord, slot: Slot) -> Block:
        """The measured forward or backward of the same turn, a chunk of it where there are several."""
        kind = BlockKind.FORWARD if slot.kind is Kind.FORWARD else BlockKind.BACKWARD
        measured = [block for block in record.blocks if block.kind is kind]
        if not measured:
            raise ValueError(f"rank {record.rank} has no {kind} to repeat")
        block = measured[slot.micro_batch % len(measured)]
        copied = self._copied(block, (slot.micro_batch, slot.chunk), 1 / self.plan.chunks)
        return replace(copied, micro_batch=slot.micro_batch)

    def _copied(self, block: Block, instance: tuple[object, ...], share: float) -> Block:
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
        return self._number(
            ("copy", old, *instance), lambda: replace(meeting, transfer_s=meeting.transfer_s * share)
        )

    def _passing(self, record: RankRecord, before: Slot | None, after: Slot | None) -> list[Block]:
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

    def _joins(self, record: RankRecord, way: str, numbers: tuple[int, ...], waits: tuple[int, ...]) -> Block:
        name = f"{way} message"
        gap = Local(Part.HOST, "gap", f"before {name}", -1, 0.0, self.messages.gap_s.get(record.rank, 0.0))
        tail_s = self.messages.tail_s.get(record.rank, 0.0) if waits else 0.0
        join = Join(Part.PP, name, name, -1, 0.0, 0.0, numbers, waits, 0.0, tail_s)
        return Block(BlockKind.MESSAGE, -1, (gap, join))

    def _message(self, record: RankRecord, slot: Slot, outbound: bool) -> tuple[int, str] | None:
        """(meeting, direction) of what *slot* makes or needs."""
        here = Place(record.stage, slot.chunk)
        forward = slot.kind is Kind.FORWARD
        other = self.plan.following(here) if forward == outbound else self.plan.previous(here)
        if other is None or other.stage == record.stage:
            return None
        way = "forward" if forward else "backward"
        source, target = (here, other) if outbound else (other, here)
        _, replica, tensor = place_of(record.rank, self.old.layout)
        ends = tuple(rank_at(place.stage, replica, tensor, self.old.layout) for place in (source, target))
        key = ("message", way, *ends, source.chunk, slot.micro_batch)
        transfer_s = self.messages.between(way, source.stage, target.stage)
        number = self._number(
            key, lambda: Meeting(Group.PP, "message", way, tuple(sorted(ends)), None, transfer_s)
        )
        return number, way
