"""How evenly the router spreads tokens: who works on more of them than the ranks it shares experts with."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from stepcast.analyze.megatron.events import Operation, exchanges
from stepcast.analyze.parts import RankParts
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import members


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
    operations: Mapping[int, list[Operation]], parts: Sequence[RankParts], layout: Layout
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


def _tokens(listed: Sequence[Operation]) -> list[int]:
    return [
        tokens
        for operation in listed
        if operation.name == "forward_step"
        for _, back in exchanges(operation)
        if (tokens := back.rows) is not None
    ]
