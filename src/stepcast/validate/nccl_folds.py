"""The constants that ``tools/fit_nccl.py`` fits to nccl-tests logs, and their values without each log.

``data/fits/nccl_folds.toml`` holds for each number of ranks what the logs of the others give, so that the
scoreboard can also say how far off a size of group is that nobody measured.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from stepcast.cost.collectives import Route, collective_s
from stepcast.cost.collectives.sweep import kind_of, measured_time_s, sweep_route
from stepcast.hardware import Cluster
from stepcast.hardware.catalog import load_fit
from stepcast.ir.sweep import CollectiveSweep
from stepcast.units import MIB, US


def with_constants(route: Route, constants: Sequence[float], cluster: Cluster) -> Route:
    """*route* with these constants in place of those that ship."""
    launch_us, channel_us, nic_us, fabric, nic, ll_us, ll128_us = map(float, constants)
    links = cluster.node.fabric.link, cluster.node.nic
    assert links[1] is not None
    between_s = route.inter_latency_s - links[1].latency_s + nic_us * US if route.nodes > 1 else 0.0
    starts = replace(route.tuning.start_s, ll=ll_us * US, ll128=ll128_us * US)
    return replace(
        route,
        launch_overhead_s=launch_us * US,
        channel_overhead_s=channel_us * US,
        intra_bytes_per_s=route.intra_bytes_per_s / links[0].efficiency * fabric,
        inter_bytes_per_s=route.inter_bytes_per_s / links[1].efficiency * nic,
        inter_latency_s=between_s,
        tuning=replace(route.tuning, start_s=starts),
    )


def left_out_errors(sweeps: Sequence[CollectiveSweep], cluster: Cluster) -> Iterator[tuple[str, float]]:
    """Mean errors of logs by the constants of logs with other numbers of ranks."""
    table = load_fit("nccl_folds")
    if table["cluster"] != cluster.name:
        return
    folds = {fold["ranks"]: fold["values"] for fold in table["fold"]}
    errors, sizes = [], []
    for sweep in sweeps:
        if sweep.ranks not in folds:
            continue
        route = with_constants(sweep_route(sweep, cluster), folds[sweep.ranks], cluster)
        timed = [(row.size_bytes, measured_time_s(row)) for row in sweep.rows if row.size_bytes]
        own, times = np.array([(size, time_s) for size, time_s in timed if time_s], dtype=np.float64).T
        errors.append(np.abs(collective_s(kind_of(sweep), own, route) / times - 1))
        sizes.append(own)
    if errors:
        every, size = np.concatenate(errors), np.concatenate(sizes)
        parts = {"all sizes": size > 0, "1 MiB and more": size >= MIB, "below 1 MiB": size < MIB}
        for name, mask in parts.items():
            if mask.any():
                yield f"each number of ranks left out of the fit, {name}", float(every[mask].mean())
