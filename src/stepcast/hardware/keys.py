"""The keys that a description of a GPU or a cluster may have, and what each of them holds."""

from stepcast.hardware.quantity import Dimension

DTYPES = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "mxfp8", "fp4", "nvfp4", "int8")
UNITS = ("matrix", "vector", "reached")  # reached: the fastest matrix multiply that was published

Kind = Dimension | type
LARGEST_COUNT = 10_000_000
SMALLEST_RATIO = 1e-4

GPU_KEYS: dict[str, Kind] = {
    "base": str,
    "aliases": list,
    "vendor": str,
    "architecture": str,
    "memory": Dimension.SIZE,
    "memory_bandwidth": Dimension.RATE,
    "l2": Dimension.SIZE,
    "sms": int,
    "clock": Dimension.FREQUENCY,
    "shared_memory_per_sm": Dimension.SIZE,
    "launch_overhead": Dimension.TIME,
    "power": Dimension.POWER,
    **{f"{unit}.{dtype}": Dimension.FLOPS for unit in UNITS for dtype in DTYPES},
}
LINK_KEYS: dict[str, Kind] = {"bandwidth": Dimension.RATE, "latency": Dimension.TIME, "efficiency": float}
LINKS = ("node.nic", "node.fabric.link", "node.fabric.host_link", "node.fabric.socket_link", "node.host.link")
CLUSTER_KEYS: dict[str, Kind] = {
    "base": str,
    "aliases": list,
    "description": str,
    "nodes": int,
    "other.cluster": str,
    "other.nodes": int,
    "node.gpus": int,
    "node.nics": int,
    "node.host.memory": Dimension.SIZE,
    "node.host.memory_bandwidth": Dimension.RATE,
    "node.host.links": int,
    "node.fabric.kind": str,
    "node.fabric.sockets": int,
    "node.fabric.in_switch_reduction": bool,
    "node.fabric.reduction_share": float,
    "node.fabric.planes": int,
    "node.nic.transport": str,
    "network.kind": str,
    "network.switch_latency": Dimension.TIME,
    "network.leaf_nodes": int,
    "network.oversubscription": float,
    "network.scale_up_nodes": int,
    "network.shape": list,
    "network.in_network_reduction": bool,
    "network.pod_nodes": int,
    "network.pod_oversubscription": float,
    "network.spines": int,
    "network.cores": int,
    "network.routing": str,
    "network.queue_pairs": int,
    "network.seed": int,
    "network.failed": list,
    "network.slow": list,
    "communication.launch_overhead": Dimension.TIME,
    "communication.channel_overhead": Dimension.TIME,
    "communication.exchange_share": float,
    "communication.expert_share": float,
    "communication.library": str,
    **{f"{link}.{key}": kind for link in LINKS for key, kind in LINK_KEYS.items()},
    **{f"gpu.{key}": kind for key, kind in GPU_KEYS.items()},
}
