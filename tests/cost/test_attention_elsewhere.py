"""Attention in fp8, and on GPUs on which nobody measured it."""

import pytest

from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.power import SUSTAINED, Load, cool_load
from stepcast.hardware import load_gpu
from stepcast.ir.types import DType
from stepcast.ir.work import Attention


def flops_per_s(gpu: str, dtype: DType = DType.BF16, backward: bool = False, load: Load = SUSTAINED) -> float:
    work = Attention(1, 8192, 8192, 64, 8, 128, 128, True, backward, dtype)
    return work.flops / compute_price(work, load_gpu(gpu), default_fit(), load).seconds


@pytest.mark.parametrize(("gpu", "rates"), [("h200", (961, 342)), ("b200", (1502, 1255)), ("gb300", (2074, 1514))])
def test_fp8_is_as_fast_as_cudnn(gpu: str, rates: tuple[float, float]) -> None:
    """NVIDIA/cudnn-frontend, benchmark: causal, heads of 128, 8,192 tokens; Hopper's backward computes masked pairs."""
    cool = cool_load(load_gpu(gpu), default_fit())
    for backward, rate in zip((False, True), rates, strict=True):
        assert flops_per_s(gpu, DType.FP8, backward, cool) == pytest.approx(rate * 1e12, rel=0.1)


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
