"""The nccl-tests set: measured collectives on a cluster."""

import os
from collections import Counter
from contextlib import suppress

import numpy as np

from stepcast.hardware import load_cluster
from stepcast.inputs.errors import FormatError
from stepcast.inputs.table import folder_files, read
from stepcast.ir.sweep import CollectiveSweep
from stepcast.units import KIB, MIB, format_bytes
from stepcast.validate.nccl_folds import left_out_errors
from stepcast.validate.nccl_tests import MeasuredCollective, compare_folder, compare_sweep
from stepcast.validate.scoreboard import Measurements, Row, columns

CLUSTER = "azure-nd-a100-v4"  # the cluster of the set
# Latency, the middle, and bandwidth.
SIZES = ((64 * KIB, "under 64 KiB"), (MIB, "64 KiB to 1 MiB"), (64 * MIB, "1 to 64 MiB"))
LARGEST = "64 MiB and more"
ORDER = (*(name for _, name in SIZES), LARGEST)


def measure_folder(folder: str, cluster: str = CLUSTER) -> Measurements:
    """Every log in *folder*, or that one log, priced on *cluster*."""
    described = load_cluster(cluster)
    skipped: Counter[str] = Counter()
    if os.path.isdir(folder):
        found, left_out = compare_folder(folder, described)
        for one in left_out:
            skipped[f"{os.path.basename(one.source)}: {one.reason}"] += 1
    else:
        sweep = read(folder)
        if not isinstance(sweep, CollectiveSweep):
            raise FormatError("is no nccl-tests log", folder)
        found = tuple(compare_sweep(sweep, described))
    table = columns([_row(one) for one in found])
    sizes = np.array([one.size_bytes for one in found], dtype=np.float64)
    return Measurements(
        table,
        skipped,
        {"1 MiB and more": sizes >= MIB, "below 1 MiB": sizes < MIB},
        figures=dict(left_out_errors(_sweeps(folder), described)),
        notes=(f"priced on {cluster}",),
        orders={"size": ORDER},
    )


def _sweeps(folder: str) -> list[CollectiveSweep]:
    """The logs that were compared."""
    found = []
    for path in folder_files(folder) if os.path.isdir(folder) else [folder]:
        with suppress(FormatError):
            sweep = read(path)
            if isinstance(sweep, CollectiveSweep) and sweep.kind is not None and sweep.ranks > 1:
                found.append(sweep)
    return found


def _row(one: MeasuredCollective) -> Row:
    size = next((name for edge, name in SIZES if one.size_bytes < edge), LARGEST)
    return Row(
        f"{one.kind} {format_bytes(one.size_bytes)} on {one.ranks} ranks",
        one.measured_s,
        one.predicted_s,
        {
            "kind": str(one.kind),
            "ranks": f"{one.ranks} ranks",
            "size": size,
            "algorithm": str(one.algorithm or ""),
        },
    )
