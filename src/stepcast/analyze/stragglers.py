"""What slow workers cost a job: its steps played again, with some operations as long as they usually are.

The rules are those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al.,
OSDI 2025; github.com/ByteDance-Seed/StragglerAnalysis). Operations of a worker follow one another in streams;
messages end together, a while after the last of them began; what remains of a recorded time then is its own.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from stepcast.ir.arrays import BoolArray, FloatArray
from stepcast.ir.measured import ReplicaOperation, WorkerSteps

FORWARD, BACKWARD = "forward-compute", "backward-compute"

# What waits for what in the steps of workers, taken from the order in which one of them began.
#
# The rules are those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et
# al., OSDI 2025; github.com/ByteDance-Seed/StragglerAnalysis).

COMPUTES = (FORWARD, BACKWARD)
GATHER, SCATTER = "params-all-gather", "grads-reduce-scatter"
EMBEDDING, CLIP, SEPARATE = ("embedding-grads-all-reduce", "optimizer-clip-main-grad", "separate-grads-all-reduce")
TAIL = ("gc", "layernorm-grads-all-reduce", EMBEDDING)
# direction -> its computes, and which stage a message goes to.
DIRECTIONS = {"forward": (FORWARD, 1), "backward": (BACKWARD, -1)}
SLACK_S = 50e-6  # a receive that begins so much after its last compute is of no compute


@dataclass(frozen=True)
class WaitUnit:
    """Operations that end together; one that waits for nobody is a unit by itself."""

    members: tuple[int, ...]
    across: bool  # over all replicas
    grouped: bool


class Structure:
    """What waits for what, taken from the order in which the first replica began its operations."""

    def __init__(self, run: WorkerSteps) -> None:
        self._run, self.operations = run, run.operations
        self._of: dict[tuple[int, str], list[int]] = defaultdict(list)
        for at, operation in enumerate(run.operations):
            self._of[operation.stage, operation.kind].append(at)
        for found in self._of.values():
            found.sort(key=lambda at: run.operations[at].turn)
        self.before: list[set[int]] = [set() for _ in run.operations]
        self._alone: set[int] = set()
        self._pairs: dict[tuple[int, str], list[int]] = {}
        for stage in range(run.stages):
            self._stage(stage)
        self.units = self._units()
        self.order = self._sorted()

    def _kinds(self, stage: int, *kinds: str) -> list[int]:
        """Operations of *kinds* on a stage, in the order in which they began."""
        return sorted(at for kind in kinds for at in self._of.get((stage, kind), []))

    def _chain(self, found: Sequence[int]) -> None:
        for earlier, later in pairwise(found):
            self.before[later].add(earlier)

    def _stage(self, stage: int) -> None:
        computes = self._kinds(stage, *COMPUTES)
        self._chain(computes)
        self._chain(self._kinds(stage, GATHER, SCATTER))
        for direction, (compute, _) in DIRECTIONS.items():
            own = self._of.get((stage, compute), [])
            for way in ("send", "recv"):
                self._messages(stage, f"{direction}-{way}", own, compute)
        self._first_backward(stage, computes)
        self._parameters(stage)
        self._tail(stage, computes)

    def _messages(self, stage: int, kind: str, computes: list[int], compute: str) -> None:
        """The k-th send waits for compute k; compute k for receive k, and that for compute k - 1."""
        messages = self._of.get((stage, kind), [])
        self._chain(messages)
        start, end = self._run.start_s[0, 0], self._run.start_s[0, 0] + self._run.duration_s[0, 0]
        if not computes:
            self._alone.update(messages)
            return
        sends = kind.endswith("send")
        kept = [
            at
            for at in messages
            if (end[at] >= end[computes[0]] - SLACK_S if sends else start[at] <= start[computes[-1]] + SLACK_S)
        ]
        self._alone.update(set(messages) - set(kept))
        pairs = []
        for number, at in enumerate(kept[: len(computes)]):
            if self._past_the_end(computes[number], kind):
                self._alone.add(at)
                continue
            pairs.append(at)
            if sends:
                self.before[at].add(computes[number])
                continue
            self.before[computes[number]].add(at)
            if number:
                self.before[at].add(computes[number - 1])
        self._alone.update(kept[len(computes) :])
        self._pairs[stage, kind] = pairs

    def _past_the_end(self, compute: int, kind: str) -> bool:
        """Whether the model ends where this message would come from or go to."""
        place = self.operations[compute].place
        if place < 0:
            return False
        last = max(each.place for each in self.operations)
        return place == (0 if kind in ("forward-recv", "backward-send") else last)

    def _first_backward(self, stage: int, computes: list[int]) -> None:
        backwards = self._of.get((stage, BACKWARD), [])
        if not backwards or computes.index(backwards[0]) < 2:
            return
        earlier = computes[computes.index(backwards[0]) - 2]
        for kind in ("backward-send", "backward-recv"):
            for at in self._pairs.get((stage, kind), [])[:1]:
                self.before[at].add(earlier)

    def _parameters(self, stage: int) -> None:
        """The first forward of a chunk waits for the last of its parameters."""
        last: dict[int, int] = {}
        for at in self._of.get((stage, GATHER), []):
            last[self.operations[at].chunk] = at
        seen: set[int] = set()
        for at in self._of.get((stage, FORWARD), []):
            chunk = self.operations[at].chunk
            if chunk not in seen and chunk in last:
                self.before[at].add(last[chunk])
            seen.add(chunk)

    def _tail(self, stage: int, computes: list[int]) -> None:
        """After the last compute: sums that could not overlap, then the optimizer."""
        tail = [computes[-1]] if computes else []
        for kind in TAIL:
            tail += self._kinds(stage, kind)
        separate = self._kinds(stage, SEPARATE)
        scatters = self._of.get((stage, SCATTER), [])
        if separate:
            backwards = {self.operations[at].chunk: at for at in self._of.get((stage, BACKWARD), [])}
            for at in scatters:
                if (chunk := self.operations[at].chunk) in backwards:
                    self.before[at].add(backwards[chunk])
            tail += separate
        else:
            tail += scatters
        clip = self._kinds(stage, CLIP)
        if separate and clip and scatters:
            self.before[clip[0]].add(scatters[-1])
        self._chain([*tail, *clip, *self._kinds(stage, "optimizer")])

    def _units(self) -> list[WaitUnit]:
        grouped: dict[int, WaitUnit] = {}
        for direction, (_, step) in DIRECTIONS.items():
            for stage in range(self._run.stages):
                peer = (stage + step) % self._run.stages
                sends = self._pairs.get((stage, f"{direction}-send"), [])
                receives = self._pairs.get((peer, f"{direction}-recv"), [])
                for pair in zip(sends, receives, strict=False):
                    unit = WaitUnit(pair, across=False, grouped=True)
                    grouped |= dict.fromkeys(pair, unit)
        for kind, across in ((EMBEDDING, False), (CLIP, True)):
            together: dict[int, list[int]] = defaultdict(list)
            for at, operation in enumerate(self.operations):
                if operation.kind == kind:
                    together[operation.turn].append(at)
            for members in together.values():
                unit = WaitUnit(tuple(members), across, grouped=True)
                grouped |= dict.fromkeys(members, unit)
        for at, operation in enumerate(self.operations):
            if operation.kind in (GATHER, SCATTER):
                grouped[at] = WaitUnit((at,), across=True, grouped=True)
        alone = {
            at: WaitUnit((at,), across=False, grouped=False) for at in range(len(self.operations)) if at not in grouped
        }
        return list(dict.fromkeys((grouped | alone).values()))

    def _sorted(self) -> list[WaitUnit]:
        """Units after what they wait for."""
        unit_of = {at: number for number, unit in enumerate(self.units) for at in unit.members}
        waits = [
            {unit_of[earlier] for at in unit.members for earlier in self.before[at]} - {number}
            for number, unit in enumerate(self.units)
        ]
        after: dict[int, list[int]] = defaultdict(list)
        for number, needed in enumerate(waits):
            for each in needed:
                after[each].append(number)
        missing = [len(needed) for needed in waits]
        ready = [number for number, count in enumerate(missing) if not count]
        found = []
        while ready:
            number = ready.pop()
            found.append(self.units[number])
            for later in after[number]:
                missing[later] -= 1
                if not missing[later]:
                    ready.append(later)
        if len(found) != len(self.units):
            raise ValueError("operations wait for one another in a circle: no order of a pipeline")
        return found


# Kinds whose usual value is a mean; of all others, which wait for a network, it is the median.
MEANS = (*COMPUTES, "gc", "optimizer")
LEAST_TRANSFER_S = -10e-3  # less than that is a clock that is off
WORST_SHARE = 0.03  # of the ranks, for the share of the slowest workers
JOINED = {"forward-send": "forward-pp-comm", "forward-recv": "forward-pp-comm",
          "backward-send": "backward-pp-comm", "backward-recv": "backward-pp-comm"}  # fmt: skip


@dataclass(frozen=True, eq=False)
class StragglerJob:
    """A job, its operations as recorded and as they usually are."""

    run: WorkerSteps

    @cached_property
    def structure(self) -> Structure:
        return Structure(self.run)

    @cached_property
    def recorded_s(self) -> FloatArray:
        """Durations; of what waits for others the part after the last of them began."""
        values = self.run.duration_s.copy()
        end_s = self.run.start_s + self.run.duration_s
        for unit in self.structure.units:
            if not unit.grouped:
                continue
            members = list(unit.members)
            latest = self.run.start_s[:, :, members].max(axis=2)
            if unit.across:
                latest = np.broadcast_to(latest.max(axis=1, keepdims=True), latest.shape)
            transfer = end_s[:, :, members] - latest[:, :, None]
            values[:, :, members] = np.where(transfer < LEAST_TRANSFER_S, 0.0, transfer)
        return values

    @cached_property
    def usual_s(self) -> FloatArray:
        """One value for every operation of a kind."""
        found = np.empty_like(self.recorded_s)
        for kind, places in self._kinds().items():
            own = self.recorded_s[:, :, places]
            found[:, :, places] = own.mean() if kind in MEANS else np.median(own)
        return found

    def _kinds(self) -> Mapping[str, list[int]]:
        found: dict[str, list[int]] = defaultdict(list)
        for at, operation in enumerate(self.run.operations):
            found[operation.kind].append(at)
        return found

    def played_s(self, values: FloatArray) -> FloatArray:
        """Each step's time where operations take *values*."""
        structure = self.structure
        steps, replicas, count = values.shape
        ends = np.zeros((count, steps, replicas))
        starts = np.zeros((count, steps, replicas))
        for unit in structure.order:
            latest = None
            for at in unit.members:
                start = starts[at]
                for earlier in structure.before[at]:
                    np.maximum(start, ends[earlier], out=start)
                latest = start if latest is None else np.maximum(latest, start)
            assert latest is not None
            if unit.across:
                latest = np.broadcast_to(latest.max(axis=1, keepdims=True), latest.shape)
            for at in unit.members:
                ends[at] = (latest if unit.grouped else starts[at]) + values[:, :, at]
        found: FloatArray = ends.max(axis=(0, 2)) - starts.min(axis=(0, 2))
        return found

    @cached_property
    def measured_s(self) -> FloatArray:
        end_s = self.run.start_s + self.run.duration_s
        found: FloatArray = end_s.max(axis=(1, 2)) - self.run.start_s.min(axis=(1, 2))
        return found

    @cached_property
    def undelayed_s(self) -> FloatArray:
        """Recorded operations without the gaps that the host left between them."""
        return self.played_s(self.recorded_s)

    @cached_property
    def ideal_s(self) -> FloatArray:
        """Every operation as its kind usually is."""
        return self.played_s(self.usual_s)

    @property
    def slowdown(self) -> float:
        return float(self.undelayed_s.mean() / self.ideal_s.mean())

    def _with(self, kept: BoolArray, base: FloatArray, other: FloatArray) -> float:
        """Mean step where operations that are *kept* are as in *base*, and all others as in *other*."""
        return float(self.played_s(np.where(kept, base, other)).mean())

    def _mask(self, stages: Iterable[int] = (), replicas: Iterable[int] = (), kinds: Iterable[str] = ()) -> BoolArray:
        shape = (1, self.run.replicas, len(self.run.operations))
        found = np.zeros(shape, dtype=np.bool_)
        for replica in replicas:
            found[:, replica, :] = True
        wanted_stages, wanted_kinds = set(stages), set(kinds)
        for at, operation in enumerate(self.run.operations):
            if operation.stage in wanted_stages or self._joined(operation) in wanted_kinds:
                found[:, :, at] = True
        return found

    @staticmethod
    def _joined(operation: ReplicaOperation) -> str:
        return JOINED.get(operation.kind, operation.kind)

    def _kept_alone(self, mask: BoolArray) -> float:
        """The ideal step where those of *mask* alone are as recorded, over the ideal."""
        return self._with(mask, self.recorded_s, self.usual_s) / float(self.ideal_s.mean())

    @cached_property
    def by_stage(self) -> list[float]:
        return [self._kept_alone(self._mask(stages=[stage])) for stage in range(self.run.stages)]

    @cached_property
    def by_replica(self) -> list[float]:
        return [self._kept_alone(self._mask(replicas=[replica])) for replica in range(self.run.replicas)]

    @cached_property
    def by_kind(self) -> dict[str, float]:
        kinds = dict.fromkeys(self._joined(operation) for operation in self.run.operations)
        return {kind: self._kept_alone(self._mask(kinds=[kind])) for kind in kinds}

    def _recovered(self, mask: BoolArray) -> float:
        """The share of the loss that is gone where those of *mask* are as usual."""
        undelayed, ideal = float(self.undelayed_s.mean()), float(self.ideal_s.mean())
        lost = undelayed - ideal
        return (undelayed - self._with(mask, self.usual_s, self.recorded_s)) / lost if lost else 0.0

    @property
    def last_stage_share(self) -> float:
        """M_S: what the last stage explains."""
        return self._recovered(self._mask(stages=[self.run.stages - 1]))

    @cached_property
    def workers(self) -> list[tuple[float, int, int]]:
        """(slowdown, replica, stage) of every worker, the slowest first."""
        found = [
            (min(self.by_replica[replica], self.by_stage[stage]), replica, stage)
            for replica in range(self.run.replicas)
            for stage in range(self.run.stages)
        ]
        return sorted(found, key=lambda each: -each[0])

    @property
    def worst_workers_share(self) -> float:
        """M_W: what the slowest three in a hundred workers explain."""
        mask = self._mask()
        for _, replica, stage in self.workers[: math.ceil(WORST_SHARE * len(self.workers))]:
            for at, operation in enumerate(self.run.operations):
                if operation.stage == stage:
                    mask[:, replica, at] = True
        return self._recovered(mask)

    def facts(self) -> dict[str, Any]:
        ranks = self.run.ranks
        undelayed_s = float(self.undelayed_s.mean())
        return {
            "step_s": float(self.measured_s.mean()),
            "undelayed_s": undelayed_s,
            "ideal_s": float(self.ideal_s.mean()),
            "steps": len(self.run.steps),
            "dp": self.run.replicas,
            "pp": self.run.stages,
            "launch_slowdown": float(self.measured_s.mean()) / undelayed_s,
            "slowdown": self.slowdown,
            "by_stage": self.by_stage,
            "by_dp_rank": self.by_replica,
            "by_kind": dict(sorted(self.by_kind.items(), key=lambda each: -each[1])),
            "last_stage_share": self.last_stage_share,
            "worst_workers_share": self.worst_workers_share,
            "stragglers": [
                {"rank": int(ranks[replica, stage]), "factor": factor, "dp_rank": replica, "stage": stage}
                for factor, replica, stage in self.workers
                if factor > STRAGGLES
            ],
            "warnings": list(self.run.warnings),
        }


STRAGGLES = 1.05  # a worker that slows the job by less is not told


def analyze_stragglers(run: WorkerSteps) -> StragglerJob:
    return StragglerJob(run)
