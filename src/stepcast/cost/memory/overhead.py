"""What a process takes on a GPU beyond the tensors of its model.

The figures are fitted: see docs/memory.md for the measurements and what they leave unexplained.
"""

from dataclasses import dataclass

from stepcast.ir.strategy import Strategy
from stepcast.units import GIB


@dataclass(frozen=True, slots=True)
class Overhead:
    """*context_bytes*: the driver's context with the kernels it loaded. *communicator_bytes*: buffers of one
    group of the communication library. *buffer_bytes*: flat buffers the framework allocates for any model.
    *fragmentation*: of activations and temporaries, what the allocator holds on top because freed pieces do
    not fit the next request. *step_bytes*: per parameter whose states a rank keeps, what the optimizer copies
    for its step in large pieces, for which no freed activation has room. *gradient_bytes*: per parameter a
    rank holds, further copies of its gradient. *whole_master*: each rank keeps the fp32 weights of all its
    parameters and updates a part of them. *fitted*: some of these figures were learnt from peaks of published
    runs, which are then no test of them.
    """

    context_bytes: float
    communicator_bytes: float
    fragmentation: float
    buffer_bytes: float = 0.0
    step_bytes: float = 0.0
    gradient_bytes: float = 0.0
    whole_master: bool = False
    fitted: bool = False


# 804 MB between what torch reserved and what the driver reported: one process on an H200, CUDA 13.
CONTEXT_BYTES = 0.8e9

OVERHEADS: dict[str, Overhead] = {
    "pytorch": Overhead(CONTEXT_BYTES, communicator_bytes=0.3 * GIB, fragmentation=0.07),
    "megatron": Overhead(CONTEXT_BYTES, communicator_bytes=0.3 * GIB, fragmentation=0.07),
    # ZeRO-1 of DeepSpeed copies the averaged gradients of its partition (2) and turns them into fp32 (4); its
    # two buckets have 5e8 elements each. Fragmentation and the rest of the buffers are fitted to the runs of
    # the BLOOM prequel (bigscience, chronicles-prequel.md) on 80 GB A100s.
    "deepspeed": Overhead(
        CONTEXT_BYTES,
        communicator_bytes=0.3 * GIB,
        fragmentation=0.2,
        buffer_bytes=6.0 * GIB,
        step_bytes=6.0,
        fitted=True,
    ),
    # The first bf16 optimizer (DeepSpeed's runtime/bf16_optimizer.py of February 2022) keeps fp32 weights and
    # fp32 sums of gradients whole, bf16 gradients beside those, and gathers weights 5e8 at a time.
    "deepspeed-bf16": Overhead(
        CONTEXT_BYTES,
        communicator_bytes=0.3 * GIB,
        fragmentation=0.2,
        buffer_bytes=1e9,
        gradient_bytes=2.0,
        whole_master=True,
        fitted=True,
    ),
}


def communicators(strategy: Strategy) -> int:
    """Groups of more than one rank that a GPU takes part in."""
    layout = strategy.layout
    sizes = [layout.tp, layout.cp, layout.dp * layout.cp, layout.pp, layout.ep]
    return sum(size > 1 for size in sizes)
