"""Replay a measured run, as it was and under changed conditions.

On the links of a cluster, meetings that coincide share them: a meeting takes its measured (or changed) time if its
links have the capacity. The interference of groups in the measured run is in its times and is not added again; if
changes bring more together than the links can carry, it takes longer.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import ceil

import msgspec
import numpy as np

from stepcast.analyze import play as playing
from stepcast.analyze.changes import assuming
from stepcast.analyze.recording import Meeting, Recording
from stepcast.analyze.result import AnalysisResult
from stepcast.analyze.whatif import Surroundings, apply_changes
from stepcast.cost.collectives.choose import price
from stepcast.cost.collectives.flows import collective_flows, members_of, message_flows
from stepcast.cost.collectives.route import route_of
from stepcast.hardware import Cluster
from stepcast.hardware.graph import Network, network_of, seats_of
from stepcast.hardware.path import resolve
from stepcast.ir.arrays import IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.facts import FactDict
from stepcast.ir.flows import FlowSet
from stepcast.ir.group import FAMILIES, Group
from stepcast.ir.ranks import RankGrid, grid_of
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.simulation.fluid.engine import SharedProgram, Traffic, simulate_fluid, waits_of
from stepcast.units import format_seconds

KINDS = {str(kind): kind for kind in CollectiveKind}


def play_shared(recording: Recording, cluster: Cluster) -> playing.PlayedStep:
    """Simulate *recording* on the links of *cluster*."""
    gpus = recording.layout.gpus
    if cluster.gpus is not None and gpus > cluster.gpus:
        raise ValueError(f"the run has {gpus} GPUs and cluster {cluster.name} has {cluster.gpus}")
    script = playing.build_script(recording)
    program = script.program.written_out
    duration_s = program.task_durations_s()
    meetings = np.flatnonzero(program.rank[program.task_calls()] >= script.real_ranks)
    meeting_flows = _MeetingFlows(cluster, recording)
    sets: list[FlowSet] = []
    kinds = np.full(program.tasks, -1, np.int64)
    for task, number in zip(meetings.tolist(), script.meeting_of_rank, strict=True):
        flows = meeting_flows.flows(recording.meetings[number])
        if flows is not None and duration_s[task] > 0:
            kinds[task] = len(sets)
            sets.append(flows)
    tasks = np.flatnonzero(kinds >= 0)
    traffic = Traffic(
        meeting_flows.network.links,
        tuple(sets),
        np.arange(len(sets)),
        np.arange(len(sets)),
        duration_s[tasks][np.argsort(kinds[tasks])],
        np.ones(len(sets)),
    )
    shared = SharedProgram(program, duration_s, traffic, kinds, np.zeros(program.tasks), waits_of(program))
    return playing.place_times(script, simulate_fluid(shared, record=False).times)


class _MeetingFlows:
    """The flows of meetings."""

    def __init__(self, cluster: Cluster, recording: Recording) -> None:
        layout = recording.layout
        self.cluster, self.layout = cluster, layout
        self.grid: RankGrid = grid_of(layout)
        self.seats: IntArray = seats_of(cluster, layout)
        nodes = ceil((int(self.seats.max()) + 1) / cluster.node.gpus)
        self.network: Network = network_of(cluster, nodes)
        self.rows = {
            family: {tuple(sorted(row)): index for index, row in enumerate(members_of(self.grid, family).tolist())}
            for family in FAMILIES
            if family != Group.WORLD
        }
        self.known: dict[object, FlowSet] = {}

    def flows(self, meeting: Meeting) -> FlowSet | None:
        """Return None for meetings without known traffic, or between ranks that are not a group."""
        size, members = meeting.size_bytes, meeting.members
        if not size or len(members) < 2 or meeting.transfer_s <= 0:
            return None
        if meeting.kind == "message":
            ends = members[::-1] if "backward" in meeting.name else members
            source, target = self.seats[list(ends)][:, None]
            return message_flows(self.network, source, target, np.array([float(size)]), meeting.transfer_s)
        row = self.rows.get(meeting.group, {}).get(tuple(members))
        if row is None or meeting.kind not in KINDS:
            return None
        work = Collective(KINDS[meeting.kind], size, Group(meeting.group))
        key = (work, meeting.transfer_s)
        if key not in self.known:
            path = resolve(self.cluster, self.seats[list(members)].tolist())
            algorithm = price(work.kind, size, route_of(path, self.cluster)).algorithm
            if algorithm is None:
                return None
            self.known[key] = collective_flows(self.network, self.seats, self.grid, work, algorithm, meeting.transfer_s)
        flows = self.known[key]
        return flows.at(np.flatnonzero(flows.group == row))


class StateResult(msgspec.Struct, frozen=True):
    step_s: float
    breakdown_s: dict[str, float]
    stages: list[dict[str, float]]


class ReplayResult(AnalysisResult, frozen=True, kw_only=True):
    """A replayed step with changes, next to the measured step and the replay without changes."""

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


@dataclass(frozen=True)
class ReplayState:
    """A played step with the time of its ranks by part."""

    played: playing.PlayedStep
    parts: tuple[playing.RankParts, ...]

    @property
    def step_s(self) -> float:
        return self.played.step_s

    @property
    def result(self) -> StateResult:
        return StateResult(self.step_s, playing.mean_parts(self.parts), playing.stage_rows(self.parts))


def _state(played: playing.PlayedStep) -> ReplayState:
    return ReplayState(played, playing.rank_parts(played))


@dataclass(frozen=True)
class Replay:
    """The run as measured, replayed, and replayed with changes (the same if there are none)."""

    recording: Recording
    changed: Recording
    changes: tuple[str, ...]
    measured: ReplayState
    before: ReplayState
    after: ReplayState

    def __repr__(self) -> str:
        changes = ", ".join(self.changes) or "nothing changed"
        was, then = format_seconds(self.before.step_s), format_seconds(self.after.step_s)
        return f"Replay({changes}: {was} to {then} a step)"

    def _repr_html_(self) -> str:
        from stepcast.views.html import render_notebook
        from stepcast.views.measured import replay_view

        return render_notebook(replay_view(self.facts()), "replay")

    def facts(self) -> FactDict:
        return self.result.facts()

    @property
    def error(self) -> float:
        return self.before.step_s / self.recording.measured_step_s - 1

    @property
    def result(self) -> ReplayResult:
        recording, changed, layout = self.recording, self.changed, self.changed.layout
        before_s, after_s = self.before.step_s, self.after.step_s
        batches = {name: run.micro_batches * run.layout.dp for name, run in (("before", recording), ("after", changed))}
        micro_batch, work_factor = recording.facts.get("micro_batch"), batches["after"] / batches["before"]
        speedup = work_factor * before_s / after_s if after_s else None
        after = self.after.result
        return ReplayResult(
            step_s=after_s,
            measured_step_s=recording.measured_step_s,
            replayed_step_s=before_s,
            error=self.error,
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
            layers={"before": _layers(recording), "after": _layers(changed)},
            tp=layout.tp,
            pp=layout.pp,
            dp=layout.dp,
            gpus=layout.gpus,
            micro_batches=changed.micro_batches,
            configuration=changed.configuration | {"micro_batches": changed.micro_batches},
            breakdown_s=after.breakdown_s,
            stages=after.stages,
            before=self.before.result,
            measured=self.measured.result,
            assumptions=list(changed.assumptions),
            warnings=list(changed.warnings),
        )


def _layers(recording: Recording) -> int | None:
    layers = recording.facts.get("layers")
    return layers if isinstance(layers, int) else None


def replay(
    recording: Recording, changes: Sequence[str] = (), around: Surroundings | None = None, shares: Cluster | None = None
) -> Replay:
    """Simulate *recording* as it was, and under *changes* (``K=V`` texts).

    Its communication *shares* the links of a cluster if one is given.
    """
    changed = apply_changes(recording, changes, around)
    if changes and not recording.is_complete:
        changed = assuming(changed, "time spent with ranks that were not given stays as it was recorded")
    run: Callable[[Recording], playing.PlayedStep] = playing.play
    if shares is not None:
        run = partial(play_shared, cluster=shares)
        changed = assuming(changed, f"engine fluid: concurrent communication shares the links of {shares.name}")
    before = _state(run(recording))
    after = _state(run(changed)) if changes else before
    return Replay(recording, changed, tuple(changes), _state(playing.measured(recording)), before, after)
