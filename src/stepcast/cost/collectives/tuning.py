"""Constants of the collective libraries, from data/fits/collectives.toml, where each has its source."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from stepcast.hardware.catalog import load_fit
from stepcast.hardware.cluster import Cluster
from stepcast.units import GB, US

# For architectures that no table names, and for routes that name no GPU.
USUAL = "hopper"
NEVER = 2**31  # ranks from which a switch without reduction is used


class Protocol(StrEnum):
    LL = "LL"
    LL128 = "LL128"
    SIMPLE = "Simple"


@dataclass(frozen=True, slots=True)
class PerProtocol:
    """One figure for each protocol."""

    ll: float
    ll128: float
    simple: float

    def __getitem__(self, protocol: Protocol) -> float:
        return {Protocol.LL: self.ll, Protocol.LL128: self.ll128, Protocol.SIMPLE: self.simple}[protocol]


@dataclass(frozen=True, slots=True)
class Tuning:
    """What a library's collectives cost on one architecture, apart from links and hosts."""

    start_s: PerProtocol
    tree_start_s: PerProtocol
    hop_s: PerProtocol  # beyond the link's own latency, over NVLink or Infinity Fabric
    pcie_hop_s: PerProtocol
    tree_hop_s: PerProtocol
    network_hop_s: PerProtocol
    share: PerProtocol  # of the rate that is left to data
    ll_limit_bytes_per_s: tuple[float, float, float]  # in one node, on two, on more
    message_s: float  # for the host to prepare one message of an all-to-all
    exchange_start_s: float
    tree_step_s: float  # a chunk's synchronisation
    nvls_start_s: float  # for each rank of the node ...
    nvls_step_s: float  # ... as is a chunk's synchronisation
    nvls_tree_hop_s: float
    nvls_least_ranks: int
    torch_call_s: float


def tuning_of(cluster: Cluster) -> Tuning:
    """The constants for *cluster*: of its library, else of its GPUs' maker's, and of their architecture."""
    usual = "rccl" if cluster.gpu.vendor == "amd" else "nccl"
    return library_tuning(cluster.communication.library or usual, cluster.gpu.architecture)


@lru_cache(maxsize=64)
def library_tuning(library: str = "nccl", architecture: str = USUAL) -> Tuning:
    """The constants of *library*; of an architecture it does not name, the usual limits without NVLS."""
    tables = load_fit("collectives")
    if library not in tables:
        raise ValueError(f"library must be one of {', '.join(tables)}, not {library!r}")
    table: dict[str, Any] = tables[library]
    if "base" in table:
        table = tables[table["base"]] | table
    known = table["architectures"]
    usual = known.get(USUAL) or next(iter(known.values()))
    own = known.get(architecture, {"ll_limit_gb_per_s": usual["ll_limit_gb_per_s"]})
    limits = [limit * GB for limit in own["ll_limit_gb_per_s"]]
    return Tuning(
        start_s=_each(table["start_us"], US),
        tree_start_s=_each(table["tree_start_us"], US),
        hop_s=_each(table["hop_us"], US),
        pcie_hop_s=_each(table["pcie_hop_us"], US),
        tree_hop_s=_each(table["tree_hop_us"], US),
        network_hop_s=_each(table["network_hop_us"], US),
        share=_each(table["share"], 1.0),
        ll_limit_bytes_per_s=(limits[0], limits[1], limits[2]),
        message_s=table["message_us"] * US,
        exchange_start_s=table["exchange_start_us"] * US,
        tree_step_s=table["tree_step_us"] * US,
        nvls_start_s=table["nvls_start_us"] * US,
        nvls_step_s=table["nvls_step_us"] * US,
        nvls_tree_hop_s=table["nvls_tree_hop_us"] * US,
        nvls_least_ranks=own.get("nvls_least_ranks", NEVER),
        torch_call_s=table["torch_call_us"] * US,
    )


def _each(figures: Mapping[str, float], unit: float) -> PerProtocol:
    return PerProtocol(*(figures[protocol] * unit for protocol in Protocol))
