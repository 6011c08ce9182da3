"""Runs damaged files through the readers: many in one child process, each with its own time."""

import mmap
import os
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from tests.fuzz.damage import damaged
from tests.fuzz.targets import Target, targets
from tests.fuzz.worker import MOST_SECONDS, Outcome, run_bounded

BATCH = 1000
MOST_BYTES = 10**9


@dataclass(frozen=True)
class Bad:
    """A case that went wrong: how to make it again, and what happened."""

    target: str
    data: bytes
    fault: str


def case(target: Target, seed: int, number: int) -> bytes:
    random = Random(f"{seed}/{target.name}/{number}")
    others = tuple(data for other in targets() for data in other.seeds[:1])
    return damaged(random.choice(target.seeds), others, random)


def fault_of(target: Target, data: bytes) -> str:
    """What is wrong with how *target* takes *data*; nothing where it answers, or refuses in one line."""
    try:
        target.run(data)
    except target.errors as error:
        text = str(error)
        return "" if text.strip() and "\n" not in text else f"an error of several lines or none: {text[:200]!r}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def run_cases(target: Target, seed: int, first: int, count: int) -> Iterator[Bad]:
    """The bad ones among *count* cases from *first* on."""
    at, end = first, first + count
    while at < end:
        with mmap.mmap(-1, 8) as place:
            outcome = run_bounded(lambda at=at: _run(target, seed, at, end, place), 10**6, MOST_BYTES)  # type: ignore[misc]
            (reached,) = struct.unpack("q", place[:8])
        for line in outcome.out.splitlines():
            number, _, fault = line.partition("\t")
            yield Bad(target.name, case(target, seed, int(number)), fault)
        if outcome.status == 0:
            return
        yield Bad(target.name, case(target, seed, reached), _ended(outcome))
        at = reached + 1


def _run(target: Target, seed: int, first: int, end: int, place: mmap.mmap) -> int:
    """In the child: says which case it is at, so that the parent knows which one ended it."""
    for number in range(first, end):
        place[:8] = struct.pack("q", number)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        if fault := fault_of(target, case(target, seed, number)):
            os.write(1, f"{number}\t{' '.join(fault.split())}\n".encode(errors="replace"))
    return 0


def _ended(outcome: Outcome) -> str:
    if outcome.status == -signal.SIGPROF:
        return f"took more than {MOST_SECONDS:.0f} s"
    return outcome.fault or f"ended with status {outcome.status}"
