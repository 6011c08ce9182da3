"""Sustained work against the power limit, as it was measured on an H200 (tools/measure_power.py)."""

import csv
from collections import Counter

import numpy as np
import pytest

from stepcast.cost.compute import compute_price, cool_seconds, load_of
from stepcast.cost.fits import default_fit
from stepcast.cost.power import Load
from stepcast.generate.workload import generate
from stepcast.hardware.catalog import load_gpu
from stepcast.hardware.cluster import Gpu
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Compute, Matmul
from stepcast.validate.h200 import shipped_folder
from stepcast.validate.transformers import Setting

H200 = load_gpu("h200")
PRODUCT = Matmul(8192, 8192, 8192)
# Share of the time in the kernel, the rest bound by memory -> how much longer it took than after idling.
MEASURED = ((PRODUCT, {1.0: 1.206, 0.75: 1.156, 0.5: 1.065, 0.25: 1.005}),
            (Matmul(8192, 8192, 8192, 1, DType.FP8), {1.0: 1.198, 0.75: 1.143, 0.5: 1.067, 0.25: 0.994}),
            (Attention(2, 8192, 8192, 32, 32, 128, 128), {1.0: 1.193, 0.75: 1.147, 0.5: 1.076, 0.25: 1.0}))  # fmt: skip


def seconds(work: Compute, duty: float, busy_s: float = 1e6) -> float:
    return compute_price(work, H200, default_fit(), Load(busy_s, duty)).seconds


@pytest.mark.parametrize(("work", "slower"), MEASURED)
def test_products_slow_down_as_measured(work: Compute, slower: dict[float, float]) -> None:
    cold_s = seconds(work, 1.0, 1e-9)
    for duty, factor in slower.items():
        assert seconds(work, duty) / cold_s == pytest.approx(factor, abs=0.07), duty


def test_a_burst_is_not_slowed() -> None:
    assert seconds(PRODUCT, 1.0, 1e-3) < 1.05 * seconds(PRODUCT, 1.0, 1e-9)


def test_more_duty_is_never_faster() -> None:
    times = [seconds(PRODUCT, duty / 10) for duty in range(11)]
    assert times == sorted(times)


def test_a_step_wants_as_much_power_as_its_clock_shows() -> None:
    """Steps of transformers on an H200: the power that they want at full clock, and how much lower their clock was."""
    folder = shipped_folder().parent / "transformers"
    pairs = []
    with (folder / "steps_eager.csv").open() as lines:
        for record in csv.DictReader(lines):
            if int(record["batch"]) * int(record["seq"]) < 4096 or "experts-eager" in record["setting"]:
                continue
            setting = Setting(record, folder)
            workload = generate(setting.model, setting.strategy, setting.framework)
            works: Counter[Compute] = Counter()
            for block in workload.stages[0].body:
                for layer in block.layers:
                    for op in layer.all_ops:
                        if isinstance(op.work, Compute):
                            works[op.work] += block.repeat
            wanted = load_of(*cool_seconds(works, H200, default_fit()), H200, default_fit()).wanted
            assert wanted is not None
            pairs.append((max(1.0, wanted), 1980 / float(record["sm_mhz"])))
    asked, slower = np.array(pairs).T
    assert len(pairs) > 40
    assert abs(asked - slower).mean() < 0.035
    assert np.corrcoef(asked, slower)[0, 1] > 0.8


@pytest.mark.parametrize("gpu", [H200, load_gpu("a100-sxm-80gb")])
def test_the_last_bit_of_a_time_changes_the_load_by_as_little(gpu: Gpu) -> None:
    """Machines round the last bit of a sum in their own way, which must not be seen in an answer."""
    for thousandth in range(400, 600):
        matrix_s, energy_s = thousandth / 1e3 + 0.0005, thousandth / 1e3 + 0.0005
        one, other = (load_of(each, 1.0, energy_s * each, gpu, default_fit()) for each in (matrix_s, matrix_s + 1e-12))
        assert other.duty == pytest.approx(one.duty, abs=1e-11)
        assert other.wanted == pytest.approx(one.wanted, abs=1e-11)
