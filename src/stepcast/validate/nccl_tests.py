"""The nccl-tests set: measured collectives on a cluster."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from stepcast.cost.collectives import Algorithm, Protocol, Route, collective_s, price
from stepcast.cost.collectives.sweep import kind_of, measured_time_s, sweep_route
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import load_fit
from stepcast.inputs.source import FormatError
from stepcast.inputs.table import folder_files, read
from stepcast.ir.measured import CollectiveSweep
from stepcast.ir.work import CollectiveKind
from stepcast.units import KIB, MIB, US, format_bytes
from stepcast.validate.scoreboard import Measurements, ScoredRow, columns, compare_each


@dataclass(frozen=True, slots=True)
class MeasuredCollective:
    """One size of one log. Measured is the mean of out-of-place and in-place, which differ by noise."""

    source: str
    kind: CollectiveKind
    ranks: int
    size_bytes: int
    measured_s: float
    predicted_s: float
    algorithm: Algorithm | None
    protocol: Protocol | None

    @property
    def error(self) -> float:
        """Signed, as a share of the measured time."""
        return self.predicted_s / self.measured_s - 1


def read_sweep(path: str) -> CollectiveSweep:
    """Read a log that can be compared; a ValueError says why another cannot."""
    sweep = read(path)
    if not isinstance(sweep, CollectiveSweep):
        raise FormatError("is no nccl-tests log", path)
    if sweep.kind is None:
        raise FormatError("does not say which collective it timed", path)
    if sweep.ranks < 2:
        raise FormatError("a single rank does not communicate", path)
    return sweep


def compare_sweep(sweep: CollectiveSweep, cluster: Cluster) -> list[MeasuredCollective]:
    kind, route = kind_of(sweep), sweep_route(sweep, cluster)
    rows = []
    for row in sweep.rows:
        measured_s = measured_time_s(row)
        if measured_s is None or row.size_bytes == 0:
            continue
        predicted = price(kind, row.size_bytes, route)
        rows.append(
            MeasuredCollective(
                source=sweep.source,
                kind=kind,
                ranks=sweep.ranks,
                size_bytes=row.size_bytes,
                measured_s=measured_s,
                predicted_s=predicted.seconds,
                algorithm=predicted.algorithm,
                protocol=predicted.protocol,
            )
        )
    return rows


def mean_abs_error(rows: Iterable[MeasuredCollective], at_least_bytes: int = 0) -> float:
    """Mean of the errors without their signs, over sizes of *at_least_bytes* and more."""
    errors: Sequence[float] = [abs(row.error) for row in rows if row.size_bytes >= at_least_bytes]
    if not errors:
        raise ValueError("no measurements to compare with")
    return sum(errors) / len(errors)


# The constants that ``tools/fit_nccl.py`` fits to nccl-tests logs, and their values without each log.
#
# ``data/fits/nccl_folds.toml`` holds for each number of ranks what the logs of the others give, so that the
# scoreboard can also say how far off a size of group is that nobody measured.


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
        sweeps, skipped = compare_each(folder_files(folder), read_sweep, os.path.basename)
    else:
        sweeps = [read_sweep(folder)]
    found = [one for sweep in sweeps for one in compare_sweep(sweep, described)]
    table = columns([_row(one) for one in found])
    sizes = np.array([one.size_bytes for one in found], dtype=np.float64)
    return Measurements(
        table,
        skipped,
        {"1 MiB and more": sizes >= MIB, "below 1 MiB": sizes < MIB},
        figures=dict(left_out_errors(sweeps, described)),
        notes=(f"priced on {cluster}",),
        orders={"size": ORDER},
    )


def _row(one: MeasuredCollective) -> ScoredRow:
    size = next((name for edge, name in SIZES if one.size_bytes < edge), LARGEST)
    return ScoredRow(
        f"{one.kind} {format_bytes(one.size_bytes)} on {one.ranks} ranks",
        one.measured_s,
        one.predicted_s,
        {"kind": str(one.kind), "ranks": f"{one.ranks} ranks", "size": size, "algorithm": str(one.algorithm or "")},
    )
