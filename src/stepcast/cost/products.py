"""Matrix products as a GPU runs them while power lasts, launches left out: each distinct one priced once.

Those of a step are priced together, a column for each size; one alone is a column of one.
"""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.matmul import MatmulFit, matmul_s, products_s
from stepcast.cost.rates import SIMT, Number, Rates, matrix_rates, matrix_unit
from stepcast.hardware.gpu import Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.dtype import DType
from stepcast.ir.work import Compute, GroupedMatmul, Matmul

Product = Matmul | GroupedMatmul
MOST = 65536  # products remembered for each GPU


class Products:
    """What is known of the products of one GPU under one fit."""

    def __init__(self, gpu: Gpu, fit: ComputeFit) -> None:
        self._gpu, self._fit = gpu, fit
        self._seconds: dict[Product, float] = {}

    def seconds(self, work: Product) -> float:
        if work not in self._seconds:
            self.learn((work,))
        return self._seconds[work]

    def learn(self, works: Iterable[Compute]) -> None:
        """Price those of *works* that are not known yet, all of a kind and format at once."""
        if len(self._seconds) >= MOST:
            self._seconds.clear()
        alike: dict[tuple[type, DType], list[Product]] = {}
        for work in works:
            if isinstance(work, Product) and work not in self._seconds:
                alike.setdefault((type(work), work.dtype), []).append(work)
        for (kind, dtype), found in alike.items():
            grouped = kind is GroupedMatmul
            m, n, k, count = np.array([_sizes(work) for work in found], dtype=np.float64).T
            seconds = product_s(m, n, k, count, dtype, self._gpu, self._fit, grouped)
            assert isinstance(seconds, np.ndarray)
            self._seconds.update(zip(found, seconds.tolist(), strict=True))


def _sizes(work: Product) -> tuple[float, int, int, int]:
    """Rows, columns, depth and number of its products; those of experts share their rows."""
    if isinstance(work, Matmul):
        return work.m, work.n, work.k, work.batch
    return work.m / work.groups, work.n, work.k, work.groups


@lru_cache(maxsize=64)
def products_of(gpu: Gpu, fit: ComputeFit) -> Products:
    return Products(gpu, fit)


def product_s(
    m: Number, n: Number, k: Number, batch: Number, dtype: DType, gpu: Gpu, fit: ComputeFit, grouped: bool = False
) -> Number:
    """Seconds of *batch* products (m, k) by (k, n), or of one kernel for all of them."""
    own = fit_of(gpu, dtype, fit)
    share = fit.efficiency_of(gpu.architecture, gpu.runs_as(dtype))
    reached = scaled(matrix_of(gpu, dtype), gpu, fit, share * (fit.grouped_efficiency if grouped else 1.0))
    seconds_of = matmul_s if grouped else products_s
    if isinstance(m, np.ndarray):
        return seconds_of(m, n, k, batch, dtype.bytes, reached, own)
    column: FloatArray = np.array([m], dtype=np.float64)
    return float(seconds_of(column, n, k, batch, dtype.bytes, reached, own)[0])


def fit_of(gpu: Gpu, dtype: DType, fit: ComputeFit) -> MatmulFit:
    """The constants of the units that multiply this format."""
    if matrix_unit(gpu, dtype) == SIMT:
        return fit.simt_fit(gpu.architecture)
    return fit.tensor_fit(gpu.architecture)


@lru_cache(maxsize=256)
def matrix_of(gpu: Gpu, dtype: DType) -> Rates:
    return matrix_rates(gpu, dtype)


def scaled(rates: Rates, gpu: Gpu, fit: ComputeFit, peak_share: float = 1.0) -> Rates:
    """*rates* with what the architecture reaches of its memory bandwidth and the format of its peak."""
    share = fit.memory_share(gpu.architecture)
    if share == 1.0 and peak_share == 1.0:
        return rates
    return rates._replace(
        peak_flops=rates.peak_flops * peak_share, bandwidth_bytes_per_s=rates.bandwidth_bytes_per_s * share
    )
