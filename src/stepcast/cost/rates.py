"""What a kernel runs on: the few rates of a GPU that decide how long it takes.

Every field may be a number or an array that broadcasts with the sizes, so that one function prices one
operator on one GPU and a million operators on many.
"""

from typing import NamedTuple

from stepcast.hardware.gpu import ORDINARY, Gpu
from stepcast.ir.arrays import FloatArray
from stepcast.ir.dtype import DType

Number = float | FloatArray

TENSOR = "tensor"
SIMT = "simt"


class Rates(NamedTuple):
    """One GPU seen by a kernel that computes in one number format."""

    peak_flops: Number
    bandwidth_bytes_per_s: Number
    sms: Number
    l2_bytes: Number
    clock_hz: Number
    shared_memory_bytes: Number
    launch_s: Number


def matrix_unit(gpu: Gpu, dtype: DType) -> str:
    """Which unit multiplies: fp32 and fp64 run on the ordinary cores, all else on tensor cores."""
    return SIMT if gpu.runs_as(dtype) in ORDINARY else TENSOR


def matrix_rates(gpu: Gpu, dtype: DType) -> Rates:
    return _rates(gpu, gpu.matrix_peak_flops(dtype))


def vector_rates(gpu: Gpu) -> Rates:
    return _rates(gpu, gpu.vector_peak_flops("fp32"))


def _rates(gpu: Gpu, peak_flops: float) -> Rates:
    return Rates(
        peak_flops,
        gpu.memory_bandwidth_bytes_per_s,
        float(gpu.sms),
        gpu.l2_bytes,
        gpu.clock_hz,
        gpu.shared_memory_per_sm_bytes,
        gpu.launch_overhead_s,
    )
