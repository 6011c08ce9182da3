"""A PyTorch profiler trace, of one rank or many, taken apart."""

from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from stepcast.analyze.kineto.kernels import COMMUNICATION, COPY, OTHER, class_of_names, label
from stepcast.analyze.kineto.match import Matching, match_collectives
from stepcast.analyze.kineto.rank import Lanes, RankTime, class_times, rank_time
from stepcast.analyze.kineto.steps import marked_steps
from stepcast.ir.timeline import SpanKind, Timeline
from stepcast.units import format_seconds

# A rank whose computation takes this much longer than the usual rank's holds the others up.
SLOW_RANK = 1.1
# Share of the window above which launching is named as what limits the run.
LAUNCH_BOUND = 0.1
TOP_KERNELS = 15


@dataclass(frozen=True, slots=True)
class Kernel:
    """All runs of one kernel, over all ranks."""

    name: str
    label: str
    count: int
    total_s: float
    share: float  # of all kernels' time

    def facts(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "class": self.label,
            "count": self.count,
            "total_s": self.total_s,
            "share": self.share,
        }


@dataclass(frozen=True, slots=True)
class Straggler:
    """*last* is how often it was the last to come to a collective, of *meetings*; *waits_s* what each other
    rank waited on average in those it took part in."""

    rank: int
    factor: float
    compute_s: float
    last: int
    meetings: int
    waits_s: float

    def facts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class KinetoAnalysis:
    source: str
    ranks: tuple[RankTime, ...]
    classes_s: dict[str, float]  # per rank and step
    kernels: tuple[Kernel, ...]
    collectives: Matching
    stragglers: tuple[Straggler, ...]
    gpus: int | None  # of the whole job, where its traces say
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        step = format_seconds(max(rank.step_s for rank in self.ranks))
        return f"KinetoAnalysis({len(self.ranks)} ranks, {step} a step)"

    def _repr_html_(self) -> str:
        from stepcast.pages.notebook import measured_html

        return measured_html(self.facts())

    @property
    def slowest(self) -> RankTime:
        """The rank that waits least for others: the one that the step waits for."""
        return max(self.ranks, key=lambda rank: rank.compute_s + rank.idle.host_s)

    def _mean(self, name: str) -> float:
        """Per step, mean over ranks."""
        per_step = [float(getattr(rank, name)) / max(rank.steps, 1) for rank in self.ranks]
        return sum(per_step) / len(per_step)

    def facts(self) -> dict[str, Any]:
        idle_s = sum(rank.idle.total_s / max(rank.steps, 1) for rank in self.ranks) / len(self.ranks)
        return {
            "kind": "kineto run",
            "source": self.source,
            "gpus": self.gpus,
            "step_s": max(rank.step_s for rank in self.ranks),
            "operations_s": self.classes_s,
            "bubble_s": idle_s,
            "compute_s": self._mean("compute_s"),
            "communication_s": self._mean("communication_s"),
            "exposed_comm_s": self._mean("exposed_communication_s"),
            "overlapped_comm_s": self._mean("overlapped_communication_s"),
            "copy_s": self._mean("copy_s"),
            "communication_by_group_s": self._groups(),
            "ranks": [_rank_facts(rank, self.collectives) for rank in self.ranks],
            "kernels": [kernel.facts() for kernel in self.kernels],
            "collectives": [row.facts() for row in self.collectives.rows],
            "matched_collectives": self.collectives.matched,
            "unmatched_collectives": self.collectives.unmatched,
            "stragglers": [one.facts() for one in self.stragglers],
            "critical_path": self._critical_path(),
            "warnings": list(self.warnings),
        }

    def _groups(self) -> dict[str, dict[str, float]]:
        """Per step, mean over the ranks that take part."""
        names = sorted({name for rank in self.ranks for name in rank.groups})
        found = {}
        for name in names:
            parts = [(rank.groups[name], max(rank.steps, 1)) for rank in self.ranks if name in rank.groups]
            found[name] = {
                "total": sum(part.total_s / steps for part, steps in parts) / len(parts),
                "exposed": sum(part.exposed_s / steps for part, steps in parts) / len(parts),
            }
        return found

    def _critical_path(self) -> list[dict[str, Any]]:
        slowest = self.slowest
        count = max(slowest.steps, 1)
        parts = [(part, seconds / count) for part, seconds in breakdown(slowest).items() if seconds > 0]
        ordered = sorted(parts, key=lambda item: -item[1])
        return [{"rank": slowest.rank, "part": part, "seconds": seconds} for part, seconds in ordered]


def breakdown(rank: RankTime) -> dict[str, float]:
    """Seconds of the window by part; they sum to it."""
    return {
        "compute": rank.compute_s,
        "exposed communication": rank.exposed_communication_s,
        "exposed copies": rank.exposed_copy_s,
        "idle: host": rank.idle.host_s,
        "idle: between kernels": rank.idle.queue_s,
        "idle: dependency": rank.idle.dependency_s,
    }


def analyze_kineto(timeline: Timeline) -> KinetoAnalysis:
    """Where the time of the traced ranks went."""
    timeline, steps = marked_steps(timeline)
    lanes = Lanes(timeline)
    times = [time for rank in timeline.ranks if (time := rank_time(lanes, rank, steps.get(rank))) is not None]
    if not times:
        raise ValueError(f"{timeline.source}: holds no work of a GPU or a CPU thread to analyse")
    matching = match_collectives(timeline)
    classes_s, kernels = _kernels(timeline, lanes, times, matching)
    stragglers = _stragglers(times, matching)
    return KinetoAnalysis(
        source=timeline.source,
        ranks=tuple(times),
        classes_s=classes_s,
        kernels=kernels,
        collectives=matching,
        stragglers=stragglers,
        gpus=timeline.facts.get("world_size"),
        warnings=(*timeline.warnings, *_doubts(timeline, times, matching)),
    )


