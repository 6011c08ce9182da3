"""Fit the communication constants of azure-nd-a100-v4 to nccl-tests all-reduce sweeps.

    python tools/fit_nccl.py FOLDER [--leave-one-out]

Seven constants (``validate/nccl_tests.py``): in the cluster's TOML the launch and channel overheads, the
NIC's latency, and the efficiency of NVLink and of the NIC; in data/fits/collectives.toml what a ring starts
with in LL and in LL128. Everything else is NCCL's or a datasheet's. The loss is the mean absolute error
below 1 MiB plus that from there on, over all logs together; the search is Nelder and Mead's simplex from
several starts, seeded. ``--leave-one-out`` also writes data/fits/nccl_folds.toml.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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

Vector = NDArray[np.float64]

START = np.array([4.0, 1.5, 10.0, 0.8, 0.7, 6.6, 13.0])
NAMES: list[str] = load_fit("nccl_folds")["names"]
FOLDS = DATA / "fits" / "nccl_folds.toml"
SEED, STARTS, ROUNDS, STEPS = 0, 4, 3, 200


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
        lines = ["# Constants without one log: written by tools/fit_nccl.py, read by stepcast.validate.nccl_tests."]
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


def errors(log: Log, constants: Vector, cluster: Cluster) -> Vector:
    predicted = collective_s(log.kind, log.sizes_bytes, with_constants(log.route, constants.tolist(), cluster))
    return np.abs(predicted / log.measured_s - 1)


def mean_errors(logs: Sequence[Log], constants: Vector, cluster: Cluster) -> tuple[float, float, float]:
    """Over all sizes, over those of 1 MiB and more, and over those below."""
    every = np.concatenate([errors(log, constants, cluster) for log in logs])
    large = np.concatenate([log.sizes_bytes for log in logs]) >= MIB
    return float(every.mean()), float(every[large].mean()), float(every[~large].mean())


def report(name: str, logs: Sequence[Log], constants: Vector, cluster: Cluster) -> None:
    every, large, small = mean_errors(logs, constants, cluster)
    print(f"{name:>8s} {every:10.1%} {large:10.1%} {small:10.1%}")


def fit(logs: Sequence[Log], cluster: Cluster) -> Vector:
    def loss(constants: Vector) -> float:
        if constants.min() <= 0 or constants[3:5].max() > 1:
            return float("inf")
        return sum(mean_errors(logs, constants, cluster)[1:])

    random = np.random.default_rng(SEED)
    found = []
    for start in range(STARTS):
        point = START * (np.exp(random.normal(0, 0.1, len(START))) if start else 1.0)
        for _ in range(ROUNDS):
            point = simplex(loss, point)
        found.append(point)
    return min(found, key=loss)


def simplex(loss: Callable[[Vector], float], start: Vector) -> Vector:
    """Nelder and Mead (1965): move the worst corner of a simplex through the middle of the others."""
    corners = [start, *(start * np.where(np.arange(len(start)) == axis, 1.1, 1.0) for axis in range(len(start)))]
    losses = [loss(corner) for corner in corners]
    for _ in range(STEPS):
        order = np.argsort(losses)
        corners, losses = [corners[at] for at in order], [losses[at] for at in order]
        middle = np.mean(corners[:-1], axis=0)
        away = middle - corners[-1]
        moved = middle + away
        moved_loss = loss(moved)
        if moved_loss < losses[0]:
            further = middle + 2 * away
            further_loss = loss(further)
            if further_loss < moved_loss:
                moved, moved_loss = further, further_loss
        elif moved_loss >= losses[-2]:
            moved = middle - away / 2
            moved_loss = loss(moved)
        if moved_loss < losses[-1]:
            corners[-1], losses[-1] = moved, moved_loss
        else:
            corners = [corners[0], *((corners[0] + corner) / 2 for corner in corners[1:])]
            losses = [losses[0], *(loss(corner) for corner in corners[1:])]
    return corners[int(np.argmin(losses))]


if __name__ == "__main__":
    main()
