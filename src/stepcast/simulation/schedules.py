"""Pipeline schedules by name: the functions that write their orders, the table that names them, and paired slots."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from stepcast.ir import schedules
from stepcast.ir.arrays import IntArray
from stepcast.ir.layout import Layout
from stepcast.simulation.schedule import Schedule, ScheduleError, Slot, SlotAction

F, B, I, W = SlotAction  # noqa: E741 (the letters of the papers)


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards in the opposite order.

    Source: Huang et al., GPipe (2019), figure 2c. With several chunks this is the breadth-first loop of Lamy-Poirier,
    Breadth-First Pipeline Parallelism (2023): a chunk takes all micro-batches before the next.
    """
    forward = _list_slots(F, range(chunks), micro_batches, micro_batches)
    order = np.concatenate([forward, _list_slots(B, range(chunks), micro_batches, micro_batches)[::-1]])
    return Schedule.of("gpipe", stages, micro_batches, chunks, schedules.PiecePlacement.LOOP, [order] * stages)


def one_f_one_b(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Enough forwards to reach the last stage and come back, then one forward and one backward in turn.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021), section 2.2.
    """
    forward, backward = (_list_slots(action, range(1), micro_batches, micro_batches) for action in (F, B))
    orders = _alternate(forward, backward, np.arange(stages)[::-1])
    return Schedule("1f1b", stages, micro_batches, chunks, schedules.PiecePlacement.LOOP, *orders)


@lru_cache(maxsize=256)
def interleaved(stages: int, micro_batches: int, chunks: int, group: int | None = None) -> Schedule:
    """1F1B over several chunks per stage: *group* micro-batches through a chunk before the next one.

    Source: Narayanan et al. (2021), section 2.3; Megatron-LM core/pipeline_parallel/schedules.py for the number of
    warm-up slots and for a last group that is short. Without *group* the smallest one that Megatron accepts is taken:
    the number of stages when it divides the micro-batches.
    """
    size = group_size(stages, micro_batches, group)
    forward = _list_slots(F, range(chunks), micro_batches, size)
    backward = _list_slots(B, range(chunks - 1, -1, -1), micro_batches, size)
    orders = _alternate(forward, backward, 2 * np.arange(stages)[::-1] + (chunks - 1) * size)
    return Schedule("interleaved", stages, micro_batches, chunks, schedules.PiecePlacement.LOOP, *orders)


def group_size(stages: int, micro_batches: int, group: int | None = None) -> int:
    """Return the micro-batches that pass through a chunk together: *group* if it is legal, or the fewest legal."""

    def is_legal(size: int) -> bool:
        rest = micro_batches % size
        return rest == 0 or rest >= stages

    if group is None:
        return next(size for size in range(stages, micro_batches + 1) if is_legal(size))
    if not stages <= group <= micro_batches:
        raise ScheduleError(f"the group must be between {stages} stages and {micro_batches} micro-batches, not {group}")
    if not is_legal(group):
        raise ScheduleError(
            f"{micro_batches} micro-batches in groups of {group} leave {micro_batches % group}, "
            f"fewer than the {stages} stages"
        )
    return group


Units = Sequence[tuple[SlotAction, int, IntArray, IntArray]]
"""Slots of an action and a chunk: their micro-batches and times."""


def _sort_slots(units: Units) -> IntArray:
    """Return slots as rows in the order of their times."""
    actions, chunks, batches, times = zip(*units, strict=True)
    sizes = list(map(len, batches))
    rows = np.zeros((sum(sizes), len(Slot._fields)), np.int64)
    rows[:, 0], rows[:, 1], rows[:, 2] = np.repeat(actions, sizes), np.concatenate(batches), np.repeat(chunks, sizes)
    return rows.take(np.argsort(np.concatenate(times), kind="stable"), 0)


def _list_slots(action: SlotAction, chunks: range, micro_batches: int, size: int) -> IntArray:
    """Return slots as rows: each group of *size* micro-batches passes through every chunk before the next starts."""
    batch = np.arange(micro_batches)
    groups = batch // size * len(chunks)
    return _sort_slots([(action, chunk, batch, groups + place) for place, chunk in enumerate(chunks)])


def _alternate(forwards: IntArray, backwards: IntArray, warm_up: IntArray) -> tuple[IntArray, tuple[int, ...]]:
    """Return the slots of stages and their numbers: *warm_up* forwards, forward and backward in turn, the backwards
    that are left.
    """
    count, stages = len(forwards), len(warm_up)
    slot, ahead, stage = np.arange(count), np.minimum(warm_up, count)[:, None], np.arange(stages)[:, None]
    orders = np.empty((stages, 2 * count, forwards.shape[1]), np.int64)
    orders[stage, np.maximum(slot, 2 * slot - ahead)] = forwards
    orders[stage, np.minimum(ahead + 2 * slot + 1, count + slot)] = backwards
    return orders.reshape(-1, forwards.shape[1]), (2 * count,) * stages


# Schedules that split the backward and fill the bubble with weight gradients. Sources: Qi et al., Zero Bubble Pipeline
# Parallelism (2023), arXiv 2401.10241, sections 2 (ZB-H1, ZB-H2) and 6 (ZB-V); Qi et al., Pipeline Parallelism with
# Controllable Memory (2024), arXiv 2405.15362.


def zb_h1(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Run as many forwards ahead as 1F1B; stage s delays s weight gradients, so memory is that of 1F1B."""
    orders = [_split_backwards(micro_batches, stages - stage, stage) for stage in range(stages)]
    return Schedule.of("zb-h1", stages, micro_batches, chunks, schedules.PiecePlacement.LOOP, orders)


