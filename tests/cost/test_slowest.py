"""The slowest of many GPUs paces products of all of them."""

from dataclasses import replace

import numpy as np
import pytest

from stepcast.cost.compute import Load, compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.slowest import VARIATION, slowest
from stepcast.forecast.predict import predict
from stepcast.hardware.catalog import load_cluster, load_gpu
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, Matmul
from stepcast.models.catalog import load_model

LOAD = Load(1e6, 0.8)


def test_one_gpu_waits_for_none() -> None:
    assert slowest(1) == 1.0


@pytest.mark.parametrize("gpus", [2, 8, 64, 1024])
def test_the_slowest_is_the_largest_of_normal_values(gpus: int) -> None:
    drawn = np.random.default_rng(0).normal(1.0, VARIATION, (4000, gpus)).max(axis=1)
    assert slowest(gpus) == pytest.approx(drawn.mean(), abs=0.001)


def test_it_paces_products_and_no_memory_bound_kernel() -> None:
    gpu, fit, many = load_gpu("h100"), default_fit(), replace(LOAD, pace=slowest(512))
    for work in (Matmul(8192, 8192, 8192), Attention(1, 8192, 8192, 32, 32, 128, 128)):
        alone_s, paced_s = (compute_price(work, gpu, fit, load).seconds for load in (LOAD, many))
        assert paced_s / alone_s == pytest.approx(slowest(512), rel=0.01)
    add = Elementwise(ElementwiseKind.ADD, 8192, 8192, 2.7e8, 1.4e8)
    assert compute_price(add, gpu, fit, many) == compute_price(add, gpu, fit, LOAD)


def test_more_replicas_take_longer_for_the_same_products() -> None:
    model, cluster = load_model("llama-3-8b"), load_cluster("dgx-h100")

    def computing_s(dp: int) -> float:
        strategy = Strategy(Layout(tp=8, dp=dp), micro_batch=1, global_batch=dp, seq=4096)
        return predict(model, cluster, strategy).report.breakdown_s["compute"]

    assert 1.005 < computing_s(64) / computing_s(1) < slowest(512)
