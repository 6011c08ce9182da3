"""A Recording with other replicas: its ranks copied or left out, the gradients reduced over all of them."""

from collections.abc import Callable
from dataclasses import replace

from stepcast.analyze.changes import assuming
from stepcast.analyze.recording import Join, Local, Meeting, Part, Piece, RankRecord, Recording
from stepcast.ir.group import Group
from stepcast.ir.ranks import place_of, rank_at

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
            number: meeting.group in (Group.DP, Group.EXPERT_DP)
            for number, meeting in enumerate(recording.meetings)
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
            if piece.part is Part.DP and self.old.layout.dp == 1 and piece.operation == "dp_allreduce":
                return [piece, self._gradients(piece, stage, tensor)]
            return [piece]
        number = {old: self._meeting(old, replica) for old in piece.meetings}
        kept = [old for old in piece.meetings if number[old] is not None]
        if not kept:
            return [Local(Part.COMPUTE, piece.operation, piece.role, piece.micro_batch, 0.0, piece.own_s)]
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
            self.meetings.append(
                Meeting(Group.DP, "all-reduce", piece.operation, members, size_bytes, transfer_s)
            )
        number = self.numbers[key]
        return Join(Part.DP, piece.operation, piece.role, piece.micro_batch, 0.0, 0.0, (number,), (number,))

    def _gradient_bytes(self, stage: int) -> int:
        known = self.old.facts.get("gradient_bytes")
        if not isinstance(known, dict) or stage not in known:
            raise ValueError(f"the size of the gradients of stage {stage} is not known")
        return int(known[stage])
