"""Layout: the ways in which each kind of parallelism splits the work, and the ranks of each of its groups.

Within each of a layout's two grids over the ranks the first axis varies fastest from rank to rank, in Megatron-Core's
order tp-cp-ep-dp-pp (``parallel_state.initialize_model_parallel``).

A group is the ranks that take part in a communication: those that differ along some axes of a grid, and in no other.
Two grids cover the same ranks, as in Megatron-Core (``parallel_state.RankGenerator``): weights outside the
experts use tp x cp x dp x pp, experts use expert_tp x ep x expert_dp x pp.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from itertools import pairwise
from math import gcd, prod
from typing import NamedTuple

from stepcast.ir.limits import CHUNKS, CONTEXT, GPUS
from stepcast.ir.types import Natural, Size, dataclass


class Group(StrEnum):
    """A family of rank sets; each rank belongs to one set of each family."""

    TP = "tp"  # tensor parallel
    CP = "cp"  # context parallel
    EP = "ep"  # expert parallel
    DP = "dp"  # data parallel (with context parallel: the ranks that hold the same weights)
    PP = "pp"  # pipeline parallel: neighbouring stages
    EMBEDDING = "embedding"  # first and last stage, which share the word embedding
    EXPERT_DP = "expert-dp"  # the replicas of one expert
    WORLD = "world"  # every rank
    EXPERT_TP = "expert-tp"  # the ranks that split each expert
    SHARD = "shard"  # ranks of a dp group that split its states among them
    REPLICA = "replica"  # ranks of a dp group that hold the same shard
    EXPERT_SHARD = "expert-shard"  # ranks of an expert-dp group that split its states among them
    EXPERT_REPLICA = "expert-replica"  # ranks of an expert-dp group that hold the same shard
    MIRROR = "mirror"  # stages i and pp-1-i, which hold the same layers in DualPipe


class HostWay(StrEnum):
    """The two directions of the link between a GPU and the memory of its host; each carries by itself."""

    OUT = "to-host"
    IN = "from-host"


Channel = Group | HostWay
"""A path of communication: each has a lane of its own."""

MODEL = "model"
"""All ranks that hold one copy of the model: they agree on the norm of the gradients."""

# family -> (is it laid out on the grid of the experts, the axes along which its members differ)
FAMILIES: dict[str, tuple[bool, tuple[str, ...]]] = {
    Group.TP: (False, ("tp",)),
    Group.CP: (False, ("cp",)),
    Group.DP: (False, ("cp", "dp")),  # the ranks that hold the same weights
    Group.PP: (False, ("pp",)),
    Group.EP: (True, ("ep",)),
    Group.EXPERT_DP: (True, ("dp",)),
    Group.EXPERT_TP: (True, ("tp",)),
    Group.EMBEDDING: (False, ("pp",)),  # its first and last member only
    Group.MIRROR: (False, ("pp",)),  # two members at the same distance from either end
    Group.WORLD: (False, ("tp", "cp", "dp", "pp")),
    MODEL: (False, ("tp", "pp")),
}
# Parts of a family where only some of its ranks split the states (hybrid FSDP): part -> family. A shard is a
# run of its ranks, a replica holds the ranks at the same place of each run.
SHARDS: dict[str, str] = {Group.SHARD: Group.DP, Group.EXPERT_SHARD: Group.EXPERT_DP}
PARTS: dict[str, str] = {**SHARDS, Group.REPLICA: Group.DP, Group.EXPERT_REPLICA: Group.EXPERT_DP}


AXES = ("tp", "cp", "ep", "dp", "pp")  # the fastest from rank to rank first


class Copies(NamedTuple):
    """Equal groups: their first ranks, and how far from its first the members of each are."""

    firsts: list[int]
    offsets: tuple[int, ...] | range


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism. Experts are spread over the same ranks by a grid of their own:
    expert_tp x ep x expert_dp = tp x cp x dp (Megatron-Core).
    """

    tp: Size = 1
    cp: Size = 1
    ep: Size = 1
    dp: Size = 1
    pp: Size = 1
    vpp: Size = 1
    expert_tp: Natural = 0  # 0: as tp
    shard: Natural = 0  # ranks of a dp group that split its states; 0: all of them

    def __post_init__(self) -> None:
        GPUS.check(self.gpus)
        CHUNKS.check(self.pp * self.vpp)
        CONTEXT.check(self.cp)

    def facts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("tp", "cp", "ep", "dp", "pp", "vpp", "gpus")}

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def rank_of_stage(self, stage: int, place: int = 0) -> int:
        """Return the rank at *place* among those of *stage*: stages vary slowest in Megatron-Core's order of
        ranks, tp-cp-ep-dp-pp (``parallel_state.initialize_model_parallel``)."""
        return stage * (self.gpus // self.pp) + place

    @property
    def expert_tp_size(self) -> int:
        return self.expert_tp or self.tp

    @property
    def expert_dp(self) -> int:
        """Replicas of one expert; whole division, as SimAI does, where ep does not divide."""
        return max(1, self.tp * self.dp * self.cp // (self.expert_tp_size * self.ep))

    @property
    def shard_size(self) -> int:
        return min(self.shard, self.dp * self.cp) or self.dp * self.cp

    @property
    def copies(self) -> int:
        """Copies of the states, each split over the ranks of a shard."""
        return self.dp * self.cp // self.shard_size

    def axes(self, *, expert: bool = False) -> dict[str, int]:
        """Axis -> size, on the grid of the experts or of all other weights."""
        if expert:
            return {"tp": self.expert_tp_size, "cp": 1, "ep": self.ep, "dp": self.expert_dp, "pp": self.pp}
        return {"tp": self.tp, "cp": self.cp, "ep": 1, "dp": self.dp, "pp": self.pp}

    def size(self, group: str) -> int:
        """Ranks in one set of *group*."""
        if group in PARTS:
            # There are as many copies of the experts as of all other weights.
            ranks = self.size(PARTS[group])
            shard = max(1, ranks // self.copies)
            return shard if group in SHARDS else ranks // shard
        expert, axes = FAMILIES[group]
        sizes = self.axes(expert=expert)
        ranks = prod(sizes[axis] for axis in axes)
        return min(2, ranks) if group in (Group.EMBEDDING, Group.MIRROR) else ranks

    def stride(self, axis: str, *, expert: bool = False) -> int:
        """Return the distance in rank of two neighbours along *axis*."""
        sizes = self.axes(expert=expert)
        return prod(sizes[name] for name in AXES[: AXES.index(axis)])

    def group(self, family: str, rank: int = 0) -> tuple[int, ...]:
        """Return the ranks of the group of *family* that *rank* belongs to, in rank order.

        For ``embedding`` a rank of a middle stage gets the group of its pipeline: it takes no part itself.
        """
        if not 0 <= rank < self.gpus:
            raise ValueError(f"rank {rank} is outside a world of {self.gpus}")
        if family in PARTS:
            return next(part for part in self._parts(family, rank) if rank in part)
        expert, axes = self._family(family)
        if family == Group.MIRROR:
            stage, stride = rank // self.stride("pp") % self.pp, self.stride("pp")
            return tuple(sorted({rank, rank + (self.pp - 1 - 2 * stage) * stride}))
        strides, sizes = [self.stride(axis, expert=expert) for axis in axes], self.axes(expert=expert)
        # Less what its coordinates on these axes add to its number.
        first = rank - sum(rank // stride % sizes[axis] * stride for axis, stride in zip(axes, strides, strict=True))
        return tuple(first + offset for offset in self._member_offsets(family, expert, axes))

    def groups(self, family: str) -> tuple[tuple[int, ...], ...]:
        """Return every group of *family*, in the order of their first ranks."""
        if family in PARTS:
            firsts = [ranks[0] for ranks in self.groups(PARTS[family])]
            return tuple(sorted(part for first in firsts for part in self._parts(family, first)))
        copies = self.group_copies(family)
        return tuple(tuple([first + offset for offset in offsets]) for firsts, offsets in copies for first in firsts)

    def group_copies(self, family: str, period: int = 0) -> list[Copies]:
        """Return the groups of *family* as copies of one, or of several; with a *period*, of groups that are multiples
        of it apart only the first.
        """
        if family in PARTS:
            return [Copies([ranks[0]], tuple(rank - ranks[0] for rank in ranks)) for ranks in self.groups(family)]
        expert, axes = self._family(family)
        others = [axis for axis in AXES if axis not in axes]
        firsts = sorted(self._combinations(others, expert, period))
        if family == Group.MIRROR:
            pp, stride = self.pp, self.stride("pp")
            return [
                Copies([first + stage * stride for first in firsts], (0, (pp - 1 - 2 * stage) * stride))
                for stage in range(pp // 2)
            ] + [Copies([first + pp // 2 * stride for first in firsts], (0,))] * (pp % 2)
        return [Copies(firsts, self._member_offsets(family, expert, axes))]

    def _parts(self, family: str, rank: int) -> list[tuple[int, ...]]:
        """Return the group of *rank* cut into runs that hold one copy, or into the holders of each shard."""
        ranks = self.group(PARTS[family], rank)
        if self.dp * self.cp % self.shard_size:
            raise ValueError(f"shard {self.shard} must divide cp x dp = {self.cp * self.dp}")
        if len(ranks) % self.copies:
            raise ValueError(
                f"shard {self.shard} makes {self.copies} copies, which must divide the {len(ranks)} "
                f"ranks of {PARTS[family]}"
            )
        size = len(ranks) // self.copies
        if family in SHARDS:
            return [ranks[start : start + size] for start in range(0, len(ranks), size)]
        return [ranks[place::size] for place in range(size)]

    def neighbours(self, family: str, period: int = 0) -> list[Copies]:
        """Return each rank with the next of its group: the transfers of a pipeline, say (see ``group_copies``)."""
        return [
            Copies([first + start for first in firsts], (0, end - start))
            for firsts, offsets in self.group_copies(family, period)
            for start, end in pairwise(offsets)
        ]

    def _family(self, family: str) -> tuple[bool, tuple[str, ...]]:
        if family not in FAMILIES:
            raise ValueError(f"unknown group {str(family)!r}; known are {', '.join(FAMILIES)}")
        if self.tp * self.cp * self.dp % (self.expert_tp_size * self.ep):
            raise ValueError(
                f"expert_tp x ep = {self.expert_tp_size} x {self.ep} must divide "
                f"tp x cp x dp = {self.tp} x {self.cp} x {self.dp}"
            )
        return FAMILIES[family]

    def _combinations(self, axes: Sequence[str], expert: bool, period: int = 0) -> Sequence[int]:
        """Return the offsets of all coordinates along *axes*, a range where they are evenly spaced; with a *period*,
        the least of those that are multiples of it apart.
        """
        sizes, offsets = self.axes(expert=expert), range(1)
        strides = {axis: self.stride(axis, expert=expert) for axis in axes if sizes[axis] > 1}
        for axis, stride in strides.items():
            if period or stride != offsets.step * len(offsets) > 1:
                return self._list_combinations(strides, sizes, period)
            offsets = range(0, stride * sizes[axis], offsets.step if len(offsets) > 1 else stride)
        return offsets

    def _list_combinations(self, strides: Mapping[str, int], sizes: Mapping[str, int], period: int) -> list[int]:
        offsets = [0]
        for axis, stride in strides.items():
            size = min(sizes[axis], period // gcd(stride, period)) if period else sizes[axis]
            offsets = [step + start for step in range(0, size * stride, stride) for start in offsets]
            if period:
                offsets = list({offset % period: offset for offset in sorted(offsets, reverse=True)}.values())
        return offsets

    def _member_offsets(self, family: str, expert: bool, axes: tuple[str, ...]) -> tuple[int, ...] | range:
        """Return how far the members of a group are from its first: the same for all groups of a family."""
        if family == Group.WORLD:
            return range(self.gpus)
        offsets = self._combinations(axes, expert)
        if family == Group.EMBEDDING and len(offsets) > 2:
            return min(offsets), max(offsets)
        return offsets if isinstance(offsets, range) else tuple(sorted(offsets))


@lru_cache(maxsize=2**16)
def members(rank: int, group: str, layout: Layout) -> tuple[int, ...]:
    """Return the ranks of *rank*'s set of *group*, itself included; of a group nobody knows, itself alone."""
    known = group in FAMILIES or group in PARTS
    return layout.group(group, rank) if known else (rank,)


def neighbour(rank: int, offset: int, layout: Layout, group: str = Group.PP) -> int:
    """Return the rank *offset* places on in its group; after the last comes the first."""
    ranks = members(rank, group, layout)
    return ranks[(ranks.index(rank) + offset) % len(ranks)]


def place_of(rank: int, layout: Layout) -> tuple[int, int, int]:
    """Return (stage, replica, tensor index) of *rank*."""
    stage, place = divmod(rank, layout.rank_of_stage(1))
    return stage, *divmod(place, layout.tp)


def rank_at(stage: int, replica: int, tensor: int, layout: Layout) -> int:
    return layout.rank_of_stage(stage, replica * layout.tp + tensor)