def _rank_facts(rank: RankTime, matching: Matching) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "step_s": rank.step_s,
        "steps": rank.steps,
        "window_s": rank.window_s,
        "busy_s": rank.busy_s,
        "idle_s": rank.idle.total_s,
        "breakdown_s": breakdown(rank),
        "communication_s": rank.communication_s,
        "overlapped_communication_s": rank.overlapped_communication_s,
        "copy_s": rank.copy_s,
        "wait_s": matching.wait_s.get(rank.rank),
        "transfer_s": matching.transfer_s.get(rank.rank),
        "launches_per_step": rank.launches,
        "launch_lag_s": rank.launch_lag_s,
        "launch_bound_share": rank.launch_bound_share,
        "streams": [{name: getattr(stream, name) for name in stream.__slots__} for stream in rank.streams],
    }


def _kernels(
    timeline: Timeline, lanes: Lanes, times: list[RankTime], matching: Matching
) -> tuple[dict[str, float], tuple[Kernel, ...]]:
    """Time by class, per rank and step, and the kernels that take most."""
    by_name = class_of_names(timeline)
    labels = tuple(dict.fromkeys(by_name))
    numbers = {name: index for index, name in enumerate(labels)}
    class_of = [numbers[name] for name in by_name]
    per_step = np.zeros(len(labels))
    for time in times:
        per_step += class_times(lanes, time.rank, class_of, len(labels)) / max(time.steps, 1) / len(times)
    classes_s = {name: float(seconds) for name, seconds in zip(labels, per_step, strict=True) if seconds > 0}
    count = sum(max(time.steps, 1) for time in times)
    for row in matching.rows:
        name = f"{COMMUNICATION}: {row.kind}"
        classes_s[name] = classes_s.get(name, 0.0) + row.total_s / count
    copies_s = float(timeline.duration_s[timeline.kind_of == SpanKind.COPY].sum())
    if copies_s:
        classes_s[COPY] = copies_s / count
    ordered = dict(sorted(classes_s.items(), key=lambda item: -item[1]))
    if OTHER in ordered:
        ordered[OTHER] = ordered.pop(OTHER)
    return ordered, _top(timeline, by_name)


def _top(timeline: Timeline, by_name: tuple[str, ...]) -> tuple[Kernel, ...]:
    device = timeline.kind_of <= SpanKind.COPY
    names, kinds = timeline.name_of[device], timeline.kind_of[device]
    seconds = np.bincount(names, weights=timeline.duration_s[device], minlength=len(by_name))
    counts = np.bincount(names, minlength=len(by_name))
    kind_of = np.zeros(len(by_name), dtype=np.int32)
    kind_of[names] = kinds
    order = np.argsort(-seconds, kind="stable")[:TOP_KERNELS]
    whole = float(seconds.sum()) or 1.0
    return tuple(
        Kernel(
            name=timeline.names[at],
            label=label(by_name[at], int(kind_of[at])),
            count=int(counts[at]),
            total_s=float(seconds[at]),
            share=float(seconds[at]) / whole,
        )
        for at in order.tolist()
        if counts[at]
    )


def _stragglers(times: list[RankTime], matching: Matching) -> tuple[Straggler, ...]:
    """Ranks that compute longer than the usual one, and that the others are seen to wait for."""
    if len(times) < 2:
        return ()
    per_step = {time.rank: time.compute_s / max(time.steps, 1) for time in times}
    meetings = sum(matching.last.values())
    found = []
    for rank, seconds in per_step.items():
        usual = median(other_s for other, other_s in per_step.items() if other != rank)
        if not usual or seconds < SLOW_RANK * usual:
            continue
        others = [wait for other, wait in matching.wait_s.items() if other != rank]
        found.append(
            Straggler(
                rank=rank,
                factor=seconds / usual,
                compute_s=seconds,
                last=matching.last.get(rank, 0),
                meetings=meetings,
                waits_s=sum(others) / len(others) if others else 0.0,
            )
        )
    return tuple(sorted(found, key=lambda one: -one.factor))


def _doubts(timeline: Timeline, times: list[RankTime], matching: Matching) -> list[str]:
    doubts = []
    if not any(time.steps for time in times):
        doubts.append("no ProfilerStep is marked: the whole trace counts as one step")
    if len(times) == 1:
        doubts.append(
            "one rank cannot tell waiting for other ranks from transfer, nor a slow GPU from slow work; "
            "give the traces of all ranks"
        )
    elif timeline.facts.get("missing_ranks"):
        doubts.append(
            f"{timeline.facts['missing_ranks']} ranks are missing: their collectives are not matched"
        )
    if matching.unmatched and len(times) > 1:
        doubts.append(
            f"{matching.unmatched} collectives lack a member, a group or a partner: waits not split"
        )
    if on_host := [time.rank for time in times if time.on_host]:
        doubts.append(f"no GPU work on {_ranks(on_host)}: operators of CPU threads count as computation")
    bound = [time for time in times if not time.on_host and time.launch_bound_share > LAUNCH_BOUND]
    if bound:
        most = max(time.launch_bound_share for time in bound)
        doubts.append(
            f"launch-bound: the GPU had nothing queued for up to {most:.0%} of the time on "
            f"{_ranks([time.rank for time in bound])}"
        )
    return doubts


def _ranks(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
