"""A Recording from durations alone. The common clock tells only when ranks start and what work is hidden.

Every collective and message takes the shortest time that any member spent in it, and nothing after it: ends
that differ between members and launch delays after a transfer are left out. Such a replay can be wrong, so
its error says how well durations and dependencies explain a run; a replay of the recording as it is repeats
what the clocks said.
"""

from dataclasses import replace
from itertools import pairwise
from typing import TypeGuard

from stepcast.analyze.play import play
from stepcast.analyze.recording import Join, Local, Piece, RankRecord, RecordedBlock, Recording, TimePart


def at_shortest(recording: Recording) -> Recording:
    """Each meeting at its shortest stay, each optimizer at that of the rank which waited least in it: the
    longest chain is what work and dependencies alone cost."""
    shortest_s = _shortest_stays(recording)
    optimizer_s = _shortest_optimizers(recording)
    meetings = []
    for number, meeting in enumerate(recording.meetings):
        stay_s = 0.0 if meeting.kind == "sync" else shortest_s.get(number, meeting.transfer_s)
        # Beside work, a stay is the work's time; the transfer is known from elsewhere.
        meetings.append(replace(meeting, transfer_s=min(stay_s, meeting.transfer_s) if meeting.overlapped else stay_s))
    ranks = tuple(
        replace(record, blocks=tuple(_block(block, optimizer_s) for block in record.blocks))
        for record in recording.ranks
    )
    return replace(recording, ranks=ranks, meetings=tuple(meetings))


def from_durations(recording: Recording) -> Recording:
    """Each meeting at its shortest stay; of each optimizer what is left of its recorded time without the wait
    that the replay itself finds."""
    shortest = at_shortest(recording)
    arrivals = play(shortest)
    ranks = []
    for number, record in enumerate(shortest.ranks):
        recorded_s = {sync.meetings[0]: _total_s(sync, update) for sync, update in _updates(recording.ranks[number])}
        at = {piece.meetings[0]: index for index, piece in enumerate(record.pieces()) if _is_sync(piece)}
        left_s = {}
        for meeting, index in at.items():
            came_s = float(arrivals.start_s[number][index])
            waited_s = float(arrivals.meeting_start_s[meeting]) - came_s
            left_s[meeting] = max(0.0, recorded_s[meeting] - waited_s)
        ranks.append(replace(record, blocks=tuple(_block(block, left_s) for block in record.blocks)))
    return replace(shortest, ranks=tuple(ranks))


def _is_sync(piece: Piece) -> TypeGuard[Join]:
    return isinstance(piece, Join) and piece.part is TimePart.OPTIMIZER


def _total_s(sync: Join, update: Local) -> float:
    """What the trace shows of an optimizer: waiting for the others, then its own work."""
    return update.start_s + update.duration_s - sync.start_s


def _shortest_stays(recording: Recording) -> dict[int, float]:
    stays_s: dict[int, float] = {}
    for record in recording.ranks:
        for piece in record.pieces():
            if isinstance(piece, Join):
                for number in piece.waits:
                    stay_s = piece.end_s - piece.start_s
                    stays_s[number] = min(stays_s.get(number, stay_s), stay_s)
    return stays_s


def _updates(record: RankRecord) -> list[tuple[Join, Local]]:
    """Each synchronisation of the optimizer with the update that follows it."""
    pieces: list[Piece] = list(record.pieces())
    return [(sync, update) for sync, update in pairwise(pieces) if _is_sync(sync) and isinstance(update, Local)]


def _shortest_optimizers(recording: Recording) -> dict[int, float]:
    times_s: dict[int, float] = {}
    for record in recording.ranks:
        for sync, update in _updates(record):
            total_s = _total_s(sync, update)
            number = sync.meetings[0]
            times_s[number] = min(times_s.get(number, total_s), total_s)
    return times_s


def _block(block: RecordedBlock, optimizer_s: dict[int, float]) -> RecordedBlock:
    pieces: list[Piece] = []
    sync: Join | None = None
    for piece in block.pieces:
        if isinstance(piece, Join):
            pieces.append(replace(piece, tail_s=0.0))
            sync = piece if _is_sync(piece) else None
        elif sync is not None:
            pieces.append(replace(piece, duration_s=optimizer_s[sync.meetings[0]]))
            sync = None
        else:
            pieces.append(piece)
    return replace(block, pieces=tuple(pieces))
