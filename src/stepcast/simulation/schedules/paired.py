"""Forwards that run together with backwards of other micro-batches: one computes while the other exchanges
tokens with its experts.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from stepcast.simulation.schedule import Schedule, Slot, SlotAction


def paired(schedule: Schedule) -> Schedule:
    """*schedule* with every forward after its stage's warm-up interleaved with the backward after it.

    One forward more runs before the first backward, so that the two of a pair never need each other; the
    forwards of the warm-up and the backwards that are left at the end have nothing beside them. Source:
    Megatron-Core's combined_1f1b.py and, for the warm-up, schedules.py (overlap_moe_expert_parallel_comm).
    """
    return replace(schedule, orders=tuple(_paired(order) for order in schedule.orders))


def _paired(order: tuple[Slot, ...]) -> tuple[Slot, ...]:
    forwards = [slot for slot in order if slot.kind is SlotAction.FORWARD]
    backwards = [slot for slot in order if slot.kind is SlotAction.BACKWARD]
    if len(backwards) < len(forwards) or any(slot.with_next for slot in order):
        return order
    # As many forwards as precede the first backward: in 1F1B that is the warm-up and one more.
    ahead = order.index(backwards[0])
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [slot for one, two in pairs for slot in (one._replace(with_next=True), two)]
    return (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])


class PairPart(NamedTuple):
    """A run of ops of one slot of a pair: all of them compute, or all exchange tokens with experts."""

    exchanges: bool
    seconds: float


class _Step(NamedTuple):
    """The fastest way to a point: when it is reached, and the point before."""

    seconds: float
    before: tuple[int, int]


def merge_parts(first: Sequence[PairPart], second: Sequence[PairPart]) -> list[int]:
    """Return the slot, 0 or 1, of each part in the order of issue that ends the pair earliest.

    Parts of a slot alternate between computing and exchanging and keep their order; of two that need the same
    one waits for the other. That is a job shop of two jobs, for which the best order is a shortest path
    around obstacles in the plane of their progress (Akers 1956, A graphical approach to production scheduling
    problems). The best order of less work is never longer, which does not hold for an order that always runs
    what can start first (Graham 1969).
    """
    jobs = (first, second)
    ends = len(first), len(second)
    steps: dict[tuple[int, int], _Step] = {(0, 0): _Step(0.0, (0, 0))}
    for i in range(ends[0] + 1):
        for j in range(ends[1] + 1):
            if (i, j) in steps:
                for point, lasts_s in _ways_on(jobs, i, j):
                    seconds = steps[i, j].seconds + lasts_s
                    if seconds < steps.get(point, _NEVER).seconds:
                        steps[point] = _Step(seconds, (i, j))
    starts: list[tuple[float, float, int, int]] = []
    point = ends
    while point != (0, 0):
        before = steps[point].before
        for number, job in enumerate(jobs):
            start_s = steps[before].seconds
            for at in range(before[number], point[number]):
                starts.append((start_s, start_s + job[at].seconds, number, at))
                start_s += job[at].seconds
        point = before
    return [number for _, _, number, _ in sorted(starts)]


_NEVER = _Step(inf, (0, 0))


def _ways_on(
    jobs: tuple[Sequence[PairPart], Sequence[PairPart]], i: int, j: int
) -> list[tuple[tuple[int, int], float]]:
    """Return where the two can be next, with the seconds until then, when parts *i* and *j* are to start.

    Either both run until one needs what the other still uses, and waits; or one waits from the start until
    the other has released what it will need.
    """
    first, second = jobs
    if i == len(first) or j == len(second):
        end = len(first), len(second)
        left_s = sum(part.seconds for part in (*first[i:], *second[j:]))
        return [(end, left_s)] if (i, j) != end else []
    one, two = first[i], second[j]
    if one.exchanges == two.exchanges:
        return [((i + 1, j), one.seconds), ((i, j + 1), two.seconds)]
    ways = [((i + 1, j + 1), max(one.seconds, two.seconds))]
    if one.seconds < two.seconds and i + 1 < len(first):
        ways.append(((i + 2, j), one.seconds + first[i + 1].seconds))
    if two.seconds < one.seconds and j + 1 < len(second):
        ways.append(((i, j + 2), two.seconds + second[j + 1].seconds))
    return ways
