"""One GPU: its peaks, memory and bandwidth, as its vendor states them."""

import math
from collections.abc import Mapping
from dataclasses import field

from stepcast.ir.dataclass import dataclass
from stepcast.ir.tables import Amount, Count, Positive

# Where a format has no matrix units of its own, the work runs in the first of these the GPU has. bf16 on
# a GPU that lacks it is converted to fp32, never to fp16, whose range is smaller. Scaled formats (fp8, mxfp8,
# fp4, nvfp4) have no substitute: Transformer Engine's check_fp8_support, check_mxfp8_support and
# check_nvfp4_support (pytorch/quantization.py) refuse GPUs without their units.
RUNS_AS: dict[str, tuple[str, ...]] = {"tf32": ("fp32",), "fp16": ("fp32",), "bf16": ("fp32",)}

# Architectures with the same kernels, and errors of predictions, by the name of one of them.
GENERATIONS: Mapping[str, str] = {"volta": "ampere", "blackwell-ultra": "blackwell", "cdna3": "cdna", "cdna4": "cdna"}
ORDINARY = ("fp32", "fp64")  # formats that ordinary cores multiply


@dataclass(frozen=True, slots=True)
class Gpu:
    """Peaks are dense (no structured sparsity) and keyed by the name of the number format."""

    name: str
    vendor: str
    architecture: str
    matrix_flops: Mapping[str, Positive] = field(hash=False)  # matrix multiply, on tensor cores where there are any
    vector_flops: Mapping[str, Positive] = field(hash=False)  # everything else
    memory_bytes: Positive
    memory_bandwidth_bytes_per_s: Positive
    l2_bytes: Positive
    sms: Count  # streaming multiprocessors, or compute units on AMD
    clock_hz: Positive  # boost
    shared_memory_per_sm_bytes: Positive
    launch_overhead_s: Amount  # the shortest an operator takes, however small
    power_w: Positive
    # The fastest matrix multiply that anybody published, where it is known.
    reached_flops: Mapping[str, Positive] = field(default_factory=dict, hash=False)
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for table in (self.matrix_flops, self.vector_flops):
            if "fp32" not in table:
                raise ValueError(f"{self.name}: fp32 peak is missing")
        for dtype, reached in self.reached_flops.items():
            if reached > self.matrix_flops.get(dtype, 0.0):
                problem = f"a product cannot exceed the peak, matrix.{dtype}; correct one of them"
                raise ValueError(f"reached.{dtype} is too high: {problem}")

    @property
    def generation(self) -> str:
        return GENERATIONS.get(self.architecture, self.architecture)

    def runs_as(self, dtype: str) -> str:
        """Return the number format in which a matrix multiply requested in *dtype* runs on this GPU."""
        for candidate in (dtype, *RUNS_AS.get(dtype, ())):
            if candidate in self.matrix_flops:
                return candidate
        raise ValueError(f"{self.name} has no {dtype} matrix units; it has {', '.join(self.matrix_flops)}")

    def matrix_peak_flops(self, dtype: str) -> float:
        """Return the dense matrix-multiply peak in *dtype*, or in the format that replaces it."""
        return self.matrix_flops[self.runs_as(dtype)]

    def best_product_flops(self, dtype: str) -> float:
        """Return the rate that no matrix multiply in *dtype* was seen to exceed. A format without a published one
        reaches the share of its peak that the best published format does; without any, or outside matrix units,
        there is no limit.
        """
        used = self.runs_as(dtype)
        if used in self.reached_flops or used in ORDINARY or not self.reached_flops:
            return self.reached_flops.get(used, math.inf)
        shares = (flops / self.matrix_flops[name] for name, flops in self.reached_flops.items())
        return self.matrix_flops[used] * max(shares)

    def vector_peak_flops(self, dtype: str) -> float:
        """Return the peak outside the matrix units; formats without a rate of their own run at the fp32 rate."""
        return self.vector_flops.get(dtype, self.vector_flops["fp32"])
