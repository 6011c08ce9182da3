"""Child processes that end with their parent, however it ends; and pools of them: the same answers, sooner."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Generic, TypeVar, cast

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

LOOK_EVERY_S = 0.3


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Keep interrupts of the terminal from children that start here, from their first moment on.

    Their parent handles them.
    """
    from multiprocessing import resource_tracker

    resource_tracker.ensure_running()  # by the first start otherwise, where it would let interrupts in again
    old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old_mask)  # a child has inherited the mask


class Child:
    """A process of its own with a pipe to it, in which ``task(pipe, *args)`` runs; it ends with its parent."""

    def __init__(self, task: Callable[..., None], *args: object) -> None:
        from multiprocessing import get_context

        context = get_context("spawn")  # a forked process would share open files and locks
        self.pipe, child_pipe = context.Pipe()
        child_args = (os.getpid(), task, child_pipe, *args)
        self.process: BaseProcess = context.Process(target=_run_child, args=child_args, daemon=True)
        with block_interrupts():
            self.process.start()
        child_pipe.close()

    def end(self) -> None:
        """End the process at once."""
        self.process.kill()  # before its pipe closes, which it would complain about
        self.process.join()
        self.pipe.close()


def _run_child(parent: int, task: Callable[..., None], pipe: "Connection", *args: object) -> None:
    follow_parent(parent)
    task(pipe, *args)


def follow_parent(parent: int) -> None:
    """Let this process end when process *parent* does, even if that was killed; call it in a child at its start.

    Interrupts of the terminal reach children too; they are handled by the parent, which ends its children.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


if TYPE_CHECKING:
    from concurrent.futures import ProcessPoolExecutor

Item = TypeVar("Item")
Answer = TypeVar("Answer")

FEWEST_EACH = 64  # a process for fewer items is not worth its start
CHUNKS_EACH = 8
AT_ONCE = 16  # answers between two ticks

# The task of a forked process, which inherits it.
_task: Callable[..., object] | None = None


def usable_workers() -> int:
    """Return how many processes to use; one if this process cannot be forked, or has threads, which forks lose."""
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return 1
    return len(os.sched_getaffinity(0))


def map_parallel(
    task: Callable[[Item], Answer], items: Sequence[Item], workers: int, tick: Callable[[], None] | None = None
) -> list[Answer]:
    """Return the answers in the order of *items*; *tick* is called between answers and may raise to end it."""
    workers = max(1, min(workers, len(items) // FEWEST_EACH))
    with WorkerPool(task, workers) as pool:
        answers: list[Answer] = []
        for answer in pool.answers(items, min(AT_ONCE, len(items) // (workers * CHUNKS_EACH))):
            answers.append(answer)
            if tick is not None and len(answers) % AT_ONCE == 0:
                tick()
        return answers


class WorkerPool(Generic[Item, Answer]):
    """Processes that run one task with the state at their start; with one worker, this process."""

    def __init__(self, task: Callable[[Item], Answer], workers: int) -> None:
        self.task, self.workers = task, workers
        self.pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> "WorkerPool[Item, Answer]":
        if self.workers > 1:
            from concurrent.futures import ProcessPoolExecutor
            from multiprocessing import get_context

            self.pool = ProcessPoolExecutor(self.workers, get_context("fork"), _start_worker, (self.task, os.getpid()))
        return self

    def __exit__(self, *error: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def answers(self, items: Sequence[Item], at_once: int = 1) -> Iterator[Answer]:
        """Yield the answers in the order of *items*; a process takes *at_once* of them."""
        if self.pool is None:
            yield from map(self.task, items)
            return
        from concurrent.futures.process import BrokenProcessPool

        try:
            yield from cast("Iterator[Answer]", self.pool.map(_run_task, items, chunksize=max(1, at_once)))
        except BrokenProcessPool:
            raise ChildProcessError(
                "a worker process was killed, perhaps because the machine is out of memory: use --workers 1"
            ) from None


def _start_worker(task: Callable[..., object], parent: int) -> None:
    """Store the task, in a new process."""
    global _task
    _task = task
    follow_parent(parent)


def _run_task(item: object) -> object:
    assert _task is not None
    return _task(item)
