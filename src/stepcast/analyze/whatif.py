"""What-if texts (``K=V``) as changes of a recorded run."""

import re
from collections.abc import Callable, Mapping, Sequence

from stepcast.analyze import changes
from stepcast.analyze.megatron.stragglers import find_stragglers
from stepcast.analyze.play import measured, rank_parts
from stepcast.analyze.recording import Recording
from stepcast.analyze.result import bus_factor
from stepcast.cost.collectives.choose import price
from stepcast.cost.collectives.route import route_of
from stepcast.hardware import Cluster, group_path, load_gpu
from stepcast.ir.dataclass import dataclass
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import grid_of
from stepcast.ir.work import CollectiveKind
from stepcast.units import parse_size_bytes

ASSUMED_GPU = "a100-sxm-80gb"
GROUPS = ("tp", "cp", "ep", "dp", "pp", "embedding", "expert-dp")
KNOWN = (
    "micro-batches=16, schedule=interleaved|1f1b|gpipe, bandwidth.tp=2x (or 50GB/s; also dp, pp, embedding, "
    "ep), rank.7=healthy (or 1.5x as long), stage.3.layers=-1, dp=4, gpu=h100, compute=0.9x"
)
FACTOR = re.compile(r"([0-9]*\.?[0-9]+)x")


class WhatIfError(ValueError):
    """A change that cannot be understood or applied."""


@dataclass(frozen=True, slots=True)
class GpuChange:
    """Another GPU: the factors of its compute time and of its memory-bound time."""

    name: str
    compute: float
    memory: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts that a change may need and a trace does not contain: another GPU, unmeasured communication."""

    gpu: Callable[[str], GpuChange] | None = None
    all_reduce_s: changes.AllReduceTime | None = None


def surroundings(dtype: str, tp: int, gpu: str | None = None, cluster: Cluster | None = None) -> Surroundings:
    """Return the hardware of a run in *dtype* with *tp* tensor ranks, on *gpu* or on that of *cluster*."""
    if cluster is None:
        return Surroundings(lambda name: gpu_change(gpu, name, dtype))
    own = gpu or cluster.gpu.name

    def all_reduce_s(size_bytes: int, ranks: int) -> float:
        path = group_path(cluster, grid_of(Layout(tp=tp, dp=ranks)), Group.DP)
        return float(price(CollectiveKind.ALL_REDUCE, size_bytes, route_of(path, cluster)).seconds)

    return Surroundings(lambda name: gpu_change(own, name, dtype), all_reduce_s)


def gpu_change(measured: str | None, other: str, dtype: str) -> GpuChange:
    """Return the ratios of the published peaks: matmul in the run's number format, and memory bandwidth."""
    old, new = load_gpu(measured or ASSUMED_GPU), load_gpu(other)
    known = "" if measured else " (the trace does not name its GPU; name it with --gpu)"
    if dtype == "fp32" and "tf32" in old.matrix_flops:
        dtype = "tf32"  # the shared fp32 traces run at 67 TFLOP/s, three times what an A100 has in fp32
    return GpuChange(
        f"{new.name} in place of {old.name}{known}, in {dtype}",
        old.matrix_peak_flops(dtype) / new.matrix_peak_flops(dtype),
        old.memory_bandwidth_bytes_per_s / new.memory_bandwidth_bytes_per_s,
    )


def apply_changes(recording: Recording, texts: Sequence[str], around: Surroundings | None = None) -> Recording:
    """Apply every ``K=V`` text to *recording*, in an order that gives each what it needs."""
    around = around or Surroundings()
    pairs = [split_change(text) for text in texts]
    values = dict(pairs)
    if len(values) < len(pairs):
        raise WhatIfError("a change is given twice; give each once")
    around = _add_stated_bandwidth(around, values)
    for key, value in pairs:
        if key in ("micro-batches", "schedule", "dp") or key.startswith("bandwidth."):
            continue
        recording = _apply_one(recording, key, value, around)
    if "dp" in values:
        recording = changes.change_replicas(recording, _parse_count("dp", values["dp"]), around.all_reduce_s)
    if "micro-batches" in values or "schedule" in values:
        number = _parse_count("micro-batches", values["micro-batches"]) if "micro-batches" in values else None
        recording = changes.reschedule(recording, number, values.get("schedule"))
    for key, value in pairs:
        if key.startswith("bandwidth."):
            recording = _change_bandwidth(recording, key, value)
    return recording


