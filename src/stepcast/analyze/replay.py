"""Replay a measured run, as it was and under changed conditions.

On the links of a cluster, meetings that coincide share them: a meeting takes its measured (or changed) time if its
links have the capacity. The interference of groups in the measured run is in its times and is not added again; if
changes bring more together than the links can carry, it takes longer.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import ceil

import msgspec
import numpy as np

from stepcast.analyze import changes
from stepcast.analyze import recording as recordings
from stepcast.analyze.changes import assuming
from stepcast.analyze.megatron.analysis import find_stragglers
from stepcast.analyze.recording import COMMUNICATION, PlayedStep, Recording
from stepcast.analyze.result import AnalysisResult
from stepcast.cost.collectives.choose import price
from stepcast.cost.collectives.flows import collective_flows, members_of, message_flows
from stepcast.cost.collectives.route import route_of
from stepcast.hardware import Cluster, group_path, load_gpu
from stepcast.hardware.graph import Network, network_of, seats_of
from stepcast.hardware.path import resolve
from stepcast.ir.arrays import IntArray
from stepcast.ir.flows import FlowSet
from stepcast.ir.layout import FAMILIES, Group, Layout
from stepcast.ir.types import dataclass, pick
from stepcast.ir.work import Collective, CollectiveKind, bus_factor
from stepcast.simulation.fluid.engine import SharedProgram, Traffic, simulate_fluid, waits_of
from stepcast.units import Dimension, parse_quantity
from stepcast.views.declared import phrase

# ---- what-if texts (``K=V``) as changes of a recorded run -------------------------------------------------

ASSUMED_GPU = "a100-sxm-80gb"
KNOWN = phrase("changes-of-recordings", {})
FACTOR = re.compile(r"([0-9]*\.?[0-9]+(?:e[-+]?[0-9]{1,2})?)x")


class WhatIfError(ValueError):
    """A change that cannot be understood or applied."""


GpuChange = tuple[str, float, float]
"""Another GPU in words, and the factors of its compute time and of its memory-bound time."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Facts that a change may need and a trace does not contain: another GPU, unmeasured communication."""

    gpu: Callable[[str], GpuChange] | None = None
    all_reduce_s: changes.AllReduceTime | None = None


def surroundings(dtype: str, tp: int, gpu: str | None = None, cluster: Cluster | None = None) -> Surroundings:
    """Return the hardware of a run in *dtype* with *tp* tensor ranks, on *gpu* or on that of *cluster*."""
    measured_gpu = gpu or (cluster.gpu.name if cluster is not None else None)

    def gpu_change(other: str) -> GpuChange:
        """Return the ratios of the published peaks: matmul in the run's number format, and memory bandwidth."""
        old, new = load_gpu(measured_gpu or ASSUMED_GPU), load_gpu(other)
        known = "" if measured_gpu else " (the trace does not name its GPU; name it with --gpu)"
        # The shared fp32 traces run at 67 TFLOP/s, three times what an A100 has in fp32.
        precision = "tf32" if dtype == "fp32" and "tf32" in old.matrix_flops else dtype
        compute = old.matrix_peak_flops(precision) / new.matrix_peak_flops(precision)
        memory = old.memory_bandwidth_bytes_per_s / new.memory_bandwidth_bytes_per_s
        return f"{new.name} in place of {old.name}{known}, in {precision}", compute, memory

    if cluster is None:
        return Surroundings(gpu_change)

    def all_reduce_s(size_bytes: int, ranks: int) -> float:
        path = group_path(cluster, Layout(tp=tp, dp=ranks), Group.DP)
        return float(price(CollectiveKind.ALL_REDUCE, size_bytes, route_of(path, cluster)).seconds)

    return Surroundings(gpu_change, all_reduce_s)


