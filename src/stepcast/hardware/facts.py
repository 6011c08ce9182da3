"""GPUs and clusters as facts for JSON and reports; and how a description of one begins."""

from dataclasses import asdict

from stepcast.hardware.catalog import data_names, load_cluster, load_gpu
from stepcast.hardware.cluster import Cluster, Gpu, NetworkRouting, Topology
from stepcast.inputs.source import FormatError, parse_toml
from stepcast.ir.types import FactDict, pick

CLUSTER_TABLES = {"base", "node", "gpu", "network", "communication"}


def looks_like_cluster(head: str) -> bool:
    """Return whether a file that begins so is a TOML description of a cluster."""
    try:
        return bool(CLUSTER_TABLES & set(parse_toml(head)))
    except FormatError:
        # A mistake in the file is reported when it is loaded; here only its look counts.
        return any(line.strip().startswith(("[node", "[gpu", "[network", 'base = "')) for line in head.splitlines())


def cluster_facts(cluster: Cluster) -> FactDict:
    node, topology = cluster.node, cluster.topology
    return {
        "kind": "cluster",
        **pick(cluster, "name description gpus nodes gpus_per_node=node.gpus"),
        "gpu": gpu_facts(cluster.gpu),
        "fabric": {"kind": str(node.fabric.kind), **asdict(node.fabric.link)},
        **pick(node, "in_switch_reduction=fabric.in_switch_reduction nics_per_node=nics"),
        "nic": asdict(node.nic) if node.nic else {},
        "transport": node.transport or None,
        "host": asdict(node.host) if node.host else {},
        "network": str(topology.kind),
        "routes": _describe_routes(topology),
        "scale_up_gpus": cluster.domain_gpus,
        "communication": pick(cluster.communication, "launch_overhead_s channel_overhead_s"),
        "sources": dict(cluster.sources),
    }


def _describe_routes(topology: Topology) -> list[str]:
    """Return tiers, routing and faults that differ from the defaults."""
    has_leaves = topology.leaf_nodes is not None and topology.oversubscription > 1
    texts = {
        f"{topology.oversubscription:g}:1 above leaves of {topology.leaf_nodes} nodes": has_leaves,
        f"{topology.pod_oversubscription:g}:1 above pods of {topology.pod_nodes} nodes": topology.pod_nodes is not None,
        f"{topology.routing} over {topology.queue_pairs} queue pairs": topology.routing is not NetworkRouting.SPRAY,
        f"{len(topology.failed)} named as failed": topology.failed,
        f"{len(topology.slow)} named as slow": topology.slow,
    }
    return [text for text, applies in texts.items() if applies]


def gpu_facts(gpu: Gpu) -> FactDict:
    peaks = "name vendor architecture matrix_flops vector_flops memory_bytes memory_bandwidth_bytes_per_s"
    return pick(gpu, f"{peaks} l2_bytes sms clock_hz launch_overhead_s power_w sources")


def all_gpus() -> list[FactDict]:
    return [{"gpu": name, **gpu_facts(load_gpu(name))} for name in data_names("gpus")]


def all_clusters() -> list[FactDict]:
    return [{"cluster": name, **cluster_facts(load_cluster(name))} for name in data_names("clusters")]
