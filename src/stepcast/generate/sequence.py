"""Around kernels that run along the whole sequence: context parallel ranks exchange positions for heads
before them and back after them (Megatron-LM, core/ssm/mamba_context_parallel.py); sequences are turned.
"""

from stepcast.generate.parts import K, Ops, collective
from stepcast.generate.sizes import Sizes
from stepcast.ir.group import Group
from stepcast.ir.work import CollectiveKind, elementwise
from stepcast.ir.workload import Op


def core_tokens(sizes: Sizes) -> int:
    """Tokens of a micro-batch between the exchanges."""
    return sizes.tokens * sizes.cp


def arranged_in(sizes: Sizes, width: int, phase: str) -> Ops:
    """What was projected, *width* wide, brought into the kernels' order: exchanged with the context parallel
    ranks, whose slices are put in the order of the sequence, and turned from tokens by sequences into
    sequences by tokens.
    """
    ops: Ops = ()
    if sizes.cp > 1:
        size = sizes.tokens * width * sizes.element
        exchange = collective(f"cp all-to-all scan{phase}", CollectiveKind.ALL_TO_ALL, size, Group.CP)
        ops = (exchange, _copied(sizes, f"reorder{phase}", width // sizes.cp))
    if sizes.strategy.micro_batch > 1:
        ops = (*ops, _copied(sizes, f"transpose{phase}", width // sizes.cp))
    return ops


def arranged_out(sizes: Sizes, width: int, phase: str) -> Ops:
    """The kernels' result back, *width* wide after the exchange."""
    ops: Ops = ()
    if sizes.strategy.micro_batch > 1:
        ops = (_copied(sizes, f"transpose back{phase}", width // sizes.cp),)
    if sizes.cp > 1:
        size = sizes.tokens * width * sizes.element
        exchange = collective(f"cp all-to-all scanned{phase}", CollectiveKind.ALL_TO_ALL, size, Group.CP)
        ops = (*ops, _copied(sizes, f"reorder back{phase}", width // sizes.cp), exchange)
    return ops


def _copied(sizes: Sizes, name: str, width: int) -> Op:
    return Op(name, elementwise(K.COPY, core_tokens(sizes), width, 1, 1, sizes.stored))
