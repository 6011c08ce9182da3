"""One clock for all ranks. Hosts count from their own start; matched communication ties them together.

Nobody leaves a meeting before everybody has come: with true time = own time + offset, each pair of members
gives end_i + offset_i >= start_j + offset_j and the same with i and j exchanged. These bound the difference
of two offsets from both sides; inside the bounds the ends of a meeting, which nearly coincide, say where it
lies.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

# Host clocks differ by the hours their machines are up. Anything within this is the delay of a launch.
SAME_CLOCK_S = 5e-3


@dataclass(frozen=True, slots=True)
class Presence:
    """One member of one meeting, on its own clock."""

    rank: int
    start_s: float
    end_s: float
    # A source may leave before the others come (a broadcast, a buffered message).
    may_leave_early: bool = False


@dataclass
class _Pair:
    """What is known of offset_j - offset_i."""

    low_s: float = float("-inf")
    high_s: float = float("inf")
    ends_s: list[float] = field(default_factory=list)

    @property
    def holds_zero(self) -> bool:
        return self.low_s - SAME_CLOCK_S <= 0 <= self.high_s + SAME_CLOCK_S


@dataclass(frozen=True, slots=True)
class Alignment:
    """Seconds to add to each rank's times. Ranks of one clock share a set."""

    offset_s: Mapping[int, float]
    clocks: tuple[tuple[int, ...], ...]
    uncertainty_s: float
    unplaced: tuple[int, ...] = ()


def align(meetings: Sequence[Sequence[Presence]], ranks: Sequence[int]) -> Alignment:
    """The offset of every rank's clock. The clock of the lowest rank is kept."""
    pairs = _pairs(meetings)
    clock_of = _clocks(pairs, ranks)
    clocks: dict[int, list[int]] = {}
    for rank in ranks:
        clocks.setdefault(clock_of[rank], []).append(rank)
    offset_s = {clock_of[ranks[0]]: 0.0}
    uncertainty_s = 0.0
    waiting = [clock for clock in clocks if clock not in offset_s]
    while waiting:
        found = _next_clock(pairs, clock_of, offset_s, waiting)
        if found is None:
            break
        clock, offset, unsure_s = found
        offset_s[clock] = offset
        uncertainty_s = max(uncertainty_s, unsure_s)
        waiting.remove(clock)
    unplaced = tuple(rank for clock in waiting for rank in clocks[clock])
    placed = {rank: offset_s[clock_of[rank]] for rank in ranks if clock_of[rank] in offset_s}
    return Alignment(placed, tuple(map(tuple, clocks.values())), uncertainty_s, unplaced)


def _pairs(meetings: Sequence[Sequence[Presence]]) -> dict[tuple[int, int], _Pair]:
    """Bounds between the first member of each meeting and every other."""
    pairs: dict[tuple[int, int], _Pair] = {}
    for meeting in meetings:
        one = min(meeting, key=lambda presence: presence.rank)
        for two in meeting:
            if two is one:
                continue
            pair = pairs.setdefault((one.rank, two.rank), _Pair())
            if not one.may_leave_early:
                pair.high_s = min(pair.high_s, one.end_s - two.start_s)
            if not two.may_leave_early:
                pair.low_s = max(pair.low_s, one.start_s - two.end_s)
            pair.ends_s.append(one.end_s - two.end_s)
    return pairs


def _clocks(pairs: Mapping[tuple[int, int], _Pair], ranks: Sequence[int]) -> dict[int, int]:
    """Ranks whose meetings need no correction share a clock, named after its lowest rank."""
    clock_of = {rank: rank for rank in ranks}

    def root(rank: int) -> int:
        while clock_of[rank] != rank:
            rank = clock_of[rank]
        return rank

    for (one, two), pair in pairs.items():
        if pair.holds_zero:
            first, second = sorted((root(one), root(two)))
            clock_of[second] = first
    return {rank: root(rank) for rank in ranks}


def _next_clock(
    pairs: Mapping[tuple[int, int], _Pair],
    clock_of: Mapping[int, int],
    offset_s: Mapping[int, float],
    waiting: Sequence[int],
) -> tuple[int, float, float] | None:
    """A clock that shares meetings with those already placed: its offset and how unsure that is."""
    for clock in waiting:
        low_s, high_s = float("-inf"), float("inf")
        ends_s: list[float] = []
        for (one, two), pair in pairs.items():
            a, b = clock_of[one], clock_of[two]
            if b == clock and a in offset_s:
                sign, base_s = 1, offset_s[a]
                bounds = pair.low_s, pair.high_s
            elif a == clock and b in offset_s:
                sign, base_s = -1, offset_s[b]
                bounds = -pair.high_s, -pair.low_s
            else:
                continue
            low_s, high_s = max(low_s, base_s + bounds[0]), min(high_s, base_s + bounds[1])
            ends_s += [base_s + sign * end_s for end_s in pair.ends_s]
        if ends_s:
            # Noise may make the bounds cross; then the ends alone decide.
            guess_s = median(ends_s)
            inside_s = min(max(guess_s, low_s), high_s) if low_s <= high_s else guess_s
            return clock, inside_s, max(0.0, high_s - low_s)
    return None
