"""The ranks that take part in a communication: those that differ along some axes of a grid, and in no other.

Two grids cover the same ranks, as in Megatron-Core (``parallel_state.RankGenerator``): weights outside the
experts use tp x cp x dp x pp, experts use expert_tp x ep x expert_dp x pp.
"""

from enum import StrEnum


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
