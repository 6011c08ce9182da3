"""Which ranks form a group. Megatron-LM numbers tensor parallelism fastest, then data, then pipeline."""

from stepcast.ir.group import Group
from stepcast.ir.layout import Layout

MODEL = "model"
"""All ranks that hold one copy of the model: they agree on the norm of the gradients."""


def place_of(rank: int, layout: Layout) -> tuple[int, int, int]:
    """(stage, replica, tensor index) of *rank*."""
    block = layout.tp * layout.dp
    return rank // block, rank % block // layout.tp, rank % layout.tp


def rank_at(stage: int, replica: int, tensor: int, layout: Layout) -> int:
    return (stage * layout.dp + replica) * layout.tp + tensor


def members(rank: int, group: str, layout: Layout) -> tuple[int, ...]:
    """The ranks of *rank*'s set of *group*, itself included."""
    stage, replica, tensor = place_of(rank, layout)
    ep = min(layout.ep, layout.dp)
    match group:
        case Group.TP:
            return tuple(rank_at(stage, replica, other, layout) for other in range(layout.tp))
        case Group.DP:
            return tuple(rank_at(stage, other, tensor, layout) for other in range(layout.dp))
        case Group.EMBEDDING:
            stages = sorted({0, layout.pp - 1})
            return tuple(rank_at(other, replica, tensor, layout) for other in stages)
        case Group.EP:
            first = replica // ep * ep
            return tuple(rank_at(stage, other, tensor, layout) for other in range(first, first + ep))
        case Group.EXPERT_DP:
            return tuple(
                rank_at(stage, other, tensor, layout) for other in range(replica % ep, layout.dp, ep)
            )
        case _ if group == MODEL:
            return tuple(
                rank_at(other, replica, each, layout)
                for other in range(layout.pp)
                for each in range(layout.tp)
            )
    return (rank,)


def neighbour(rank: int, offset: int, layout: Layout) -> int:
    """The rank *offset* stages further on; after the last stage comes the first (interleaved schedules)."""
    stage, replica, tensor = place_of(rank, layout)
    return rank_at((stage + offset) % layout.pp, replica, tensor, layout)
