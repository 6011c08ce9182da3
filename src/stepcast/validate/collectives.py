"""The nccl-tests set: measured collectives on a cluster."""

import csv
import math
import os
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np

from stepcast.cost.collectives import Algorithm, Protocol, Route, collective_s, price, route_of, send_receive_price
from stepcast.cost.collectives.sweep import kind_of, measured_time_s, sweep_route
from stepcast.hardware import Cluster, load_cluster, resolve
from stepcast.hardware.catalog import load_fit
from stepcast.inputs.source import FormatError
from stepcast.inputs.table import folder_files, read
from stepcast.ir.dataclass import dataclass
from stepcast.ir.measured import CollectiveSweep
from stepcast.ir.work import CollectiveKind
from stepcast.units import KIB, MIB, US, format_bytes
from stepcast.validate.scoreboard import Measurements, ScoredRow, columns_of, compare_each


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
        """Return the signed error as a share of the measured time."""
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
    """Return the mean absolute error over sizes of *at_least_bytes* and more."""
    errors: Sequence[float] = [abs(row.error) for row in rows if row.size_bytes >= at_least_bytes]
    if not errors:
        raise ValueError("no measurements to compare with")
    return sum(errors) / len(errors)


# The constants that ``tools/fit_nccl.py`` fits to nccl-tests logs, and their values without each log.
#
# ``data/fits/nccl_folds.toml`` holds for each number of ranks what the logs of the others give, so that the
# scoreboard can also say how far off a size of group is that nobody measured.


def with_constants(route: Route, constants: Sequence[float], cluster: Cluster) -> Route:
    """Return *route* with these constants in place of those that ship."""
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
    """Yield the mean errors of logs by constants of logs with other numbers of ranks."""
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
        sizes_of_sweep, times = np.array([(size, time_s) for size, time_s in timed if time_s], dtype=np.float64).T
        errors.append(np.abs(collective_s(kind_of(sweep), sizes_of_sweep, route) / times - 1))
        sizes.append(sizes_of_sweep)
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


def measure_nccl_tests(folder: str, cluster: str = CLUSTER) -> Measurements:
    """Compare every log in *folder*, or that one log, with estimates for *cluster*."""
    described = load_cluster(cluster)
    skipped: Counter[str] = Counter()
    if os.path.isdir(folder):
        sweeps, skipped = compare_each(folder_files(folder), read_sweep, os.path.basename)
    else:
        sweeps = [read_sweep(folder)]
    rows = [row for sweep in sweeps for row in compare_sweep(sweep, described)]
    table = columns_of([_row(row) for row in rows])
    sizes = np.array([row.size_bytes for row in rows], dtype=np.float64)
    return Measurements(
        table,
        skipped,
        {"1 MiB and more": sizes >= MIB, "below 1 MiB": sizes < MIB},
        figures=dict(left_out_errors(sweeps, described)),
        notes=(f"priced on {cluster}",),
        orders={"size": ORDER},
    )


def _row(row: MeasuredCollective) -> ScoredRow:
    size = next((name for edge, name in SIZES if row.size_bytes < edge), LARGEST)
    return ScoredRow(
        f"{row.kind} {format_bytes(row.size_bytes)} on {row.ranks} ranks",
        row.measured_s,
        row.predicted_s,
        {"kind": str(row.kind), "ranks": f"{row.ranks} ranks", "size": size, "algorithm": str(row.algorithm or "")},
    )


# The set of public tables of collectives: nccl-tests and rccl-tests on many machines.

# Tables of measured collectives, gathered from many sources: one line for each size of each table (csv).

