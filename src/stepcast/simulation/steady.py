"""Steps of many micro-batches, computed from a short pipeline and what each additional period of it adds.

In (max, +) a pipeline that repeats itself settles: from some period on, every time in it is that of the period before
plus the same number. The last two periods of a short run before its pipeline drains are compared. Where everything that
the calls of the second leave is later by one number than what those of the first left, so are all periods that could
follow: a call of an added period waits for calls of its own and of the one before, as those did. A lane that no call
of a period touches only falls behind; that no such lane decides the end is seen from a second run that is one period
shorter and ends earlier by the same number. All of it is exact: prices are whole numbers of ticks.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import FloatArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import SLOTS
from stepcast.ir.schedules import ScheduleKind
from stepcast.simulation.breakdown import StageTime, stage_times
from stepcast.simulation.engine import Run, extend_makespan_s, find_shift_s, simulate
from stepcast.simulation.pipeline import reschedule
from stepcast.simulation.program import TICK_S, Program
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import group_size, interleaved, kind_named, make_schedule
from stepcast.simulation.step import Step

LONG = 2**17
"""Slots of all stages from which on a step is extended even where sums of its ticks are rounded."""
MOST_SHORT = 2**17
"""The most slots of all stages of a short run."""
MOST = SLOTS.most
"""The most slots of all stages that are run one by one: some seconds and 500 MB."""
FEWEST_SLOTS = 2**11
"""Slots of all stages below which running all of them takes no longer than two shorter schedules."""
EXACT_S = 2.0**53 * TICK_S
"""Sums of ticks are exact up to here."""
ROUNDED = 4096
"""Units in the last place that rounded sums may be off: below a nanosecond in a step of an hour."""
FILL_MICRO_BATCHES, FILL_GROUPS = 8, 6
"""Micro-batches beyond those that fill the stages after which most pipelines have settled, and groups of micro-batches
after which interleaved ones have."""
PERIODS: dict[ScheduleKind, Callable[[int, int], int]] = {
    ScheduleKind.ONE_F_ONE_B: lambda stages, micro_batches: 1,
    ScheduleKind.INTERLEAVED: group_size,
    ScheduleKind.ZB_H1: lambda stages, micro_batches: 1,
    ScheduleKind.ZB_H2: lambda stages, micro_batches: 1,
    ScheduleKind.ZB_V: lambda stages, micro_batches: 1,
}
"""Micro-batches after which a schedule repeats itself, by stages and micro-batches; gpipe and DualPipe turn around in
the middle."""
REPEATED = dict(zip(PERIODS, (1, 4, 2, 3, 2), strict=True))
"""Micro-batches for each stage, or periods, in which a pipeline fills, repeats itself and drains."""


def count_slots(stages: int, micro_batches: int, chunks: int) -> int:
    return 2 * stages * micro_batches * chunks


class ShortSchedules(NamedTuple):
    """Two schedules in place of a long one, and by how many periods the short one is shorter than that."""

    short: Schedule
    longer: Schedule
    periods: int

    @property
    def period(self) -> int:
        return self.longer.micro_batches - self.short.micro_batches


@lru_cache(maxsize=1024)
def shorten_schedule(
    name: str, stages: int, micro_batches: int, chunks: int, least: int = 0, repeats: int = 1
) -> ShortSchedules | None:
    """Return two shorter schedules, *repeats* periods apart, of which the longer has at *least* so many micro-batches;
    None where nothing is gained.
    """
    kind = kind_named(name)
    if kind not in PERIODS or count_slots(stages, micro_batches, chunks) < FEWEST_SLOTS:
        return None
    group = PERIODS[kind](stages, micro_batches)
    # ZB-H2 and ZB-V run up to twice the number of stages ahead.
    ahead = 1 if kind in (ScheduleKind.ONE_F_ONE_B, ScheduleKind.ZB_H1) else 2
    least = max(least, ahead * stages + FILL_MICRO_BATCHES if group == 1 else FILL_GROUPS * group)
    period = repeats * group
    longer = least + (micro_batches - least) % period
    short = longer - period
    if 4 * (short + longer) > 3 * micro_batches or count_slots(stages, longer, chunks) > MOST:
        return None
    one, two = (_make_schedule(kind, stages, size, chunks, group) for size in (short, longer))
    return ShortSchedules(one, two, (micro_batches - short) // period)


@lru_cache(maxsize=512)
def _make_schedule(kind: ScheduleKind, stages: int, micro_batches: int, chunks: int, group: int) -> Schedule:
    if kind is ScheduleKind.INTERLEAVED:
        return interleaved(stages, micro_batches, chunks, group)
    return make_schedule(kind, stages, micro_batches, chunks)


@dataclass(frozen=True, eq=False)
class ProgramPair:
    """The program of a short step in place of a long one, and the same with one period more."""

    short: Program
    longer: Program
    periods: int

    def run(self, seconds: FloatArray) -> "PairRun | None":
        """Run both with *seconds*, one for each of their costs; None where the end of the long step does not follow."""
        longer = simulate(self.longer, seconds)
        slack_s = _slack_s(longer.makespan_s)
        shift_s = find_shift_s(longer, self.longer.calls - self.short.calls, slack_s)
        short = simulate(self.short, seconds, longer.maps) if shift_s else None
        if short is None or abs(longer.makespan_s - short.makespan_s - shift_s) > slack_s:
            return None
        return PairRun(short, longer, short.makespan_s + self.periods * (longer.makespan_s - short.makespan_s))


class PairRun(NamedTuple):
    """The runs of both programs of a pair, and when the long step ends."""

    short: Run
    longer: Run
    end_s: float


def _slack_s(end_s: float) -> float:
    """Return by how much times that should be equal may differ: beyond EXACT_S thousands of sums are rounded."""
    return 0.0 if end_s < EXACT_S else ROUNDED * float(np.spacing(end_s))


def pair_programs(short: Program, schedules: ShortSchedules) -> ProgramPair | None:
    """Return the pair for the program of the short schedule; None where the longer one calls other segments."""
    table = reschedule(short.table, schedules.longer)
    return None if table is None else ProgramPair(short, replace(short, table=table), schedules.periods)


@dataclass(frozen=True, eq=False)
class SteadyStep:
    """A short step, one that is a period longer, and how many periods the whole step is longer than it."""

    short: tuple[Step, Run]
    longer: tuple[Step, Run]
    pair: ProgramPair

    def extend(self, short: float, longer: float) -> float:
        """Return the value after all periods of what grows from *short* to *longer* in one period."""
        return short + self.pair.periods * (longer - short)

    @property
    def makespan_s(self) -> float:
        return self.extend(self.short[1].makespan_s, self.longer[1].makespan_s)

    def stage_times(self) -> tuple[StageTime, ...]:
        pairs = zip(stage_times(*self.short), stage_times(*self.longer), strict=True)
        return tuple(one.combine(two, self.extend) for one, two in pairs)


def find_step_s(
    size: tuple[str, int, int, int], build: Callable[[Schedule], Step], arrange: Callable[[Schedule], Schedule]
) -> float | None:
    """Return when a step of *size* (schedule, stages, micro-batches, chunks) ends, from one of few micro-batches whose
    last period is repeated; None where it has no periods, too few slots for that or too many.
    """
    name, stages, micro_batches, chunks = size
    kind = kind_named(name)
    if kind not in REPEATED or not FEWEST_SLOTS <= count_slots(*size[1:]) <= LONG:
        return None
    period = PERIODS[kind](stages, micro_batches)
    least = REPEATED[kind] * (stages if period == 1 else period) + FILL_MICRO_BATCHES // 2
    short = least + (micro_batches - least) % period
    if 4 * short > 3 * micro_batches:
        return None
    step = build(arrange(_make_schedule(kind, stages, short, chunks, period)))
    batches = step.program.table.micro_batches
    assert batches is not None
    middle = (short - period) // 2
    calls = int(((batches[:, 0] >= middle) & (batches[:, 0] < middle + period)).sum())

    def run(seconds: FloatArray) -> float | None:
        return extend_makespan_s(step.program, seconds, calls, (micro_batches - short) // period)

    seconds = step.base_seconds
    step_s = run(seconds)
    if step_s is not None and step.has_lead:
        step_s = run(step.with_lead(seconds, step_s - (run(step.host_seconds(seconds)) or 0.0)))
    return None if step_s is None or step_s >= EXACT_S else step_s


def find_steady_step(
    name: str,
    stages: int,
    micro_batches: int,
    chunks: int,
    build: Callable[[Schedule], Step],
    arrange: Callable[[Schedule], Schedule],
) -> SteadyStep | None:
    """Return the step of so many *micro_batches* from runs of shorter schedules, which *arrange* may change and *build*
    makes a step of; None if they do not settle soon.

    Steps of more than LONG slots are worth longer runs than others, and periods that are several micro-batches long:
    what is waited for may go through several stages and back.
    """
    is_long = count_slots(stages, micro_batches, chunks) > LONG
    for plain in _list_shorter(name, stages, micro_batches, chunks, is_long):
        schedules = ShortSchedules(arrange(plain.short), arrange(plain.longer), plain.periods)
        step = build(schedules.short)
        pair = pair_programs(step.program, schedules)
        steady = _run_pair(step, pair, schedules) if pair else None
        if steady and (is_long or steady.makespan_s < EXACT_S):
            return steady
    return None


def _list_shorter(name: str, stages: int, micro_batches: int, chunks: int, is_long: bool) -> Iterator[ShortSchedules]:
    size = (name, stages, micro_batches, chunks)
    first = shorten_schedule(*size)
    if first is None:
        return
    yield first
    least = 16 * (stages + first.period)  # as long as it takes where one stage is a little slower than others
    while is_long and 4 * least < micro_batches and count_slots(stages, least, chunks) <= MOST_SHORT:
        for repeats in range(1, stages + 1):
            schedules = shorten_schedule(*size, least, repeats)
            if schedules:
                yield schedules
        least *= 4


def _run_pair(step: Step, pair: ProgramPair, schedules: ShortSchedules) -> SteadyStep | None:
    runs = run_with_lead(step, pair, step.base_seconds)
    longer_step = replace(step, program=pair.longer, schedule=schedules.longer)
    return SteadyStep((step, runs.short), (longer_step, runs.longer), pair) if runs else None


def run_with_lead(step: Step, pair: ProgramPair, seconds: FloatArray) -> PairRun | None:
    """Run both programs with *seconds*, and with the lead of a host that issues one step after the other."""
    if step.has_lead:
        whole, host = pair.run(seconds), pair.run(step.host_seconds(seconds))
        if whole is None or host is None:
            return None
        seconds = step.with_lead(seconds, whole.end_s - host.end_s)
    return pair.run(seconds)
