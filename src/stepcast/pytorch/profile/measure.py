"""The loop that measures: cases in order, what is known already left out, failures noted, time kept."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepcast.pytorch.profile.cases import Case, Operator

Clock = Callable[[], float]
Report = Callable[["Progress"], None]


class Backend(Protocol):
    """What can time an operator on this machine."""

    def seconds(self, work: Operator) -> float:
        """The median of repeated runs with cold caches; any exception is a failed case."""

    def sustained_s(self, work: Operator) -> float:
        """The same of runs without a pause, once the clock has settled."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the measuring is, after one more case."""

    done: int
    total: int
    case: Case
    seconds: float | None  # None: failed
    elapsed_s: float
    points: "Points"  # all so far


@dataclass(frozen=True, slots=True)
class Points:
    """What was measured, by the name of the case."""

    seconds: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)  # name -> reason
    left: tuple[str, ...] = ()  # not reached in time; a rerun measures them
    sustained: Mapping[str, float] = field(default_factory=dict)  # run again and again


def measure_sustained(cases: Sequence[Case], backend: Backend, known: Points) -> Points:
    """*known* with the time of each case by itself, all of these first, and then without a pause."""
    points = measure(cases, backend, known, math.inf, lambda: 0.0)
    sustained, failed = dict(known.sustained), dict(points.failed)
    for case in cases:
        if case.name in sustained or case.name not in points.seconds:
            continue
        try:
            found = backend.sustained_s(case.work)
            if not found > 0:
                raise ValueError(f"measured {found} s")
            sustained[case.name] = found
        except Exception as error:  # as below
            failed[f"{case.name} sustained"] = " ".join(str(error).split())[:200] or type(error).__name__
    return Points(points.seconds, {**known.failed, **failed}, known.left, sustained)


def measure(
    cases: Sequence[Case],
    backend: Backend,
    known: Points,
    limit_s: float,
    clock: Clock,
    report: Report = lambda progress: None,
) -> Points:
    """The points of *known* and those of every case that is not among them, until *limit_s* have passed.

    A case that failed before is tried again: memory may be free now.
    """
    start = clock()
    seconds, failed, left = dict(known.seconds), {}, []
    todo = [case for case in cases if case.name not in seconds]
    for done, case in enumerate(todo, start=1):
        if clock() - start >= limit_s:
            left.append(case.name)
            continue
        found: float | None = None
        try:
            found = backend.seconds(case.work)
            if not found > 0:
                raise ValueError(f"measured {found} s")
            seconds[case.name] = found
        except Exception as error:  # whatever a driver or library raises, the other cases go on
            failed[case.name] = " ".join(str(error).split())[:200] or type(error).__name__
        so_far = Points(dict(seconds), dict(failed), sustained=known.sustained)
        report(Progress(done, len(todo), case, found, clock() - start, so_far))
    return Points(seconds, failed, tuple(left), known.sustained)
