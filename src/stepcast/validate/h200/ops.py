"""The time that the model gives a row of the h200 operator files."""

from collections.abc import Mapping

from stepcast.cost.compute import ALONE, compute_price
from stepcast.cost.compute_fit import ComputeFit
from stepcast.hardware.gpu import Gpu
from stepcast.inputs.op_times import works_of


def operator_s(row: Mapping[str, str], gpu: Gpu, fit: ComputeFit) -> float:
    """Seconds of the measured call.

    A second kernel queues behind the first; a lone backward waits for the autograd engine.
    """
    works = works_of(row)
    prices = [compute_price(work, gpu, fit, ALONE).seconds for work in works]
    hidden_s = gpu.launch_overhead_s + fit.stream("add").latency_s - fit.step_launch_s
    seconds = sum(prices) - hidden_s * (len(works) - 1)
    if row["op"] == "sdpa_bwd":
        return float((seconds**4 + fit.backward_call_s**4) ** 0.25)
    return seconds
