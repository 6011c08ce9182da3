"""The slowest of many GPUs paces products of all of them."""

from dataclasses import replace

import numpy as np
import pytest

from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.pace import VARIATION, apply_pace, apply_pace_s, convert_for_kernel, least_pace, pace_of, slowest
from stepcast.cost.power import Load
from stepcast.cost.price import Price
from stepcast.forecast.predict import predict
from stepcast.hardware.catalog import load_cluster, load_gpu
from stepcast.ir.framework import AttentionKernel
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, Matmul
from stepcast.models.catalog import load_model


def test_one_gpu_waits_for_none() -> None:
    assert slowest(1) == 1.0


@pytest.mark.parametrize("gpus", [2, 8, 64, 1024])
def test_the_slowest_is_the_largest_of_normal_values(gpus: int) -> None:
    samples = np.random.default_rng(0).normal(1.0, VARIATION, (4000, gpus)).max(axis=1)
    assert slowest(gpus) == pytest.approx(samples.mean(), abs=0.001)


def test_it_paces_products_and_no_memory_bound_kernel() -> None:
    def price(work: Compute) -> Price:
        return compute_price(work, load_gpu("h100"), default_fit(), Load(1e6, 0.8))

    for work in (Matmul(8192, 8192, 8192), Attention(1, 8192, 8192, 32, 32, 128, 128)):
        assert apply_pace(price(work), work, 1.04).seconds == pytest.approx(1.04 * price(work).seconds)
        assert apply_pace_s(2.0, work, 1.04) == pytest.approx(2.08)
    add = Elementwise(ElementwiseKind.ADD, 8192, 8192, 2.7e8, 1.4e8)
    assert apply_pace(price(add), add, 1.04) == price(add)
    assert apply_pace_s(2.0, add, 1.04) == 2.0


def test_old_kernels_widen_batched_products_off_the_boundaries() -> None:
    for batch, k, dtype in ((8, 108, DType.FP32), (8, 128, DType.BF16), (1, 108, DType.BF16)):
        work = Matmul(2048, 2048, k, batch, DType.BF16)
        assert convert_for_kernel(work, AttentionKernel.CUDA_11) == replace(work, dtype=dtype)
        assert convert_for_kernel(work, AttentionKernel.FLASH_2) is work


def test_pipelines_fill_and_drain_at_the_pace_of_their_stages() -> None:
    layout = Layout(tp=8, dp=8, pp=8)
    busy, filling = pace_of(layout, 10_000), pace_of(layout, 1)
    assert busy == pytest.approx(slowest(512), abs=1e-4)
    assert slowest(8) < filling < (slowest(8) + slowest(512)) / 2
    assert filling < pace_of(replace(layout, vpp=4), 1) < busy


def test_no_cut_into_stages_is_paced_less_than_the_bound() -> None:
    for pp in (1, 2, 4, 8, 16, 64):
        layout, micro_batches = Layout(tp=2, cp=2, dp=64 // pp, pp=pp), 3 * pp
        for other in (1, 2, 8, 64):
            same = Layout(tp=2, cp=2, dp=64 // other, pp=other, vpp=2 if other > 1 else 1)
            assert least_pace(layout, micro_batches) <= pace_of(same, 3 * other) + 1e-12


def test_more_replicas_take_longer_for_the_same_products() -> None:
    model, cluster = load_model("llama-3-8b"), load_cluster("dgx-h100")

    def computing_s(dp: int) -> float:
        strategy = Strategy(Layout(tp=8, dp=dp), micro_batch=1, global_batch=dp, seq=4096)
        return predict(model, cluster, strategy).report.breakdown_s["compute"]

    assert 1.005 < computing_s(64) / computing_s(1) < slowest(512)


@pytest.mark.parametrize("head_s", [0.0, 0.02, 0.05, 0.5])
def test_uneven_stages_wait_for_slow_gpus_with_as_much_work(head_s: float) -> None:
    """Eight stages of eight GPUs; the last one has the output head. Many micro-batches make filling negligible."""
    clocked_s, other_s = np.array([1.0] * 7 + [1.0 + head_s]), 0.2
    paces = np.random.default_rng(0).normal(1.0, VARIATION, (4000, 8, 8)).max(axis=2)
    longest_s = (clocked_s * paces + other_s).max(axis=1).mean()
    pace = pace_of(Layout(tp=4, pp=8, dp=2), 10**6, tuple((seconds, other_s) for seconds in clocked_s))
    assert clocked_s.max() * pace + other_s == pytest.approx(longest_s, abs=0.001)
    assert slowest(64, 8) - 1e-6 <= pace <= slowest(64) + 1e-6
