"""When a step of many micro-batches ends, from two shorter ones that are run among others.

Of the longer one the last two periods are looked at before its pipeline drains. Where everything that the
calls of the second leave is later than what those of the first left, by one number, so are all periods that
could follow: a call of a further period waits for calls of its own and of the one before, as those did. A
lane that no call of a period touches stays as it is and only falls behind; that none such decides when the
step ends is seen from the two steps, which differ by the same number. All of it is exact: prices are whole
numbers of ticks.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from stepcast.simulation.arrays import Calls, Program
from stepcast.simulation.pieces import Ints
from stepcast.simulation.plan import order_of
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules.table import kind_named
from stepcast.simulation.skeleton import rescheduled
from stepcast.simulation.steady import EXACT_S, MOST, PERIODS, first_calls, schedule_in, slots_of

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
