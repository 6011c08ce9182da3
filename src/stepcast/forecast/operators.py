"""The operators of a predicted step: what each computes, moves and takes, beside what the GPU could do."""

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stepcast.cost.moved import moved_bytes
from stepcast.ir.facts import OperatorFacts, RooflineFacts
from stepcast.ir.work import Attention, Compute, Elementwise, GroupedMatmul, Matmul, Recorded

if TYPE_CHECKING:
    from stepcast.forecast.simulate import Prediction

Counted = Matmul | GroupedMatmul | Attention | Elementwise


@dataclass(slots=True)
class _Sum:
    kind: str
    dtype: str
    count: float = 0.0
    flops: float = 0.0
    moved_bytes: float = 0.0
    seconds: float = 0.0
    bound: str = ""


def roofline(prediction: "Prediction") -> RooflineFacts | None:
    """Operators by name, over an average GPU of the step; None where only their times are known."""
    workload, pricer, gpu = prediction.workload, prediction.pricer, prediction.cluster.gpu
    sums: dict[tuple[str, str], _Sum] = {}
    formats: defaultdict[str, float] = defaultdict(float)
    times = 1 if workload.uniform else 1 / workload.layout.pp
    for stage in workload.stages:
        for layer, count in stage.counted_layers(workload.micro_batches):
            for op in layer.all_ops:
                work = op.work
                if not isinstance(work, Compute) or isinstance(work, Recorded):
                    continue
                price = pricer.price(work)
                kind, dtype = type(work).__name__.lower(), str(getattr(work, "dtype", ""))
                each = sums.setdefault((layer.op_name(op), kind), _Sum(kind, dtype, bound=str(price.bound)))
                flops = _flops(work)
                each.count += count * times
                each.flops += count * times * flops
                each.moved_bytes += count * times * (moved_bytes(work) if isinstance(work, Counted) else 0.0)
                each.seconds += count * times * price.seconds
                if isinstance(work, Matmul | GroupedMatmul | Attention):
                    formats[dtype] += flops * count
    listed = [
        OperatorFacts(
            name=name,
            kind=each.kind,
            dtype=each.dtype,
            count=each.count,
            flops=each.flops,
            bytes=each.moved_bytes,
            seconds=each.seconds,
            bound=each.bound,
        )
        for (name, _), each in sums.items()
        if each.seconds > 0 and each.flops > 0 and each.moved_bytes > 0
    ]
    if not listed:
        return None
    dtype = max(formats, key=lambda name: formats[name], default="bf16")
    return RooflineFacts(
        gpu=gpu.name,
        dtype=gpu.runs_as(dtype),
        peak_flops=gpu.matrix_peak_flops(dtype),
        bytes_per_s=gpu.memory_bandwidth_bytes_per_s,
        operators=sorted(listed, key=lambda each: -each["seconds"]),
    )


def _flops(work: Compute) -> float:
    if isinstance(work, Matmul | GroupedMatmul | Attention):
        return work.flops
    return float(work.elements) if isinstance(work, Elementwise) else 0.0
