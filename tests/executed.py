"""FLOPs that a workload executes, counted op by op."""

from stepcast.ir.recurrent import DeltaRule, Scan, SelectiveScan
from stepcast.ir.work import Attention, GroupedMatmul, Matmul
from stepcast.ir.workload import Layer, Workload

COUNTED = Matmul | GroupedMatmul | Attention | Scan | DeltaRule | SelectiveScan


def hardware_flops(workload: Workload) -> float:
    """What all ranks execute in one step, recomputation included: matrix products, attention, scans."""
    layout = workload.layout
    total = sum(
        count * layer_flops(layer)
        for stage in workload.stages
        for layer, count in stage.counted_layers(workload.micro_batches)
    )
    copies = layout.pp * layout.vpp if workload.uniform else 1
    return total * copies * layout.tp * layout.cp * layout.dp


def layer_flops(layer: Layer) -> float:
    """Matrix products, attention and scans of one layer on one rank, all phases."""
    ops = layer.all_ops
    return sum(op.work.flops for op in ops if isinstance(op.work, COUNTED))
