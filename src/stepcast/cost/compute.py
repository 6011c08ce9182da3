"""The price of an operator on a GPU: the physical bound first, then what is fitted.

Each kind of operator has its module, with a function that times one work and one that takes columns of sizes, from the
same formulas. COSTS lists them all.

A ``Load`` describes what the operator is part of: ALONE for one measured by itself, SUSTAINED for endless matrix
work, ``step_load(...)`` for a training step.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

from stepcast.cost.attention import time_attention
from stepcast.cost.fits import ComputeFit
from stepcast.cost.matmul import products_of, time_product
from stepcast.cost.memory_bound import stream_key, time_stream
from stepcast.cost.pace import CLOCKED
from stepcast.cost.power import ALONE, SUSTAINED, Load, cool_load, design_power_w
from stepcast.cost.price import Price, matrix_unit, price_seconds, require_seconds
from stepcast.cost.scan_and_convolution import SCAN_KINDS, time_cells, time_convolution, time_scan
from stepcast.hardware.cluster import Gpu
from stepcast.ir.recurrent import RecurrentCells, Scan
from stepcast.ir.work import Attention, Compute, Convolution, Elementwise, GroupedMatmul, Matmul, Recorded, Work

COOL = (Elementwise, Scan, Recorded)
"""Work that takes as long in one step as in another, however hot that makes the GPU."""
MOST_KNOWN = 65536
WorkCounts = Mapping[Compute, int]
PASSES, PRODUCTS = ("forward", "backward"), ("matmul", "bmm")


class OperatorCost(NamedTuple):
    """The seconds of a type of operator, and the names under which it is calibrated and the fit knows its error."""

    seconds: Callable[..., float]
    label: Callable[..., str]
    kind: str = ""  # of products it is the unit that multiplies their format


COSTS: dict[type[Compute], OperatorCost] = {
    Matmul: OperatorCost(time_product, lambda work: f"{PRODUCTS[work.batch > 1]}.{work.dtype}"),
    GroupedMatmul: OperatorCost(time_product, lambda work: f"grouped.{work.dtype}"),
    Convolution: OperatorCost(time_convolution, lambda work: f"convolution.{work.of}", "convolution"),
    Attention: OperatorCost(time_attention, lambda work: f"attention.{PASSES[work.backward]}", "attention"),
    **{
        scanned: OperatorCost(time_scan, lambda work: f"{SCAN_KINDS[type(work)]}.{PASSES[work.backward]}", kind)
        for scanned, kind in SCAN_KINDS.items()
    },
    RecurrentCells: OperatorCost(time_cells, lambda work: "cells", "stream"),
    Elementwise: OperatorCost(time_stream, lambda work: f"stream.{stream_key(work)}", "stream"),
    Recorded: OperatorCost(lambda work, *_: work.duration_s, lambda work: "recorded", "recorded"),
}


def compute_price(work: Compute, gpu: Gpu, fit: ComputeFit, load: Load = ALONE) -> Price:
    """Return the price of one operator."""
    return _price(work, _time_work(work, gpu, fit, load), gpu, fit)


def _time_work(work: Compute, gpu: Gpu, fit: ComputeFit, load: Load) -> float:
    return require_seconds(COSTS[type(work)].seconds(work, gpu, fit, load))


def _price(work: Compute, seconds: float, gpu: Gpu, fit: ComputeFit) -> Price:
    kind = COSTS[type(work)].kind or matrix_unit(gpu, work.dtype)  # type: ignore[union-attr]
    return price_seconds(seconds, work, kind, gpu, fit)


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
    pricer, power = make_pricer(gpu, fit, cool_load(gpu, fit)), fit.power.of(gpu.architecture)
    for work, count in works.items():
        clocked_s, other_s, _ = pricer.spend(work)
        seconds = count * (clocked_s + other_s)
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
        time_work = self._time_work = lru_cache(MOST_KNOWN)(lambda work: _time_work(work, gpu, fit, load))
        self._price = lru_cache(MOST_KNOWN)(lambda work: _price(work, time_work(work), gpu, fit))

    def __call__(self, work: Compute) -> Price:
        """Return the price of *work*."""
        return (self.cool if type(work) in COOL else self)._price(work)

    def spend(self, work: Compute) -> Spent:
        """Return the seconds of *work*, in half the time of its price."""
        pricer, key = self.cool if type(work) in COOL else self, id(work)
        spent = pricer.spent
        if key not in spent:
            if len(spent) >= MOST_KNOWN:
                spent.clear()
            seconds = pricer._time_work(work)
            spent[key] = (seconds, 0.0, work) if type(work) in CLOCKED else (0.0, seconds, work)
        return spent[key]


make_pricer = lru_cache(512)(LoadPricer)
make_cool_pricer = lru_cache(64)(LoadPricer)
