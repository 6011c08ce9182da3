"""Which ranks take part in a communication."""

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
