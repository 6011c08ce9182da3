"""Child processes that end with their parent, however it ends."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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
