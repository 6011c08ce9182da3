"""Slow ranks, told by the work they do alone: pieces of the same role are the same work on every rank, but
for experts, whose work follows the tokens that they are sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from stepcast.analyze.megatron.events import OPTIMIZER
from stepcast.analyze.parts import RankParts
from stepcast.analyze.recording import Join, Local, Part, RankRecord, Recording
from stepcast.analyze.tokens import at_tokens_s, seconds_per_token

# Slower than this is no chance: ranks of a healthy run differ by a few per cent.
FACTOR = 1.15
# And it must matter: extra time as a share of the step.
SHARE = 0.01


@dataclass(frozen=True, slots=True)
class Pace:
    """One kind of work of a rank against the same work on the other ranks."""

    operation: str
    role: str
    own_s: float
    reference_s: float
    other_stages: bool  # whether ranks of other stages do the same

    @property
    def factor(self) -> float:
        return self.own_s / self.reference_s


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that needs *factor* times as long as others for the same work."""

    rank: int
    paces: tuple[Pace, ...]
    waits_caused_s: tuple[tuple[int, float], ...]  # (rank that waited, seconds), longest first

    @property
    def own_s(self) -> float:
        return sum(pace.own_s for pace in self.paces)

    @property
    def reference_s(self) -> float:
        return sum(pace.reference_s for pace in self.paces)

    @property
    def extra_s(self) -> float:
        return self.own_s - self.reference_s

    @property
    def factor(self) -> float:
        """Over the work that every stage has, for which there are most ranks to compare with; where there is
        little of it, over all work that is compared."""
        shared = [pace for pace in self.paces if pace.other_stages]
        paces = shared if 2 * sum(pace.reference_s for pace in shared) > self.reference_s else self.paces
        return sum(pace.own_s for pace in paces) / sum(pace.reference_s for pace in paces)

    def operations(self) -> dict[str, tuple[float, float]]:
        """Operation -> own and reference seconds."""
        return self._totals(self.paces)

    def shared_operations(self) -> dict[str, tuple[float, float]]:
        """The same over work that every stage has: layers, without embedding or loss."""
        return self._totals([pace for pace in self.paces if pace.other_stages])

    @staticmethod
    def _totals(paces: Sequence[Pace]) -> dict[str, tuple[float, float]]:
        totals: dict[str, tuple[float, float]] = {}
        for pace in paces:
            own_s, reference_s = totals.get(pace.operation, (0.0, 0.0))
            totals[pace.operation] = own_s + pace.own_s, reference_s + pace.reference_s
        return totals


@dataclass(frozen=True, slots=True)
class RoleTime:
    """How often and how long a rank computed in one role, and for how many tokens."""

    count: int = 0
    total_s: float = 0.0
    tokens: int = 0

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count

    @property
    def mean_tokens(self) -> float:
        return self.tokens / self.count


def role_times_s(record: RankRecord) -> dict[tuple[str, str], RoleTime]:
    """(operation, role) -> what this rank computed."""
    times: dict[tuple[str, str], RoleTime] = {}
    for piece in record.pieces():
        tokens = 0
        if isinstance(piece, Local) and piece.part in (Part.COMPUTE, Part.OPTIMIZER):
            seconds, tokens = piece.duration_s, piece.tokens or 0
        elif isinstance(piece, Join) and piece.own_s and piece.waits:
            seconds = piece.own_s
        else:
            continue
        before = times.get((piece.operation, piece.role), RoleTime())
        times[piece.operation, piece.role] = RoleTime(
            before.count + 1, before.total_s + seconds, before.tokens + tokens
        )
    return times


def find_stragglers(recording: Recording, parts: Sequence[RankParts]) -> tuple[Straggler, ...]:
    """Ranks whose own work takes longer than the same work elsewhere, the slowest first."""
    by_rank = {record.rank: role_times_s(record) for record in recording.ranks}
    stage_of = {record.rank: record.stage for record in recording.ranks}
    slopes_s = seconds_per_token(recording.ranks)
    found = []
    for rank in by_rank:
        paces = _paces(rank, by_rank, stage_of, slopes_s)
        caused = [(one.rank, one.waits_for_s[rank]) for one in parts if one.waits_for_s.get(rank, 0.0) > 0]
        caused.sort(key=lambda pair: -pair[1])
        one = Straggler(rank, paces, tuple(caused))
        slow = one.reference_s > 0 and min(one.factor, one.own_s / one.reference_s) >= FACTOR
        if slow and one.extra_s >= SHARE * recording.measured_step_s:
            found.append(one)
    return tuple(sorted(found, key=lambda one: -one.factor))


def _paces(
    rank: int,
    by_rank: Mapping[int, Mapping[tuple[str, str], RoleTime]],
    stage_of: Mapping[int, int],
    slopes_s: Mapping[str, float],
) -> tuple[Pace, ...]:
    """The work of *rank* that other ranks do too."""
    paces = []
    for key, own in by_rank[rank].items():
        operation, role = key
        if operation == OPTIMIZER:
            continue  # its work follows the parameters of the stage, and its sync hides part of it
        others = {other: times[key] for other, times in by_rank.items() if other != rank and key in times}
        slope_s = slopes_s.get(role, 0.0)
        each_s = [
            at_tokens_s(one.mean_s, one.mean_tokens, own.mean_tokens, slope_s) for one in others.values()
        ]
        reference_s = own.count * median(each_s) if others else 0
        if reference_s:
            elsewhere = any(stage_of[other] != stage_of[rank] for other in others)
            paces.append(Pace(operation, role, own.total_s, reference_s, elsewhere))
    return tuple(paces)