def apply_changes(recording: Recording, texts: Sequence[str], around: Surroundings | None = None) -> Recording:
    """Apply every ``K=V`` text to *recording*, in an order that gives each what it needs."""
    around = around or Surroundings()
    pairs = [split_change(text) for text in texts]
    values = dict(pairs)
    if len(values) < len(pairs):
        raise WhatIfError("a change is given twice; give each once")
    if dp_rate := _parse_rate(values.get("bandwidth.dp", "")):  # also of the all-reduce that one replica did not need
        around = Surroundings(
            around.gpu, lambda size_bytes, ranks: size_bytes * bus_factor("all-reduce", ranks) / dp_rate
        )
    for key, value in pairs:
        if key not in ("micro-batches", "schedule", "dp") and not key.startswith("bandwidth."):
            recording = _apply_one(recording, key, value, around)
    if "dp" in values:
        recording = changes.change_replicas(recording, _parse_count("dp", values["dp"]), around.all_reduce_s)
    if "micro-batches" in values or "schedule" in values:
        number = _parse_count("micro-batches", values["micro-batches"]) if "micro-batches" in values else None
        recording = changes.reschedule(recording, number, values.get("schedule"))
    for key, value in (pair for pair in pairs if pair[0].startswith("bandwidth.")):
        group, rate = key.split(".", 1)[1], _parse_rate(value)
        if rate is not None and rate <= 0:
            raise WhatIfError(f"{key} must be above zero, not {value!r}")
        if group not in COMMUNICATION:
            raise WhatIfError(f"unknown group {group!r} in {key}; known: {', '.join(COMMUNICATION)}")
        factor = parse_factor(key, value, ", or a rate such as 50GB/s") if rate is None else 1.0
        recording = changes.change_bandwidth(recording, group, factor, rate)
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


def parse_factor(key: str, text: str, or_else: str = "") -> float:
    """Return the factor of a change such as ``0.5x``; *or_else* names other values in an error."""
    match = FACTOR.fullmatch(text)
    if match is None or float(match[1]) <= 0:
        raise WhatIfError(f"{key} must be a factor such as 2x or 0.5x{or_else}, not {text!r}")
    return float(match[1])


def _apply_one(recording: Recording, key: str, value: str, around: Surroundings) -> Recording:
    """Apply a change of a rank, a stage, the GPU or its computation."""
    if match := re.fullmatch(r"rank\.([0-9]{1,7})", key):
        rank = int(match[1])
        if value == "healthy":
            slow = find_stragglers(recording, recordings.rank_parts(recordings.play_measured(recording)))
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
    words, compute, memory = around.gpu(value)
    return changes.assuming(
        changes.scale_compute(recording, compute, memory),
        f"{words}: forward and backward take {compute:.3g} and memory-bound work {memory:.3g} of the time, by the "
        "published peaks; communication stays as it was",
    )


def _parse_rate(text: str) -> float | None:
    """Return the bytes per second of a text like ``50GB/s`` or ``400Gb/s``; None for any other."""
    return parse_quantity(text, Dimension.RATE) if text.endswith("s") else None


def play_shared(recording: Recording, cluster: Cluster) -> PlayedStep:
    """Simulate *recording* on the links of *cluster*."""
    gpus = recording.layout.gpus
    if cluster.gpus is not None and gpus > cluster.gpus:
        raise ValueError(f"the run has {gpus} GPUs and cluster {cluster.name} has {cluster.gpus}")
    script = recordings.build_script(recording)
    program = script.program.written_out
    duration_s = program.task_durations_s()
    seats = seats_of(cluster, recording.layout)
    network = network_of(cluster, ceil((int(seats.max()) + 1) / cluster.node.gpus))
    meetings = np.flatnonzero(program.rank[program.task_calls()] >= script.real_ranks)
    flows = _meeting_flows(recording, script.meeting_of_rank, cluster, seats, network)
    sets = {task: own for task, own in zip(meetings.tolist(), flows, strict=True) if own is not None}
    kinds, numbers, tasks = np.full(program.tasks, -1, np.int64), np.arange(len(sets)), np.array([*sets], np.int64)
    kinds[tasks] = numbers
    traffic = Traffic(network.links, tuple(sets.values()), numbers, duration_s[tasks])
    shared = SharedProgram(program, duration_s, traffic, kinds, np.zeros(program.tasks), waits_of(program))
    return recordings.place_times(script, simulate_fluid(shared, record=False).times)


def _meeting_flows(
    recording: Recording, numbers: Sequence[int], cluster: Cluster, seats: IntArray, network: Network
) -> Iterator[FlowSet | None]:
    """Yield the flows of meetings; None for those without known traffic, or between ranks that are not a group."""
    layout = recording.layout
    rows = {
        family: {tuple(sorted(row)): index for index, row in enumerate(members_of(layout, family).tolist())}
        for family in FAMILIES
        if family != Group.WORLD
    }
    known: dict[tuple[Collective, float], FlowSet] = {}
    for meeting in (recording.meetings[number] for number in numbers):
        size, members, transfer_s = meeting.size_bytes, meeting.members, meeting.transfer_s
        row = rows.get(meeting.group, {}).get(tuple(members))
        if not size or len(members) < 2 or transfer_s <= 0:
            yield None
        elif meeting.kind == "message":
            ends = members[::-1] if "backward" in meeting.name else members
            source, target = seats[list(ends)][:, None]
            yield message_flows(network, source, target, np.array([float(size)]), transfer_s)
        elif row is None or meeting.kind not in set(CollectiveKind):
            yield None
        else:
            work = Collective(CollectiveKind(meeting.kind), size, Group(meeting.group))
            if (work, transfer_s) not in known:
                path = resolve(cluster, seats[list(members)].tolist())
                algorithm = price(work.kind, size, route_of(path, cluster)).algorithm
                if algorithm is not None:
                    known[work, transfer_s] = collective_flows(network, seats, layout, work, algorithm, transfer_s)
            flows = known.get((work, transfer_s))
            yield None if flows is None else flows.select(np.flatnonzero(flows.group == row))


