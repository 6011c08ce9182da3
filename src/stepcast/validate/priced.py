"""Lists of kernels, priced."""

from collections.abc import Sequence

from stepcast.cost.compute import Load, compute_price
from stepcast.cost.compute_fit import ComputeFit
from stepcast.hardware.gpu import Gpu
from stepcast.ir.work import Compute


def priced(kernels: Sequence[Compute], gpu: Gpu, fit: ComputeFit, load: Load) -> list[float]:
    """Seconds of each kernel; equal kernels are priced once."""
    seconds = {work: compute_price(work, gpu, fit, load).seconds for work in set(kernels)}
    return [seconds[work] for work in kernels]
