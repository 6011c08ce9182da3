"""How many ways each kind of parallelism splits the work."""

from dataclasses import dataclass

from stepcast.ir.check import require_counts
from stepcast.ir.group import Group


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism. Expert parallelism reuses the ranks of data and context parallelism."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    vpp: int = 1

    def __post_init__(self) -> None:
        require_counts(self, 1, "tp", "cp", "ep", "dp", "pp", "vpp")

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_dp(self) -> int:
        """Replicas of one expert; whole division, as SimAI does, where ep does not divide."""
        return max(1, self.dp * self.cp // self.ep)

    def size(self, group: Group) -> int:
        """Ranks in one set of *group*."""
        sizes = {
            Group.TP: self.tp,
            Group.CP: self.cp,
            Group.EP: self.ep,
            Group.DP: self.dp * self.cp,
            Group.PP: self.pp,
            Group.EMBEDDING: min(2, self.pp),
            Group.EXPERT_DP: self.expert_dp,
            Group.WORLD: self.gpus,
        }
        return sizes[group]
