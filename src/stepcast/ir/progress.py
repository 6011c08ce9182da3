"""Report the progress of a long loop to whoever watches, without passing a function down to it."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Row = TypeVar("Row")
ProgressWatcher = Callable[[int, int], None]
"""Called with the number of finished rows and the number of all rows."""
_watcher: ContextVar[ProgressWatcher | None] = ContextVar("watcher", default=None)


@contextmanager
def watch_progress(watcher: ProgressWatcher) -> Iterator[None]:
    """Call *watcher* for each row of ``report_progress`` inside this context."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def report_progress(rows: Iterable[Row]) -> Iterator[Row]:
    """Yield *rows* and report each to the watcher, if there is one."""
    watcher = _watcher.get()
    if watcher is None:
        yield from rows
        return
    listed = list(rows)
    for done, row in enumerate(listed):
        watcher(done, len(listed))
        yield row
    watcher(len(listed), len(listed))
