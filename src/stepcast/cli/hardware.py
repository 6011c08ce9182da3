"""What GPUs and clusters are, as facts for ``show`` and rows for ``list``."""

import tomllib
from typing import Any

from stepcast.hardware import Cluster, Gpu, Link, cluster_names, gpu_names, load_cluster, load_gpu
from stepcast.units import GB, GIB, TFLOPS, US

Facts = dict[str, Any]
CLUSTER_KEYS = {"base", "node", "gpu", "network", "communication"}


def looks_like_cluster(head: str) -> bool:
    """Whether a file that begins so is a TOML description of a cluster."""
    try:
        return bool(CLUSTER_KEYS & set(tomllib.loads(head)))
    except tomllib.TOMLDecodeError:
        # A mistake in the file is reported when it is loaded; here only its look counts.
        return any(
            line.strip().startswith(("[node", "[gpu", "[network", 'base = "')) for line in head.splitlines()
        )


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
        "network": str(topology.kind),
        "scale_up_gpus": cluster.domain_gpus,
        "communication": {
            "launch_overhead_s": cluster.communication.launch_overhead_s,
            "channel_overhead_s": cluster.communication.channel_overhead_s,
        },
        "sources": dict(cluster.sources),
    }


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


def cluster_pairs(found: Facts) -> list[tuple[str, object]]:
    """The facts of a cluster as a person reads them."""
    gpu, fabric, nic = found["gpu"], found["fabric"], found["nic"]
    peaks = ", ".join(f"{name} {flops / TFLOPS:g}" for name, flops in gpu["matrix_flops"].items())
    size = (
        "as large as asked for" if found["gpus"] is None else f"{found['nodes']} nodes, {found['gpus']} GPUs"
    )
    pairs: list[tuple[str, object]] = [
        ("cluster", f"{found['name']}: {found['description']}" if found["description"] else found["name"]),
        ("size", size),
        ("node", f"{found['gpus_per_node']} x {gpu['name']}"),
        ("matrix peak", f"{peaks} TFLOP/s dense"),
        (
            "memory",
            f"{gpu['memory_bytes'] / GIB:.0f} GiB at {gpu['memory_bandwidth_bytes_per_s'] / GB:,.0f} GB/s",
        ),
        (
            "fabric",
            f"{fabric['kind']}, {_rate(fabric)}"
            + (", adds in the switch" if found["in_switch_reduction"] else ""),
        ),
        ("NICs", f"{found['nics_per_node']} of {_rate(nic)}" if nic else "none"),
        ("network", found["network"]),
    ]
    if found["scale_up_gpus"] > found["gpus_per_node"]:
        pairs.append(("scale-up domain", f"{found['scale_up_gpus']} GPUs"))
    return pairs


def _rate(link: Facts) -> str:
    reached = f" x {link['efficiency']:.2f}" if link["efficiency"] < 1 else ""
    return f"{link['bandwidth_bytes_per_s'] / GB:g} GB/s{reached} each way, {link['latency_s'] / US:.2g} us"


def all_gpus() -> list[Facts]:
    return [{"gpu": name, **gpu_facts(load_gpu(name))} for name in gpu_names()]


def all_clusters() -> list[Facts]:
    return [{"cluster": name, **cluster_facts(load_cluster(name))} for name in cluster_names()]


def gpu_row(found: Facts) -> Facts:
    """A GPU as a row for a person; peaks in TFLOP/s."""
    peak = {name: f"{flops / TFLOPS:g}" for name, flops in found["matrix_flops"].items()}
    return {
        "gpu": found["name"],
        "architecture": found["architecture"],
        "fp32": peak.get("fp32", "-"),
        "bf16": peak.get("bf16", "-"),
        "fp8": peak.get("fp8", "-"),
        "fp4": peak.get("fp4", peak.get("nvfp4", "-")),
        "GiB": f"{found['memory_bytes'] / GIB:.0f}",
        "TB/s": f"{found['memory_bandwidth_bytes_per_s'] / 1e12:.2f}",
        "SMs": found["sms"],
        "W": f"{found['power_w']:.0f}",
    }


def cluster_row(found: Facts) -> Facts:
    nic = found["nic"]
    return {
        "cluster": found["name"],
        "node": f"{found['gpus_per_node']} x {found['gpu']['name']}",
        "fabric": found["fabric"]["kind"],
        "GB/s": f"{found['fabric']['bandwidth_bytes_per_s'] / GB:g}",
        "NICs": found["nics_per_node"],
        "Gb/s": f"{nic['bandwidth_bytes_per_s'] * 8 / GB:g}" if nic else "-",
        "network": found["network"],
    }
