"""Slow ranks, told by the work they do alone: pieces of the same role are the same work on every rank, but
for experts, whose work follows the tokens that they are sent.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

from stepcast.analyze.changes import at_tokens_s, seconds_per_token
from stepcast.analyze.megatron.events import OPTIMIZER, TraceOperation, exchanges
from stepcast.analyze.parts import RankParts
from stepcast.analyze.recording import BlockKind, Join, Local, RankRecord, Recording, TimePart
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import members

# Time of each layer, where tensor-parallel collectives mark its end: two in each layer and direction.

PER_LAYER = 2


@dataclass(frozen=True, slots=True)
class StageLayers:
    """Layers of one stage. *forward_s* and *backward_s* are means over its layers, computation only;
    *each_forward_s* and *each_backward_s* are wall times from layer to layer, empty where nothing marks
    them."""

    stage: int
    layers: int
    forward_s: float
    backward_s: float
    each_forward_s: tuple[float, ...]
    each_backward_s: tuple[float, ...]

    def facts(self) -> dict[str, object]:
        return {
            "stage": self.stage,
            "layers": self.layers,
            "forward_s": self.forward_s,
            "backward_s": self.backward_s,
            "each_forward_s": list(self.each_forward_s),
            "each_backward_s": list(self.each_backward_s),
        }


def stage_layers(operations: Mapping[int, list[TraceOperation]], recording: Recording) -> tuple[StageLayers, ...]:
    """One entry per stage whose number of layers is known."""
    found = []
    for stage in sorted({record.stage for record in recording.ranks}):
        layers = _layers_on(recording, stage)
        if not layers:
            continue
        mine = [record for record in recording.ranks if record.stage == stage]
        batches = max(1, recording.micro_batches)
        forward_s, backward_s = (
            mean(recording.compute_s(record, kind) for record in mine) / layers / batches
            for kind in (BlockKind.FORWARD, BlockKind.BACKWARD)
        )
        listed = [operation for record in mine for operation in operations[record.rank]]
        found.append(
            StageLayers(
                stage,
                layers,
                forward_s,
                backward_s,
                _each(listed, "forward_step", layers),
                _each(listed, "backward_step", layers)[::-1],
            )
        )
    return tuple(found)


def _layers_on(recording: Recording, stage: int) -> int:
    known = recording.facts.get("layers_on")
    if isinstance(known, dict) and stage in known:
        return int(known[stage])
    layers = recording.facts.get("layers")
    return layers // recording.layout.pp if isinstance(layers, int) else 0


def _each(operations: list[TraceOperation], name: str, layers: int) -> tuple[float, ...]:
    """The mean wall time of each layer in the order of running, over ranks and micro-batches."""
    rows = []
    for operation in operations:
        if operation.name != name or not operation.parts:
            continue
        usual, count = Counter(event.name for event in operation.parts).most_common(1)[0]
        if count != PER_LAYER * layers:
            continue
        marks = [event for event in operation.parts if event.name == usual]
        before = [event for event in operation.parts if event.end_s <= marks[0].start_s]
        cursor_s = before[-1].end_s if before else operation.start_s
        row = []
        for event in marks[PER_LAYER - 1 :: PER_LAYER]:
            row.append(event.end_s - cursor_s)
            cursor_s = event.end_s
        rows.append(row)
    return tuple(mean(column) for column in zip(*rows, strict=True))


# How evenly the router spreads tokens: who works on more of them than the ranks it shares experts with.


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """Tokens that the ranks of one expert-parallel set worked on in all forward passes."""

    tokens: Mapping[int, int]
    exchange_factor: float  # the busiest rank of each exchange over its mean, mean of all exchanges
    waits_caused_s: Mapping[int, float]  # rank of the set that waited for the busiest -> seconds

    @property
    def busiest(self) -> int:
        return max(self.tokens, key=lambda rank: self.tokens[rank])

    @property
    def factor(self) -> float:
        """The busiest rank over the mean."""
        return self.tokens[self.busiest] / mean(self.tokens.values())

    def facts(self) -> dict[str, Any]:
        return {
            "busiest_rank": self.busiest,
            "factor": self.factor,
            "exchange_factor": self.exchange_factor,
            "mean_tokens": mean(self.tokens.values()),
            "tokens": {str(rank): tokens for rank, tokens in self.tokens.items()},
            "waits_caused_s": {str(rank): seconds for rank, seconds in self.waits_caused_s.items()},
        }


def expert_loads(
    operations: Mapping[int, list[TraceOperation]], parts: Sequence[RankParts], layout: Layout
) -> tuple[ExpertLoad, ...]:
    """One for each set of ranks that share experts and were all given, the most uneven first."""
    tokens_of = {rank: _tokens(listed) for rank, listed in operations.items()}
    waits_s = {one.rank: one.waits_for_s for one in parts}
    found = []
    for ranks in sorted({members(rank, Group.EP, layout) for rank in operations}):
        columns = list(zip(*(tokens_of.get(rank, []) for rank in ranks), strict=False))
        even = len({len(tokens_of.get(rank, [])) for rank in ranks}) == 1
        if len(ranks) < 2 or not even or not any(map(any, columns)):
            continue
        tokens = {rank: sum(tokens_of[rank]) for rank in ranks}
        busiest = max(tokens, key=lambda rank: tokens[rank])
        caused_s = {rank: waits_s[rank].get(busiest, 0.0) for rank in ranks if rank != busiest}
        factor = mean(max(column) / mean(column) for column in columns if any(column))
        found.append(ExpertLoad(tokens, factor, caused_s))
    return tuple(sorted(found, key=lambda load: -load.factor))


def _tokens(listed: Sequence[TraceOperation]) -> list[int]:
    return [
        tokens
        for operation in listed
        if operation.name == "forward_step"
        for _, back in exchanges(operation)
        if (tokens := back.rows) is not None
    ]


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
        if isinstance(piece, Local) and piece.part in (TimePart.COMPUTE, TimePart.OPTIMIZER):
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
        each_s = [at_tokens_s(one.mean_s, one.mean_tokens, own.mean_tokens, slope_s) for one in others.values()]
        reference_s = own.count * median(each_s) if others else 0
        if reference_s:
            elsewhere = any(stage_of[other] != stage_of[rank] for other in others)
            paces.append(Pace(operation, role, own.total_s, reference_s, elsewhere))
    return tuple(paces)
