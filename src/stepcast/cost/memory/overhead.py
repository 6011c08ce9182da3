"""Memory beyond tensors: communication groups, what the caching allocator reserves, and how sure the sum is.

PyTorch reserves more than its tensors take (max_memory_reserved against max_memory_allocated). Measured on an
H200 (153 steps of the h200 and transformers sets), the gap follows what comes and goes in a step and what is
allocated late: the optimizer's moments are made in its first step, in blocks that activations have freed, and
the activations of the next step then need new ones. Where layers are recomputed both shares are about twice
as large, since few large blocks (logits, one layer) serve many small requests. Rounding to 512 bytes and to
segments of 2 MiB is part of the shares. expandable_segments:True leaves 0.4 of the gap where nothing is
recomputed, and all of it where everything is (15 of these steps measured both ways).
"""

from dataclasses import dataclass
from functools import lru_cache

from stepcast.hardware.catalog import load_fit
from stepcast.ir.band import LEVEL
from stepcast.ir.framework import Overhead
from stepcast.ir.strategy import Strategy

RECOMPUTED_TIMES = 2.0
EXPANDABLE_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class MemoryBand:
    """Measured over predicted memory: the 90 % interval, and of how many rows it was learnt."""

    low: float = 1.0
    high: float = 1.0
    rows: int = 0
    of: str = ""
    level: float = LEVEL


UNKNOWN_BAND = MemoryBand()


def communicators(strategy: Strategy) -> int:
    """Groups of more than one rank that a GPU takes part in."""
    layout = strategy.layout
    sizes = [layout.tp, layout.cp, layout.dp * layout.cp, layout.pp, layout.ep]
    return sum(size > 1 for size in sizes)


def fragmented_bytes(overhead: Overhead, loose: float, moments: float, update: float, recomputed: float) -> float:
    """Return the bytes that the allocator reserves beyond the tensors.

    *loose*: the most that activations and temporaries take together. *moments*: of the optimizer. *update*:
    temporaries of an optimizer that is not fused. *recomputed*: share of the layers that run forward again.
    """
    plain = EXPANDABLE_SHARE if overhead.expandable_segments else 1.0
    times = plain + (RECOMPUTED_TIMES - plain) * recomputed
    gap = overhead.fragmentation * loose + overhead.displaced * min(moments, loose)
    return times * gap + plain * overhead.displaced * min(update, loose)


def memory_band(gpus: int) -> MemoryBand:
    """Return the interval of steps of *gpus* GPUs."""
    return _bands()["one GPU" if gpus == 1 else "several GPUs"]


@lru_cache(maxsize=1)
def _bands() -> dict[str, MemoryBand]:
    return {name: MemoryBand(**each, of=name) for name, each in load_fit("memory")["kinds"].items()}
