"""The sets of measured collectives: nccl-tests logs of one cluster, and public tables of many machines."""

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np

from stepcast.cost.collectives.choose import Algorithm, CollectivePrice, collective_s, price, send_receive_price
from stepcast.cost.collectives.route import Route, route_of
from stepcast.cost.collectives.sweep import kind_of, measured_time_s, sweep_route
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import load_fit
from stepcast.hardware.path import job_path
from stepcast.inputs.source import FormatError, parse_count
from stepcast.inputs.table import folder_files, read
from stepcast.ir.arrays import BoolArray
from stepcast.ir.measured import CollectiveSweep
from stepcast.ir.types import FactDict, dataclass, group_by_key, require
from stepcast.ir.work import CollectiveKind
from stepcast.units import KIB, MIB, US, format_bytes
from stepcast.validate import scoreboard

FILE = "collectives.csv"
CLUSTER = "azure-nd-a100-v4"  # the cluster of the nccl-tests set
# Upper ends of size classes: latency, the middle, and bandwidth; of tables sizes by powers of 16.
SWEEP_SIZES = {"under 64 KiB": 64 * KIB, "64 KiB to 1 MiB": MIB, "1 to 64 MiB": 64 * MIB, "64 MiB and more": math.inf}
TABLE_SIZES = {"under 64.00 KiB": 64 * KIB, "64.00 KiB to 1.00 MiB": MIB, "1.00 MiB to 16.00 MiB": 16 * MIB,
               "16.00 MiB to 256.00 MiB": 256 * MIB, "256.00 MiB and more": math.inf}  # fmt: skip


def _class_of(size_bytes: float, classes: Mapping[str, float]) -> str:
    return next(name for name, end in classes.items() if size_bytes < end)


def _by_size(sizes: Sequence[float]) -> dict[str, BoolArray]:
    """Return the rows whose bandwidth counts, and those whose latency does."""
    large = np.array(sizes, dtype=np.float64) >= MIB
    return {"1 MiB and more": large, "below 1 MiB": ~large}


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


def compare_sweep(sweep: CollectiveSweep, cluster: Cluster) -> Iterator[tuple[int, scoreboard.ScoredRow]]:
    """Yield each size of a log and its row; measured is the mean of both places, which differ by noise."""
    kind, route, ranks = kind_of(sweep), sweep_route(sweep, cluster), f"{sweep.ranks} ranks"
    for row in sweep.rows:
        measured_s = measured_time_s(row)
        if measured_s is None or row.size_bytes == 0:
            continue
        predicted = price(kind, row.size_bytes, route)
        tags = {"kind": str(kind), "ranks": ranks, "size": _class_of(row.size_bytes, SWEEP_SIZES)}
        tags["algorithm"] = str(predicted.algorithm or "")
        name = f"{kind} {format_bytes(row.size_bytes)} on {ranks}"
        yield row.size_bytes, scoreboard.ScoredRow(name, measured_s, predicted.seconds, tags)


def measure_nccl_tests(folder: str, cluster: str = CLUSTER) -> scoreboard.Measurements:
    """Compare every log in *folder*, or that one log, with estimates for *cluster*."""
    described = load_cluster(cluster)
    skipped: Counter[str] = Counter()
    if os.path.isdir(folder):
        sweeps, skipped = scoreboard.compare_each(
            folder_files(folder), lambda path: [read_sweep(path)], os.path.basename
        )
    else:
        sweeps = [read_sweep(folder)]
    rows = [row for sweep in sweeps for row in compare_sweep(sweep, described)]
    return scoreboard.Measurements(
        scoreboard.columns_of([row for _, row in rows]),
        skipped,
        _by_size([size for size, _ in rows]),
        figures=left_out_errors(sweeps, described),
        notes=(f"priced on {cluster}",),
        orders={"size": list(SWEEP_SIZES)},
    )


