"""The cost of slow workers: the steps of a job simulated with some operations at their typical time.

The rules are those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al., OSDI
2025; github.com/ByteDance-Seed/StragglerAnalysis). Operations of a worker follow one another in streams; messages end
together, some time after the last of them began; the rest of a recorded time is its own.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

import msgspec
import numpy as np

from stepcast.analyze.result import AnalysisResult
from stepcast.ir.arrays import BoolArray, FloatArray
from stepcast.ir.measured import WorkerSteps
from stepcast.ir.types import dataclass, group_by_key, pick

FORWARD, BACKWARD = "forward-compute", "backward-compute"
COMPUTES = (FORWARD, BACKWARD)
GATHER, SCATTER = "params-all-gather", "grads-reduce-scatter"
EMBEDDING, CLIP, SEPARATE = ("embedding-grads-all-reduce", "optimizer-clip-main-grad", "separate-grads-all-reduce")
TAIL = ("gc", "layernorm-grads-all-reduce", EMBEDDING)
DIRECTIONS = {"forward": (FORWARD, 1), "backward": (BACKWARD, -1)}  # its computes, and the step to the next stage
SLACK_S = 50e-6  # a receive that begins this long after the last compute belongs to none
MEANS = (*COMPUTES, "gc", "optimizer")  # their usual value is a mean; that of kinds with a network the median
LEAST_TRANSFER_S = -10e-3  # less means that a clock is off
WORST_SHARE = 0.03  # share of the workers that count as the slowest
STRAGGLES = 1.05  # a worker that slows the job by less is not reported
JOINED_KINDS = {
    f"{direction}-{way}": f"{direction}-pp-comm" for direction in ("forward", "backward") for way in ("send", "recv")
}


class SlowWorker(msgspec.Struct, frozen=True):
    rank: int
    factor: float
    dp_rank: int
    stage: int


class StragglerResult(AnalysisResult, frozen=True, kw_only=True):
    """The slowdown of a job, in total and with the recorded times of one stage, replica or kind alone."""

    view = "measured.stragglers_view"
    step_s: float
    undelayed_s: float  # without the gaps that the host leaves between operations
    ideal_s: float  # with every operation at its typical time
    steps: int
    dp: int
    pp: int
    launch_slowdown: float
    slowdown: float
    by_stage: list[float]
    by_dp_rank: list[float]
    by_kind: dict[str, float]
    last_stage_share: float  # of the loss, due to the last stage (M_S)
    worst_workers_share: float  # of the loss, due to the slowest three in a hundred workers (M_W)
    stragglers: list[SlowWorker]
    warnings: list[str]


@dataclass(frozen=True)
class WaitUnit:
    """Operations that end together; an operation that waits for nobody is a unit of its own."""

    members: tuple[int, ...]
    across: bool  # over all replicas
    grouped: bool = True


class WaitGraph:
    """The dependencies of operations, from the order in which the first replica began them."""

    def __init__(self, run: WorkerSteps) -> None:
        self.run, self.operations = run, run.operations
        self.listed: dict[tuple[int, str], list[int]] = defaultdict(list)  # by stage and kind
        for index, operation in sorted(enumerate(run.operations), key=lambda pair: pair[1].turn):
            self.listed[operation.stage, operation.kind].append(index)
        self.before: list[set[int]] = [set() for _ in run.operations]
        self.paired: dict[tuple[int, str], list[int]] = defaultdict(list)  # the messages that belong to computes
        for stage in range(run.stages):
            self._add_stage(stage)
        units = self._find_units()
        unit_of = {index: number for number, unit in enumerate(units) for index in unit.members}
        sorter: TopologicalSorter[int] = TopologicalSorter()
        for number, unit in enumerate(units):
            sorter.add(number, *({unit_of[other] for index in unit.members for other in self.before[index]} - {number}))
        try:
            self.units = [units[number] for number in sorter.static_order()]  # each after those it waits for
        except CycleError:
            raise ValueError("operations wait for one another in a circle: no order of a pipeline") from None

    def _kinds(self, stage: int, *kinds: str) -> list[int]:
        """Return the operations of *kinds* on a stage, in the order in which they began."""
        return sorted(index for kind in kinds for index in self.listed[stage, kind])

    def _chain(self, operations: Sequence[int]) -> None:
        for earlier, later in pairwise(operations):
            self.before[later].add(earlier)

    def _last_of_chunks(self, operations: Sequence[int]) -> dict[int, int]:
        return {self.operations[index].chunk: index for index in operations}

    def _add_stage(self, stage: int) -> None:
        computes, backwards = self._kinds(stage, *COMPUTES), self.listed[stage, BACKWARD]
        self._chain(computes)
        self._chain(self._kinds(stage, GATHER, SCATTER))
        for direction, (compute, _) in DIRECTIONS.items():
            for way in ("send", "recv"):
                self._add_messages(stage, f"{direction}-{way}", self.listed[stage, compute])
        if backwards and (place := computes.index(backwards[0])) >= 2:
            for kind in ("backward-send", "backward-recv"):
                for message in self.paired[stage, kind][:1]:
                    self.before[message].add(computes[place - 2])

        # The first forward of a chunk waits for the last of its parameters.
        gathers = self._last_of_chunks(self.listed[stage, GATHER])
        for forward in self.listed[stage, FORWARD]:
            gather = gathers.pop(self.operations[forward].chunk, None)
            if gather is not None:
                self.before[forward].add(gather)

        # After the last compute: reductions that could not overlap, then the optimizer.
        separate, clip, scatters = self._kinds(stage, SEPARATE), self._kinds(stage, CLIP), self.listed[stage, SCATTER]
        if separate:
            last = self._last_of_chunks(backwards)
            for scatter in scatters:
                if (chunk := self.operations[scatter].chunk) in last:
                    self.before[scatter].add(last[chunk])
            if clip and scatters:
                self.before[clip[0]].add(scatters[-1])
        tail = [index for kind in TAIL for index in self._kinds(stage, kind)]
        self._chain([*computes[-1:], *tail, *(separate or scatters), *clip, *self._kinds(stage, "optimizer")])

    def _add_messages(self, stage: int, kind: str, computes: list[int]) -> None:
        """Let send k wait for compute k, compute k for receive k, and that for compute k - 1."""
        messages = self.listed[stage, kind]
        self._chain(messages)
        start, end = self.run.start_s[0, 0], self.run.start_s[0, 0] + self.run.duration_s[0, 0]
        if not computes:
            return
        is_send = kind.endswith("send")
        if is_send:
            messages = [message for message in messages if end[message] >= end[computes[0]] - SLACK_S]
        else:
            messages = [message for message in messages if start[message] <= start[computes[-1]] + SLACK_S]
        # No message goes beyond the end of the model.
        from_first = kind in ("forward-recv", "backward-send")
        last = 0 if from_first else max(operation.place for operation in self.operations)
        for number, (message, compute) in enumerate(zip(messages, computes, strict=False)):
            if 0 <= self.operations[compute].place == last:
                continue
            self.paired[stage, kind].append(message)
            if is_send:
                self.before[message].add(compute)
                continue
            self.before[compute].add(message)
            if number:
                self.before[message].add(computes[number - 1])

    def _find_units(self) -> list[WaitUnit]:
        units: list[WaitUnit] = []
        for direction, (_, step) in DIRECTIONS.items():
            for stage in range(self.run.stages):
                sends = self.paired[stage, f"{direction}-send"]
                receives = self.paired[(stage + step) % self.run.stages, f"{direction}-recv"]
                units += [WaitUnit(pair, across=False) for pair in zip(sends, receives, strict=False)]
        numbered = list(enumerate(self.operations))
        for kind, across in ((EMBEDDING, False), (CLIP, True)):
            together = group_by_key((operation.turn, index) for index, operation in numbered if operation.kind == kind)
            units += [WaitUnit(tuple(members), across) for members in together.values()]
        units += [WaitUnit((index,), True) for index, operation in numbered if operation.kind in (GATHER, SCATTER)]
        grouped = {index for unit in units for index in unit.members}
        return units + [WaitUnit((index,), False, grouped=False) for index, _ in numbered if index not in grouped]


class StragglerJob:
    """A job with its operations as recorded and as they usually are, and its slowdown by stage, replica and kind."""

    def __init__(self, run: WorkerSteps) -> None:
        self.run, self.graph = run, WaitGraph(run)
        end_s = run.start_s + run.duration_s
        self.measured_s: FloatArray = end_s.max(axis=(1, 2)) - run.start_s.min(axis=(1, 2))
        # Of operations that wait for others, the part after the last of them began.
        self.recorded_s = run.duration_s.copy()
        for unit in (unit for unit in self.graph.units if unit.grouped):
            members = list(unit.members)
            latest = run.start_s[:, :, members].max(axis=2)
            if unit.across:
                latest = np.broadcast_to(latest.max(axis=1, keepdims=True), latest.shape)
            transfer = end_s[:, :, members] - latest[:, :, None]
            self.recorded_s[:, :, members] = np.where(transfer < LEAST_TRANSFER_S, 0.0, transfer)
        self.usual_s = np.empty_like(self.recorded_s)
        for kind in {operation.kind for operation in run.operations}:
            indices = [index for index, operation in enumerate(run.operations) if operation.kind == kind]
            own = self.recorded_s[:, :, indices]
            self.usual_s[:, :, indices] = own.mean() if kind in MEANS else np.median(own)
        self.undelayed_s = self.simulate_s(self.recorded_s)  # without the gaps that the host left between operations
        self.ideal_s = self.simulate_s(self.usual_s)  # with every operation as its kind usually is
        self.slowdown = float(self.undelayed_s.mean() / self.ideal_s.mean())
        stage_of = np.array([operation.stage for operation in run.operations])
        kinds = [JOINED_KINDS.get(operation.kind, operation.kind) for operation in run.operations]
        replicas = np.arange(run.replicas)[:, None]
        self.by_stage = [self._slowdown_by(stage_of == stage) for stage in range(run.stages)]
        self.by_replica = [self._slowdown_by(replicas == replica) for replica in range(run.replicas)]
        self.by_kind = {kind: self._slowdown_by(np.array(kinds) == kind) for kind in dict.fromkeys(kinds)}
        self.last_stage_share = self._recovered_share(stage_of == run.stages - 1)
        # (slowdown, replica, stage) of every worker, the slowest first.
        workers = [
            (min(of_replica, of_stage), replica, stage)
            for replica, of_replica in enumerate(self.by_replica)
            for stage, of_stage in enumerate(self.by_stage)
        ]
        self.workers = sorted(workers, key=lambda worker: -worker[0])
        mask: BoolArray = np.zeros((run.replicas, len(run.operations)), dtype=np.bool_)
        for _, replica, stage in self.workers[: math.ceil(WORST_SHARE * len(workers))]:
            mask[replica] |= stage_of == stage
        self.worst_workers_share = self._recovered_share(mask)

    def simulate_s(self, values: FloatArray) -> FloatArray:
        """Return the time of each step if operations take *values*."""
        graph = self.graph
        steps, replicas, count = values.shape
        ends = np.zeros((count, steps, replicas))
        starts = np.zeros((count, steps, replicas))
        for unit in graph.units:
            latest = np.zeros((steps, replicas))
            for index in unit.members:
                for earlier in graph.before[index]:
                    np.maximum(starts[index], ends[earlier], out=starts[index])
                latest = np.maximum(latest, starts[index])
            if unit.across:
                latest = np.broadcast_to(latest.max(axis=1, keepdims=True), latest.shape)
            for index in unit.members:
                ends[index] = (latest if unit.grouped else starts[index]) + values[:, :, index]
        step_s: FloatArray = ends.max(axis=(0, 2))  # what waits for nothing starts at 0
        return step_s

    def _slowdown_by(self, mask: BoolArray) -> float:
        """Return the slowdown if only the operations of *mask* are as recorded."""
        return float(self.simulate_s(np.where(mask, self.recorded_s, self.usual_s)).mean()) / float(self.ideal_s.mean())

    def _recovered_share(self, mask: BoolArray) -> float:
        """Return the share of the loss that is gone if the operations of *mask* take their typical time."""
        undelayed_s = float(self.undelayed_s.mean())
        lost_s = undelayed_s - float(self.ideal_s.mean())
        left_s = float(self.simulate_s(np.where(mask, self.usual_s, self.recorded_s)).mean())
        return (undelayed_s - left_s) / lost_s if lost_s else 0.0


def analyze_stragglers(run: WorkerSteps) -> StragglerResult:
    job = StragglerJob(run)
    step_s, undelayed_s = float(job.measured_s.mean()), float(job.undelayed_s.mean())
    return StragglerResult(
        step_s=step_s,
        undelayed_s=undelayed_s,
        ideal_s=float(job.ideal_s.mean()),
        steps=len(run.steps),
        **pick(run, "dp=replicas pp=stages"),
        launch_slowdown=step_s / undelayed_s,
        **pick(job, "slowdown by_stage by_dp_rank=by_replica last_stage_share worst_workers_share"),
        by_kind=dict(sorted(job.by_kind.items(), key=lambda pair: -pair[1])),
        stragglers=[
            SlowWorker(int(run.ranks[replica, stage]), factor, replica, stage)
            for factor, replica, stage in job.workers
            if factor > STRAGGLES
        ],
        warnings=list(run.warnings),
    )
