"""What GPUs and clusters are, as facts for JSON and reports; and how a description of one looks."""

from typing import Any

from stepcast.hardware.catalog import cluster_names, gpu_names, load_cluster, load_gpu
from stepcast.hardware.cluster import Cluster, Host, Link, NetworkRouting, Topology
from stepcast.hardware.gpu import Gpu
from stepcast.inputs.source import FormatError, parse_toml

Facts = dict[str, Any]
CLUSTER_KEYS = {"base", "node", "gpu", "network", "communication"}


def looks_like_cluster(head: str) -> bool:
    """Whether a file that begins so is a TOML description of a cluster."""
    try:
        return bool(CLUSTER_KEYS & set(parse_toml(head)))
    except FormatError:
        # A mistake in the file is reported when it is loaded; here only its look counts.
        return any(line.strip().startswith(("[node", "[gpu", "[network", 'base = "')) for line in head.splitlines())


def cluster_facts(cluster: Cluster) -> Facts:
    node, topology = cluster.node, cluster.topology
    return {
        "kind": "cluster",
        "name": cluster.name,
        "description": cluster.description,
        "gpus": cluster.gpus,
        "nodes": cluster.nodes,
        "gpus_per_node": node.gpus,
        "gpu": gpu_facts(cluster.gpu),
        "fabric": {"kind": str(node.fabric.kind), **_link(node.fabric.link)},
        "in_switch_reduction": node.fabric.in_switch_reduction,
        "nics_per_node": node.nics,
        "nic": _link(node.nic),
        "transport": node.transport or None,
        "host": _host(node.host),
        "network": str(topology.kind),
        "routes": _routes(topology),
        "scale_up_gpus": cluster.domain_gpus,
        "communication": {
            "launch_overhead_s": cluster.communication.launch_overhead_s,
            "channel_overhead_s": cluster.communication.channel_overhead_s,
        },
        "sources": dict(cluster.sources),
    }


def _routes(topology: Topology) -> list[str]:
    """What is said of tiers, routing and faults, where it is not the usual."""
    said = []
    if topology.leaf_nodes is not None and topology.oversubscription > 1:
        said.append(f"{topology.oversubscription:g}:1 above leaves of {topology.leaf_nodes} nodes")
    if topology.pod_nodes is not None:
        said.append(f"{topology.pod_oversubscription:g}:1 above pods of {topology.pod_nodes} nodes")
    if topology.routing is not NetworkRouting.SPRAY:
        said.append(f"{topology.routing} over {topology.queue_pairs} queue pairs")
    faults = [("failed", topology.failed), ("slow", topology.slow)]
    return said + [f"{len(links)} named as {word}" for word, links in faults if links]


def gpu_facts(gpu: Gpu) -> Facts:
    return {
        "name": gpu.name,
        "vendor": gpu.vendor,
        "architecture": gpu.architecture,
        "matrix_flops": dict(gpu.matrix_flops),
        "vector_flops": dict(gpu.vector_flops),
        "memory_bytes": gpu.memory_bytes,
        "memory_bandwidth_bytes_per_s": gpu.memory_bandwidth_bytes_per_s,
        "l2_bytes": gpu.l2_bytes,
        "sms": gpu.sms,
        "clock_hz": gpu.clock_hz,
        "launch_overhead_s": gpu.launch_overhead_s,
        "power_w": gpu.power_w,
        "sources": dict(gpu.sources),
    }


def _link(link: Link | None) -> Facts:
    if link is None:
        return {}
    return {
        "bandwidth_bytes_per_s": link.bandwidth_bytes_per_s,
        "latency_s": link.latency_s,
        "efficiency": link.efficiency,
    }


def _host(host: Host | None) -> Facts:
    if host is None:
        return {}
    return {
        "memory_bytes": host.memory_bytes,
        "memory_bandwidth_bytes_per_s": host.memory_bandwidth_bytes_per_s,
        "links": host.links,
        "link": _link(host.link),
    }


def all_gpus() -> list[Facts]:
    return [{"gpu": name, **gpu_facts(load_gpu(name))} for name in gpu_names()]


def all_clusters() -> list[Facts]:
    return [{"cluster": name, **cluster_facts(load_cluster(name))} for name in cluster_names()]
