"""Where the time of a measured Megatron-LM step went, who waited for whom, and who is slow."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from stepcast.analyze.changes import heal_rank
from stepcast.analyze.durations import at_shortest
from stepcast.analyze.megatron.events import TraceOperation, operations_of
from stepcast.analyze.megatron.meetings import MeetingTraffic, traffic_of
from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.megatron.stragglers import (
    ExpertLoad,
    StageLayers,
    Straggler,
    expert_loads,
    find_stragglers,
    stage_layers,
)
from stepcast.analyze.parts import RankParts, breakdown_s, rank_parts, stage_rows
from stepcast.analyze.play import PathStep, critical_steps, measured, play
from stepcast.analyze.recording import Join, RankRecord, Recording, TimePart, configuration
from stepcast.ir.timeline import Timeline
from stepcast.units import format_seconds

# Work that is less of a rank than this is left out of what is said about it.
SMALL_SHARE = 0.05
BusBandwidth = Callable[[MeetingTraffic], float | None]
"""What a cluster reaches for the same communication, bytes per second."""


@dataclass(frozen=True)
class MegatronAnalysis:
    recording: Recording
    operations: Mapping[int, list[TraceOperation]]
    parts: tuple[RankParts, ...]
    layers: tuple[StageLayers, ...]
    traffic: tuple[MeetingTraffic, ...]
    stragglers: tuple[Straggler, ...]
    expert_loads: tuple[ExpertLoad, ...]
    critical_path: tuple[PathStep, ...]
    critical_path_s: float | None  # the longest chain of durations alone; None where ranks are missing
    warnings: tuple[str, ...]
    straggler_cost_s: float | None = None

    def __repr__(self) -> str:
        ranks, gpus = len(self.recording.ranks), self.recording.layout.gpus
        step = format_seconds(self.recording.measured_step_s)
        return f"MegatronAnalysis({ranks} of {gpus} ranks, {step} a step)"

    def _repr_html_(self) -> str:
        from stepcast.views.html import render_notebook
        from stepcast.views.measured import megatron_view

        return render_notebook(megatron_view(self.facts()), "analysis")

    @property
    def alone(self) -> bool:
        """One rank of a run of several: nothing can be matched."""
        return len(self.recording.ranks) == 1 and self.recording.layout.gpus > 1

    @property
    def bubble_s(self) -> float:
        """Mean over the ranks of the time spent waiting for other stages. Of one rank alone: its receives."""
        if self.alone:
            (listed,) = self.operations.values()
            return sum(one.duration_s for one in listed if one.name.startswith("recv_"))
        return mean(one.bubble_s for one in self.parts)

    @property
    def exposed_comm_s(self) -> float:
        """Mean over the ranks of communication in which nothing was computed, waiting left out."""
        return mean(sum(one.exposed_s.values()) for one in self.parts)

    def facts(self) -> dict[str, Any]:
        recording = self.recording
        return {
            "kind": "megatron run",
            "step_s": recording.measured_step_s,
            "ranks": [record.rank for record in recording.ranks],
            **_layout_facts(recording),
            "operations_s": self._operations_s(),
            "gaps_s": mean(_gaps_s(listed) for listed in self.operations.values()),
            "bubble_s": self.bubble_s,
            "bubble_share": self.bubble_s / recording.measured_step_s if recording.measured_step_s else 0.0,
            "exposed_comm_s": self.exposed_comm_s,
            "breakdown_s": breakdown_s(self.parts),
            "waits_s": _means([one.waits_s for one in self.parts]),
            "communication_s": self._communication_s(),
            "communication": [one.facts() for one in self.traffic],
            "layers": [one.facts() for one in self.layers],
            "stages": stage_rows(self.parts),
            "imbalance": self._imbalance(),
            "expert_imbalance": [one.facts() for one in self.expert_loads],
            "rank_times": [self._rank_facts(one) for one in self.parts],
            "stragglers": [_straggler_facts(one, self.recording) for one in self.stragglers],
            "straggler_cost_s": self.straggler_cost_s,
            "critical_path": [_step_facts(one) for one in self.critical_path],
            "critical_path_s": self.critical_path_s,
            "warnings": list(self.warnings),
        }

    def _operations_s(self) -> dict[str, float]:
        """Mean over the ranks given, so that operations and gaps sum to the mean span of a rank."""
        totals: dict[str, float] = {}
        for listed in self.operations.values():
            for operation in listed:
                totals[operation.name] = totals.get(operation.name, 0.0) + operation.duration_s
        count = len(self.operations)
        ordered = sorted(totals.items(), key=lambda pair: -pair[1])
        return {name: total_s / count for name, total_s in ordered}

    def _communication_s(self) -> dict[str, dict[str, float]]:
        exposed = _means([one.exposed_s for one in self.parts])
        hidden = _means([one.overlapped_s for one in self.parts])
        return {
            group: {
                "total": exposed.get(group, 0.0) + hidden.get(group, 0.0),
                "exposed": exposed.get(group, 0.0),
                "overlapped": hidden.get(group, 0.0),
            }
            for group in sorted({*exposed, *hidden})
        }

    def _imbalance(self) -> float:
        """How much longer the busiest stage computes than the mean stage, as a share."""
        busy = [float(row[f"{TimePart.COMPUTE}_s"]) for row in stage_rows(self.parts)]
        return max(busy) / mean(busy) - 1 if mean(busy) else 0.0

    def _rank_facts(self, parts: RankParts) -> dict[str, Any]:
        listed = self.operations[parts.rank]
        inside: dict[str, dict[str, float]] = {}
        totals: dict[str, float] = {}
        for operation in listed:
            totals[operation.name] = totals.get(operation.name, 0.0) + operation.duration_s
            for event in operation.parts:
                groups = inside.setdefault(operation.name, {})
                groups[event.group] = groups.get(event.group, 0.0) + event.end_s - event.start_s
        return {
            "rank": parts.rank,
            "stage": parts.stage,
            "span_s": listed[-1].end_s - listed[0].start_s,
            "operations_s": totals,
            "inside_operations_s": inside,
            "gaps_s": _gaps_s(listed),
            "breakdown_s": {str(part): seconds for part, seconds in parts.parts_s.items()},
            "waits_s": parts.waits_s,
            "waits_for_s": {str(rank): seconds for rank, seconds in parts.waits_for_s.items()},
        }


def analyze_megatron(timeline: Timeline, busbw: BusBandwidth | None = None) -> MegatronAnalysis:
    """Explain *timeline*; *busbw* says what a cluster should reach."""
    recording = record_megatron(timeline)
    operations = operations_of(timeline, recording.layout)
    parts = rank_parts(measured(recording))
    traffic = traffic_of(operations, recording)
    if busbw is not None:
        traffic = tuple(one.priced(busbw(one)) for one in traffic)
    analysis = MegatronAnalysis(
        recording=recording,
        operations=operations,
        parts=parts,
        layers=stage_layers(operations, recording),
        traffic=traffic,
        stragglers=find_stragglers(recording, parts),
        expert_loads=expert_loads(operations, parts, recording.layout),
        critical_path=critical_steps(recording),
        critical_path_s=play(at_shortest(recording)).step_s,
        warnings=(),
    )
    if analysis.alone:
        analysis = replace(analysis, stragglers=(), critical_path=(), critical_path_s=None)
    cost_s = _straggler_cost_s(recording, [one.rank for one in analysis.stragglers])
    return replace(analysis, straggler_cost_s=cost_s, warnings=tuple(_warnings(analysis)))


def _straggler_cost_s(recording: Recording, slow: Sequence[int]) -> float | None:
    """Return how much shorter the replayed step is with all *slow* ranks at the pace of their peers.

    None where no healthy rank does the same work.
    """
    if not slow:
        return 0.0
    healed = recording
    try:
        for rank in slow:
            healed = heal_rank(healed, rank, frozenset(slow))
    except ValueError:
        return None
    return max(0.0, play(recording).step_s - play(healed).step_s)


def _warnings(analysis: MegatronAnalysis) -> list[str]:
    recording = analysis.recording
    reader = [text for text in recording.warnings if not text.startswith("only ")]
    missing = recording.layout.gpus - len(recording.ranks)
    if not missing:
        return reader
    if analysis.alone:
        rank = recording.ranks[0].rank
        return [
            *reader,
            f"only rank {rank} of {recording.layout.gpus} was given: one rank cannot separate a slow GPU "
            "from slow work (no other rank runs the same operations to compare with), nor waiting from "
            "transferring (when its peers arrived is not known: times of receives, all-reduces and the "
            "optimizer contain both), so bubble_s is the time in receives, exposed_comm_s contains waits, "
            "and stragglers and the critical path are not told; give the traces of all ranks",
        ]
    absent = sorted(set(range(recording.layout.gpus)) - {record.rank for record in recording.ranks})
    listed = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
    return [
        *reader,
        f"{missing} of {recording.layout.gpus} ranks are missing ({listed}): communication with them keeps "
        "its waiting time, a slow rank among them cannot be named, and the critical path may run through "
        "them",
    ]


def _layout_facts(recording: Recording) -> dict[str, Any]:
    layout = recording.layout
    return {
        "tp": layout.tp,
        "dp": layout.dp,
        "pp": layout.pp,
        "ep": layout.ep,
        "gpus": layout.gpus,
        "configuration": configuration(recording),
        "configuration_basis": recording.facts.get("basis", {}),
    }


def _gaps_s(operations: list[TraceOperation]) -> float:
    """Time between operations: launching, logging, the host."""
    span_s = operations[-1].end_s - operations[0].start_s
    return max(0.0, span_s - sum(one.duration_s for one in operations))


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    keys = sorted({key for one in tables for key in one})
    return {key: sum(one.get(key, 0.0) for one in tables) / len(tables) for key in keys}


def _step_facts(step: PathStep) -> dict[str, Any]:
    return {
        "ranks": list(step.ranks),
        "operation": step.operation,
        "micro_batch": None if step.micro_batch < 0 else step.micro_batch,
        "start_s": step.start_s,
        "duration_s": step.duration_s,
    }


def _straggler_facts(one: Straggler, recording: Recording) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "factor": one.factor,
        "own_s": one.own_s,
        "reference_s": one.reference_s,
        "operations": {
            name: {"own_s": own_s, "reference_s": reference_s}
            for name, (own_s, reference_s) in one.operations().items()
        },
        "shared_operations": {
            name: {"own_s": own_s, "reference_s": reference_s}
            for name, (own_s, reference_s) in one.shared_operations().items()
        },
        "waits_caused_s": {str(rank): seconds for rank, seconds in one.waits_caused_s},
        "evidence": evidence(one, recording),
    }


def evidence(one: Straggler, recording: Recording) -> list[str]:
    """Why *one* is called slow, in sentences."""
    texts = []
    operations = one.shared_operations() or one.operations()
    for name, (own_s, reference_s) in operations.items():
        if reference_s > SMALL_SHARE * one.reference_s:
            texts.append(
                f"{name} without communication takes rank {one.rank} {own_s * 1e3:.0f} ms where other ranks "
                f"need {reference_s * 1e3:.0f} ms for the same work ({own_s / reference_s:.2f}x)"
            )
    mine = recording.record_of(one.rank)
    stage_of = {record.rank: record.stage for record in recording.ranks}
    near = [pair for pair in one.waits_caused_s if stage_of[pair[0]] == mine.stage]
    for rank, seconds in (near or list(one.waits_caused_s))[:2]:
        text = f"rank {rank} waits {seconds * 1e3:.0f} ms for it"
        theirs = _stays_s(recording.record_of(rank))
        role = max(theirs, key=lambda role: theirs[role][0], default="")
        if role in _stays_s(mine):
            (own_s, _), (their_s, count) = _stays_s(mine)[role], theirs[role]
            text += (
                f": it stays {their_s * 1e3:.0f} ms in {count} collectives ({role}), rank {one.rank} "
                f"{own_s * 1e3:.0f} ms"
            )
        texts.append(text)
    return texts


def _stays_s(record: RankRecord) -> dict[str, tuple[float, int]]:
    """By role: time in collectives that hide no work, and how many."""
    stays: dict[str, tuple[float, int]] = {}
    for piece in record.pieces():
        if isinstance(piece, Join) and piece.part in (TimePart.TP, TimePart.DP, TimePart.EP) and not piece.own_s:
            total_s, count = stays.get(piece.role, (0.0, 0))
            stays[piece.role] = total_s + piece.end_s - piece.start_s, count + 1
    return stays
