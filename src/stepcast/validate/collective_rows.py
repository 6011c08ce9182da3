"""Rows of public tables of collectives, on the hardware they ran on and by the host that ran them."""

import re
import tomllib
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from stepcast.cost.collectives import Algorithm, Route, price, route_of, send_receive_price
from stepcast.hardware import Cluster, load_cluster, resolve
from stepcast.inputs.collective_table import TableRow
from stepcast.ir.work import CollectiveKind

SEND_RECEIVE = "send-receive"
NICS = re.compile(r"(\d+) x (\d+) ?Gb")


@dataclass(frozen=True, slots=True)
class Matched:
    """A row's hardware: a cluster, and the transport whose usual constants it takes ("": its entry's own)."""

    cluster: Cluster
    transport: str


@lru_cache(maxsize=1)
def _matching() -> dict[str, Any]:
    text = (resources.files("stepcast") / "data" / "rows" / "collectives.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def matched(row: TableRow, own_entry: bool = True) -> Matched:
    """The catalogue's cluster of the row's GPU, with the NICs that its network names.

    A machine that has an entry of its own is that one, unless it is to be taken for any other.
    """
    table = _matching()
    own = next((name for start, name in table["machines"].items() if row.source.startswith(start)), None)
    if own is not None and own_entry:
        return Matched(_loaded(own, ()), "")
    usual = table["gpus"].get(row.gpu)
    if usual is None:
        raise ValueError(f"no cluster of {row.gpu} is known")
    overrides: list[str] = []
    transport = usual["takes"] if row.nodes > 1 else ""
    if row.nodes > 1:
        if found := NICS.search(row.network):
            overrides += [f"node.nics={found[1]}", f'node.nic.bandwidth="{found[2]} Gb/s"']
        words = (entry["name"] for entry in table["transport"] if entry["word"] in row.network)
        told = next(words, usual["transport"])
        if told != usual["transport"]:
            transport = told
            overrides.append(f"node.nic.transport={told}")
        if "SHARP" in row.network:
            overrides.append("network.in_network_reduction=true")
    return Matched(_loaded(usual["cluster"], tuple(overrides)), transport)


@lru_cache(maxsize=1024)
def _loaded(name: str, overrides: tuple[str, ...]) -> Cluster:
    return load_cluster(name, overrides)


def row_route(row: TableRow, own_entry: bool = True) -> Route:
    """The row's ranks on its cluster, started as its source started them.

    Where a run stays in a node and nothing is said of its processes, one drives all GPUs: a run of several
    needs a launcher, which its source would show.
    """
    cluster = matched(row, own_entry).cluster
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


def priced_row(row: TableRow, route: Route) -> PricedRow:
    """The mean of in place and out of place where the source has both, else the one that it has."""
    if row.collective == SEND_RECEIVE:
        found = send_receive_price(row.size_bytes, route)
        return PricedRow(found.seconds, found.algorithm, route.nodes)
    if row.collective not in set(CollectiveKind):
        raise ValueError(f"{row.collective} is not priced")
    kind = CollectiveKind(row.collective)
    forced = Algorithm.RING if re.match(r"ring \(NVLS off\)|ring forced", row.algorithm) else None
    places = [place for place, told in ((True, row.in_place), (False, row.out_of_place)) if told] or [True]
    prices = [price(kind, row.size_bytes, route, forced, in_place=place) for place in places]
    return PricedRow(sum(each.seconds for each in prices) / len(prices), prices[0].algorithm, route.nodes)
