"""A cluster description (TOML) from what a file says of how nodes or their network are wired."""

from collections.abc import Mapping

from stepcast.hardware import Cluster, FabricKind, NetworkKind, load_cluster
from stepcast.hardware.catalog import clusters_of
from stepcast.ir.wiring import Wiring
from stepcast.units import GB

BARE = "pcie-node"  # GPUs of which the catalogue has no cluster
# Between GPUs without a bridge: PCIe 4.0 x16, as data/clusters/pcie-node.toml has it.
HOST_LINK: dict[str, object] = {"bandwidth": "31.5 GB/s", "latency": "1.0 us", "efficiency": 0.724}
ALIKE = 0.02  # rates that differ by less are the same: catalogues round


def write(wiring: Wiring) -> bytes:
    """What builds on the plainest cluster of the same GPUs and says where this one differs."""
    if wiring.gpu is None:
        raise ValueError(
            "the file does not say which GPUs its nodes have: add --gpu, such as --gpu h100-sxm "
            "('stepcast list gpus' knows the names)"
        )
    gpu = load_cluster(wiring.gpu).gpu.name
    having = clusters_of(gpu)
    base = having[0] if having else BARE
    known = load_cluster(base)
    tables: dict[str, dict[str, object]] = {
        "": {"base": base, "description": f"as {wiring.told_by} tells it", "nodes": wiring.nodes},
        "node": {"gpus": wiring.gpus, "nics": _nics(wiring, known)},
        "node.nic": {"bandwidth": _rate(wiring.nic_bytes_per_s)},
        "node.fabric": {},
        "node.fabric.link": {},
        "network": {},
    }
    if known.gpu.name != gpu:
        tables[""]["gpu"] = gpu
    if known.nodes == 1 and wiring.nodes is None:
        tables[""]["nodes"] = 1
    _say_fabric(wiring, known, tables)
    _say_network(wiring, known, tables)
    told = {prefix: wiring.told_by for prefix, table in tables.items() if prefix and _given(table)}
    return _toml({**tables, "sources": told}).encode()


def _nics(wiring: Wiring, known: Cluster) -> int | None:
    """As many as are told, unless nobody says how fast they are."""
    unknown = known.node.nic is None and wiring.nic_bytes_per_s is None
    return None if unknown else wiring.nics


def _say_fabric(wiring: Wiring, known: Cluster, tables: dict[str, dict[str, object]]) -> None:
    if wiring.fabric is None:
        return
    fabric, table = known.node.fabric, tables["node.fabric"]
    if wiring.fabric != fabric.kind:
        table["kind"] = wiring.fabric
        if wiring.fabric != FabricKind.NVSWITCH:
            table["in_switch_reduction"] = False if fabric.in_switch_reduction else None
            tables["network"]["scale_up_nodes"] = 1 if known.topology.scale_up_nodes > 1 else None
        if wiring.fabric == FabricKind.NVLINK_PAIRS and fabric.host_link is None:
            tables["node.fabric.host_link"] = dict(HOST_LINK)
    rate, usual = wiring.fabric_bytes_per_s, fabric.link.bandwidth_bytes_per_s
    if rate is not None and ("kind" in table or abs(rate - usual) > ALIKE * usual):
        tables["node.fabric.link"]["bandwidth"] = _rate(rate)
    hosted = wiring.fabric in (FabricKind.PCIE, FabricKind.NVLINK_PAIRS)
    if hosted and wiring.sockets not in (None, fabric.sockets):
        table["sockets"] = wiring.sockets


def _say_network(wiring: Wiring, known: Cluster, tables: dict[str, dict[str, object]]) -> None:
    """A tree of switches where one is told; whether its leaves are rails no such file says."""
    network = tables["network"]
    network.setdefault("scale_up_nodes", wiring.scale_up_nodes)
    if wiring.scale_up_nodes is None and wiring.leaf_nodes and known.topology.scale_up_nodes > wiring.leaf_nodes:
        network["scale_up_nodes"] = 1
    network["leaf_nodes"] = wiring.leaf_nodes
    network["pod_nodes"] = wiring.pod_nodes
    if wiring.leaf_nodes is not None and known.topology.kind is NetworkKind.TORUS:
        network["kind"] = str(NetworkKind.FAT_TREE)


def _rate(bytes_per_s: float | None) -> str | None:
    return None if bytes_per_s is None else f"{bytes_per_s / GB:.9g} GB/s"


def _given(table: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in table.items() if value is not None}


def _toml(tables: Mapping[str, Mapping[str, object]]) -> str:
    lines: list[str] = []
    for name, table in tables.items():
        given = _given(table)
        if given and name:
            lines += ["", f"[{name}]"]
        lines += [f"{_key(key)} = {_value(value)}" for key, value in given.items()]
    return "\n".join(lines) + "\n"


def _key(key: str) -> str:
    return f'"{key}"' if "." in key else key


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f'"{value}"' if isinstance(value, str) else str(value)
