"""Fit the communication constants of azure-nd-a100-v4 to nccl-tests all-reduce sweeps.

    python tools/fit_nccl.py FOLDER [--leave-one-out]

Seven constants (``validate/collectives.py``): in the cluster's TOML the launch and channel overheads, the
NIC's latency, and the efficiency of NVLink and of the NIC; in data/fits/collectives.toml what a ring starts
with in LL and in LL128. Everything else is NCCL's or a datasheet's. ``--leave-one-out`` also writes
data/fits/nccl_folds.toml.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from minimise import Vector, minimise

from stepcast.cost.collectives.choose import collective_s
from stepcast.cost.collectives.route import Route
from stepcast.cost.collectives.sweep import measured_time_s, sweep_route
from stepcast.frameworks.catalog import DATA
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import load_fit
from stepcast.inputs.table import folder_files, read
from stepcast.ir.work import CollectiveKind
from stepcast.units import MIB
from stepcast.validate.collectives import with_constants

START, LOW, HIGH = np.array([
    [4.0, 1.5, 10.0, 0.8, 0.7, 6.6, 13.0], [0.1, 0.01, 0.1, 0.1, 0.1, 0.1, 0.1], [50, 50, 100, 1, 1, 100, 100]
])  # fmt: skip
NAMES: list[str] = load_fit("nccl_folds")["names"]
FOLDS = DATA / "fits" / "nccl_folds.toml"


@dataclass(frozen=True)
class Log:
    kind: CollectiveKind
    ranks: int
    sizes_bytes: Vector
    measured_s: Vector
    route: Route


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="nccl-tests logs of the cluster")
    parser.add_argument("--leave-one-out", action="store_true", help="also fit without each log in turn")
    args = parser.parse_args()
    cluster = load_cluster("azure-nd-a100-v4")
    logs = read_logs(args.folder, cluster)
    constants = fit(logs, cluster)
    for name, value in zip(NAMES, constants, strict=True):
        print(f"{name:40s} {value:.3f}")
    print(f"{'ranks':>8s} {'all sizes':>10s} {'>= 1 MiB':>10s} {'< 1 MiB':>10s}")
    for log in logs:
        report(str(log.ranks), [log], constants, cluster)
    report("together", logs, constants, cluster)
    if args.leave_one_out:
        print("left out, fitted on the others:")
        lines = ["# Constants without one log: written by tools/fit_nccl.py, read by stepcast.validate.collectives."]
        lines += [f'cluster = "{cluster.name}"', f"names = [{', '.join(map(repr, NAMES))}]".replace("'", '"')]
        for log in logs:
            found = fit([other for other in logs if other is not log], cluster)
            report(str(log.ranks), [log], found, cluster)
            values = ", ".join(f"{value:.4g}" for value in found)
            lines += ["", "[[fold]]", f"ranks = {log.ranks}", f"values = [{values}]"]
        FOLDS.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_logs(folder: str, cluster: Cluster) -> list[Log]:
    logs = []
    for path in folder_files(folder):
        sweep = read(path)
        timed = [(row.size_bytes, measured_time_s(row)) for row in sweep.rows]
        sizes, times = zip(*((size, time_s) for size, time_s in timed if time_s), strict=True)
        route = sweep_route(sweep, cluster)
        logs.append(Log(sweep.kind, sweep.ranks, np.array(sizes, float), np.array(times), route))
    return sorted(logs, key=lambda log: log.ranks)


def ratios(log: Log, constants: Vector, cluster: Cluster) -> Vector:
    predicted = collective_s(log.kind, log.sizes_bytes, with_constants(log.route, constants.tolist(), cluster))
    return predicted / log.measured_s


def mean_errors(logs: Sequence[Log], constants: Vector, cluster: Cluster) -> tuple[float, float, float]:
    """Over all sizes, over those of 1 MiB and more, and over those below."""
    every = np.abs(np.concatenate([ratios(log, constants, cluster) for log in logs]) - 1)
    large = np.concatenate([log.sizes_bytes for log in logs]) >= MIB
    return float(every.mean()), float(every[large].mean()), float(every[~large].mean())


def report(name: str, logs: Sequence[Log], constants: Vector, cluster: Cluster) -> None:
    every, large, small = mean_errors(logs, constants, cluster)
    print(f"{name:>8s} {every:10.1%} {large:10.1%} {small:10.1%}")


def fit(logs: Sequence[Log], cluster: Cluster) -> Vector:
    return minimise(
        lambda constants: np.concatenate([ratios(log, constants, cluster) for log in logs]), START, LOW, HIGH
    )


if __name__ == "__main__":
    main()
