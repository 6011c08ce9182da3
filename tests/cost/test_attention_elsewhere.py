"""Attention in fp8, and on GPUs on which nobody measured it."""

import pytest

from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.power import SUSTAINED
from stepcast.hardware import load_gpu
from stepcast.ir.dtype import DType
from stepcast.ir.work import Attention


def flops_per_s(gpu: str, dtype: DType = DType.BF16, backward: bool = False) -> float:
    work = Attention(1, 8192, 8192, 64, 8, 128, 128, True, backward, dtype)
    return work.flops / compute_price(work, load_gpu(gpu), default_fit(), SUSTAINED).seconds


@pytest.mark.parametrize("gpu", ["h100-sxm", "h200", "b200"])
def test_fp8_speeds_up_products_and_not_exponentials(gpu: str) -> None:
    """FlashAttention-3 (Shah et al. 2024) reaches 740 TFLOP/s in fp16 and 1.2 PFLOP/s in fp8: 1.6 times."""
    for backward in (False, True):
        gain = flops_per_s(gpu, DType.FP8, backward) / flops_per_s(gpu, backward=backward)
        assert 1.3 < gain < 2.0


@pytest.mark.parametrize("gpu", ["mi300x", "mi325x"])
def test_what_holds_products_back_holds_attention_back(gpu: str) -> None:
    """An MI300X reaches half of its peak in products, an H200 four fifths: so much less in attention."""
    described, measured = load_gpu(gpu), load_gpu("h200")
    share = described.best_product_flops("bf16") / described.matrix_peak_flops("bf16")
    usual = measured.best_product_flops("bf16") / measured.matrix_peak_flops("bf16")
    assert share < 0.7 < usual
    for backward in (False, True):
        reached = flops_per_s(gpu, backward=backward) / described.best_product_flops("bf16")
        known = flops_per_s("h200", backward=backward) / measured.best_product_flops("bf16")
        assert reached <= known * 1.25
        assert reached < 0.9
