"""The price of an operator on a GPU: the physical bound first, then what is fitted.

Each kind of operator has its module, with a function that prices one work and one that takes columns of sizes, from
the same formulas. COSTS lists them all.

A ``Load`` describes what the operator is part of: ALONE for one measured by itself, SUSTAINED for endless matrix
work, ``step_load(...)`` for a training step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from stepcast.cost.attention import price_attention
from stepcast.cost.fits import ComputeFit
from stepcast.cost.matmul import price_matmul, products_of
from stepcast.cost.memory_bound import price_stream, stream_key
from stepcast.cost.pace import CLOCKED
from stepcast.cost.power import ALONE, SUSTAINED, Load, cool_load, design_power_w
from stepcast.cost.price import Bound, Price, PriceSource
from stepcast.cost.scan_and_convolution import price_cells, price_convolution, price_scan, scan_kind
from stepcast.hardware.cluster import Gpu
from stepcast.ir.recurrent import DeltaRule, RecurrentCells, Scan, SelectiveScan
from stepcast.ir.work import Attention, Compute, Convolution, Elementwise, GroupedMatmul, Matmul, Recorded, Work

COOL = (Elementwise, Scan, Recorded)
"""Work that takes as long in one step as in another, however hot that makes the GPU."""
MOST_KNOWN = 65536
WorkCounts = Mapping[Compute, int]
PASSES, PRODUCTS = ("forward", "backward"), ("matmul", "bmm")


class OperatorCost(NamedTuple):
    """The price of a kind of operator, and the class under which it is calibrated."""

    price: Callable[..., Price]
    label: Callable[..., str]


SCANNED = OperatorCost(price_scan, lambda work: f"{scan_kind(work)}.{PASSES[work.backward]}")
COSTS: dict[type[Compute], OperatorCost] = {
    Matmul: OperatorCost(price_matmul, lambda work: f"{PRODUCTS[work.batch > 1]}.{work.dtype}"),
    GroupedMatmul: OperatorCost(price_matmul, lambda work: f"grouped.{work.dtype}"),
    Convolution: OperatorCost(price_convolution, lambda work: f"convolution.{work.of}"),
    Attention: OperatorCost(price_attention, lambda work: f"attention.{PASSES[work.backward]}"),
    Scan: SCANNED,
    DeltaRule: SCANNED,
    SelectiveScan: SCANNED,
    RecurrentCells: OperatorCost(price_cells, lambda work: "cells"),
    Elementwise: OperatorCost(price_stream, lambda work: f"stream.{stream_key(work)}"),
    Recorded: OperatorCost(
        lambda work, *_: Price.spread(work.duration_s, PriceSource.MEASURED, Bound.COMPUTE, 0.0),
        lambda work: "recorded",
    ),
}


def compute_price(work: Compute, gpu: Gpu, fit: ComputeFit, load: Load = ALONE) -> Price:
    """Return the price of one operator."""
    return COSTS[type(work)].price(work, gpu, fit, load)


def work_class(work: Compute) -> str:
    """Return the class under which an operator is calibrated."""
    return COSTS[type(work)].label(work)


def step_load(works: Iterable[Compute], gpu: Gpu, fit: ComputeFit) -> Load:
    """Return the load of a sequence of operators: the share of its time that matrix kernels take."""
    return load_of(*cool_seconds(Counter(works), gpu, fit), gpu, fit)


def cool_seconds(works: WorkCounts, gpu: Gpu, fit: ComputeFit) -> tuple[float, float, float]:
    """Return three times of a cool GPU: in matrix kernels, in all kernels, and the energy of matrix kernels over the
    power limit of the board.
    """
    matrix_s = total_s = energy_s = 0.0
    products_of(gpu, fit).learn(works)
    price, power = make_pricer(gpu, fit, cool_load(gpu, fit)), fit.power.of(gpu.architecture)
    for work, count in works.items():
        seconds = count * price(work).seconds
        total_s += seconds
        if isinstance(work, Matmul | GroupedMatmul | Convolution | Attention):
            matrix_s += seconds
            energy = power.energy(gpu.architecture, gpu.runs_as(work.dtype))
            energy *= power.attention if isinstance(work, Attention) else 1.0
            energy_s += count * work.flops * energy / gpu.power_w
    return matrix_s, total_s, energy_s


def load_of(matrix_s: float, total_s: float, energy_s: float, gpu: Gpu, fit: ComputeFit) -> Load:
    """Return the load with the three values of ``cool_seconds``."""
    if total_s == 0:
        return SUSTAINED
    duty, power_share = min(1.0, matrix_s / total_s), None
    if gpu.architecture in fit.power.measured:
        power = fit.power.of(gpu.architecture)
        shares = duty * power.idle_share + (1.0 - duty) * power.memory_share
        power_share = energy_s / total_s + shares * design_power_w(gpu.name, gpu.power_w) / gpu.power_w
    return Load(math.inf, duty, wanted=power_share)


Spent = tuple[float, float, Work]
"""The seconds of a work that clocks decide, and others, with the work, which stays alive with its identity."""


class LoadPricer:
    """Prices works under one load and remembers them by identity, since comparing them takes longer. Work that draws
    little power is priced once for all loads.
    """

    def __init__(self, gpu: Gpu, fit: ComputeFit, load: Load, is_cool: bool = False) -> None:
        # One for all loads, which is asked for no other work: else its seconds of that would be taken for another load.
        self.cool = self if is_cool or load.busy_s == 0 else make_cool_pricer(gpu, fit, SUSTAINED, is_cool=True)
        self.spent: dict[int, Spent] = {}
        self._prices: dict[int, Price] = {}
        self._price = lru_cache(MOST_KNOWN)(lambda work: compute_price(work, gpu, fit, load))

    def __call__(self, work: Compute) -> Price:
        """Return the price of *work*."""
        pricer = self.cool if type(work) in COOL else self
        key, prices = id(work), pricer._prices
        if key not in prices:
            if len(prices) >= MOST_KNOWN:
                prices.clear()
                pricer.spent.clear()
            price = prices[key] = pricer._price(work)
            seconds = price.seconds
            pricer.spent[key] = (seconds, 0.0, work) if type(work) in CLOCKED else (0.0, seconds, work)
        return prices[key]


make_pricer = lru_cache(512)(LoadPricer)
make_cool_pricer = lru_cache(64)(LoadPricer)
