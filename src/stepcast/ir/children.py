"""Child processes that end with their parent, however it ends."""

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

LOOK_EVERY_S = 0.3


def start_quietly(process: "BaseProcess") -> None:
    """Start a child that interrupts of the terminal do not reach, from its first moment on: its parent handles them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()  # a child inherits the mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def follow_parent(parent: int, ignores_interrupts: bool = True) -> None:
    """Let this process end when process *parent* does, even if that was killed; call it in a child at its start.

    Interrupts of the terminal reach children too; they are handled by the parent, which ends its children.
    """
    if ignores_interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_EVERY_S)
    os._exit(1)
