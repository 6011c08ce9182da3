"""What a row of NeuSight's fp32 operator set ran, and the time the model gives it.

Their linear and bmm multiply (m, n) by (n, k): the grids of the recorded kernels cover m by k. A time they
report holds the kernel and what their measuring adds, and never falls below a least time of the host.
"""

from dataclasses import dataclass

import numpy as np

from stepcast.cost.compute import Load, matmul_seconds, softmax_key, stream_seconds
from stepcast.cost.compute_fit import ComputeFit
from stepcast.cost.rates import Array
from stepcast.hardware.gpu import Gpu
from stepcast.ir.dtype import DType

MATRIX = ("linear", "bmm")
INPUTS = {"add": 2, "mul": 2, "div": 2, "pow": 2}  # all others read one tensor
UNARY = ("addu", "mulu", "divu", "powu", "relu", "gelu", "tanh", "softmax", "ln")
OPERATORS = (*MATRIX, *INPUTS, *UNARY)
REPEATED = Load(0.0, repeats=25)  # they call an operator 25 times, waiting for the GPU after each
SHARPNESS = 8  # of the smooth maximum of kernel and least time


@dataclass(frozen=True, slots=True)
class FP32Rows:
    """One operator on one GPU: *batch* products (rows, depth) by (depth, columns), or rows x columns."""

    op: str
    gpu: Gpu
    rows: Array
    columns: Array
    depth: Array
    batch: Array

    def __post_init__(self) -> None:
        if self.op not in OPERATORS:
            raise ValueError(f"unknown operator {self.op!r}; known are {', '.join(OPERATORS)}")


def kernel_s(points: FP32Rows, fit: ComputeFit) -> Array:
    """Seconds of the kernels themselves."""
    rows, columns, gpu = points.rows, points.columns, points.gpu
    if points.op in MATRIX:
        sizes = (rows, columns, points.depth, points.batch)
        return np.asarray(matmul_seconds(*sizes, DType.FP32, gpu, fit, REPEATED))
    size = 4.0 * rows * columns
    if points.op == "softmax":
        keys = np.array([softmax_key(int(wide)) for wide in columns])
        seconds = np.empty_like(rows)
        for key in np.unique(keys):
            i = keys == key
            seconds[i] = stream_seconds(str(key), rows[i], columns[i], size[i], size[i], gpu, fit, REPEATED)
        return seconds
    key = "layer-norm" if points.op == "ln" else "add"
    reads = size * INPUTS.get(points.op, 1)
    return np.asarray(stream_seconds(key, rows, columns, reads, size, gpu, fit, REPEATED))


def reported_s(points: FP32Rows, fit: ComputeFit, added_s: float, least_s: float) -> Array:
    """Seconds as that set reports them."""
    seconds = kernel_s(points, fit) + added_s
    return np.asarray((seconds**SHARPNESS + least_s**SHARPNESS) ** (1.0 / SHARPNESS))
