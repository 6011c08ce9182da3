"""Layout: the ways in which each kind of parallelism splits the work."""

from math import prod

from stepcast.ir.check import require_counts
from stepcast.ir.dataclass import dataclass
from stepcast.ir.group import FAMILIES, PARTS, SHARDS, Group
from stepcast.ir.limits import CHUNKS, CONTEXT, GPUS


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism. Experts are spread over the same ranks by a grid of their own:
    expert_tp x ep x expert_dp = tp x cp x dp (Megatron-Core).
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1
    expert_tp: int = 0  # 0: as tp
    shard: int = 0  # ranks of a dp group that split its states; 0: all of them

    def __post_init__(self) -> None:
        require_counts(self, 1, "tp", "cp", "ep", "dp", "pp", "vpp")
        require_counts(self, 0, "expert_tp", "shard")
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
