"""The constants that were fitted to public tables of collectives, and their values without some of them.

``tools/fit_collectives.py`` fits them and writes ``data/fits/collective_folds.toml``: for each machine the
values that the tables of the others give. A constant that only one machine tells of falls back to what was
published, so a machine that is left out is predicted as one that nobody measured.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from stepcast.cost.collectives import Route
from stepcast.hardware import Cluster
from stepcast.hardware.catalog import load_fit
from stepcast.inputs.collective_table import TableRow
from stepcast.units import US
from stepcast.validate.collective_rows import Matched, matched, row_route

Change = Callable[[Route, Cluster, float], Route]
HGX = ("H100", "H200", "B200", "B300")
NVL72 = ("GB200", "GB300")


@dataclass(frozen=True, slots=True)
class Constant:
    """*value* ships; *published* is a library's or a datasheet's; *scale* is the size of a usual change."""

    name: str
    value: float
    published: float
    scale: float
    change: Change
    gpus: tuple[str, ...] = ()  # none: all
    transport: str = ""
    library: str = ""

    def concerns(self, row: TableRow, found: Matched) -> bool:
        library = found.cluster.communication.library or ("rccl" if row.gpu.startswith("MI") else "nccl")
        return (
            (not self.gpus or row.gpu in self.gpus)
            and self.transport in ("", found.transport)
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
    Constant("ring Simple start (us)", 30.0, 8.4, 10, _tuning("start_s", "simple", US), library="nccl"),
    Constant("LL128 share", 0.8, 0.92, 0.2, _tuning("share", "ll128"), library="nccl"),
    Constant("message (us)", 0.41, 0.0, 0.3, _tuning("message_s", "", US), library="nccl"),
    Constant("exchange start (us)", 20.0, 8.4, 10, _tuning("exchange_start_s", "", US)),
    Constant("tree step (us)", 4.0, 0.0, 3, _tuning("tree_step_s", "", US), library="nccl"),
    Constant("NVLS start (us a rank)", 3.45, 2.9, 1, _tuning("nvls_start_s", "", US)),
    Constant("NVLS step (us a rank)", 0.7, 0.0, 0.4, _tuning("nvls_step_s", "", US)),
    Constant("NVLS tree hop (us)", 10.0, 9.0, 5, _tuning("nvls_tree_hop_s", "", US)),
    Constant("torch call (us)", 20.0, 0.0, 10, _torch),
    Constant("launch (us)", 4.4, 6.6, 2, _field("launch_overhead_s", US)),
    Constant("exchange share", 0.95, 1.0, 0.1, _field("exchange_share")),
    Constant(
        "A100 channel (us)", 1.56, 0.0, 1, _field("channel_overhead_s", US), ("A100", "A100-40", "A100-80")
    ),
    Constant("HGX reduction share", 0.89, 0.85, 0.1, _field("reduction_share"), HGX),
    Constant("NVL72 reduction share", 0.75, 0.85, 0.1, _field("reduction_share"), NVL72),
    Constant("NVL72 hop (us)", 1.25, 0.6, 0.5, _field("intra_latency_s", US), NVL72),
    Constant("NVLink 5 efficiency", 0.76, 0.802, 0.1, _link_efficiency, ("B200", "B300", *NVL72)),
    Constant("MI300X link efficiency", 0.716, 0.75, 0.1, _link_efficiency, ("MI300X", "MI325X")),
    Constant("MI355X link efficiency", 0.76, 0.75, 0.1, _link_efficiency, ("MI355X",)),
    Constant("MI300X NIC latency (us)", 104.0, 5.0, 50, _nic_latency, ("MI300X",)),
    Constant("MI300X NIC efficiency", 0.9, 0.97, 0.1, _nic_efficiency, ("MI300X",)),
    Constant("RCCL LL128 share", 0.57, 0.92, 0.2, _tuning("share", "ll128"), library="rccl"),
    Constant("RCCL LL128 hop (us)", 10.0, 3.5, 5, _tuning("network_hop_s", "ll128", US), library="rccl"),
    Constant("roce latency (us)", 15.0, 5.0, 5, _nic_latency, transport="roce"),
    Constant("roce efficiency", 0.93, 0.97, 0.1, _nic_efficiency, transport="roce"),
    Constant("tcpxo latency (us)", 63.0, 5.0, 30, _nic_latency, transport="tcpxo"),
    Constant("tcpxo efficiency", 0.95, 0.97, 0.1, _nic_efficiency, transport="tcpxo"),
    Constant("tcpx latency (us)", 800.0, 5.0, 300, _nic_latency, transport="tcpx"),
    Constant("tcpx efficiency", 0.8, 0.97, 0.1, _nic_efficiency, transport="tcpx"),
)


def changed_route(row: TableRow, values: Mapping[str, float], own_entry: bool = True) -> Route:
    """The row's route with *values* in place of shipped constants; without *own_entry* as its GPU's usual."""
    found = matched(row, own_entry)
    route = row_route(row, own_entry)
    if own_entry and found.cluster.communication.library:
        return route  # a machine of its own, whose constants tools/fit_nccl.py fits
    for constant in CONSTANTS:
        if constant.name in values and constant.concerns(row, found):
            route = constant.change(route, found.cluster, values[constant.name])
    return route


@lru_cache(maxsize=1)
def folds() -> dict[str, dict[str, float]]:
    """By machine, the values that the tables of the others give."""
    return {fold["held"]: dict(fold["values"]) for fold in load_fit("collective_folds")["fold"]}
