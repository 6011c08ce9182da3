"""Units: layers that are gathered, reduced, recomputed and offloaded together."""

from dataclasses import dataclass

from stepcast.generate.parts import Ops, waiting
from stepcast.ir.weights import Shard
from stepcast.ir.workload import Layer


@dataclass(frozen=True, slots=True)
class Unit:
    """A transformer layer, or an end of the model."""

    layers: tuple[Layer, ...]
    held: Shard
    trained: Shard
    # Bytes of activations that the host keeps from the forward until the backward.
    leaving: int = 0


def fed(ops: Ops, own: Ops, following: Ops, begins: bool) -> Ops:
    """*ops* that wait for their *own* gathers, requested here if a unit *begins* with them, and then request
    those of what runs next.
    """
    names = tuple(op.name for op in own)
    return (*(own if begins else ()), *waiting(ops[:1], names), *following, *ops[1:])