# Field of a TableRow -> column, where their names differ.
TABLE_COLUMNS = {
    "table": "id",
    "algorithm": "algo",
    "measured_s": "time_us",
    "out_of_place": "time_oop_us",
    "in_place": "time_ip_us",
    "problem": "status",
}


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
    try:
        with open(path, encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
            if missing:
                raise FormatError(f"is no table of collectives: no column {missing[0]}", path)
            return [_read_row(line, f"{path}:{number}") for number, line in enumerate(reader, start=2)]
    except UnicodeDecodeError:
        raise FormatError("is not UTF-8 text", path) from None
    except csv.Error as error:
        raise FormatError(f"is not valid csv: {error}", path) from None


def _read_row(line: dict[str, str], where: str) -> TableRow:
    values: dict[str, Any] = {}
    for (name, kind), column in zip(TableRow.__annotations__.items(), COLUMNS, strict=True):
        text = line[column]
        if text is None:
            raise FormatError("ends early, or names no source", where)
        if name == "problem":
            values[name] = text == "problem"
        elif name == "measured_s":
            try:
                values[name] = float(text or "nan") * US
            except ValueError:
                raise FormatError(f"{column}: {text!r} is not a number", where) from None
        elif kind is int:
            if not ((text or "0").isascii() and (text or "0").isdigit()):
                raise FormatError(f"{column}: {text!r} is not a whole number", where)
            values[name] = int(text or "0")
        else:
            values[name] = bool(text) if kind is bool else text
    if not values["source"]:
        raise FormatError("ends early, or names no source", where)
    return TableRow(**values)


# Rows of public tables of collectives, on the hardware they ran on and by the host that ran them.

SEND_RECEIVE = "send-receive"
NICS = re.compile(r"(\d+) x (\d+) ?Gb")


@dataclass(frozen=True, slots=True)
class TableHardware:
    """A row's hardware: a cluster, and the transport whose usual constants it takes ("": its entry's own)."""

    cluster: Cluster
    transport: str


@lru_cache(maxsize=1)
def _matching() -> dict[str, Any]:
    text = (resources.files("stepcast") / "data" / "rows" / "collectives.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def match_hardware(row: TableRow, own_entry: bool = True) -> TableHardware:
    """Return the catalogue's cluster of the row's GPU, with the NICs that its network names.

    A machine that has an entry of its own is that one, unless it is to be taken for any other.
    """
    table = _matching()
    own = next((name for start, name in table["machines"].items() if row.source.startswith(start)), None)
    if own is not None and own_entry:
        return TableHardware(_loaded(own, ()), "")
    usual = table["gpus"].get(row.gpu)
    if usual is None:
        raise ValueError(f"no cluster of {row.gpu} is known")
    overrides: list[str] = []
    transport = usual["takes"] if row.nodes > 1 else ""
    if row.nodes > 1:
        if nics := NICS.search(row.network):
            overrides += [f"node.nics={nics[1]}", f'node.nic.bandwidth="{nics[2]} Gb/s"']
        words = (entry["name"] for entry in table["transport"] if entry["word"] in row.network)
        stated = next(words, usual["transport"])
        if stated != usual["transport"]:
            transport = stated
            overrides.append(f"node.nic.transport={stated}")
        if "SHARP" in row.network:
            overrides.append("network.in_network_reduction=true")
    return TableHardware(_loaded(usual["cluster"], tuple(overrides)), transport)


@lru_cache(maxsize=1024)
def _loaded(name: str, overrides: tuple[str, ...]) -> Cluster:
    return load_cluster(name, overrides)


def row_route(row: TableRow, own_entry: bool = True) -> Route:
    """Return the row's ranks on its cluster, started as its source started them.

    If a run stays in a node and its processes are not stated, one process drives all GPUs: a run of several
    needs a launcher, which its source would show.
    """
    cluster = match_hardware(row, own_entry).cluster
    if row.ranks < 2 or row.nodes < 1:
        raise ValueError("does not say how many ranks or nodes took part")
    domain = cluster.domain_gpus
    scale_up = cluster.topology.scale_up_nodes > 1
    per_node = row.ranks_per_node or (min(row.ranks, domain) if scale_up else -(-row.ranks // row.nodes))
    if per_node > domain:
        raise ValueError(f"{per_node} ranks on a node; {cluster.name} holds {domain}")
    ranks = [rank // per_node * domain + rank % per_node for rank in range(row.ranks)]
    per_thread = row.ranks_per_thread or (row.ranks if row.nodes == 1 else 1)
    route = route_of(resolve(cluster, ranks, active_per_node=per_node), cluster, per_thread)
    if "torch" in row.notes:
        return replace(route, call_overhead_s=route.tuning.torch_call_s)
    if "CUDA graph" in row.notes:
        return replace(route, launch_overhead_s=0.0)
    return route


@dataclass(frozen=True, slots=True)
class PricedRow:
    seconds: float
    algorithm: Algorithm | None
    nodes: int  # or scale-up domains


def price_row(row: TableRow, route: Route) -> PricedRow:
    """Return the mean of in place and out of place where the source has both, else the one it has."""
    if row.collective == SEND_RECEIVE:
        cost = send_receive_price(row.size_bytes, route)
        return PricedRow(cost.seconds, cost.algorithm, route.nodes)
    if row.collective not in set(CollectiveKind):
        raise ValueError(f"{row.collective} is not priced")
    kind = CollectiveKind(row.collective)
    forced = Algorithm.RING if re.match(r"ring \(NVLS off\)|ring forced", row.algorithm) else None
    places = [place for place, measured in ((True, row.in_place), (False, row.out_of_place)) if measured] or [True]
    prices = [price(kind, row.size_bytes, route, forced, in_place=place) for place in places]
    return PricedRow(sum(cost.seconds for cost in prices) / len(prices), prices[0].algorithm, route.nodes)


# The constants that were fitted to public tables of collectives, and their values without some of them.
#
# ``tools/fit_collectives.py`` fits them and writes ``data/fits/collective_folds.toml``: for each machine the
# values that the tables of the others give. A constant that only one machine tells of falls back to what was
# published, so a machine that is left out is predicted as one that nobody measured.

Change = Callable[[Route, Cluster, float], Route]
HGX = ("H100", "H200", "B200", "B300")
NVL72 = ("GB200", "GB300")


@dataclass(frozen=True, slots=True)
class TableConstant:
    """*value* ships; *published* is a library's or a datasheet's; *scale* is the size of a usual change."""

    name: str
    value: float
    published: float
    scale: float
    change: Change
    gpus: tuple[str, ...] = ()  # none: all
    transport: str = ""
    library: str = ""

    def concerns(self, row: TableRow, hardware: TableHardware) -> bool:
        library = hardware.cluster.communication.library or ("rccl" if row.gpu.startswith("MI") else "nccl")
        return (
            (not self.gpus or row.gpu in self.gpus)
            and self.transport in ("", hardware.transport)
            and self.library in ("", library)
        )


def _tuning(field: str, part: str = "", unit: float = 1.0) -> Change:
    def change(route: Route, cluster: Cluster, value: float) -> Route:
        new: object = value * unit
        if part:
            new = replace(getattr(route.tuning, field), **{part: new})
        return replace(route, tuning=replace(route.tuning, **{field: new}))  # type: ignore[arg-type]

    return change


def _field(name: str, unit: float = 1.0) -> Change:
    return lambda route, cluster, value: replace(route, **{name: value * unit})  # type: ignore[arg-type]


def _torch(route: Route, cluster: Cluster, value: float) -> Route:
    return replace(route, call_overhead_s=value * US) if route.call_overhead_s else route


def _link_efficiency(route: Route, cluster: Cluster, value: float) -> Route:
    factor = value / cluster.node.fabric.link.efficiency
    return replace(route, intra_bytes_per_s=route.intra_bytes_per_s * factor)


def _nic_latency(route: Route, cluster: Cluster, value: float) -> Route:
    if cluster.node.nic is None or route.nodes == 1:
        return route
    shift_s = value * US - cluster.node.nic.latency_s
    return replace(route, inter_latency_s=max(0.0, route.inter_latency_s + shift_s))


def _nic_efficiency(route: Route, cluster: Cluster, value: float) -> Route:
    if cluster.node.nic is None or route.nodes == 1:
        return route
    factor = value / cluster.node.nic.efficiency
    return replace(
        route,
        inter_bytes_per_s=route.inter_bytes_per_s * factor,
        exchange_bytes_per_s=route.exchange_bytes_per_s * factor,
    )


CONSTANTS = (
    TableConstant("ring Simple start (us)", 30.0, 8.4, 10, _tuning("start_s", "simple", US), library="nccl"),
    TableConstant("LL128 share", 0.8, 0.92, 0.2, _tuning("share", "ll128"), library="nccl"),
    TableConstant("message (us)", 0.41, 0.0, 0.3, _tuning("message_s", "", US), library="nccl"),
    TableConstant("exchange start (us)", 8.0, 8.4, 10, _tuning("exchange_start_s", "", US), library="nccl"),
    TableConstant("tree step (us)", 4.0, 0.0, 3, _tuning("tree_step_s", "", US), library="nccl"),
    TableConstant("NVLS start (us a rank)", 3.45, 2.9, 1, _tuning("nvls_start_s", "", US)),
    TableConstant("NVLS step (us a rank)", 0.7, 0.0, 0.4, _tuning("nvls_step_s", "", US)),
    TableConstant("NVLS tree hop (us)", 10.0, 9.0, 5, _tuning("nvls_tree_hop_s", "", US)),
    TableConstant("torch call (us)", 20.0, 0.0, 10, _torch),
    TableConstant("launch (us)", 4.4, 6.6, 2, _field("launch_overhead_s", US)),
    TableConstant("exchange share", 0.95, 1.0, 0.1, _field("exchange_share")),
    TableConstant("A100 channel (us)", 1.56, 0.0, 1, _field("channel_overhead_s", US), ("A100", "A100-40", "A100-80")),
    TableConstant("HGX reduction share", 0.89, 0.85, 0.1, _field("reduction_share"), HGX),
    TableConstant("NVL72 reduction share", 0.75, 0.85, 0.1, _field("reduction_share"), NVL72),
    TableConstant("HGX Blackwell hop (us)", 1.3, 0.6, 0.5, _field("intra_latency_s", US), ("B200", "B300")),
    TableConstant("NVL72 hop (us)", 1.25, 0.6, 0.5, _field("intra_latency_s", US), NVL72),
    TableConstant("NVLink 5 efficiency", 0.76, 0.802, 0.1, _link_efficiency, ("B200", "B300", *NVL72)),
    TableConstant("MI300X link efficiency", 0.716, 0.75, 0.1, _link_efficiency, ("MI300X", "MI325X")),
    TableConstant("MI355X link efficiency", 0.76, 0.75, 0.1, _link_efficiency, ("MI355X",)),
    TableConstant("MI300X NIC latency (us)", 104.0, 5.0, 50, _nic_latency, ("MI300X",)),
    TableConstant("MI300X NIC efficiency", 0.9, 0.97, 0.1, _nic_efficiency, ("MI300X",)),
    TableConstant("RCCL LL128 share", 0.57, 0.92, 0.2, _tuning("share", "ll128"), library="rccl"),
    TableConstant("RCCL LL128 hop (us)", 10.0, 3.5, 5, _tuning("network_hop_s", "ll128", US), library="rccl"),
    TableConstant("roce latency (us)", 15.0, 5.0, 5, _nic_latency, transport="roce"),
    TableConstant("roce efficiency", 0.93, 0.97, 0.1, _nic_efficiency, transport="roce"),
    TableConstant("tcpxo latency (us)", 63.0, 5.0, 30, _nic_latency, transport="tcpxo"),
    TableConstant("tcpxo efficiency", 0.95, 0.97, 0.1, _nic_efficiency, transport="tcpxo"),
    TableConstant("tcpx latency (us)", 800.0, 5.0, 300, _nic_latency, transport="tcpx"),
    TableConstant("tcpx efficiency", 0.8, 0.97, 0.1, _nic_efficiency, transport="tcpx"),
)


def change_route(row: TableRow, values: Mapping[str, float], own_entry: bool = True) -> Route:
    """Return the row's route with *values* in place of shipped constants; without *own_entry*, of its usual cluster."""
    hardware = match_hardware(row, own_entry)
    route = row_route(row, own_entry)
    if own_entry and hardware.cluster.communication.library:
        return route  # a machine of its own, whose constants tools/fit_nccl.py fits
    for constant in CONSTANTS:
        if constant.name in values and constant.concerns(row, hardware):
            route = constant.change(route, hardware.cluster, values[constant.name])
    return route


@lru_cache(maxsize=1)
def load_table_folds() -> dict[str, dict[str, float]]:
    """Return by machine the values that the tables of the others give."""
    return {fold["held"]: dict(fold["values"]) for fold in load_fit("collective_folds")["fold"]}


FILE = "collectives.csv"
IN_A_NODE, BETWEEN_NODES = "in a node", "between nodes"
DECADE = 16  # sizes by powers of 16, from 64 KiB on


def measure_tables(folder: str) -> Measurements:
    """Compare every row of the table in *folder*, or of that file, on the hardware that it names."""
    path = os.path.join(folder, FILE) if os.path.isdir(folder) else folder
    rows = read_rows(path)
    reasons = [find_exclusion(row) for row in rows]
    comparable = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    compared, skipped = compare_each(
        comparable, lambda row: (row, price_row(row, row_route(row))), lambda row: row.table
    )
    skipped.update(reason for reason in reasons if reason is not None)
    sizes = np.array([row.size_bytes for row, _ in compared], dtype=np.float64)
    return Measurements(
        columns_of([_table_row(row, priced) for row, priced in compared]),
        skipped,
        {"1 MiB and more": sizes >= MIB, "below 1 MiB": sizes < MIB},
        figures=_left_out_figures(compared),
        notes=("left out: by constants that have not seen the row's machine, nor the entry fitted to it",),
        orders={"size": [name for _, name in _decades()]},
        details=("table", "system"),
    )


def _left_out_figures(compared: Sequence[tuple[TableRow, PricedRow]]) -> dict[str, float]:
    """Return mean errors of rows whose machine took part in no fit, in total and by GPU from 1 MiB on."""
    errors: dict[str, list[float]] = {}
    for row, priced in compared:
        seconds = priced.seconds
        if row.system in load_table_folds():
            seconds = price_row(row, change_route(row, load_table_folds()[row.system], own_entry=False)).seconds
        error = abs(seconds / row.measured_s - 1)
        if row.size_bytes < MIB:
            errors.setdefault("left out, below 1 MiB", []).append(error)
            continue
        for label in ("1 MiB and more", f"{row.gpu} {_way(priced)}"):
            errors.setdefault(f"left out, {label}", []).append(error)
    return {label: sum(values) / len(values) for label, values in sorted(errors.items())}


def _way(priced: PricedRow) -> str:
    return IN_A_NODE if priced.nodes == 1 else BETWEEN_NODES


def find_exclusion(row: TableRow) -> str | None:
    """Return why a row is not compared; None where it is."""
    if row.problem:
        return "marked as a problem by who gathered it"
    if row.outlier:
        return "marked as an outlier: a hiccup on one side, or slower than the next size"
    if not math.isfinite(row.measured_s) or row.measured_s <= 0 or row.size_bytes == 0:
        return "no time, or no size"
    return None


def _decades() -> list[tuple[float, str]]:
    """Return the upper ends and names of the size classes."""
    edges = [64 * KIB * DECADE**power for power in range(4)]
    names = [f"under {format_bytes(edges[0])}"]
    names += [f"{format_bytes(low)} to {format_bytes(high)}" for low, high in pairwise(edges)]
    return [*zip(edges, names, strict=True), (math.inf, f"{format_bytes(edges[-1])} and more")]


def _table_row(row: TableRow, priced: PricedRow) -> ScoredRow:
    way = _way(priced)
    return ScoredRow(
        f"{row.table} {format_bytes(row.size_bytes)}",
        row.measured_s,
        priced.seconds,
        {
            "gpu from 1 MiB": f"{row.gpu} {way}" if row.size_bytes >= MIB else "",
            "gpu below 1 MiB": f"{row.gpu} {way}" if row.size_bytes < MIB else "",
            "collective": row.collective,
            "size": next(name for edge, name in _decades() if row.size_bytes < edge),
            "algorithm": str(priced.algorithm or ""),
            "table": row.table,
            "system": row.system,
        },
    )
