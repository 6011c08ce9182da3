"""How far a long loop is, for whoever looks: the loop tells, and nobody hands a function down to it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Each = TypeVar("Each")
Told = Callable[[int, int], None]
"""Called with how many are done, and of how many."""
_told: ContextVar[Told | None] = ContextVar("told", default=None)


@contextmanager
def watching(told: Told) -> Iterator[None]:
    """*told* hears of every loop over ``watched`` rows meanwhile."""
    before = _told.set(told)
    try:
        yield
    finally:
        _told.reset(before)


def watched(rows: Iterable[Each]) -> Iterator[Each]:
    """*rows*, one after the other, told of where somebody looks."""
    told = _told.get()
    if told is None:
        yield from rows
        return
    listed = list(rows)
    for done, row in enumerate(listed):
        told(done, len(listed))
        yield row
    told(len(listed), len(listed))