def left_out_errors(sweeps: Sequence[CollectiveSweep], cluster: Cluster) -> dict[str, float]:
    """Return the mean errors of logs by constants of logs with other numbers of ranks.

    ``data/fits/nccl_folds.toml`` holds for each number of ranks what the logs of the others give.
    """
    table = load_fit("nccl_folds")
    folds = {fold["ranks"]: fold["values"] for fold in table["fold"]}
    errors: list[tuple[float, float]] = []
    for sweep in sweeps if table["cluster"] == cluster.name else ():
        if sweep.ranks in folds:
            route = with_constants(sweep_route(sweep, cluster), folds[sweep.ranks], cluster)
            timed = [(row.size_bytes, measured_time_s(row)) for row in sweep.rows if row.size_bytes]
            sizes, times = np.array([(size, time_s) for size, time_s in timed if time_s], dtype=np.float64).T
            off = np.abs(collective_s(kind_of(sweep), sizes, route) / times - 1)
            errors += zip(sizes.tolist(), off.tolist(), strict=True)
    sizes, off = np.array(errors).reshape(-1, 2).T
    return {
        f"each number of ranks left out of the fit, {name}": float(off[mask].mean())
        for name, mask in {"all sizes": sizes > 0, **_by_size(sizes.tolist())}.items()
        if mask.any()
    }


# The set of public tables of collectives: nccl-tests and rccl-tests on many machines, one line for each size of
# each table. Field of a TableRow -> column, where their names differ.
TABLE_COLUMNS = scoreboard.load_table("rows/collectives")["columns"]


@dataclass(frozen=True, slots=True)
class TableRow:
    """One size of one table; None and 0 stand for what its source does not tell."""

    table: str
    source: str
    gpu: str
    nodes: int
    ranks: int
    network: str
    ranks_per_thread: int
    collective: str
    algorithm: str
    size_bytes: int
    measured_s: float
    out_of_place: bool
    in_place: bool
    problem: bool
    outlier: bool
    notes: str
    ranks_per_node: int

    @property
    def system(self) -> str:
        """Return the machine: one publisher's GPUs of one kind."""
        return f"{self.source.strip().partition(' ')[0]} {self.gpu}"


COLUMNS = tuple(TABLE_COLUMNS.get(name, name) for name in TableRow.__annotations__)


def read_rows(path: str) -> list[TableRow]:
    """Return the rows of a csv file, one for each size of each table."""
    rows = []
    for number, line in enumerate(scoreboard.read_records(path, FILE, needed=COLUMNS), start=2):
        values: FactDict = {}
        for (name, kind), column in zip(TableRow.__annotations__.items(), COLUMNS, strict=True):
            text = line[column]
            try:
                if kind is int:
                    values[name] = parse_count(text or "0", column, None)
                elif kind is float:
                    values[name] = float(text or "nan") * US
                else:
                    values[name] = bool(text) if kind is bool else text
            except ValueError:
                raise FormatError(f"{column}: {text!r} is not a number", f"{path}:{number}") from None
        if not values["source"]:
            raise FormatError("ends early, or names no source", f"{path}:{number}")
        rows.append(TableRow(**values | {"problem": line["status"] == "problem"}))
    return rows


# Rows of public tables of collectives, on the hardware they ran on and by the host that ran them.

SEND_RECEIVE = "send-receive"
NICS = re.compile(r"(\d+) x (\d+) ?Gb")


class TableHardware(NamedTuple):
    """A row's hardware: a cluster, and the transport whose usual constants it takes ("": its entry's own)."""

    cluster: Cluster
    transport: str


@lru_cache(maxsize=4096)
def match_hardware(row: TableRow, own_entry: bool = True) -> TableHardware:
    """Return the catalogue's cluster of the row's GPU, with the NICs that its network names.

    A machine that has an entry of its own is that one, unless it is to be taken for any other.
    """
    table = scoreboard.load_table("rows/collectives")
    own = next((name for start, name in table["machines"].items() if row.source.startswith(start)), None)
    if own is not None and own_entry:
        return TableHardware(load_cluster(own), "")
    usual = table["gpus"].get(row.gpu)
    if usual is None:
        raise ValueError(f"no cluster of {row.gpu} is known")
    if row.nodes <= 1:
        return TableHardware(load_cluster(usual["cluster"]), "")
    overrides, transport = [], usual["takes"]
    if nics := NICS.search(row.network):
        overrides += [f"node.nics={nics[1]}", f'node.nic.bandwidth="{nics[2]} Gb/s"']
    words = (entry["name"] for entry in table["transport"] if entry["word"] in row.network)
    if (stated := next(words, usual["transport"])) != usual["transport"]:
        transport = stated
        overrides.append(f"node.nic.transport={stated}")
    if "SHARP" in row.network:
        overrides.append("network.in_network_reduction=true")
    return TableHardware(load_cluster(usual["cluster"], overrides), transport)


