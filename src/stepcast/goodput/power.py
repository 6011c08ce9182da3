"""What a node draws, by what its GPUs do."""

from collections.abc import Mapping

# Of a GPU's power limit. Measured on an H200 (tools/measure_hf_steps.py, measure_power.py): 653 W of 700 over
# 56 training steps that kept it busy, 121 W with a kernel that only waits. What communication draws that
# computation waits for was not measured: a third is taken, between waiting and moving memory (560 W).
COMPUTING, EXCHANGING, IDLE = 0.93, 0.33, 0.17
BUSY_PARTS = ("compute", "optimizer")
IDLE_PARTS = ("bubble",)


def node_watts(gpu_power_w: float, gpus: int, host_w: float, breakdown_s: Mapping[str, float]) -> float:
    """The mean over a step that spends its time as *breakdown_s* tells."""
    total_s = sum(breakdown_s.values())
    busy_s = sum(breakdown_s.get(part, 0.0) for part in BUSY_PARTS)
    idle_s = sum(breakdown_s.get(part, 0.0) for part in IDLE_PARTS)
    share = (COMPUTING * busy_s + IDLE * idle_s + EXCHANGING * (total_s - busy_s - idle_s)) / (total_s or 1)
    return host_w + gpus * gpu_power_w * share


def idle_node_watts(gpu_power_w: float, gpus: int, host_w: float) -> float:
    return host_w + gpus * gpu_power_w * IDLE
