"""Steps of very many micro-batches: a short pipeline, and what each further period of it adds.

In (max, +) a pipeline that repeats itself settles: from some period on, every time in it is that of the
period before plus the same number. Once two periods in a row differ by one number alone, all later ones do,
for what does not move with them only falls further behind. So a short run proves what a long one takes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from stepcast.ir.limits import SLOTS
from stepcast.ir.schedules import ScheduleKind
from stepcast.simulation.breakdown import StageTime, stage_times
from stepcast.simulation.engine import Run
from stepcast.simulation.pipeline import rescheduled
from stepcast.simulation.program import Calls, Program, order_of
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import group_size, interleaved, kind_named, make_schedule
from stepcast.simulation.segments import Ints
from stepcast.simulation.step import Step

LONG = 2**17
"""Slots of all stages from which on a steady state is looked for; fewer are soon run one by one."""
MOST = SLOTS.most
"""Slots of all stages that are run one by one at most: some seconds and 500 MB."""
LOOKED_AT = 4
"""Periods in a row that must differ by one number; no call may wait for one of longer ago."""
EXACT_S = 2.0**53 * 2.0**-46
"""Sums of ticks are exact up to here."""
ROUNDED = 4096
"""Units in the last place that rounded sums may be off: below a nanosecond in a step of an hour."""
PERIODS: dict[ScheduleKind, Callable[[int, int], int]] = {
    ScheduleKind.ONE_F_ONE_B: lambda stages, micro_batches: 1,
    ScheduleKind.INTERLEAVED: group_size,
    ScheduleKind.ZB_H1: lambda stages, micro_batches: 1,
    ScheduleKind.ZB_H2: lambda stages, micro_batches: 1,
    ScheduleKind.ZB_V: lambda stages, micro_batches: 1,
}
"""Micro-batches after which a schedule repeats itself, by stages and micro-batches; gpipe and DualPipe turn
around in the middle."""


@dataclass(frozen=True, eq=False)
class SteadyStep:
    """A short step, one that is a period longer, and how many periods longer than the short one it is."""

    short: tuple[Step, Run]
    longer: tuple[Step, Run]
    periods: int

    def extended(self, short: float, longer: float) -> float:
        """What grows from *short* to *longer* in one period, after all of them."""
        return short + self.periods * (longer - short)

    @property
    def makespan_s(self) -> float:
        return self.extended(self.short[1].makespan_s, self.longer[1].makespan_s)

    def stage_times(self) -> tuple[StageTime, ...]:
        pairs = zip(stage_times(*self.short), stage_times(*self.longer), strict=True)
        return tuple(self._stage_time(one, two) for one, two in pairs)

    def _stage_time(self, one: StageTime, two: StageTime) -> StageTime:
        return StageTime(
            stage=one.stage,
            compute_s=self.extended(one.compute_s, two.compute_s),
            optimizer_s=self.extended(one.optimizer_s, two.optimizer_s),
            exposed_s={key: self.extended(each, two.exposed_s[key]) for key, each in one.exposed_s.items()},
            host_s=self.extended(one.host_s, two.host_s),
            bubble_s=self.extended(one.bubble_s, two.bubble_s),
            communication_s={
                key: self.extended(each, two.communication_s[key]) for key, each in one.communication_s.items()
            },
        )


def slots_of(stages: int, micro_batches: int, chunks: int) -> int:
    return 2 * stages * micro_batches * chunks


def settled(
    name: str, stages: int, micro_batches: int, chunks: int, built: Callable[[Schedule], tuple[Step, Run]]
) -> SteadyStep | None:
    """The step of that many *micro_batches*, from shorter ones that are *built*; None if they do not settle
    soon.
    """
    kind = kind_named(name)
    if kind not in PERIODS:
        return None
    group = PERIODS[kind](stages, micro_batches)

    def pair(count: int, period: int) -> tuple[int, tuple[Step, Run], tuple[Step, Run]]:
        first = count + (micro_batches - count) % period
        sizes = (first, first + period)
        short, longer = (built(schedule_in(kind, stages, size, chunks, group)) for size in sizes)
        return first, short, longer

    count = 16 * (stages + group)
    while 4 * count < micro_batches and slots_of(stages, count, chunks) <= LONG:
        first, short, longer = pair(count, group)
        period = group * repeats_after(short[1], longer[1], first, group, stages)
        if period > group:
            first, short, longer = pair(count, period)
        if period and added_s(short[1], longer[1], first, period) is not None:
            return SteadyStep(short, longer, (micro_batches - first) // period)
        count *= 4
    return None


def schedule_in(kind: ScheduleKind, stages: int, micro_batches: int, chunks: int, period: int) -> Schedule:
    """The schedule that repeats itself after *period* micro-batches."""
    if kind is ScheduleKind.INTERLEAVED:
        return interleaved(stages, micro_batches, chunks, period)
    return make_schedule(kind, stages, micro_batches, chunks)


def added_s(short: Run, longer: Run, micro_batches: int, period: int) -> float | None:
    """What each further *period* adds to a step of so many *micro_batches*; None if it has not settled.

    *longer* is the run of one period more.
    """
    added_s = longer.makespan_s - short.makespan_s
    lengths = np.diff(longer.program.rank_start) - np.diff(short.program.rank_start)
    moves_s = _moves_s(longer, micro_batches // 2, period, lengths)
    return added_s if added_s > 0 and moves_s and abs(added_s - moves_s) <= _slack_s(longer) else None


def repeats_after(short: Run, longer: Run, micro_batches: int, period: int, most: int) -> int:
    """After how many periods, at *most*, all times are as before but for one number; 0 if after none.

    They are more than one where what is waited for goes through several stages and back.
    """
    lengths = np.diff(longer.program.rank_start) - np.diff(short.program.rank_start)
    return next(
        (
            times
            for times in range(1, most + 1)
            if _moves_s(longer, micro_batches // 2, times * period, times * lengths) is not None
        ),
        0,
    )


def _moves_s(run: Run, first: int, period: int, lengths: Ints) -> float | None:
    """By how much the times of a period from micro-batch *first* on are later than those of the period before
    it, whose *lengths* are calls of each rank; None if that is not one number.
    """
    starts = np.stack([first_calls(run.program.made, first + number * period) for number in range(LOOKED_AT + 1)])
    if not (np.diff(starts, axis=0) == lengths).all():
        return None
    rank = np.repeat(np.arange(len(lengths)), lengths)
    within = np.arange(lengths.sum()) - (np.cumsum(lengths) - lengths)[rank]
    calls = starts[:-1, rank] + within
    change_s = np.diff(run.entry_s[calls], axis=0)
    moves_s = float(change_s[0, 0, 0])
    moves = (np.abs(change_s - moves_s) <= _slack_s(run)).all(axis=0)
    stays = (change_s == 0).all(axis=0)
    return moves_s if (moves | stays).all() and _repeats(run, starts[0], lengths, calls) else None


def _slack_s(run: Run) -> float:
    """By how much times that should be equal may differ: beyond EXACT_S thousands of sums are rounded."""
    return 0.0 if run.makespan_s < EXACT_S else ROUNDED * float(np.spacing(run.makespan_s))


def first_calls(made: Calls, micro_batch: int) -> Ints:
    """For each rank a first call, so that none before these waits for one after them, and none before these
    is about *micro_batch* or a later one.
    """
    assert made.micro_batches is not None
    reached = np.flatnonzero(made.micro_batches[:, 0] >= micro_batch)
    first = made.rank_start[1:].copy()
    np.minimum.at(first, made.rank[reached], reached)
    waits, ports = np.nonzero(made.source_call >= 0)
    rank, source = made.rank[waits], made.source_call[waits, ports]
    rank_of_source = made.rank[source]
    while True:
        early = (waits < first[rank]) & (source >= first[rank_of_source])
        if not early.any():
            return first
        np.minimum.at(first, rank[early], waits[early])


def _repeats(run: Run, start: Ints, lengths: Ints, calls: Ints) -> bool:
    """Whether all periods (rows of *calls*) call the same and wait for the same calls of those before them,
    none of which is longer ago than those that are looked at.
    """
    program, made = run.program, run.program.made
    chain, source = program.chain_of[program.segment][calls], made.source_call[calls]
    port = made.source_port[calls]
    moved = np.where(source[:-1] >= 0, source[:-1] + lengths[made.rank[source[:-1]]], -1)
    if not ((chain == chain[0]).all() and (port == port[0]).all() and (source[1:] == moved).all()):
        return False
    ranks, bound = made.rank[source[0]], source[0] >= 0
    ago = (start[ranks] - source[0] + lengths[ranks] - 1) // np.maximum(lengths[ranks], 1)
    return bool((ago[bound] < LOOKED_AT).all())


# When a step of many micro-batches ends, from two shorter ones that are run among others.
#
# Of the longer one the last two periods are looked at before its pipeline drains. Where everything that the
# calls of the second leave is later than what those of the first left, by one number, so are all periods that
# could follow: a call of a further period waits for calls of its own and of the one before, as those did. A
# lane that no call of a period touches stays as it is and only falls behind; that none such decides when the
# step ends is seen from the two steps, which differ by the same number. All of it is exact: prices are whole
# numbers of ticks.

FEWEST_SLOTS = 2**11
"""Slots of all stages below which to run all of them takes no longer."""
FILLING = 8
"""Micro-batches beyond as many as there are stages, after which 1F1B and its like have settled; if not, all
micro-batches are run."""
GROUPS = 6
"""The same in groups of micro-batches that pass through chunks together."""


class Shorter(NamedTuple):
    """Schedules in place of a long one, and how many periods the short one is shorter than that."""

    short: Schedule
    longer: Schedule
    periods: int

    @property
    def period(self) -> int:
        return self.longer.micro_batches - self.short.micro_batches


@lru_cache(maxsize=1024)
def shorter(name: str, stages: int, micro_batches: int, chunks: int) -> Shorter | None:
    """None where nothing is gained."""
    kind = kind_named(name)
    if stages == 1 or kind not in PERIODS or slots_of(stages, micro_batches, chunks) < FEWEST_SLOTS:
        return None
    period = PERIODS[kind](stages, micro_batches)
    least = stages + FILLING if period == 1 else GROUPS * period
    longer = least + (micro_batches - least) % period
    short = longer - period
    if 4 * (short + longer) > 3 * micro_batches or slots_of(stages, longer, chunks) > MOST:
        return None
    one, two = (schedule_in(kind, stages, size, chunks, period) for size in (short, longer))
    return Shorter(one, two, (micro_batches - short) // period)


@dataclass(frozen=True, eq=False)
class Pair:
    """The program of a short step in place of a long one, and the same with one period more."""

    short: Program
    longer: Program
    periods: int
    watched: Ints
    """2 x calls: the places of the calls of two periods of the longer one, in its order."""

    def ends_s(self, short_s: float, longer_s: float, moves_s: float | None) -> float | None:
        """When the long one ends, given when these do and by how much later the second period is; None where
        that cannot be told.
        """
        if moves_s is None or longer_s - short_s != moves_s:
            return None
        found_s = short_s + self.periods * moves_s
        return found_s if found_s < EXACT_S else None


def pair(short: Program, sizes: Shorter) -> Pair | None:
    """None where periods do not repeat themselves as they should."""
    made = rescheduled(short.made, sizes.longer)
    if made is None:
        return None
    longer = short.calling(made)
    watched = _periods(longer, sizes.longer.micro_batches, sizes.period)
    return None if watched is None else Pair(short, longer, sizes.periods, watched)


def _periods(program: Program, micro_batches: int, period: int) -> Ints | None:
    """The places of the calls of the last two periods before the last micro-batch begins."""
    known = _PERIODS.setdefault(program.made, {})
    if period not in known:
        calls = _repeated(program.made, micro_batches - 1 - 2 * period, period)
        if calls is None:
            known[period] = None
        else:
            place = np.empty(program.calls, np.int64)
            place[order_of(program).calls] = np.arange(program.calls)
            known[period] = place[calls]
    return known[period]


_PERIODS: WeakKeyDictionary[Calls, dict[int, Ints | None]] = WeakKeyDictionary()


def _repeated(made: Calls, first: int, period: int) -> Ints | None:
    """The calls of two periods from micro-batch *first* on; None unless the second does what the first did
    and waits for calls of these two alone.
    """
    if first < 0:
        return None
    starts = np.stack([first_calls(made, first + number * period) for number in range(3)])
    lengths = starts[1] - starts[0]
    if not lengths.any() or (lengths != starts[2] - starts[1]).any():
        return None
    rank = np.repeat(np.arange(len(lengths)), lengths)
    calls: Ints = starts[:2, rank] + np.arange(lengths.sum()) - (np.cumsum(lengths) - lengths)[rank]
    segment, source, port = made.segment[calls], made.source_call[calls], made.source_port[calls]
    moved = np.where(source[0] >= 0, source[0] + lengths[made.rank[source[0]]], -1)
    if (segment[0] != segment[1]).any() or (port[0] != port[1]).any() or (moved != source[1]).any():
        return None
    before = (source[1] >= 0) & (source[1] < starts[0][made.rank[source[1]]])
    return None if before.any() else calls
