"""What waits for what in the steps of workers, taken from the order in which one of them began.

The rules are those of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin et al.,
OSDI 2025; github.com/ByteDance-Seed/StragglerAnalysis).
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from stepcast.ir.stragglers import WorkerSteps

FORWARD, BACKWARD = "forward-compute", "backward-compute"
COMPUTES = (FORWARD, BACKWARD)
GATHER, SCATTER = "params-all-gather", "grads-reduce-scatter"
EMBEDDING, CLIP, SEPARATE = (
    "embedding-grads-all-reduce",
    "optimizer-clip-main-grad",
    "separate-grads-all-reduce",
)
TAIL = ("gc", "layernorm-grads-all-reduce", EMBEDDING)
# direction -> its computes, and which stage a message goes to.
DIRECTIONS = {"forward": (FORWARD, 1), "backward": (BACKWARD, -1)}
SLACK_S = 50e-6  # a receive that begins so much after its last compute is of no compute


@dataclass(frozen=True)
class Unit:
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
            if (
                end[at] >= end[computes[0]] - SLACK_S if sends else start[at] <= start[computes[-1]] + SLACK_S
            )
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

    def _units(self) -> list[Unit]:
        grouped: dict[int, Unit] = {}
        for direction, (_, step) in DIRECTIONS.items():
            for stage in range(self._run.stages):
                peer = (stage + step) % self._run.stages
                sends = self._pairs.get((stage, f"{direction}-send"), [])
                receives = self._pairs.get((peer, f"{direction}-recv"), [])
                for pair in zip(sends, receives, strict=False):
                    unit = Unit(pair, across=False, grouped=True)
                    grouped |= dict.fromkeys(pair, unit)
        for kind, across in ((EMBEDDING, False), (CLIP, True)):
            together: dict[int, list[int]] = defaultdict(list)
            for at, operation in enumerate(self.operations):
                if operation.kind == kind:
                    together[operation.turn].append(at)
            for members in together.values():
                unit = Unit(tuple(members), across, grouped=True)
                grouped |= dict.fromkeys(members, unit)
        for at, operation in enumerate(self.operations):
            if operation.kind in (GATHER, SCATTER):
                grouped[at] = Unit((at,), across=True, grouped=True)
        alone = {
            at: Unit((at,), across=False, grouped=False)
            for at in range(len(self.operations))
            if at not in grouped
        }
        return list(dict.fromkeys((grouped | alone).values()))

    def _sorted(self) -> list[Unit]:
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
