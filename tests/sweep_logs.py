"""nccl-tests logs of clusters that we describe: what a test prints where every time is the model's, or a faulty one's."""

import random
from collections.abc import Iterable

import numpy as np

from stepcast.cost.collectives.sweep import sweep_s
from stepcast.hardware import Cluster
from stepcast.ir.measured import CollectiveSweep, SweepRow
from stepcast.ir.work import CollectiveKind, bus_factor

PROGRAMS = {
    CollectiveKind.ALL_REDUCE: "all_reduce_perf",
    CollectiveKind.ALL_GATHER: "all_gather_perf",
    CollectiveKind.REDUCE_SCATTER: "reduce_scatter_perf",
    CollectiveKind.ALL_TO_ALL: "alltoall_perf",
}
COLUMNS = "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong"
SIZES = tuple(2**power for power in range(10, 34))


def log_of(
    cluster: Cluster,
    ranks: int,
    nodes: int = 1,
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
    sizes: Iterable[int] = SIZES,
    noise: float = 0.0,
    device: str = "NVIDIA H100 80GB HBM3",
) -> str:
    """The log of one sweep on *cluster*; *noise* is the standard deviation of a time, seeded."""
    chosen, rng = list(sizes), random.Random(0)
    both = (SweepRow(chosen[0], 1.0, 1.0),)  # in place and out of place, whose mean is printed for each
    sweep = CollectiveSweep(kind, ranks, nodes, device, None, both, "made.log")
    seconds = sweep_s(sweep, np.array(chosen, dtype=np.float64), cluster)
    rows = []
    for size, exact in zip(chosen, seconds.tolist(), strict=True):
        sides = []
        for _ in range(2):
            time_s = exact * rng.lognormvariate(0.0, noise)
            rate = size / time_s / 1e9
            sides.append(f"{time_s * 1e6:.4f} {rate:.4f} {rate * bus_factor(kind, ranks):.4f} 0")
        rows.append(f"  {size} {size // 4} float sum -1 {' '.join(sides)}")
    per_node = -(-ranks // nodes)
    devices = [
        f"#  Rank {rank:2d} Group  0 Pid {100 + rank} on node-{rank // per_node} device {rank % per_node} [0x0a] {device}"
        for rank in range(ranks)
    ]
    head = [
        f"# Collective test starting: {PROGRAMS[kind]}",
        "# nThread 1 nGpus 1 minBytes 1024 maxBytes 8589934592 step: 2(factor) warmup iters: 5 iters: 20",
        "#",
        "# Using devices",
    ]
    return "\n".join([*head, *devices, "#", COLUMNS, *rows, "# Out of bounds values : 0 OK", "#"]) + "\n"
