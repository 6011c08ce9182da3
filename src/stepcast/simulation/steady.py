"""Steps of many micro-batches, computed from a short pipeline and what each additional period of it adds.

In (max, +) a pipeline that repeats itself settles: from some period on, every time in it is that of the period before
plus the same number. Once two periods in a row differ by one number alone, all later ones do, because what does not
move with them only falls behind. So a short run proves what a long one takes.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from stepcast.ir.arrays import IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import SLOTS
from stepcast.ir.schedules import ScheduleKind
from stepcast.simulation.breakdown import StageTime, stage_times
from stepcast.simulation.engine import Run
from stepcast.simulation.pipeline import reschedule
from stepcast.simulation.program import TICK_S, CallTable, Program
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import group_size, interleaved, kind_named, make_schedule
from stepcast.simulation.step import Step

LONG = 2**17
"""Slots of all stages from which on a steady step replaces the whole one; fewer are soon run one by one."""
MOST = SLOTS.most
"""The most slots of all stages that are run one by one: some seconds and 500 MB."""
FEWEST_SLOTS = 2**11
"""Slots of all stages below which running all of them takes no longer than two shorter schedules."""
PERIODS_COMPARED = 4
"""Periods in a row that must differ by one number; no call may wait for one of longer ago."""
EXACT_S = 2.0**53 * TICK_S
"""Sums of ticks are exact up to here."""
ROUNDED = 4096
"""Units in the last place that rounded sums may be off: below a nanosecond in a step of an hour."""
FILL_MICRO_BATCHES, FILL_GROUPS = 8, 6
"""Micro-batches beyond the number of stages after which 1F1B and the like have settled, and groups of micro-batches
after which interleaved schedules have. If they have not, all micro-batches are run."""
PERIODS: dict[ScheduleKind, Callable[[int, int], int]] = {
    ScheduleKind.ONE_F_ONE_B: lambda stages, micro_batches: 1,
    ScheduleKind.INTERLEAVED: group_size,
    ScheduleKind.ZB_H1: lambda stages, micro_batches: 1,
    ScheduleKind.ZB_H2: lambda stages, micro_batches: 1,
    ScheduleKind.ZB_V: lambda stages, micro_batches: 1,
}
"""Micro-batches after which a schedule repeats itself, by stages and micro-batches; gpipe and DualPipe turn around in
the middle."""


def count_slots(stages: int, micro_batches: int, chunks: int) -> int:
    return 2 * stages * micro_batches * chunks


def periodic_schedule(kind: ScheduleKind, stages: int, micro_batches: int, chunks: int, period: int) -> Schedule:
    """Make the schedule that repeats itself after *period* micro-batches."""
    if kind is ScheduleKind.INTERLEAVED:
        return interleaved(stages, micro_batches, chunks, period)
    return make_schedule(kind, stages, micro_batches, chunks)


def first_calls(table: CallTable, micro_batch: int) -> IntArray:
    """Return for each rank a first call, so that no call before these waits for one after them or belongs to
    *micro_batch* or a later one.
    """
    assert table.micro_batches is not None
    reached = np.flatnonzero(table.micro_batches[:, 0] >= micro_batch)
    first = table.rank_start[1:].copy()
    np.minimum.at(first, table.rank[reached], reached)
    waits, ports = np.nonzero(table.source_call >= 0)
    rank, source = table.rank[waits], table.source_call[waits, ports]
    rank_of_source = table.rank[source]
    while True:
        early = (waits < first[rank]) & (source >= first[rank_of_source])
        if not early.any():
            return first
        np.minimum.at(first, rank[early], waits[early])


class _PeriodCalls(NamedTuple):
    """The calls of some periods in a row."""

    start: IntArray  # for each rank the first call
    lengths: IntArray  # for each rank the calls of a period
    calls: IntArray  # periods x calls


def _find_periods(table: CallTable, first: int, period: int, count: int) -> _PeriodCalls | None:
    """Return the calls of *count* periods from micro-batch *first* on; None if they differ in length."""
    starts = np.stack([first_calls(table, first + number * period) for number in range(count + 1)])
    lengths = starts[1] - starts[0]
    if not lengths.any() or (np.diff(starts, axis=0) != lengths).any():
        return None
    rank = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(lengths.sum()) - (np.cumsum(lengths) - lengths)[rank]
    return _PeriodCalls(starts[0], lengths, starts[:-1, rank] + within)


def _repeats(table: CallTable, segment: IntArray, periods: _PeriodCalls) -> bool:
    """Return whether all periods call the same *segment* and wait for the same calls of the periods before them."""
    calls = periods.calls
    called, source, port = segment[calls], table.source_call[calls], table.source_port[calls]
    moved = np.where(source[:-1] >= 0, source[:-1] + periods.lengths[table.rank[source[:-1]]], -1)
    return bool((called == called[0]).all() and (port == port[0]).all() and (source[1:] == moved).all())


# A short step in place of the whole one, from two runs whose periods are compared in full.


@dataclass(frozen=True, eq=False)
class SteadyStep:
    """A short step, one that is a period longer, and how many periods the whole step is longer than it."""

    short: tuple[Step, Run]
    longer: tuple[Step, Run]
    periods: int

    def extend(self, short: float, longer: float) -> float:
        """Return the value after all periods of what grows from *short* to *longer* in one period."""
        return short + self.periods * (longer - short)

    @property
    def makespan_s(self) -> float:
        return self.extend(self.short[1].makespan_s, self.longer[1].makespan_s)

    def stage_times(self) -> tuple[StageTime, ...]:
        pairs = zip(stage_times(*self.short), stage_times(*self.longer), strict=True)
        return tuple(one.combine(two, self.extend) for one, two in pairs)


def find_steady_step(
    name: str, stages: int, micro_batches: int, chunks: int, run_schedule: Callable[[Schedule], tuple[Step, Run]]
) -> SteadyStep | None:
    """Return the step of so many *micro_batches* from runs of shorter schedules; None if they do not settle soon."""
    kind = kind_named(name)
    if kind not in PERIODS:
        return None
    group = PERIODS[kind](stages, micro_batches)

    def run_pair(count: int, period: int) -> tuple[int, tuple[Step, Run], tuple[Step, Run]]:
        first = count + (micro_batches - count) % period
        sizes = (first, first + period)
        short, longer = (run_schedule(periodic_schedule(kind, stages, size, chunks, group)) for size in sizes)
        return first, short, longer

    count = 16 * (stages + group)
    while 4 * count < micro_batches and count_slots(stages, count, chunks) <= LONG:
        first, short, longer = run_pair(count, group)
        period = group * count_repeats(short[1], longer[1], first, group, stages)
        if period > group:
            first, short, longer = run_pair(count, period)
        if period and added_s(short[1], longer[1], first, period) is not None:
            return SteadyStep(short, longer, (micro_batches - first) // period)
        count *= 4
    return None


def added_s(short: Run, longer: Run, micro_batches: int, period: int) -> float | None:
    """Return what each additional *period* adds to a step of so many *micro_batches*; None if it has not settled.

    *longer* is the run of one period more.
    """
    added_s = longer.makespan_s - short.makespan_s
    lengths = np.diff(longer.program.rank_start) - np.diff(short.program.rank_start)
    shift_s = _shift_s(longer, micro_batches // 2, period, lengths)
    return added_s if added_s > 0 and shift_s and abs(added_s - shift_s) <= _slack_s(longer) else None


def count_repeats(short: Run, longer: Run, micro_batches: int, period: int, most: int) -> int:
    """Return after how many periods, at *most*, all times are as before but for one number; 0 if after none.

    They are more than one where what is waited for goes through several stages and back.
    """
    lengths = np.diff(longer.program.rank_start) - np.diff(short.program.rank_start)
    for times in range(1, most + 1):
        if _shift_s(longer, micro_batches // 2, times * period, times * lengths) is not None:
            return times
    return 0


def _shift_s(run: Run, first: int, period: int, lengths: IntArray) -> float | None:
    """Return by how much later the times of each period from micro-batch *first* on are than those of the period
    before it, of so many calls on each rank (*lengths*); None if that is not one number.
    """
    table = run.program.table
    periods = _find_periods(table, first, period, PERIODS_COMPARED)
    if periods is None or (periods.lengths != lengths).any():
        return None
    change_s = np.diff(run.entry_s[periods.calls], axis=0)
    shift_s = float(change_s[0, 0, 0])
    moves = (np.abs(change_s - shift_s) <= _slack_s(run)).all(axis=0)
    stays = (change_s == 0).all(axis=0)
    if not (moves | stays).all() or not _repeats(table, run.program.chain_of[run.program.segment], periods):
        return None
    # No call may wait for one of longer ago than the periods that were compared.
    source = table.source_call[periods.calls[0]]
    ranks = table.rank[source]
    ago = (periods.start[ranks] - source + lengths[ranks] - 1) // np.maximum(lengths[ranks], 1)
    return shift_s if (ago[source >= 0] < PERIODS_COMPARED).all() else None


def _slack_s(run: Run) -> float:
    """Return by how much times that should be equal may differ: beyond EXACT_S thousands of sums are rounded."""
    return 0.0 if run.makespan_s < EXACT_S else ROUNDED * float(np.spacing(run.makespan_s))


# The end of a long step from two shorter programs that run together with those of other predictions.
#
# The last two periods of the longer one before its pipeline drains are compared. Where everything that the calls of the
# second leave is later by one number than what those of the first left, so are all periods that could follow: a call of
# a further period waits for calls of its own and of the one before, as those did. A lane that no call of a period
# touches only falls behind; that no such lane decides the end is seen from the two steps, which differ by the same
# number. All of it is exact: prices are whole numbers of ticks.


class ShortSchedules(NamedTuple):
    """Two schedules in place of a long one, and by how many periods the short one is shorter than that."""

    short: Schedule
    longer: Schedule
    periods: int

    @property
    def period(self) -> int:
        return self.longer.micro_batches - self.short.micro_batches


@lru_cache(maxsize=1024)
def shorten_schedule(name: str, stages: int, micro_batches: int, chunks: int) -> ShortSchedules | None:
    """Return two shorter schedules; None where nothing is gained."""
    kind = kind_named(name)
    if stages == 1 or kind not in PERIODS or count_slots(stages, micro_batches, chunks) < FEWEST_SLOTS:
        return None
    period = PERIODS[kind](stages, micro_batches)
    least = stages + FILL_MICRO_BATCHES if period == 1 else FILL_GROUPS * period
    longer = least + (micro_batches - least) % period
    short = longer - period
    if 4 * (short + longer) > 3 * micro_batches or count_slots(stages, longer, chunks) > MOST:
        return None
    one, two = (periodic_schedule(kind, stages, size, chunks, period) for size in (short, longer))
    return ShortSchedules(one, two, (micro_batches - short) // period)


@dataclass(frozen=True, eq=False)
class ProgramPair:
    """The program of a short step in place of a long one, and the same with one period more."""

    short: Program
    longer: Program
    periods: int
    watched: IntArray  # 2 x calls: the places of the calls of two periods of the longer one, in its order

    def end_s(self, short_s: float, longer_s: float, shift_s: float | None) -> float | None:
        """Return when the long step ends, from the ends of these and the shift of the second period; None where it
        does not follow.
        """
        if shift_s is None or longer_s - short_s != shift_s:
            return None
        end_s = short_s + self.periods * shift_s
        return end_s if end_s < EXACT_S else None


def pair_programs(short: Program, schedules: ShortSchedules) -> ProgramPair | None:
    """Return the pair for the program of the short schedule; None where periods do not repeat themselves."""
    table = reschedule(short.table, schedules.longer)
    if table is None:
        return None
    known = _WATCHED.setdefault(table, {})
    if schedules.period not in known:
        known[schedules.period] = _watch_periods(table, schedules.longer.micro_batches, schedules.period)
    watched = known[schedules.period]
    return None if watched is None else ProgramPair(short, short.with_table(table), schedules.periods, watched)


_WATCHED: WeakKeyDictionary[CallTable, dict[int, IntArray | None]] = WeakKeyDictionary()


def _watch_periods(table: CallTable, micro_batches: int, period: int) -> IntArray | None:
    """Return the places of the calls of the last two periods before the last micro-batch begins; None unless the
    second repeats the first and waits for calls of these two alone.
    """
    first = micro_batches - 1 - 2 * period
    periods = _find_periods(table, first, period, 2) if first >= 0 else None
    if periods is None or not _repeats(table, table.segment, periods):
        return None
    source = table.source_call[periods.calls[1]]
    if ((source >= 0) & (source < periods.start[table.rank[source]])).any():
        return None
    place = np.empty(table.calls, np.int64)
    place[table.order.calls] = np.arange(table.calls)
    return place[periods.calls]
