"""Steps of many micro-batches, computed from a short pipeline whose last period is repeated.

In (max, +) a pipeline that repeats itself settles: from some period on, every time in it is that of the period before
plus the same number. So a schedule of few micro-batches is run instead, and the calls of its last period before it
drains are repeated as often as the long one has them more; where nothing overtakes anything else, many at once
(``engine.simulate_repeated``). Prices are whole numbers of ticks, so that all of it is exact up to two minutes.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from stepcast.ir.limits import SLOTS
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.types import dataclass, replace
from stepcast.simulation.engine import Repetition, Run, simulate_repeated
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import group_size, interleaved, kind_named, make_schedule
from stepcast.simulation.seconds import WorkSeconds
from stepcast.simulation.step import Step

LONG = 2**17
"""Slots of all stages from which on the tasks of a step are not written out."""
MOST = SLOTS.most
"""The most slots of all stages that are run one by one: some seconds and 500 MB."""
FEWEST_SLOTS = 2**11
"""Slots of all stages below which running all of them takes no longer than a short schedule and its periods."""
PERIODS: dict[ScheduleKind, Callable[[int, int], int]] = {
    ScheduleKind.ONE_F_ONE_B: lambda stages, micro_batches: 1,
    ScheduleKind.INTERLEAVED: group_size,
    ScheduleKind.ZB_H1: lambda stages, micro_batches: 1,
    ScheduleKind.ZB_H2: lambda stages, micro_batches: 1,
    ScheduleKind.ZB_V: lambda stages, micro_batches: 1,
}
"""Micro-batches after which a schedule repeats itself, by stages and micro-batches; gpipe and DualPipe turn around in
the middle."""
FILLING = dict(zip(PERIODS, (1, 4, 2, 3, 2), strict=True))
"""Micro-batches for each stage, or periods, in which a pipeline fills, repeats itself and drains."""
MORE_MICRO_BATCHES = 4
"""Micro-batches beyond those."""
FEW_PERIODS = 64
"""Periods after which a step that has not settled is tried with a longer schedule."""
LONGER = (1, 4, 16)
"""How many times longer schedules are tried: as long as it takes where one stage is a little slower than others."""


def count_slots(stages: int, micro_batches: int, chunks: int) -> int:
    return 2 * stages * micro_batches * chunks


class ShortSchedule(NamedTuple):
    """A schedule in place of a long one, the micro-batches of one of its periods, and how many periods more the long
    one has.
    """

    schedule: Schedule
    period: range
    repeats: int


@lru_cache(maxsize=1024)
def shorten_schedule(name: str, stages: int, micro_batches: int, chunks: int, longer: int = 1) -> ShortSchedule | None:
    """Return a short schedule, about *longer* times as long as it takes to fill, repeat and drain a pipeline; None
    where nothing is gained. Longer ones repeat as many micro-batches as there are stages: between equal stages
    messages and their answers make waves of that length.
    """
    kind = kind_named(name)
    if kind not in PERIODS or count_slots(stages, micro_batches, chunks) < FEWEST_SLOTS:
        return None
    group = PERIODS[kind](stages, micro_batches)
    period = stages if group == 1 < longer else group
    least = longer * (FILLING[kind] * (stages if group == 1 else group) + MORE_MICRO_BATCHES)
    size = least + (micro_batches - least) % period
    if 4 * size > 3 * micro_batches or count_slots(stages, size, chunks) > MOST:
        return None
    if kind is ScheduleKind.INTERLEAVED:
        schedule = interleaved(stages, size, chunks, group)
    else:
        schedule = make_schedule(kind, stages, size, chunks)
    middle = (size - period) // 2
    return ShortSchedule(schedule, range(middle, middle + period), (micro_batches - size) // period)


@dataclass(frozen=True)
class SteadyStep:
    """A step of few micro-batches, with the period that a step of many repeats."""

    step: Step
    repetition: Repetition

    def simulate(self, seconds: WorkSeconds) -> Run | None:
        """Run the long step with *seconds*, and with the lead of a host that issues one step after the other; None
        where the short one does not repeat itself.
        """
        run = simulate_repeated(self.step.program, seconds, self.repetition)
        if run is None or not self.step.has_lead:
            return run
        host = simulate_repeated(self.step.program, self.step.host_seconds(seconds), self.repetition)
        assert host is not None
        seconds = self.step.with_lead(seconds, run.makespan_s - host.makespan_s)
        return simulate_repeated(self.step.program, seconds, self.repetition)

    def settles_soon(self) -> bool:
        """Whether a few periods are enough for all to take and wait the same."""
        few = self.repetition._replace(repeats=min(self.repetition.repeats, FEW_PERIODS))
        run = replace(self, repetition=few).simulate(self.step.base_seconds)
        return run is not None and run.is_settled


def find_steady_run(
    size: tuple[str, int, int, int],
    build: Callable[[Schedule], Step],
    arrange: Callable[[Schedule], Schedule],
    is_reported: bool = False,
) -> tuple[SteadyStep, Run] | None:
    """Return a short step in place of one of *size* (schedule, stages, micro-batches, chunks) with its run, whose
    breakdown is that of the whole if it is *reported*; None where there is none. *arrange* may change its schedule,
    *build* makes a step of it.
    """
    is_long = count_slots(*size[1:]) > LONG
    first: SteadyStep | None = None
    for longer in LONGER:
        short = shorten_schedule(*size, longer)
        if short is None:
            break
        step = build(arrange(short.schedule))
        batches = step.program.table.micro_batches
        assert batches is not None
        calls = int(((batches[:, 0] >= short.period.start) & (batches[:, 0] < short.period.stop)).sum())
        steady = SteadyStep(step, Repetition(calls, short.repeats))
        first = first or steady
        if (is_long or is_reported) and not steady.settles_soon():
            continue
        run = steady.simulate(step.base_seconds)
        if run is not None and (not is_reported or run.is_settled):
            return steady, run
    run = first.simulate(first.step.base_seconds) if first and is_long else None
    return (first, run) if first and run else None