class StateResult(msgspec.Struct, frozen=True):
    step_s: float
    breakdown_s: dict[str, float]
    stages: list[dict[str, float]]


class ReplayResult(AnalysisResult, frozen=True, kw_only=True):
    """A replayed step with changes, next to the measured step and the replay without changes."""

    view, title = "measured.replay_view", "replay"
    step_s: float
    measured_step_s: float
    replayed_step_s: float
    error: float  # of the replay without changes against the measured step, signed
    changes: list[str]
    change_s: float
    work_factor: float  # sequences of a step with the changes, divided by those without
    speedup: float | None  # work per second with the changes, divided by that without
    speedup_per_gpu: float | None
    step_factor: float | None
    sequences_per_s: dict[str, float | None]
    layers: dict[str, int | None]
    tp: int
    pp: int
    dp: int
    gpus: int
    micro_batches: int
    configuration: dict[str, object]
    breakdown_s: dict[str, float]
    stages: list[dict[str, float]]
    before: StateResult
    measured: StateResult
    assumptions: list[str]
    warnings: list[str]


def _state(played: PlayedStep) -> StateResult:
    parts = recordings.rank_parts(played)
    return StateResult(played.step_s, recordings.mean_parts(parts), recordings.stage_rows(parts))


@dataclass(frozen=True)
class Replay:
    """The run as measured, replayed, and replayed with changes (the same if there are none)."""

    recording: Recording
    changed: Recording
    changes: tuple[str, ...]
    measured: PlayedStep
    before: PlayedStep
    after: PlayedStep

    @property
    def result(self) -> ReplayResult:
        recording, changed, layout = self.recording, self.changed, self.changed.layout
        before_s, after_s = self.before.step_s, self.after.step_s
        batches = {name: run.micro_batches * run.layout.dp for name, run in (("before", recording), ("after", changed))}
        micro_batch, work_factor = recording.facts.get("micro_batch"), batches["after"] / batches["before"]
        speedup = work_factor * before_s / after_s if after_s else None
        return ReplayResult(
            step_s=after_s,
            measured_step_s=recording.measured_step_s,
            replayed_step_s=before_s,
            error=before_s / recording.measured_step_s - 1,
            changes=list(self.changes),
            change_s=after_s - before_s,
            work_factor=work_factor,
            speedup=speedup,
            speedup_per_gpu=None if speedup is None else speedup / (layout.gpus / recording.layout.gpus),
            step_factor=after_s / before_s if before_s else None,
            sequences_per_s={
                name: batches[name] * micro_batch / step_s if isinstance(micro_batch, int) and step_s else None
                for name, step_s in (("before", before_s), ("after", after_s))
            },
            layers={"before": recording.layers, "after": changed.layers},
            **pick(layout, "tp pp dp gpus"),
            micro_batches=changed.micro_batches,
            configuration=changed.configuration | {"micro_batches": changed.micro_batches},
            **pick(_state(self.after), "breakdown_s stages"),
            before=_state(self.before),
            measured=_state(self.measured),
            assumptions=list(changed.assumptions),
            warnings=list(changed.warnings),
        )


def replay(
    recording: Recording, changes: Sequence[str] = (), around: Surroundings | None = None, shares: Cluster | None = None
) -> Replay:
    """Simulate *recording* as it was, and under *changes* (``K=V`` texts).

    Its communication *shares* the links of a cluster if one is given.
    """
    changed = apply_changes(recording, changes, around)
    if changes and not recording.is_complete:
        changed = assuming(changed, "time spent with ranks that were not given stays as it was recorded")
    run: Callable[[Recording], PlayedStep] = recordings.play
    if shares is not None:
        run = partial(play_shared, cluster=shares)
        changed = assuming(changed, f"engine fluid: concurrent communication shares the links of {shares.name}")
    before = run(recording)
    after = run(changed) if changes else before
    return Replay(recording, changed, tuple(changes), recordings.play_measured(recording), before, after)
