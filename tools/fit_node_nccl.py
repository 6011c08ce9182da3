"""Fit the constants of NCCL inside a node to a public table: entries of architectures in data/fits/collectives.toml.

    python tools/fit_node_nccl.py ../shared/data/operators [ampere pcie blackwell]

Rows are those of aiconfigurator's ``nccl`` (one thread for each of 2, 4 and 8 GPUs). For each group of architectures
that share constants, the tool prints the rows, the errors of the constants in the file, those of a new fit, those of
each number of GPUs by a fit without it, and the entry to put into the file. Rates and latencies of links stay as they
are in data/clusters.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from fit_tables import literal
from minimise import Vector, minimise

from stepcast.cost.collectives.choose import collective_s
from stepcast.cost.collectives.route import Route, Tuning, route_of
from stepcast.hardware import load_cluster, resolve
from stepcast.hardware.catalog import convert_units, load_fit
from stepcast.inputs.operator_tables import read_operator_table
from stepcast.ir.tables import convert_table
from stepcast.ir.work import CollectiveKind
from stepcast.pytorch.profile import gpu_of
from stepcast.units import MIB, MS
from stepcast.validate.operators import COLLECTIVES, RECENT

# Group -> library, its architectures, and the constant of a hop over their links.
GROUPS = {
    "ampere": (RECENT, ("ampere",), "hop_us"),
    "pcie": ("nccl", ("ada", "blackwell-rtx"), "pcie_hop_us"),
    "blackwell": ("nccl", ("blackwell", "blackwell-ultra"), "hop_us"),
}
BOUNDS = {"ll_limit_gb_per_s": (10, 400), "share": (0.2, 1), "start_us": (1, 80), "hop": (0.01, 20),
          "exchange_start_us": (1, 40), "peer_gb_per_s": (5, 900), "filling_share": (0.01, 1)}  # fmt: skip
MOST_ROWS = 1200


class Case(NamedTuple):
    """Rows of one collective on one number of one kind of GPU."""

    kind: CollectiveKind
    route: Route
    sizes_bytes: Vector
    measured_s: Vector


def read_cases(path: Path, library: str, architectures: Iterable[str]) -> list[Case]:
    cases = []
    for rows in read_operator_table(str(path)).split(("system", "device", "op_name", "nccl_dtype", "num_gpus")):
        gpu, ranks = gpu_of(rows), int(rows.word("num_gpus"))
        if gpu.architecture not in architectures or rows.word("op_name") not in COLLECTIVES:
            continue
        cluster = load_cluster(gpu.name, [f"communication.library={library}"])
        route = route_of(resolve(cluster, range(ranks), active_per_node=min(ranks, cluster.domain_gpus)), cluster)
        sizes = rows.numbers("message_size") * (1.0 if rows.word("nccl_dtype") == "int8" else 2.0)
        timed = rows.numbers("latency_ms") > 0
        measured_s = rows.numbers("latency_ms")[timed] * MS
        cases.append(Case(COLLECTIVES[rows.word("op_name")], route, sizes[timed], measured_s))
    return cases


def ratios(cases: list[Case], tuning: Tuning) -> Vector:
    return np.concatenate([
        collective_s(case.kind, case.sizes_bytes, replace(case.route, tuning=tuning), in_place=False) / case.measured_s
        for case in cases
    ])  # fmt: skip


def describe(label: str, cases: list[Case], tuning: Tuning) -> None:
    errors, large = np.abs(ratios(cases, tuning) - 1), np.concatenate([case.sizes_bytes for case in cases]) >= MIB
    medians = ", ".join(
        f"{name} {np.median(errors[part]):.1%} of {int(part.sum())} rows"
        for name, part in (("from 1 MiB", large), ("below", ~large))
        if part.any()
    )
    print(f"  {label}: median {medians}", flush=True)


def fit_group(path: Path, group: str) -> None:
    library, architectures, hop = GROUPS[group]
    tables = load_fit("collectives")
    base = tables[tables[library].get("base", library)]
    common = {key: value for key, value in {**base, **tables[library]}.items() if key not in ("architectures", "base")}
    entry: dict[str, Any] = tables[library]["architectures"][architectures[0]]
    entry = {hop: common[hop], "share": common["share"], "filling_share": 0.3} | entry
    names = [("ll_limit_gb_per_s", 0), ("share", "LL128"), *((key, name) for key in ("start_us", hop) for name in
             ("LL", "LL128", "Simple")), ("exchange_start_us", None), ("peer_gb_per_s", None)]  # fmt: skip
    names += [] if group == "pcie" else [("filling_share", None)]

    def change(values: Vector) -> dict[str, Any]:
        changed = {key: list(x) if isinstance(x, list) else dict(x) if isinstance(x, dict) else x
                   for key, x in entry.items()}  # fmt: skip
        for (key, part), value in zip(names, (float(f"{value:.3g}") for value in values), strict=True):
            if part is None:
                changed[key] = value
            else:
                changed[key][part] = value
        return changed

    def tune(own: dict[str, Any]) -> Tuning:
        return convert_table(convert_units(common | own), Tuning)

    start = np.array([entry[key] if part is None else entry[key][part] for key, part in names], dtype=float)
    low, high = np.array([BOUNDS["hop" if key == hop else key] for key, _ in names], dtype=float).T

    def fit(cases: list[Case]) -> dict[str, Any]:
        every = -(-sum(len(case.sizes_bytes) for case in cases) // MOST_ROWS)
        some = []
        for index, case in enumerate(cases):
            part = slice(index % every, None, every)
            if len(case.sizes_bytes) > index % every:
                some.append(case._replace(sizes_bytes=case.sizes_bytes[part], measured_s=case.measured_s[part]))
        return change(minimise(lambda x: ratios(some, tune(change(x))), np.clip(start, low, high), low, high))

    cases = read_cases(path, library, architectures)
    print(f"{group}: {library} on {', '.join(architectures)}")
    describe("the file's constants", cases, tune(entry))
    fitted = fit(cases)
    describe("new fit", cases, tune(fitted))
    for ranks in sorted({case.route.ranks for case in cases}):
        rest, held = ([case for case in cases if (case.route.ranks == ranks) is out] for out in (False, True))
        describe(f"{ranks} GPUs left out", held, tune(fit(rest)))
    print(f"{architectures[0]} = {literal(fitted)}\n", flush=True)


if __name__ == "__main__":
    for name in sys.argv[2:] or GROUPS:
        fit_group(Path(sys.argv[1]) / "nccl.csv.gz", name)
