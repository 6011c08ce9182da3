"""What the catalogue knows of the hardware around a trace: another GPU, and communication never measured."""

from stepcast.analyze.replicas import AllReduceTime
from stepcast.analyze.whatif import GpuChange, Surroundings
from stepcast.cost.collectives import price, route_of
from stepcast.hardware import Cluster, group_path, load_gpu
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import grid_of
from stepcast.ir.work import CollectiveKind

ASSUMED_GPU = "a100-sxm-80gb"


def surroundings(dtype: str, tp: int, gpu: str | None = None, cluster: Cluster | None = None) -> Surroundings:
    """Of a run in *dtype* with *tp* tensor ranks, on *gpu* or on that of *cluster*."""
    if cluster is None:
        return Surroundings(lambda name: gpu_change(gpu, name, dtype))
    own = gpu or cluster.gpu.name
    return Surroundings(lambda name: gpu_change(own, name, dtype), _all_reduce(cluster, tp))


def gpu_change(measured: str | None, other: str, dtype: str) -> GpuChange:
    """Ratios of the published peaks: matrix multiply in the run's number format, and memory bandwidth."""
    old, new = load_gpu(measured or ASSUMED_GPU), load_gpu(other)
    known = "" if measured else " (the trace does not name its GPU; say it with --gpu)"
    if dtype == "fp32" and "tf32" in old.matrix_flops:
        dtype = "tf32"  # the shared fp32 traces run at 67 TFLOP/s, three times what an A100 has in fp32
    return GpuChange(
        f"{new.name} in place of {old.name}{known}, in {dtype}",
        old.matrix_peak_flops(dtype) / new.matrix_peak_flops(dtype),
        old.memory_bandwidth_bytes_per_s / new.memory_bandwidth_bytes_per_s,
    )


def _all_reduce(cluster: Cluster, tp: int) -> AllReduceTime:
    """An all-reduce between the replicas of a stage."""

    def seconds(size_bytes: int, ranks: int) -> float:
        path = group_path(cluster, grid_of(Layout(tp=tp, dp=ranks)), Group.DP)
        return float(price(CollectiveKind.ALL_REDUCE, size_bytes, route_of(path, cluster)).seconds)

    return seconds
