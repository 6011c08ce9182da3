"""Which ranks form a group: how the parallel sizes are laid over the ranks.

Two grids cover the same ranks, as in Megatron-Core (``parallel_state.RankGenerator``): weights outside the
experts use tp x cp x dp x pp, experts use expert_tp x ep x expert_dp x pp. Within each, the first axis of the
order varies fastest from rank to rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from stepcast.hardware.check import require_count

AXES = ("tp", "cp", "ep", "dp", "pp")

# family -> (is it laid out on the expert grid, the axes along which its members differ)
FAMILIES: dict[str, tuple[bool, frozenset[str]]] = {
    "tp": (False, frozenset({"tp"})),
    "cp": (False, frozenset({"cp"})),
    "dp": (False, frozenset({"cp", "dp"})),  # the ranks that hold the same weights
    "pp": (False, frozenset({"pp"})),
    "ep": (True, frozenset({"ep"})),
    "expert-dp": (True, frozenset({"dp"})),
    "expert-tp": (True, frozenset({"tp"})),
    "embedding": (False, frozenset({"pp"})),  # its first and last member only
    "world": (False, frozenset({"tp", "cp", "dp", "pp"})),
}
# Parts of a group where only some of its ranks split the states (hybrid FSDP): part -> group. A shard is a
# run of its ranks, a replica holds the ranks at the same place of each run.
SHARDS = {"shard": "dp", "expert-shard": "expert-dp"}
PARTS = {**SHARDS, "replica": "dp", "expert-replica": "expert-dp"}


@dataclass(frozen=True, slots=True)
class RankGrid:
    """Sizes of the parallel axes and their order, fastest first. ``dp`` counts all replicas, ep inside it."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    expert_tp: int = 0  # 0: as tp
    shard: int = 0  # ranks of a dp group that split its states among them; 0: all
    order: tuple[str, ...] = AXES

    def __post_init__(self) -> None:
        require_count(self, *AXES)
        if sorted(self.order) != sorted(AXES):
            raise ValueError(f"order must name each of {', '.join(AXES)} once, not {', '.join(self.order)}")
        if type(self.expert_tp) is not int or self.expert_tp < 0:
            raise ValueError(f"expert_tp must be a whole number, not {self.expert_tp!r}")
        replicas, rest = divmod(self.tp * self.cp * self.dp, self.expert_tp_size * self.ep)
        if rest or not replicas:
            raise ValueError(
                f"expert_tp x ep = {self.expert_tp_size} x {self.ep} must divide "
                f"tp x cp x dp = {self.tp} x {self.cp} x {self.dp}"
            )
        if self.pp > 1 and self.stride("pp", expert=False) != self.stride("pp", expert=True):
            raise ValueError(
                f"order {'-'.join(self.order)} puts a stage's experts on other ranks than its other weights"
            )

    @property
    def expert_tp_size(self) -> int:
        return self.expert_tp or self.tp

    @property
    def expert_dp(self) -> int:
        """Replicas of one expert."""
        return self.tp * self.cp * self.dp // (self.expert_tp_size * self.ep)

    @property
    def world(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def sizes(self, *, expert: bool) -> dict[str, int]:
        """Axis -> size, fastest first, on the grid of the experts or of all other weights."""
        if expert:
            size = {"tp": self.expert_tp_size, "cp": 1, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}
        else:
            size = {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}
        return {axis: size[axis] for axis in self.order}

    def stride(self, axis: str, *, expert: bool = False) -> int:
        """How far apart in rank two neighbours along *axis* are."""
        sizes = self.sizes(expert=expert)
        return prod(sizes[name] for name in self.order[: self.order.index(axis)])

    def group(self, family: str, rank: int = 0) -> tuple[int, ...]:
        """The ranks of the group of *family* that *rank* belongs to, in rank order.

        For ``embedding`` a rank of a middle stage gets the group of its pipeline: it takes no part itself.
        """
        if not 0 <= rank < self.world:
            raise ValueError(f"rank {rank} is outside a world of {self.world}")
        if family in PARTS:
            return next(part for part in self._parts(family, rank) if rank in part)
        expert, axes = self._family(family)
        first = rank - sum(self._offset(rank, axis, expert) for axis in axes)
        return tuple(first + offset for offset in self._member_offsets(family, expert, axes))

    def groups(self, family: str) -> tuple[tuple[int, ...], ...]:
        """Every group of *family*, in the order of their first ranks."""
        if family in PARTS:
            firsts = [ranks[0] for ranks in self.groups(PARTS[family])]
            return tuple(sorted(part for first in firsts for part in self._parts(family, first)))
        expert, axes = self._family(family)
        others = [axis for axis in AXES if axis not in axes]
        firsts = sorted(self._combinations(others, expert))
        offsets = self._member_offsets(family, expert, axes)
        return tuple(tuple([first + offset for offset in offsets]) for first in firsts)

    def _parts(self, family: str, rank: int) -> list[tuple[int, ...]]:
        """The group of *rank* cut into runs that hold one copy, or into the holders of each shard.

        There are as many copies of the experts as of all other weights.
        """
        ranks, copies = self.group(PARTS[family], rank), self._copies
        if len(ranks) % copies:
            raise ValueError(
                f"shard {self.shard} makes {copies} copies, which must divide the {len(ranks)} ranks of "
                f"{PARTS[family]}"
            )
        size = len(ranks) // copies
        if family in SHARDS:
            return [ranks[start : start + size] for start in range(0, len(ranks), size)]
        return [ranks[place::size] for place in range(size)]

    @property
    def _copies(self) -> int:
        ranks = self.cp * self.dp
        size = self.shard or ranks
        if ranks % size:
            raise ValueError(f"shard {size} must divide cp x dp = {ranks}")
        return ranks // size

    def neighbours(self, family: str) -> tuple[tuple[int, int], ...]:
        """Each rank with the next of its group: the transfers of a pipeline, say."""
        return tuple(pair for ranks in self.groups(family) for pair in pairwise(ranks))

    def _family(self, family: str) -> tuple[bool, frozenset[str]]:
        if family not in FAMILIES:
            raise ValueError(f"unknown group {str(family)!r}; known are {', '.join(FAMILIES)}")
        return FAMILIES[family]

    def _offset(self, rank: int, axis: str, expert: bool) -> int:
        """What *rank*'s coordinate on *axis* adds to its number."""
        stride = self.stride(axis, expert=expert)
        return rank // stride % self.sizes(expert=expert)[axis] * stride

    def _combinations(self, axes: Sequence[str], expert: bool) -> list[int]:
        """The offsets of all coordinates along *axes*."""
        sizes = self.sizes(expert=expert)
        steps = [
            range(0, sizes[axis] * self.stride(axis, expert=expert), self.stride(axis, expert=expert))
            for axis in axes
        ]
        return [sum(offsets) for offsets in product(*steps)]

    def _member_offsets(self, family: str, expert: bool, axes: frozenset[str]) -> list[int]:
        """How far the members of a group are from its first: the same for all groups of a family."""
        offsets = sorted(self._combinations(sorted(axes), expert))
        if family == "embedding" and len(offsets) > 2:
            return [offsets[0], offsets[-1]]
        return offsets
