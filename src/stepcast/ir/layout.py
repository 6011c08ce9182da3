"""How many ways each kind of parallelism splits the work."""

from dataclasses import dataclass

from stepcast.ir.check import require_counts
from stepcast.ir.group import Group


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

    def facts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("tp", "cp", "ep", "dp", "pp", "vpp", "gpus")}

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def rank_of_stage(self, stage: int, place: int = 0) -> int:
        """The rank at *place* among those of *stage*: stages vary slowest in Megatron-Core's order of
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

    def size(self, group: Group) -> int:
        """Ranks in one set of *group*."""
        expert_shard = max(1, self.expert_dp // self.copies)
        sizes = {
            Group.TP: self.tp,
            Group.CP: self.cp,
            Group.EP: self.ep,
            Group.DP: self.dp * self.cp,
            Group.PP: self.pp,
            Group.EMBEDDING: min(2, self.pp),
            Group.EXPERT_DP: self.expert_dp,
            Group.WORLD: self.gpus,
            Group.EXPERT_TP: self.expert_tp_size,
            Group.SHARD: self.shard_size,
            Group.REPLICA: self.copies,
            Group.EXPERT_SHARD: expert_shard,
            Group.EXPERT_REPLICA: self.expert_dp // expert_shard,
        }
        return sizes[group]
