"""GPUs and clusters as a person reads them: pairs for ``show``, rows for ``list``."""

from typing import Any

from stepcast.units import GB, GIB, TFLOPS, US

Facts = dict[str, Any]


def cluster_pairs(found: Facts) -> list[tuple[str, object]]:
    """The facts of a cluster as a person reads them."""
    gpu, fabric, nic = found["gpu"], found["fabric"], found["nic"]
    peaks = ", ".join(f"{name} {flops / TFLOPS:g}" for name, flops in gpu["matrix_flops"].items())
    size = "as large as asked for" if found["gpus"] is None else f"{found['nodes']} nodes, {found['gpus']} GPUs"
    pairs: list[tuple[str, object]] = [
        ("cluster", f"{found['name']}: {found['description']}" if found["description"] else found["name"]),
        ("size", size),
        ("node", f"{found['gpus_per_node']} x {gpu['name']}"),
        ("matrix peak", f"{peaks} TFLOP/s dense"),
        ("memory", f"{gpu['memory_bytes'] / GIB:.0f} GiB at {gpu['memory_bandwidth_bytes_per_s'] / GB:,.0f} GB/s"),
        (
            "fabric",
            f"{fabric['kind']}, {_rate(fabric)}" + (", adds in the switch" if found["in_switch_reduction"] else ""),
        ),
        ("NICs", f"{found['nics_per_node']} of {_rate(nic)}{_spoken(found)}" if nic else "none"),
        ("network", ", ".join([found["network"], *found["routes"]])),
    ]
    if host := found["host"]:
        rate = host["memory_bandwidth_bytes_per_s"] / GB
        memory = f"{host['memory_bytes'] / GB:,.0f} GB at {rate:,.0f} GB/s"
        pairs.append(("host", f"{memory}, {host['links']} links of {_rate(host['link'])}"))
    if found["scale_up_gpus"] > found["gpus_per_node"]:
        pairs.append(("scale-up domain", f"{found['scale_up_gpus']} GPUs"))
    return pairs


def wiring_pairs(found: Facts) -> list[tuple[str, object]]:
    """What a file says of the wiring of a node or of a network."""
    pairs: list[tuple[str, object]] = []
    if "gpus" in found:
        pairs.append(("node", f"{found['gpus']} x {found.get('gpu', 'GPU')}"))
    if "fabric" in found:
        links = f", {found['fabric_links']:g} NVLinks" if "fabric_links" in found else ""
        rate = f", {found['fabric_bytes_per_s'] / GB:g} GB/s each way" if "fabric_bytes_per_s" in found else ""
        pairs.append(("fabric", f"{found['fabric']}{links}{rate}"))
    if "sockets" in found:
        pairs.append(("sockets", found["sockets"]))
    if "nics" in found:
        rate = f" of {found['nic_bytes_per_s'] / GB:g} GB/s" if "nic_bytes_per_s" in found else ""
        pairs.append(("NICs", f"{found['nics']}{rate}" if found["nics"] else "none"))
    words = {
        "nodes": "cluster",
        "leaf_nodes": "under a leaf",
        "pod_nodes": "in a pod",
        "scale_up_nodes": "in an NVLink domain",
    }
    pairs += [(word, f"{found[key]:,} nodes") for key, word in words.items() if key in found]
    return pairs


def _spoken(found: Facts) -> str:
    return f", {found['transport']}" if found["transport"] else ""


def _rate(link: Facts) -> str:
    reached = f" x {link['efficiency']:.2f}" if link["efficiency"] < 1 else ""
    return f"{link['bandwidth_bytes_per_s'] / GB:g} GB/s{reached} each way, {link['latency_s'] / US:.2g} us"


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
        "transport": found["transport"] or "-",
        "network": found["network"],
    }
