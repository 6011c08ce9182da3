"""Forecasts on GPUs that nobody measured: they say so, know less, and beat no published product."""

from itertools import product

import pytest

from stepcast import Layout, Strategy, load_cluster, load_model, predict
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.power import ALONE, SUSTAINED
from stepcast.cost.price import PriceSource
from stepcast.hardware import load_gpu
from stepcast.hardware.catalog import CatalogError, data_names
from stepcast.ir.step import StepReport
from stepcast.ir.types import DType
from stepcast.ir.work import Matmul

SIZES = (2048, 4096, 8192, 16384)


def forecast(cluster: str, precision: DType = DType.BF16) -> StepReport:
    plan = Strategy(Layout(dp=8), 1, 8, 4096, precision=precision)
    return predict(load_model("llama-3.2-1b"), load_cluster(cluster), plan).report


def test_sources_are_ordered_by_trust() -> None:
    assert list(map(str, PriceSource)) == ["measured", "calibrated", "fitted", "scaled", "roofline"]


def test_a_gpu_nobody_measured_says_so() -> None:
    unseen, seen = forecast("mi300x-node"), forecast("hgx-h200")
    for kind in ("matmul", "attention", "elementwise"):
        assert (unseen.sources[kind], seen.sources[kind]) == ("scaled", "fitted")
    assert any("nobody measured bf16 products on mi300x or its kind" in warning for warning in unseen.warnings)
    assert not seen.warnings
    assert unseen.high_s / unseen.step_s > 1.4 > 1.3 > seen.high_s / seen.step_s


def test_a_gpu_is_known_as_far_as_it_was_measured() -> None:
    """NeuSight measured a T4 in fp32, on ordinary cores; nobody its tensor cores."""
    narrow, wide = (forecast("generic:gpu=t4", precision) for precision in (DType.FP16, DType.FP32))
    assert (narrow.sources["matmul"], wide.sources["matmul"]) == ("scaled", "fitted")
    assert narrow.high_s / narrow.step_s > wide.high_s / wide.step_s
    assert forecast("dgx-a100").sources["matmul"] == forecast("dgx-b200").sources["matmul"] == "fitted"


@pytest.mark.parametrize("name", [name for name in data_names("gpus") if load_gpu(name).reached_flops])
def test_no_product_beats_the_best_published(name: str) -> None:
    gpu, fit = load_gpu(name), default_fit()
    assert gpu.sources["reached.bf16"].startswith("stas00/ml-engineering")
    for dtype, load in product((DType.BF16, DType.FP16), (ALONE, SUSTAINED)):
        rates = [
            work.flops / compute_price(work, gpu, fit, load).seconds
            for work in (Matmul(m, n, k, 1, dtype) for m, n, k in product(SIZES, repeat=3))
        ]
        assert max(rates) <= gpu.reached_flops["bf16"]


def test_a_measured_gpu_is_not_held_back() -> None:
    work, fit, gpu = Matmul(8192, 8192, 8192, 1, DType.BF16), default_fit(), load_gpu("h200")
    assert work.flops / compute_price(work, gpu, fit).seconds < 0.97 * gpu.reached_flops["bf16"]


def test_other_peaks_leave_published_products_behind() -> None:
    assert not load_gpu("h20").reached_flops
    assert load_gpu("a800-sxm-80gb").reached_flops == load_gpu("a100-sxm-80gb").reached_flops
    changed = load_cluster("mi300x-node", ["gpu.matrix.bf16=1000 TFLOP/s"]).gpu
    assert not changed.reached_flops
    with pytest.raises(
        CatalogError, match=r"reached\.bf16 is too high: a product cannot exceed the peak, matrix\.bf16"
    ):
        load_cluster("mi300x-node", ["gpu.reached.bf16=2000 TFLOP/s"])
