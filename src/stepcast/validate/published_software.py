"""How much slower the kernels of earlier years are than those our prices were learnt on.

The prices know PyTorch 2.11 with cuDNN's attention. FlashAttention 1 reaches 30 to 50 % of an A100's peak
forward and 25 to 35 % backward (Dao, FlashAttention-2, 2023, section 1); FlashAttention-2 what our prices say
of an A100 (figures 5 and 6 there) but only 35 % of an H100 (Shah et al., FlashAttention-3, 2024, abstract).
FlashAttention 1 on an H100 is taken to gain as much over an A100 as its successor does.
"""

from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache

from stepcast.cost.calibration import Calibration, Correction


class AttentionKernel(StrEnum):
    """Which fused attention a run used."""

    FLASH_1 = "flash-attention 1"
    FLASH_2 = "flash-attention 2"
    CURRENT = "current"


# (kernel, architecture) -> seconds forward and backward over those of the current kernels.
SLOWER: Mapping[tuple[AttentionKernel, str], tuple[float, float]] = {
    (AttentionKernel.FLASH_1, "ampere"): (1.46, 1.68),
    (AttentionKernel.FLASH_1, "hopper"): (2.5, 2.8),
    (AttentionKernel.FLASH_2, "hopper"): (1.5, 1.5),
}


@lru_cache(maxsize=16)
def calibration_of(kernel: AttentionKernel, gpu: str, architecture: str) -> Calibration | None:
    """Prices with the attention of *kernel*; None where the current ones hold."""
    if (kernel, architecture) not in SLOWER:
        return None
    forward, backward = SLOWER[kernel, architecture]
    return Calibration(
        gpu, {"attention.forward": Correction(forward), "attention.backward": Correction(backward)}
    )
