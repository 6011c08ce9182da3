"""A cluster description (TOML) from a file that describes how nodes or their network are wired."""

from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import clusters_of
from stepcast.hardware.cluster import FabricKind, NetworkKind
from stepcast.ir.measured import Wiring
from stepcast.outputs.plain import toml_rows
from stepcast.units import GB

BARE = "pcie-node"  # GPUs of which the catalogue has no cluster
# Between GPUs without a bridge: PCIe 4.0 x16, as data/clusters/pcie-node.toml has it.
HOST_LINK: dict[str, object] = {"bandwidth": "31.5 GB/s", "latency": "1.0 us", "efficiency": 0.724}
ROUNDING = 0.02  # rates that differ by less are the same: catalogues round


def write(wiring: Wiring) -> bytes:
    """Return a description that builds on the plainest cluster of the same GPUs and states the differences."""
    if wiring.gpu is None:
        raise ValueError(
            "the file does not say which GPUs its nodes have: add --gpu, such as --gpu h100-sxm "
            "('stepcast list gpus' knows the names)"
        )
    gpu = load_cluster(wiring.gpu).gpu.name
    having = clusters_of(gpu)
    base = having[0] if having and wiring.fabric != FabricKind.PCIE else BARE
    known = load_cluster(base)
    # NICs are left out where nobody states how fast they are.
    has_unknown_nics = known.node.nic is None and wiring.nic_bytes_per_s is None
    tables: dict[str, dict[str, object]] = {
        "": {"base": base, "description": f"as described by {wiring.source_format}", "nodes": wiring.nodes},
        "node": {"gpus": wiring.gpus, "nics": None if has_unknown_nics else wiring.nics},
        "node.nic": {"bandwidth": _rate(wiring.nic_bytes_per_s)},
        "node.fabric": {},
        "node.fabric.link": {},
        "network": {},
    }
    tables[""] |= {"gpu": gpu} if known.gpu.name != gpu else {}
    tables[""] |= {"nodes": 1} if known.nodes == 1 and wiring.nodes is None else {}
    if wiring.fabric is not None:
        _describe_fabric(wiring, known, tables)
    network = tables["network"]  # no such file states whether the leaves of its tree are rails
    network.setdefault("scale_up_nodes", wiring.scale_up_nodes)
    if wiring.scale_up_nodes is None and wiring.leaf_nodes and known.topology.scale_up_nodes > wiring.leaf_nodes:
        network["scale_up_nodes"] = 1
    network |= {"leaf_nodes": wiring.leaf_nodes, "pod_nodes": wiring.pod_nodes}
    if wiring.leaf_nodes is not None and known.topology.kind is NetworkKind.TORUS:
        network["kind"] = str(NetworkKind.FAT_TREE)
    texts = {name: toml_rows(table) for name, table in tables.items()}
    texts["sources"] = toml_rows({name: wiring.source_format for name, text in texts.items() if name and text})
    return "".join(f"\n[{name}]\n{text}" if name else text for name, text in texts.items() if text).encode()


def _describe_fabric(wiring: Wiring, known: Cluster, tables: dict[str, dict[str, object]]) -> None:
    fabric, table = known.node.fabric, tables["node.fabric"]
    if wiring.fabric != fabric.kind:
        table["kind"] = wiring.fabric
        if wiring.fabric != FabricKind.NVSWITCH:
            tables["network"]["scale_up_nodes"] = 1 if known.topology.scale_up_nodes > 1 else None
        if wiring.fabric == FabricKind.NVLINK_PAIRS and fabric.host_link is None:
            tables["node.fabric.host_link"] = dict(HOST_LINK)
    if fabric.in_switch_reduction and (wiring.fabric != FabricKind.NVSWITCH or wiring.in_switch_reduction is False):
        table["in_switch_reduction"] = False
    rate, usual = wiring.fabric_bytes_per_s, fabric.link.bandwidth_bytes_per_s
    if rate is not None and ("kind" in table or abs(rate - usual) > ROUNDING * usual):
        tables["node.fabric.link"]["bandwidth"] = _rate(rate)
    if wiring.fabric in (FabricKind.PCIE, FabricKind.NVLINK_PAIRS) and wiring.sockets not in (None, fabric.sockets):
        table["sockets"] = wiring.sockets


def _rate(bytes_per_s: float | None) -> str | None:
    return None if bytes_per_s is None else f"{bytes_per_s / GB:.9g} GB/s"