def zb_h2(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Twice as far ahead, which leaves no bubble when F = I = W; a stage holds up to 2 * stages - 1.

    That takes 2 * stages - 1 micro-batches. With fewer, more forward passes ahead only delay the backwards: the surplus
    over ZB-H1 is then what the micro-batches beyond one per stage allow.
    """
    spare = max(0, micro_batches - stages)
    orders = [
        _split_backwards(micro_batches, stages - stage + min(stages - stage - 1, spare), stage + min(stage, spare))
        for stage in range(stages)
    ]
    return Schedule.of("zb-h2", stages, micro_batches, chunks, schedules.PiecePlacement.LOOP, orders)


def _split_backwards(micro_batches: int, ahead: int, delay: int) -> IntArray:
    """Return *ahead* forwards before the first backward; a weight gradient runs *delay* backwards after its own."""
    batch = np.arange(micro_batches)
    forwards = np.where(batch < ahead, -1, 3 * (batch - ahead) + 2)
    weights = np.where(batch + delay < micro_batches, 3 * (batch + delay) + 1, 3 * micro_batches)
    return _sort_slots([(F, 0, batch, forwards), (I, 0, batch, 3 * batch), (W, 0, batch, weights)])


def zb_v(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Two chunks in a V: no bubble when F = I = W, with the memory of 1F1B on every stage.

    The phases are those of the paper's figure, as torch.distributed.pipelining's ZBV schedule counts them. Fewer than
    2 * stages - 1 micro-batches: the order of that many, without the slots that do not exist.
    """
    full = max(micro_batches, 2 * stages - 1)
    orders = (
        tuple(slot for slot in _order_vee(stages, full, stage) if slot.micro_batch < micro_batches)
        for stage in range(stages)
    )
    return Schedule.of("zb-v", stages, micro_batches, chunks, schedules.PiecePlacement.V, tuple(orders))


def _order_vee(stages: int, micro_batches: int, stage: int) -> list[Slot]:
    slots: list[Slot] = []
    done = {(action, chunk): 0 for action in SlotAction for chunk in (0, 1)}

    def run(*steps: tuple[SlotAction, int]) -> None:
        for step in steps:
            slots.append(Slot(step[0], done[step], step[1]))
            done[step] += 1

    for _ in range(2 * (stages - stage) - 1):
        run((F, 0))
    for _ in range(stage):
        run((F, 1), (F, 0))
    for _ in range(stages - stage):
        run((F, 1), (I, 1), (W, 1))
    while done[F, 1] < micro_batches:
        if done[F, 0] < micro_batches:
            run((F, 0))
        run((I, 0), (W, 0), (F, 1), (I, 1), (W, 1))
    for _ in range(stage):
        run((I, 0), (I, 1))
    for _ in range(stages - stage):
        run((I, 0), (W, 0))
    for chunk in (1, 0):
        while done[W, chunk] < micro_batches:
            run((W, chunk))
    return slots


def vee(name: str, step: int, stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Return V-Half (*step* 2) or V-Min (1): the units of ``ir.schedules.vee_times`` in the order of their times."""
    batch, orders = np.arange(micro_batches), []
    for stage in range(stages):
        starts = zip((F, I, W), schedules.vee_times(stages, stage, step), strict=True)
        units = [
            (action, chunk, batch, start + schedules.VEE_PERIOD * batch)
            for action, own in starts
            for chunk, start in enumerate(own)
        ]
        orders.append(_sort_slots(units))
    return Schedule.of(name, stages, micro_batches, chunks, schedules.PiecePlacement.V, orders)


def dualpipe(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """The eight steps of DualPipe: micro-batches enter at both ends, and a forward overlaps a backward that goes the
    other way. A chunk is a direction: the stage holds two pieces of the model.

    Source: DeepSeek-V3 Technical Report (2024), section 3.2.1 and figure 5; the lengths of the steps are those of
    github.com/deepseek-ai/DualPipe.
    """
    orders = (_DualPipeStage(stages, micro_batches, stage).order() for stage in range(stages))
    return Schedule.of("dualpipe", stages, micro_batches, chunks, schedules.PiecePlacement.TWO_WAY, tuple(orders))


class _DualPipeStage:
    """Writes the order of one stage. *near* is the direction whose entrance is the closer one, *far* the other."""

    def __init__(self, stages: int, micro_batches: int, stage: int) -> None:
        self.from_edge = min(stage, stages - 1 - stage)
        self.to_middle = stages // 2 - 1 - self.from_edge
        self.main = micro_batches // 2 - stages + self.from_edge + 1
        self.near, self.far = (0, 1) if stage < stages // 2 else (1, 0)
        self.half = micro_batches // 2
        self.slots: list[Slot] = []
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.delayed: deque[Slot] = deque()

    def order(self) -> tuple[Slot, ...]:
        near, far = self.near, self.far
        for _ in range(2 * self.to_middle):
            self.add(F, near)
        for _ in range(self.from_edge + 1):
            self.add(F, near)
            self.add(F, far)
        for _ in range(self.to_middle):
            self.add(I, far)
            self.add_weight()
            self.add(F, far)
        for turn in range(self.main):
            # The two middle stages run their first pair one after the other: the far side is waiting for it.
            self.add(F, near, overlap=turn > 0 or self.to_middle > 0)
            self.add(B, far)
            self.add(F, far, overlap=True)
            self.add(B, near)
        for _ in range(self.to_middle):
            self.add(B, far)
            self.add(F, far, overlap=True)
            self.add(B, near)
        # The second half of the last backwards leave their weight gradients for the gaps that follow.
        for count, direction in enumerate([far, near] * (self.from_edge + 1)):
            self.add(B if count <= self.from_edge else I, direction)
        for _ in range(self.to_middle):
            self.add_weight()
            self.add(I, near)
        while self.delayed:
            self.add_weight()
        return tuple(self.slots)

    def add(self, action: SlotAction, direction: int, overlap: bool = False) -> None:
        counter = self.forwards if action is F else self.backwards
        slot = Slot(action, direction * self.half + counter[direction], direction, overlap)
        counter[direction] += 1
        self.slots.append(slot)
        if action is I:
            self.delayed.append(slot)

    def add_weight(self) -> None:
        """Add the weight gradient that has waited longest."""
        slot = self.delayed.popleft()
        self.slots.append(Slot(W, slot.micro_batch, slot.chunk))


# The schedules by name.

ORDERS: dict[schedules.ScheduleKind, Callable[[int, int, int], Schedule]] = {
    schedules.ScheduleKind.GPIPE: gpipe,
    schedules.ScheduleKind.ONE_F_ONE_B: one_f_one_b,
    schedules.ScheduleKind.INTERLEAVED: interleaved,
    schedules.ScheduleKind.ZB_H1: zb_h1,
    schedules.ScheduleKind.ZB_H2: zb_h2,
    schedules.ScheduleKind.ZB_V: zb_v,
    schedules.ScheduleKind.V_HALF: partial(vee, "v-half", 2),
    schedules.ScheduleKind.V_MIN: partial(vee, "v-min", 1),
    schedules.ScheduleKind.DUALPIPE: dualpipe,
}


def kind_named(name: str) -> schedules.ScheduleKind:
    if name not in schedules.SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(schedules.ScheduleKind)}")
    return schedules.ScheduleKind(name)


@lru_cache(maxsize=256)
def make_schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """Make the schedule called *name*; *chunks* are all pieces on a stage, of each copy of the model."""
    kind = kind_named(name)
    facts = schedules.SCHEDULES[kind]
    if min(stages, micro_batches, chunks) < 1:
        raise ScheduleError(f"a schedule needs at least 1 of {stages=}, {micro_batches=}, {chunks=}")
    if chunks < facts.fewest_chunks and facts.most_chunks is None:
        raise ScheduleError(f"{name} needs at least {facts.fewest_chunks} chunks per stage, not {chunks}; use 1f1b")
    if (wanted := facts.pieces(chunks)) != chunks:
        raise ScheduleError(f"{name} runs {wanted} chunk(s) per stage, not {chunks}")
    if problem := schedules.describe_misfit(kind, stages, micro_batches):
        raise ScheduleError(problem)
    return ORDERS[kind](stages, micro_batches, chunks)


def choose_schedule(layout: Layout, micro_batches: int, name: str | None = None) -> str:
    """Return the schedule of a pipeline for which *name* or nothing was given."""
    if layout.pp == 1 and not (name and schedules.SCHEDULES[kind_named(name)].alone):
        return schedules.ScheduleKind.ONE_F_ONE_B
    if name:
        return name
    usual = schedules.default_schedule(layout.vpp)
    return schedules.ScheduleKind.GPIPE if schedules.describe_misfit(usual, layout.pp, micro_batches) else usual


def schedule_for(layout: Layout, micro_batches: int, name: str | None = None) -> Schedule:
    """Make the schedule of *layout*'s pipeline, by name or the default one."""
    name = choose_schedule(layout, micro_batches, name)
    return make_schedule(name, layout.pp, micro_batches, chunks_for(layout, name))


def chunks_for(layout: Layout, name: str) -> int:
    """Return the pieces on a stage of *layout* under the schedule called *name*."""
    return schedules.SCHEDULES[kind_named(name)].pieces(layout.vpp) if layout.pp > 1 else 1


# Forwards that run together with backwards of other micro-batches: one computes while the other exchanges tokens with
# its experts.


def pair_slots(schedule: Schedule) -> Schedule:
    """Return *schedule* with every forward after its stage's warm-up interleaved with the backward after it.

    One forward more runs before the first backward, so that the two of a pair never need each other; the forwards of
    the warm-up and the backwards that are left at the end run alone. Source: Megatron-Core's combined_1f1b.py and, for
    the warm-up, schedules.py (overlap_moe_expert_parallel_comm).
    """
    orders = []
    for order in schedule.orders:
        forwards = [slot for slot in order if slot.kind is F]
        backwards = [slot for slot in order if slot.kind is B]
        if len(backwards) >= len(forwards) and not any(slot.with_next for slot in order):
            # As many forwards as precede the first backward: in 1F1B that is the warm-up and one more.
            ahead = order.index(backwards[0])
            pairs = zip(forwards[ahead:], backwards, strict=False)
            steady = [slot for forward, backward in pairs for slot in (forward._replace(with_next=True), backward)]
            order = (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])
        orders.append(order)
    size = (schedule.name, schedule.stages, schedule.micro_batches, schedule.chunks)
    return Schedule.of(*size, schedule.placement, orders)


class PairPart(NamedTuple):
    """A run of ops of one slot of a pair: all of them compute, or all exchange tokens with experts."""

    exchanges: bool
    seconds: float


def merge_parts(first: Sequence[PairPart], second: Sequence[PairPart]) -> list[int]:
    """Return the slot, 0 or 1, of each part in the order of issue that ends the pair earliest.

    Parts of a slot alternate between computing and exchanging and keep their order; of two that need the same one waits
    for the other. That is a job shop of two jobs, for which the best order is a shortest path around obstacles in the
    plane of their progress (Akers 1956, A graphical approach to production scheduling problems). The best order of less
    work is never longer, which does not hold for an order that always runs what can start first (Graham 1969).
    """
    # In picoseconds: ways that are equally fast must not be told apart by the last bit of their sums.
    first, second = jobs = [
        [part._replace(seconds=round(part.seconds * 1e12)) for part in job] for job in (first, second)
    ]
    ends = len(first), len(second)
    # The fastest way to each point of progress: when it is reached, and the point before.
    steps: dict[tuple[int, int], tuple[float, tuple[int, int]]] = {(0, 0): (0.0, (0, 0))}
    for i in range(ends[0] + 1):
        for j in range(ends[1] + 1):
            if (i, j) in steps:
                for point, lasts_s in _next_points(first, second, i, j):
                    seconds = steps[i, j][0] + lasts_s
                    if point not in steps or seconds < steps[point][0]:
                        steps[point] = (seconds, (i, j))
    starts: list[tuple[float, float, int, int]] = []
    point = ends
    while point != (0, 0):
        before = steps[point][1]
        for number, job in enumerate(jobs):
            start_s = steps[before][0]
            for index in range(before[number], point[number]):
                starts.append((start_s, start_s + job[index].seconds, number, index))
                start_s += job[index].seconds
        point = before
    return [number for _, _, number, _ in sorted(starts)]


def _next_points(
    first: Sequence[PairPart], second: Sequence[PairPart], i: int, j: int
) -> list[tuple[tuple[int, int], float]]:
    """Return the next points of progress, with the seconds until then, when parts *i* and *j* are to start.

    Either both run until one needs what the other still uses, and waits; or one waits from the start until the other
    has released what it will need.
    """
    if i == len(first) or j == len(second):
        end = len(first), len(second)
        left_s = sum(part.seconds for part in (*first[i:], *second[j:]))
        return [(end, left_s)] if (i, j) != end else []
    part, other = first[i], second[j]
    if part.exchanges == other.exchanges:
        return [((i + 1, j), part.seconds), ((i, j + 1), other.seconds)]
    points = [((i + 1, j + 1), max(part.seconds, other.seconds))]
    if part.seconds < other.seconds and i + 1 < len(first):
        points.append(((i + 2, j), part.seconds + first[i + 1].seconds))
    if other.seconds < part.seconds and j + 1 < len(second):
        points.append(((i, j + 2), other.seconds + second[j + 1].seconds))
    return points
