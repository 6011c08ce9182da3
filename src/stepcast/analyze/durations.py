"""A Recording from durations alone, without anything that only a common clock tells.

Every collective and message takes the shortest time that any member spent in it, and every optimizer that of
the member which waited least. What is left out (ends that differ between members, launch delays after a
transfer) is what a replay cannot know, so this replay can be wrong, and its error says how well durations and
dependencies explain a run.
"""

from dataclasses import replace
from itertools import pairwise

from stepcast.analyze.recording import Block, Join, Local, Part, Piece, RankRecord, Recording


def durations_only(recording: Recording) -> Recording:
    """*recording* with each meeting at its shortest stay, and nothing after it."""
    shortest_s = _shortest_stays(recording)
    optimizer_s = _shortest_optimizers(recording)
    meetings = []
    for number, meeting in enumerate(recording.meetings):
        stay_s = 0.0 if meeting.kind == "sync" else shortest_s.get(number, meeting.transfer_s)
        # Beside work, a stay is the work's time; the transfer is known from elsewhere.
        meetings.append(
            replace(meeting, transfer_s=min(stay_s, meeting.transfer_s) if meeting.overlapped else stay_s)
        )
    ranks = tuple(
        replace(record, blocks=tuple(_block(block, optimizer_s) for block in record.blocks))
        for record in recording.ranks
    )
    return replace(recording, ranks=ranks, meetings=tuple(meetings))


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
    return [
        (sync, update)
        for sync, update in pairwise(pieces)
        if isinstance(sync, Join) and sync.part is Part.OPTIMIZER and isinstance(update, Local)
    ]


def _shortest_optimizers(recording: Recording) -> dict[int, float]:
    times_s: dict[int, float] = {}
    for record in recording.ranks:
        for sync, update in _updates(record):
            total_s = update.start_s + update.duration_s - sync.start_s
            number = sync.meetings[0]
            times_s[number] = min(times_s.get(number, total_s), total_s)
    return times_s


def _block(block: Block, optimizer_s: dict[int, float]) -> Block:
    pieces: list[Piece] = []
    sync: Join | None = None
    for piece in block.pieces:
        if isinstance(piece, Join):
            pieces.append(replace(piece, tail_s=0.0))
            sync = piece if piece.part is Part.OPTIMIZER else None
        elif sync is not None:
            pieces.append(replace(piece, duration_s=optimizer_s[sync.meetings[0]]))
            sync = None
        else:
            pieces.append(piece)
    return replace(block, pieces=tuple(pieces))
