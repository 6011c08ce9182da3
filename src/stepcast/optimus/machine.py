"""The numbers of a host that an OptimusPrime step depends on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from stepcast.cost.collectives import price, route_of
from stepcast.hardware import Cluster, resolve
from stepcast.ir.check import require
from stepcast.ir.work import CollectiveKind

FP32_BYTES = 4
# Share of the memory's peak that element-wise kernels reach.
MEMORY_EFFICIENCY = 0.85


@dataclass(frozen=True, slots=True)
class Machine:
    """`machine_of` takes them from the catalogue."""

    name: str
    matrix_flops: float  # fp32
    memory_bytes_per_s: float
    launch_s: float  # the shortest a kernel takes
    all_reduce_s: Callable[[range, float], float]  # (ranks, bytes) -> seconds
    hop_bytes_per_s: Callable[[int, int], float]  # (rank, rank) -> bytes per second

    def __post_init__(self) -> None:
        require(self.matrix_flops > 0 and self.memory_bytes_per_s > 0, "rates must be above zero")

    def move_s(self, values: float) -> float:
        """Read or write that many fp32 values."""
        return FP32_BYTES * values / (MEMORY_EFFICIENCY * self.memory_bytes_per_s)


def machine_of(cluster: Cluster) -> Machine:
    """What the step's cost needs of a cluster; OptimusPrime computes in fp32 without TF32."""
    gpu = cluster.node.gpu

    @lru_cache(maxsize=4096)
    def all_reduce_s(ranks: range, size_bytes: float) -> float:
        if len(ranks) < 2:
            return 0.0
        path = resolve(cluster, ranks, active_per_node=min(len(ranks), cluster.domain_gpus))
        return float(
            price(CollectiveKind.ALL_REDUCE, max(1, round(size_bytes)), route_of(path, cluster)).seconds
        )

    def hop_bytes_per_s(one: int, other: int) -> float:
        path = resolve(cluster, [one, other])
        link = path.intra or path.inter
        assert link is not None
        return link.effective_bytes_per_s

    return Machine(
        name=cluster.name,
        matrix_flops=gpu.matrix_peak_flops("fp32"),
        memory_bytes_per_s=gpu.memory_bandwidth_bytes_per_s,
        launch_s=gpu.launch_overhead_s,
        all_reduce_s=all_reduce_s,
        hop_bytes_per_s=hop_bytes_per_s,
    )
