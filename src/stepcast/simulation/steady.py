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
from weakref import WeakKeyDictionary

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import SLOTS
from stepcast.ir.schedules import ScheduleKind
from stepcast.simulation.breakdown import StageTime, stage_times
from stepcast.simulation.engine import Run, find_shift_s, simulate
from stepcast.simulation.pipeline import reschedule
from stepcast.simulation.program import TICK_S, CallTable, Program
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

    def make(size: int) -> Schedule:
        if kind is ScheduleKind.INTERLEAVED:
            return interleaved(stages, size, chunks, group)
        return make_schedule(kind, stages, size, chunks)

    return ShortSchedules(make(short), make(longer), (micro_batches - short) // period)


@dataclass(frozen=True, eq=False)
class ProgramPair:
    """The program of a short step in place of a long one, and the same with one period more."""

    short: Program
    longer: Program
    periods: int
    watched: IntArray  # 2 x calls: the calls of two periods of the longer one

    def run(self, seconds: FloatArray) -> "PairRun | None":
        """Run both with *seconds*, one for each of their costs; None where the end of the long step does not follow."""
        longer = simulate(self.longer, seconds)
        slack_s, lanes = _slack_s(longer.makespan_s), longer.maps.shape[1] - self.longer.inputs
        shift_s = find_shift_s(longer.left_s, self.watched, longer.maps, self.longer.call_chains, lanes, slack_s)
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
    """Return the pair for the program of the short schedule; None where periods do not repeat themselves."""
    table = reschedule(short.table, schedules.longer)
    if table is None:
        return None
    known = _WATCHED.setdefault(table, {})
    if schedules.period not in known:
        # Calls that post the receive of the next one differ before the last micro-batch.
        last = schedules.longer.micro_batches - 1
        watched = _watch_periods(table, last, schedules.period)
        known[schedules.period] = _watch_periods(table, last - 1, schedules.period) if watched is None else watched
    watched = known[schedules.period]
    return None if watched is None else ProgramPair(short, short.with_table(table), schedules.periods, watched)


_WATCHED: WeakKeyDictionary[CallTable, dict[int, IntArray | None]] = WeakKeyDictionary()


def _watch_periods(table: CallTable, end: int, period: int) -> IntArray | None:
    """Return the calls of the last two periods before micro-batch *end* begins; None unless the second
    repeats the first and waits for calls of these two alone.
    """
    first = end - 2 * period
    if first < 0:
        return None
    starts = np.stack([_first_calls(table, first + number * period) for number in range(3)])
    lengths = starts[1] - starts[0]
    if not lengths.any() or (starts[2] - starts[1] != lengths).any():
        return None
    rank = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(lengths.sum()) - (np.cumsum(lengths) - lengths)[rank]
    one, two = starts[:-1, rank] + within
    source = table.source_call[one]
    moved = np.where(source >= 0, source + lengths[table.rank[source]], -1)
    repeats = (table.segment[one] == table.segment[two]).all() and (
        table.source_port[one] == table.source_port[two]
    ).all()
    if not repeats or (table.source_call[two] != moved).any():
        return None
    if ((moved >= 0) & (moved < starts[0][table.rank[moved]])).any():
        return None
    return np.stack([one, two])


def _first_calls(table: CallTable, micro_batch: int) -> IntArray:
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
    seconds = step.base_seconds
    if step.has_lead:
        whole, host = pair.run(seconds), pair.run(step.host_seconds)
        if whole is None or host is None:
            return None
        seconds = step.with_lead(whole.end_s - host.end_s)
    runs = pair.run(seconds)
    longer_step = replace(step, program=pair.longer, schedule=schedules.longer)
    return SteadyStep((step, runs.short), (longer_step, runs.longer), pair) if runs else None