def split_change(text: str, known: str = KNOWN) -> tuple[str, str]:
    """Return the key and the value of a change; *known* are the changes to name in an error."""
    key, equals, value = (word.strip() for word in text.rpartition("="))
    if not equals or not key or not value:
        raise WhatIfError(f"{text!r} is no change; write K=V, one of: {known}")
    return key if ":" in key else key.replace("_", "-"), value


def _parse_count(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise WhatIfError(f"{key} must be a whole number from 1 to 999,999, not {text!r}")
    return int(text)


def parse_factor(key: str, text: str) -> float:
    """Return the factor of a change such as ``0.5x``."""
    match = FACTOR.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise WhatIfError(f"{key} must be a factor such as 2x or 0.5x, not {text!r}")
    return float(match[1])


def _apply_one(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    """Apply a change of a rank, a stage, the GPU or its computation."""
    if match := re.fullmatch(r"rank\.([0-9]{1,7})", key):
        rank = int(match[1])
        if value == "healthy":
            slow = find_stragglers(recording, rank_parts(measured(recording)))
            return changes.heal_rank(recording, rank, frozenset(straggler.rank for straggler in slow))
        slower = changes.scale_rank(recording, rank, parse_factor(key, value))
        return changes.assuming(slower, f"all work of rank {rank} takes {value} as long")
    if match := re.fullmatch(r"stage\.([0-9]{1,5})\.layers", key):
        if not re.fullmatch(r"[+-][0-9]{1,4}", value):
            raise WhatIfError(f"{key} must be a change such as -1 or +2, not {value!r}")
        return changes.change_layers(recording, int(match[1]), int(value))
    if key == "compute":
        changed = changes.scale_compute(recording, parse_factor(key, value), 1.0)
        return changes.assuming(changed, f"forward and backward take {value} as long")
    if key != "gpu":
        raise WhatIfError(f"unknown change {key!r}; known: {KNOWN}")
    if around.gpu is None:
        raise WhatIfError("gpu= scales by the GPU that ran, which a trace does not name; name it with --gpu")
    change = around.gpu(value)
    return changes.assuming(
        changes.scale_compute(recording, change.compute, change.memory),
        f"{change.name}: forward and backward take {change.compute:.3g} and memory-bound work "
        f"{change.memory:.3g} of the time, by the published peaks; communication stays as it was",
    )


def _parse_group(key: str) -> str:
    group = key.split(".", 1)[1]
    if group not in GROUPS:
        raise WhatIfError(f"unknown group {group!r} in {key}; known: {', '.join(GROUPS)}")
    return group


def _parse_rate(text: str) -> float | None:
    """Return the bytes per second of a text like ``50GB/s``; None for a factor."""
    return float(parse_size_bytes(text[:-2])) if text.lower().endswith("/s") else None


def _change_bandwidth(recording: Recording, key: str, value: str) -> Recording:
    rate = _parse_rate(value)
    if rate is None:
        return changes.scale_transfers(recording, _parse_group(key), parse_factor(key, value))
    if rate <= 0:
        raise WhatIfError(f"{key} must be above zero, not {value!r}")
    return changes.set_bandwidth(recording, _parse_group(key), rate)


def _add_stated_bandwidth(around: Surroundings, values: Mapping[str, str]) -> Surroundings:
    """Use a given bandwidth between replicas for the all-reduce that one replica did not need."""
    rate = _parse_rate(values.get("bandwidth.dp", ""))
    if not rate:
        return around
    return Surroundings(around.gpu, lambda size_bytes, ranks: size_bytes * bus_factor("all-reduce", ranks) / rate)
