"""A measured run again, as it was and under changed conditions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import numpy as np

from stepcast.analyze.changes import assuming
from stepcast.analyze.parts import RankParts, breakdown_s, rank_parts, stage_rows
from stepcast.analyze.play import Played, measured, play, played, script_of
from stepcast.analyze.recording import Meeting, Recording, configuration
from stepcast.analyze.whatif import Surroundings, apply_changes
from stepcast.cost.collectives import price, route_of
from stepcast.cost.collectives.flows import collective_flows, members_of, message_flows
from stepcast.hardware import Cluster
from stepcast.hardware.graph import Network, network_of, seats_of
from stepcast.hardware.path import resolve
from stepcast.ir.arrays import IntArray
from stepcast.ir.flows import FlowSet
from stepcast.ir.group import FAMILIES, Group
from stepcast.ir.ranks import RankGrid, grid_of
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.simulation.fluid.engine import Shared, Traffic, simulate_fluid, waits_of
from stepcast.units import format_seconds

# A Recording run again on the links of a cluster: meetings that fall together share them.
#
# A meeting takes the time that it took, or that a change gave it, where its links have room for that: what
# groups did to each other in the measured run is in its times, and is not added again. Where changes bring
# more together than the links can carry, it takes longer.

KINDS = {str(kind): kind for kind in CollectiveKind}


def play_shared(recording: Recording, cluster: Cluster) -> Played:
    """Simulate *recording* on *cluster*."""
    gpus = recording.layout.gpus
    if cluster.gpus is not None and gpus > cluster.gpus:
        raise ValueError(f"the run has {gpus} GPUs and cluster {cluster.name} has {cluster.gpus}")
    script = script_of(recording)
    program = script.program.written_out
    duration_s = program.task_durations_s()
    meetings = np.flatnonzero(program.rank[program.task_calls()] >= script.real_ranks)
    sending = _Sending(cluster, recording)
    sets: list[FlowSet] = []
    kinds = np.full(program.tasks, -1, np.int64)
    for task, number in zip(meetings.tolist(), script.meeting_of_rank, strict=True):
        flows = sending.flows(recording.meetings[number])
        if flows is not None and duration_s[task] > 0:
            kinds[task] = len(sets)
            sets.append(flows)
    tasks = np.flatnonzero(kinds >= 0)
    traffic = Traffic(
        sending.network.links,
        tuple(sets),
        np.arange(len(sets)),
        np.arange(len(sets)),
        duration_s[tasks][np.argsort(kinds[tasks])],
        np.ones(len(sets)),
    )
    shared = Shared(program, duration_s, traffic, kinds, np.zeros(program.tasks), waits_of(program))
    return played(script, simulate_fluid(shared, record=False).times)


class _Sending:
    """The flows of meetings."""

    def __init__(self, cluster: Cluster, recording: Recording) -> None:
        layout = recording.layout
        self.cluster, self.layout = cluster, layout
        self.grid: RankGrid = grid_of(layout)
        self.seats: IntArray = seats_of(cluster, layout)
        nodes = ceil((int(self.seats.max()) + 1) / cluster.node.gpus)
        self.network: Network = network_of(cluster, nodes)
        self.rows = {
            family: {tuple(sorted(row)): at for at, row in enumerate(members_of(self.grid, family).tolist())}
            for family in FAMILIES
            if family != Group.WORLD
        }
        self.known: dict[object, FlowSet] = {}

    def flows(self, meeting: Meeting) -> FlowSet | None:
        """None of what moves nothing that is known, or between ranks that are no group."""
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
        return self.known[key].of_group(row)


@dataclass(frozen=True)
class ReplayState:
    """One run of the step and where its time went."""

    played: Played
    parts: tuple[RankParts, ...]

    @property
    def step_s(self) -> float:
        return self.played.step_s

    def facts(self) -> dict[str, Any]:
        return {"step_s": self.step_s, "breakdown_s": breakdown_s(self.parts), "stages": stage_rows(self.parts)}


@dataclass(frozen=True)
class Replay:
    """The run as measured, replayed, and replayed with changes (the same where there are none)."""

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

    @property
    def error(self) -> float:
        """Of the replay without changes against the measured step, signed."""
        return self.before.step_s / self.recording.measured_step_s - 1

    @property
    def work_factor(self) -> float:
        """Sequences of a step with the changes, over those of the run as it was."""
        return _micro_batches(self.changed) / _micro_batches(self.recording)

    @property
    def speedup(self) -> float | None:
        """Work per second with the changes, over that of the run as it was."""
        return self.work_factor * self.before.step_s / self.after.step_s if self.after.step_s else None

    def _rates(self) -> dict[str, Any]:
        gpus = self.changed.layout.gpus / self.recording.layout.gpus
        held = self.recording.facts.get("micro_batch")
        sequences = {
            name: _micro_batches(run) * held / state.step_s if isinstance(held, int) and state.step_s else None
            for name, run, state in (("before", self.recording, self.before), ("after", self.changed, self.after))
        }
        return {
            "work_factor": self.work_factor,
            "speedup": self.speedup,
            "speedup_per_gpu": None if self.speedup is None else self.speedup / gpus,
            "step_factor": self.after.step_s / self.before.step_s if self.before.step_s else None,
            "sequences_per_s": sequences,
            "layers": {"before": _layers(self.recording), "after": _layers(self.changed)},
        }

    def facts(self) -> dict[str, Any]:
        before, after = self.before.facts(), self.after.facts()
        layout = self.changed.layout
        return {
            "step_s": self.after.step_s,
            "measured_step_s": self.recording.measured_step_s,
            "replayed_step_s": self.before.step_s,
            "error": self.error,
            "changes": list(self.changes),
            "change_s": self.after.step_s - self.before.step_s,
            **self._rates(),
            "tp": layout.tp,
            "pp": layout.pp,
            "dp": layout.dp,
            "gpus": layout.gpus,
            "micro_batches": self.changed.micro_batches,
            "configuration": configuration(self.changed) | {"micro_batches": self.changed.micro_batches},
            "breakdown_s": after["breakdown_s"],
            "stages": after["stages"],
            "before": before,
            "measured": self.measured.facts(),
            "assumptions": list(self.changed.assumptions),
            "warnings": list(self.changed.warnings),
        }


def _micro_batches(recording: Recording) -> int:
    """Of a step, over all replicas."""
    return recording.micro_batches * recording.layout.dp


def _layers(recording: Recording) -> int | None:
    layers = recording.facts.get("layers")
    return layers if isinstance(layers, int) else None


def replay(
    recording: Recording, changes: Sequence[str] = (), around: Surroundings | None = None, shares: Cluster | None = None
) -> Replay:
    """Simulate *recording* as it was, and under *changes* (``K=V`` texts).

    Its communication *shares* the links of a cluster, or has links of its own where none is given.
    """
    changed = apply_changes(recording, changes, around)
    if changes and not recording.whole:
        changed = assuming(changed, "time spent with ranks that were not given stays as it was recorded")
    run: Callable[[Recording], Played] = play
    if shares is not None:
        run = partial(play_shared, cluster=shares)
        changed = assuming(changed, f"engine fluid: what meets at once shares the links of {shares.name}")
    as_was = run(recording)
    before = ReplayState(as_was, rank_parts(as_was))
    after = before
    if changes:
        then = run(changed)
        after = ReplayState(then, rank_parts(then))
    as_measured = measured(recording)
    return Replay(recording, changed, tuple(changes), ReplayState(as_measured, rank_parts(as_measured)), before, after)
