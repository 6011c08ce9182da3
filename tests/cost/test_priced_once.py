"""Prices that are remembered are those of ``compute_price``, whichever step asked for them first."""

import math

import pytest

from stepcast.cost.compute import COOL, compute_price, make_pricer
from stepcast.cost.fits import default_fit
from stepcast.cost.power import SUSTAINED, Load
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.recurrent import Scan
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, GroupedMatmul, Matmul, Recorded

WORKS: tuple[Compute, ...] = (
    Matmul(8192, 8192, 8192),
    GroupedMatmul(8192, 2048, 4096, 8),
    Attention(1, 8192, 8192, 16, 2, 128, 128),
    Elementwise(ElementwiseKind.RMS_NORM, 8192, 8192, 1.3e8, 1.3e8),
    Elementwise(ElementwiseKind.ADD, 64, 64, 16384.0, 8192.0),
    Scan(1, 8192, 64, 64, 128, 8, 256),
    Recorded(1e-3),
)
# A step that leaves the GPU cool, one that heats it, and work by itself.
LOADS = (Load(math.inf, 0.1, wanted=0.5), Load(math.inf, 0.95, wanted=1.6), SUSTAINED, Load(0.0))


@pytest.mark.parametrize("name", ["h100-sxm", "h200-sxm", "a100-sxm-80gb"])
@pytest.mark.parametrize("work", WORKS, ids=lambda work: type(work).__name__)
def test_what_is_remembered_is_the_price_under_that_load(name: str, work: Compute) -> None:
    gpu, fit = load_gpu(name), default_fit()
    for load in (*LOADS, *LOADS[::-1]):
        pricer, price = make_pricer(gpu, fit, load), compute_price(work, gpu, fit, load)
        assert pricer(work) == price
        assert sum(pricer.spend(work)[:2]) == price.seconds


def test_a_hot_step_slows_what_is_not_cool() -> None:
    gpu, fit = load_gpu("h100-sxm"), default_fit()
    for work in WORKS:
        cool, hot = (compute_price(work, gpu, fit, load).seconds for load in LOADS[:2])
        assert (hot == cool) is isinstance(work, COOL)
