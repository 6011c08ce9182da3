"""nccl-tests and rccl-tests logs beside a cluster."""

import argparse
from typing import Any

from stepcast.analyze.sweeps import analyze_sweep
from stepcast.hardware import CatalogError, cluster_names, load_cluster, load_gpu
from stepcast.ir.measured import CollectiveSweep


def sweep_facts(sweep: CollectiveSweep, args: argparse.Namespace) -> dict[str, Any]:
    """Measured against predicted, size by size, and what a shortfall usually means."""
    if args.cluster is None:
        raise ValueError(
            f"{sweep.source}: say with --cluster what it ran on, which its times are compared with"
            f"{_candidates(sweep.device)}"
        )
    return analyze_sweep(sweep, load_cluster(args.cluster, args.set)).facts()


def _candidates(device: str) -> str:
    """Clusters of the catalogue with the GPU that a log names."""
    try:
        gpu = load_gpu(device).name
    except CatalogError:
        return "; 'stepcast list clusters' names those that are known"
    names = [name for name in cluster_names() if load_cluster(name).gpu.name == gpu]
    return f"; with {gpu} are known {', '.join(names)}" if names else ""