@lru_cache(maxsize=4096)
def row_route(row: TableRow, own_entry: bool = True) -> Route:
    """Return the row's ranks on its cluster, started as its source started them.

    If a run stays in a node and its processes are not stated, one process drives all GPUs: a run of several
    needs a launcher, which its source would show.
    """
    cluster = match_hardware(row, own_entry).cluster
    require(row.ranks >= 2 and row.nodes >= 1, "does not say how many ranks or nodes took part")
    domain = cluster.domain_gpus
    scale_up = cluster.topology.scale_up_nodes > 1
    per_node = row.ranks_per_node or (min(row.ranks, domain) if scale_up else -(-row.ranks // row.nodes))
    require(per_node <= domain, f"{per_node} ranks on a node; {cluster.name} holds {domain}")
    per_thread = row.ranks_per_thread or (row.ranks if row.nodes == 1 else 1)
    route = route_of(job_path(cluster, row.ranks, per_node), cluster, per_thread)
    if "torch" in row.notes:
        return replace(route, call_overhead_s=route.tuning.torch_call_s)
    return replace(route, launch_overhead_s=0.0) if "CUDA graph" in row.notes else route


def price_row(row: TableRow, route: Route) -> CollectivePrice:
    """Return the mean of in place and out of place where the source has both, else the one it has."""
    if row.collective == SEND_RECEIVE:
        return send_receive_price(row.size_bytes, route)
    require(row.collective in set(CollectiveKind), f"{row.collective} is not priced")
    kind = CollectiveKind(row.collective)
    forced = Algorithm.RING if re.match(r"ring \(NVLS off\)|ring forced", row.algorithm) else None
    places = [place for place, measured in ((True, row.in_place), (False, row.out_of_place)) if measured] or [True]
    prices = [price(kind, row.size_bytes, route, forced, in_place=place) for place in places]
    return replace(prices[0], seconds=sum(cost.seconds for cost in prices) / len(prices))


# The constants that were fitted to public tables of collectives, and their values without some of them.
#
# ``tools/fit_collectives.py`` fits them and writes ``data/fits/collective_folds.toml``: for each machine the
# values that the tables of the others give. A constant that only one machine determines falls back to what was
# published, so a machine that is left out is predicted as one that nobody measured.

# Those that ``tools/fit_nccl.py`` fits to the logs of one cluster, in its order.
SWEEP_CONSTANTS = (
    *("route.launch_overhead_s", "route.channel_overhead_s", "nic_latency", "link_efficiency", "nic_efficiency"),
    *("tuning.start_s.LL", "tuning.start_s.LL128"),
)


class TableConstant(msgspec.Struct, frozen=True):
    """A constant of ``data/rows/collectives.toml``: *value* ships, *scale* is the size of a usual change."""

    name: str
    value: float
    published: float
    scale: float
    change: str
    gpus: tuple[str, ...] = ()  # none: all
    transport: str = ""
    library: str = ""
    without: tuple[str, ...] = ()  # GPUs with values of their own

    def concerns(self, row: TableRow, hardware: TableHardware) -> bool:
        library = hardware.cluster.communication.library or ("rccl" if row.gpu.startswith("MI") else "nccl")
        return (
            (not self.gpus or row.gpu in self.gpus)
            and row.gpu not in self.without
            and self.transport in ("", hardware.transport)
            and self.library in ("", library)
        )


CONSTANTS = msgspec.convert(scoreboard.load_table("rows/collectives")["constants"], tuple[TableConstant, ...])


def change_constant(route: Route, cluster: Cluster, change: str, value: float) -> Route:
    """Return *route* with another *value* (times in microseconds) of a field, or of what several fields follow from."""
    nic, link = cluster.node.nic, cluster.node.fabric.link
    match change.split("."):
        case ["torch_call"]:
            return replace(route, call_overhead_s=value * US) if route.call_overhead_s else route
        case ["link_efficiency"]:
            return replace(route, intra_bytes_per_s=route.intra_bytes_per_s * (value / link.efficiency))
        case ["nic_latency" | "nic_efficiency"] if nic is None or route.nodes == 1:
            return route
        case ["nic_latency"] if nic:
            return replace(route, inter_latency_s=max(0.0, route.inter_latency_s + (value * US - nic.latency_s)))
        case ["nic_efficiency"] if nic:
            rates = route.inter_bytes_per_s, route.exchange_bytes_per_s
            inter, exchange = (rate * (value / nic.efficiency) for rate in rates)
            return replace(route, inter_bytes_per_s=inter, exchange_bytes_per_s=exchange)
        case ["tuning", field, *parts]:
            new: object = value * US if field.endswith("_s") else value
            if parts:
                new = {**getattr(route.tuning, field), parts[0]: new}
            return replace(route, tuning=replace(route.tuning, **{field: new}))  # type: ignore[arg-type]
        case ["route", field]:
            return replace(route, **{field: value * US if field.endswith("_s") else value})  # type: ignore[arg-type]
    raise ValueError(f"unknown constant {change!r}")


def with_constants(route: Route, constants: Sequence[float], cluster: Cluster) -> Route:
    """Return *route* with these SWEEP_CONSTANTS in place of those that ship."""
    for change, value in zip(SWEEP_CONSTANTS, constants, strict=True):
        route = change_constant(route, cluster, change, float(value))
    return route


def change_route(row: TableRow, values: Mapping[str, float], own_entry: bool = True) -> Route:
    """Return the row's route with *values* in place of shipped constants; without *own_entry*, of its usual cluster."""
    hardware, route = match_hardware(row, own_entry), row_route(row, own_entry)
    if own_entry and hardware.cluster.communication.library:
        return route  # a machine of its own, whose constants tools/fit_nccl.py fits
    for constant in CONSTANTS:
        if constant.name in values and constant.concerns(row, hardware):
            route = change_constant(route, hardware.cluster, constant.change, values[constant.name])
    return route


@lru_cache(maxsize=1)
def load_table_folds() -> dict[str, dict[str, float]]:
    """Return by machine the values that the tables of the others give."""
    return {fold["held"]: dict(fold["values"]) for fold in load_fit("collective_folds")["fold"]}


def measure_tables(folder: str) -> scoreboard.Measurements:
    """Compare every row of the table in *folder*, or of that file, on the hardware that it names."""
    rows = read_rows(os.path.join(folder, FILE) if os.path.isdir(folder) else folder)
    by_exclusion = group_by_key((find_exclusion(row), row) for row in rows)
    errors: dict[str, list[float]] = defaultdict(list)

    def compare(row: TableRow) -> list[scoreboard.ScoredRow]:
        route = row_route(row)
        priced = price_row(row, route)
        seconds = priced.seconds
        if row.system in load_table_folds():
            seconds = price_row(row, change_route(row, load_table_folds()[row.system], own_entry=False)).seconds
        large, where = row.size_bytes >= MIB, f"{row.gpu} {'in a node' if route.nodes == 1 else 'between nodes'}"
        for label in ("1 MiB and more", where) if large else ("below 1 MiB",):
            errors[f"left out, {label}"].append(abs(seconds / row.measured_s - 1))
        tags = {
            "gpu from 1 MiB": where if large else "",
            "gpu below 1 MiB": "" if large else where,
            "collective": row.collective,
            "size": _class_of(row.size_bytes, TABLE_SIZES),
            "algorithm": str(priced.algorithm or ""),
            "table": row.table,
            "system": row.system,
        }
        sizes.append(row.size_bytes)
        name = f"{row.table} {format_bytes(row.size_bytes)}"
        return [scoreboard.ScoredRow(name, row.measured_s, priced.seconds, tags)]

    sizes: list[float] = []
    compared, skipped = scoreboard.compare_each(by_exclusion.pop(None, []), compare, lambda row: row.table)
    skipped.update({str(reason): len(excluded) for reason, excluded in by_exclusion.items()})
    return scoreboard.Measurements(
        scoreboard.columns_of(compared),
        skipped,
        _by_size(sizes),
        figures={label: sum(values) / len(values) for label, values in sorted(errors.items())},
        orders={"size": list(TABLE_SIZES)},
        details=("table", "system"),
    )


def find_exclusion(row: TableRow) -> str | None:
    """Return why a row is not compared; None where it is."""
    if row.problem:
        return "marked as a problem by who gathered it"
    if row.outlier:
        return "marked as an outlier: a hiccup on one side, or slower than the next size"
    if not math.isfinite(row.measured_s) or row.measured_s <= 0 or row.size_bytes == 0:
        return "no time, or no size"
    return None
