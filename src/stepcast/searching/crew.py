"""Work over several processes: the same answers as one gives, sooner."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

Item = TypeVar("Item")
Answer = TypeVar("Answer")

FEWEST_EACH = 64  # a process for fewer is not worth its start
PARTS_EACH = 8
AT_ONCE = 16  # answers between two ticks

# Of a process that was forked off; no task needs to be sent to it.
_task: Callable[[Any], Any] | None = None


def usable_workers() -> int:
    """As many as this process may use; one where it cannot be forked, or has threads, which forks lose."""
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return 1
    return len(os.sched_getaffinity(0))


def in_parallel(
    of: Callable[[Item], Answer], items: Sequence[Item], workers: int, tick: Callable[[], None] | None = None
) -> list[Answer]:
    """Return *of* every item, in their order; *tick* is called between answers and may raise to end it."""
    workers = max(1, min(workers, len(items) // FEWEST_EACH))
    with Crew(of, workers) as crew:
        found: list[Answer] = []
        for answer in crew.answers(items, min(AT_ONCE, len(items) // (workers * PARTS_EACH))):
            found.append(answer)
            if tick is not None and len(found) % AT_ONCE == 0:
                tick()
        return found


class Crew:
    """Processes that do one task, with all that was known when they began; with one worker, this process."""

    def __init__(self, task: Callable[[Item], Answer], workers: int) -> None:
        self.task, self.workers = task, workers
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "Crew":
        if self.workers > 1:
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import get_context

            self.pool = ProcessPoolExecutor(self.workers, get_context("fork"), _begin, (self.task,))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def answers(self, items: Sequence[Any], at_once: int = 1) -> Iterator[Any]:
        """The answers in the order of *items*; a process takes *at_once* of them."""
        return map(self.task, items) if self.pool is None else self._theirs(items, max(1, at_once))

    def _theirs(self, items: Sequence[Any], at_once: int) -> Iterator[Any]:
        from concurrent.futures.process import BrokenProcessPool

        assert self.pool is not None
        try:
            yield from self.pool.map(_do, items, chunksize=at_once)
        except BrokenProcessPool:
            raise ChildProcessError(
                "one of the processes was ended from outside, as by a machine that is out of memory: "
                "ask with --workers 1"
            ) from None


def _begin(task: Callable[[Any], Any]) -> None:
    """A process that was forked off has its task; an interrupt is for the one that asked."""
    global _task
    _task = task
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _do(item: Any) -> Any:
    assert _task is not None
    return _task(item)
