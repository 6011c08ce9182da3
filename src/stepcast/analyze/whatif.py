"""``K=V`` texts as changes of a run, several at once."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from stepcast.analyze.changes import (
    assuming,
    bus_factor,
    change_layers,
    heal_rank,
    scale_compute,
    scale_rank,
    scale_transfers,
    set_bandwidth,
)
from stepcast.analyze.megatron.stragglers import find_stragglers
from stepcast.analyze.parts import rank_parts
from stepcast.analyze.play import measured
from stepcast.analyze.recording import Recording
from stepcast.analyze.relayout import reschedule
from stepcast.analyze.replicas import AllReduceTime, change_replicas
from stepcast.units import parse_size_bytes

GROUPS = ("tp", "cp", "ep", "dp", "pp", "embedding", "expert-dp")
KNOWN = (
    "micro-batches=16, schedule=interleaved|1f1b|gpipe, bandwidth.tp=2x (or 50GB/s; also dp, pp, embedding, "
    "ep), rank.7=healthy (or 1.5x as long), stage.3.layers=-1, dp=4, gpu=h100, compute=0.9x"
)
FACTOR = re.compile(r"([0-9]*\.?[0-9]+)x")


class WhatIfError(ValueError):
    """A change that cannot be understood or made."""


@dataclass(frozen=True, slots=True)
class GpuChange:
    """Another GPU: how much longer (below one: shorter) its computation and its memory traffic take."""

    name: str
    compute: float
    memory: float


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a trace does not say and a change may need; given by the caller."""

    gpu: Callable[[str], GpuChange] | None = None
    all_reduce_s: AllReduceTime | None = None


Apply = Callable[[Recording, str, str, "Surroundings"], Recording]


def apply_changes(
    recording: Recording, texts: Sequence[str], around: Surroundings | None = None
) -> Recording:
    """*recording* under every change, in an order that lets each see what it needs."""
    around = around or Surroundings()
    pairs = [_split(text) for text in texts]
    values = dict(pairs)
    if len(values) < len(pairs):
        raise WhatIfError("a change is given twice; give each once")
    around = _with_stated_bandwidth(around, values)
    for key, value in pairs:
        if key in ("micro-batches", "schedule", "dp") or key.startswith("bandwidth."):
            continue
        recording = _apply_of(key)(recording, key, value, around)
    if "dp" in values:
        recording = change_replicas(recording, _count("dp", values["dp"]), around.all_reduce_s)
    if "micro-batches" in values or "schedule" in values:
        number = _count("micro-batches", values["micro-batches"]) if "micro-batches" in values else None
        recording = reschedule(recording, number, values.get("schedule"))
    for key, value in pairs:
        if key.startswith("bandwidth."):
            recording = _bandwidth(recording, key, value)
    return recording


def _split(text: str) -> tuple[str, str]:
    key, equals, value = (word.strip() for word in text.partition("="))
    if not equals or not key or not value:
        raise WhatIfError(f"{text!r} is no change; write K=V, one of: {KNOWN}")
    return key.replace("_", "-"), value


def _apply_of(key: str) -> Apply:
    for pattern, apply in CHANGES.items():
        if re.fullmatch(pattern, key):
            return apply
    raise WhatIfError(f"unknown change {key!r}; known: {KNOWN}")


def _count(key: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise WhatIfError(f"{key} must be a whole number from 1 to 999,999, not {text!r}")
    return int(text)


def _factor(key: str, text: str) -> float:
    match = FACTOR.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise WhatIfError(f"{key} must be a factor such as 2x or 0.5x, not {text!r}")
    return float(match[1])


def _rank(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    rank = int(key.split(".")[1])
    if value == "healthy":
        slow = find_stragglers(recording, rank_parts(measured(recording)))
        return heal_rank(recording, rank, frozenset(one.rank for one in slow))
    return assuming(
        scale_rank(recording, rank, _factor(key, value)), f"all work of rank {rank} takes {value} as long"
    )


def _layers(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    if not re.fullmatch(r"[+-][0-9]{1,4}", value):
        raise WhatIfError(f"{key} must be a change such as -1 or +2, not {value!r}")
    return change_layers(recording, int(key.split(".")[1]), int(value))


def _gpu(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    if around.gpu is None:
        raise WhatIfError("gpu= scales by the GPU that ran, which a trace does not name; say it with --gpu")
    change = around.gpu(value)
    return assuming(
        scale_compute(recording, change.compute, change.memory),
        f"{change.name}: forward and backward take {change.compute:.3g} and memory-bound work "
        f"{change.memory:.3g} of the time, as the published peaks say; communication stays as it was",
    )


def _compute(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    factor = _factor(key, value)
    return assuming(scale_compute(recording, factor, 1.0), f"forward and backward take {value} as long")


CHANGES: Mapping[str, Apply] = {
    r"rank\.[0-9]{1,7}": _rank,
    r"stage\.[0-9]{1,5}\.layers": _layers,
    r"gpu": _gpu,
    r"compute": _compute,
}


def _group(key: str) -> str:
    group = key.split(".", 1)[1]
    if group not in GROUPS:
        raise WhatIfError(f"unknown group {group!r} in {key}; known: {', '.join(GROUPS)}")
    return group


def _rate(text: str) -> float | None:
    """``50GB/s`` as bytes per second; None where the text is a factor."""
    return float(parse_size_bytes(text[:-2])) if text.lower().endswith("/s") else None


def _bandwidth(recording: Recording, key: str, value: str) -> Recording:
    rate = _rate(value)
    if rate is None:
        return scale_transfers(recording, _group(key), _factor(key, value))
    if rate <= 0:
        raise WhatIfError(f"{key} must be above zero, not {value!r}")
    return set_bandwidth(recording, _group(key), rate)


def _with_stated_bandwidth(around: Surroundings, values: Mapping[str, str]) -> Surroundings:
    """A stated bandwidth between replicas prices the all-reduce that one replica did not need."""
    rate = _rate(values.get("bandwidth.dp", ""))
    if not rate:
        return around
    return Surroundings(
        around.gpu, lambda size_bytes, ranks: size_bytes * bus_factor("all-reduce", ranks) / rate
    )
