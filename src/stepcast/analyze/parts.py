"""Where the time of every rank went; the parts of a rank sum to the step."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from stepcast.analyze.play import Played
from stepcast.analyze.recording import COMMUNICATION, Join, Local, TimePart
from stepcast.ir.group import Group

# Waiting in these is waiting for a rank of the same stage; in any other, for another stage.
WITHIN_STAGE = (Group.TP, Group.CP, Group.EP, Group.DP, Group.EXPERT_DP)


@dataclass
class RankParts:
    """The seconds of one rank."""

    rank: int
    stage: int
    parts_s: dict[TimePart, float] = field(default_factory=lambda: dict.fromkeys(TimePart, 0.0))
    waits_s: dict[str, float] = field(default_factory=dict)  # by group
    exposed_s: dict[str, float] = field(default_factory=dict)  # communication in which nothing else ran
    overlapped_s: dict[str, float] = field(default_factory=dict)  # transfers hidden behind computation
    waits_for_s: dict[int, float] = field(default_factory=dict)  # by the rank that came last

    @property
    def busy_s(self) -> float:
        return self.parts_s[TimePart.COMPUTE] + self.parts_s[TimePart.OPTIMIZER]

    @property
    def bubble_s(self) -> float:
        return self.parts_s[TimePart.BUBBLE]

    def add(self, part: TimePart, seconds: float) -> None:
        self.parts_s[part] += max(0.0, seconds)


def rank_parts(played: Played) -> tuple[RankParts, ...]:
    """The parts of every rank, in the order of the recording."""
    recording = played.recording
    last = _last_arrivals(played)
    found = []
    for number, record in enumerate(recording.ranks):
        parts = RankParts(record.rank, record.stage)
        starts, ends = played.start_s[number].tolist(), played.end_s[number].tolist()
        cursor_s = 0.0
        for piece, start_s, end_s in zip(record.pieces(), starts, ends, strict=True):
            if isinstance(piece, Local):
                parts.add(piece.part, end_s - cursor_s)
                if piece.part in COMMUNICATION:
                    _add(parts.exposed_s, piece.part, end_s - start_s)
            else:
                _add_join(parts, played, piece, (cursor_s, end_s), last)
            cursor_s = end_s
        parts.add(TimePart.BUBBLE, played.step_s - cursor_s)
        found.append(parts)
    return tuple(found)


def _add(table: dict[str, float], key: str, seconds: float) -> None:
    table[str(key)] = table.get(str(key), 0.0) + seconds


def _last_arrivals(played: Played) -> dict[int, tuple[int, float]]:
    """Who came last to each meeting, and when."""
    last: dict[int, tuple[int, float]] = {}
    for number, record in enumerate(played.recording.ranks):
        starts = played.start_s[number]
        for at, piece in enumerate(record.pieces()):
            if isinstance(piece, Join):
                for meeting in piece.meetings:
                    if meeting not in last or starts[at] > last[meeting][1]:
                        last[meeting] = record.rank, float(starts[at])
    return last


def _add_join(
    parts: RankParts, played: Played, join: Join, span_s: tuple[float, float], last: Mapping[int, tuple[int, float]]
) -> None:
    """First the work of its own, then waiting for the last to come, then the transfer."""
    start_s, end_s = span_s
    free_s = min(start_s + join.own_s, end_s)
    parts.add(TimePart.COMPUTE if join.waits else join.part, free_s - start_s)
    came_s = max((float(played.meeting_start_s[number]) for number in join.waits), default=free_s)
    came_s = min(max(came_s, free_s), end_s)
    meetings = [played.recording.meetings[number] for number in join.meetings]
    group = meetings[0].group
    parts.add(TimePart.WAIT if group in WITHIN_STAGE else TimePart.BUBBLE, came_s - free_s)
    parts.add(join.part, end_s - came_s)
    _add(parts.waits_s, group, came_s - free_s)
    exposed_s = end_s - came_s + (0.0 if join.waits else free_s - start_s)
    if join.part is not TimePart.OPTIMIZER:
        _add(parts.exposed_s, join.part, exposed_s)
        transfer_s = max(meeting.transfer_s for meeting in meetings)
        _add(parts.overlapped_s, join.part, max(0.0, transfer_s - exposed_s) if join.own_s else 0.0)
    if join.waits:
        latest = max(join.waits, key=lambda number: last[number][1])
        if last[latest][0] != parts.rank and came_s > free_s:
            parts.waits_for_s[last[latest][0]] = parts.waits_for_s.get(last[latest][0], 0.0) + came_s - free_s


def breakdown_s(parts: tuple[RankParts, ...]) -> dict[str, float]:
    """The mean over the ranks, which sums to the step."""
    return {str(part): sum(one.parts_s[part] for one in parts) / len(parts) for part in TimePart}


def stage_rows(parts: tuple[RankParts, ...]) -> list[dict[str, float]]:
    """The mean over the ranks of each stage."""
    rows = []
    for stage in sorted({one.stage for one in parts}):
        mine = [one for one in parts if one.stage == stage]
        row: dict[str, float] = {
            "stage": stage,
            "busy_s": sum(one.busy_s for one in mine) / len(mine),
            "bubble_s": sum(one.bubble_s for one in mine) / len(mine),
        }
        for part in TimePart:
            row[f"{part}_s"] = sum(one.parts_s[part] for one in mine) / len(mine)
        rows.append(row)
    return rows
