"""Prices of the products of experts and of the kernels around them, against an H200."""

import csv
import math
from pathlib import Path
from statistics import mean

import pytest

import stepcast
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.power import Load
from stepcast.frameworks.catalog import load_framework
from stepcast.generate.workload import generate
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.ir.work import Compute, Elementwise, GroupedMatmul
from stepcast.ir.workload import Phase
from stepcast.models.catalog import load_model

FILE = Path(stepcast.__file__).parent / "data" / "h200" / "experts.csv"
# Kernel of the file -> op of a generated layer.
OPS = {
    "activation": "activation",
    "activation backward": "activation gradient",
    "clamp": "clamp",
    "clamp backward": "clamp gradient",
    "weighted bias": "weighted bias",
    "weighted bias backward": "weighted bias gradient",
}


def measured(kernels: dict[str, str]) -> list[tuple[str, int, int, int, float]]:
    with FILE.open(encoding="utf-8", newline="") as lines:
        return [
            (kernels[row["kernel"]], int(row["rows"]), int(row["columns"]), int(row["groups"]), float(row["gpu_us"]))
            for row in csv.DictReader(lines)
            if row["kernel"] in kernels
        ]


def seconds(work: Compute) -> float:
    return compute_price(work, load_gpu("h200"), default_fit(), Load(math.inf, 0.3)).seconds


def elements_s() -> dict[str, float]:
    """Seconds of each op of gpt-oss's experts, for each element it works on."""
    workload = generate(load_model("gpt-oss-120b"), Strategy(Layout(), 4, 8, 4096))
    found: dict[str, float] = {}
    for layer in workload.stages[0].body_layers():
        for op in (op for phase in Phase for op in layer.ops(phase)):
            if layer.name.startswith("experts") and isinstance(op.work, Elementwise):
                found[op.name] = seconds(op.work) / op.work.elements
    return found


def test_kernels_around_the_products() -> None:
    each_s = elements_s()
    errors = [each_s[name] * rows * columns / (gpu_us * 1e-6) - 1 for name, rows, columns, _, gpu_us in measured(OPS)]
    assert len(errors) == 24
    assert mean(abs(error) for error in errors) < 0.06
    assert max(abs(error) for error in errors) < 0.35


@pytest.mark.parametrize("way", ["one product", "products on 1 stream", "products on 4 streams"])
def test_products_take_as_long_one_by_one_as_in_one_kernel(way: str) -> None:
    inner = {(2048, 16): 768, (2880, 2): 2880, (2880, 16): 2880, (7168, 32): 2048}
    errors = [
        seconds(GroupedMatmul(rows, 2 * inner[columns, groups], columns, groups)) / (gpu_us * 1e-6) - 1
        for _, rows, columns, groups, gpu_us in measured({way: way})
    ]
    assert len(errors) == 4
    assert max(abs(error) for error in errors) < 0.14


def test_an_expert_by_itself_costs_more_on_blackwell() -> None:
    """Share of 2,250 TFLOP/s of Transformer Engine's grouped products on a B200 (SimuMax, configs/system)."""
    rows = {(160, 154, 3072, 5120): 0.2018, (160, 154, 5120, 1536): 0.1180, (256, 128, 7168, 2048): 0.1833}
    rows |= {(80, 308, 3072, 5120): 0.3607, (80, 308, 5120, 1536): 0.2349, (40, 616, 5120, 1536): 0.3258}
    errors: dict[bool, list[float]] = {False: [], True: []}
    for (groups, each, n, k), share in rows.items():
        for separate, found in errors.items():
            work = GroupedMatmul(groups * each, n, k, groups, separate=separate)
            price = compute_price(work, load_gpu("b200"), default_fit(), Load(math.inf, 0.0, wanted=0.0))
            found.append(price.seconds / (work.flops / (share * 2250e12)) - 1)
    assert mean(errors[False]) < -0.25
    assert mean(abs(error) for error in errors[True]) < 0.2


def test_only_transformer_engine_has_a_kernel_for_each_expert() -> None:
    def separate(framework: str) -> set[bool]:
        workload = generate(load_model("mixtral-8x7b"), Strategy(Layout(), 1, 2, 4096), load_framework(framework))
        ops = (op for layer in workload.stages[0].body_layers() for op in layer.all_ops)
        return {op.work.separate for op in ops if isinstance(op.work, GroupedMatmul)}

    assert separate("megatron-core") == {True}
    assert separate("torchtitan") == {False}
