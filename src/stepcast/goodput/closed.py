"""The expected course of a run in closed form.

Interruptions come at a constant rate, whatever the job does, restarts and checkpoints included. To get
through *x* seconds without one then takes (e^(rate x) - 1) / rate seconds of attempts, and a restart after
each that failed (Daly 2006, equation 13; the optimum below is his, and Young's of 1974 its first term).
A checkpoint that is written in the background is safe only after a lag: a failure before that goes back to
the one before.

Nodes under repair are customers of a loss system with one place more than there are spares: with all of them
taken the job stands still and no further node breaks. Erlang's formula gives that share of time, whatever the
distribution of repairs (Erlang 1917; Sevastyanov 1957).
"""

import math
from collections.abc import Callable
from dataclasses import replace

from stepcast.goodput.process import Process, Shortage, TimeSplit

# Attempts that fail more often than this for each success get nowhere: e^20 tries are five hundred million.
HOPELESS = 20.0
# Choices that are tried one by one: how the last interval falls makes the fewest of them uneven.
EXHAUSTED = 300


def expected(process: Process) -> TimeSplit:
    """How the time of *process* splits on average."""
    rate = process.failures_per_s
    pauses_s = process.checkpoints * process.pause_s
    if not rate:
        return TimeSplit(process.work_s, pauses_s)
    check_progress(process)
    failures = _failures(process)
    # Until a restart gets through; one that fails begins again.
    tried = math.expm1(rate * process.restart_s)
    running_s = failures / rate
    split = TimeSplit(
        process.work_s,
        pauses_s,
        lost_s=max(0.0, running_s - process.work_s - pauses_s),
        restarts_s=failures * tried / rate,
        failures=failures * (1 + tried),
    )
    return _with_shortage(process, split)


def check_progress(process: Process) -> None:
    """Refuse what never comes to an end."""
    rate = process.failures_per_s
    longest_s = min(process.work_s, process.period_s) + process.lag_s + process.restart_s
    if rate * longest_s > HOPELESS:
        raise ValueError(
            f"the run gets nowhere: it is interrupted every {1 / rate:.4g} s on average, and restart, work "
            f"and checkpoint need {longest_s:.4g} s without one; save more often, restart faster or use "
            "fewer GPUs"
        )


def _segments(process: Process) -> list[tuple[int, float, float]]:
    """(how many, length of the first attempt, length of every further one) between points that are safe."""
    if not process.checkpoints:
        return [(1, process.work_s, process.work_s)]
    period_s, lag_s = process.period_s, process.lag_s
    return [
        (1, period_s + lag_s, period_s + lag_s),
        (process.checkpoints - 1, period_s, period_s + lag_s),
        (1, max(0.0, process.last_s - lag_s), process.last_s),
    ]


def _failures(process: Process) -> float:
    """Failures while working or saving: one comes each 1 / rate seconds of that.

    A first attempt at x seconds fails with 1 - e^-rx, and it then takes e^ry - 1 more to get through y.
    """
    rate = process.failures_per_s
    return sum(
        number * -math.expm1(-rate * first_s) * math.exp(rate * further_s)
        for number, first_s, further_s in _segments(process)
    )


def _with_shortage(process: Process, split: TimeSplit) -> TimeSplit:
    if not process.repairs:
        return split
    load = process.failures_per_s * process.broken_share * process.repair_s
    spares = process.spares or 0
    if process.shortage is Shortage.WAIT:
        waiting = erlang_b(spares + 1, load)
        return replace(split, waiting_s=split.total_s * waiting / (1 - waiting))
    speed = _mean_speed(process, load, spares)
    return replace(split, lost_s=split.lost_s / speed, shrunk_s=split.work_s * (1 / speed - 1))


def erlang_b(places: int, load: float) -> float:
    """The share of time in which all *places* are taken, those who come then being turned away."""
    blocked = 1.0
    for place in range(1, places + 1):
        blocked = load * blocked / (place + load * blocked)
    return blocked


def _mean_speed(process: Process, load: float, spares: int) -> float:
    """Of a job that goes on with the nodes it has: those under repair are Poisson distributed."""
    mean, chance, tail = 0.0, math.exp(-load), 1.0
    count = 0
    while tail > 1e-12 and count < 100_000:
        mean += chance * process.speed(count - spares)
        tail -= chance
        count += 1
        chance *= load / count
    if mean < 1e-6:
        raise ValueError("the run gets nowhere: so many nodes are under repair that no replica is whole")
    return mean


def young_s(pause_s: float, failures_per_s: float) -> float:
    """Young's interval: sqrt(2 x checkpoint x time between failures)."""
    return math.sqrt(2 * pause_s / failures_per_s) if failures_per_s else math.inf


def daly_s(pause_s: float, failures_per_s: float) -> float:
    """Daly's interval of higher order (2006, equation 37)."""
    if not failures_per_s:
        return math.inf
    between_s = 1 / failures_per_s
    if pause_s >= 2 * between_s:
        return between_s
    ratio = math.sqrt(pause_s / (2 * between_s))
    return math.sqrt(2 * pause_s * between_s) * (1 + ratio / 3 + ratio * ratio / 9) - pause_s


def best_interval_s(process: Process, step_s: float) -> float:
    """The interval, in whole steps, with the least expected time: of all that divide the work evenly."""
    if not process.failures_per_s:
        return math.inf
    steps = max(1, math.ceil(process.work_s / step_s))
    # A checkpoint begins when the one before is safe.
    least = min(steps, max(1, math.ceil(process.lag_s / step_s)))

    # Short intervals step by step, long ones by how many parts they make of the work.
    root = math.isqrt(steps)

    def interval_s(at: int) -> float:
        return max(least, at if at <= root else math.ceil(steps / (2 * root + 1 - at))) * step_s

    def total_s(at: int) -> float:
        try:
            return expected(replace(process, interval_s=interval_s(at))).total_s
        except ValueError:
            return math.inf

    return interval_s(_least(total_s, 1, 2 * root))


def _least(value: Callable[[int], float], low: int, high: int) -> int:
    """The whole number with the least value of a function that falls, then rises: a grid, then thirds."""
    grid = sorted({low, high, *(round(low * (high / low) ** (at / 60)) for at in range(61))})
    values = [value(each) for each in grid]
    at = values.index(min(values))
    low, high = grid[max(0, at - 1)], grid[min(len(grid) - 1, at + 1)]
    while high - low > EXHAUSTED:
        third = (high - low) // 3
        left, right = low + third, high - third
        if value(left) <= value(right):
            high = right
        else:
            low = left
    return min(range(low, high + 1), key=value)
