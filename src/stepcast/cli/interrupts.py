"""Ctrl-C ends a command with one line, whatever it is doing: loading, computing, writing or ending."""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from signal import SIG_IGN, SIGINT, default_int_handler, getsignal, signal
    from types import FrameType
else:
    from _signal import (  # the module around it first loads much of Python
        SIG_IGN,
        SIGINT,
        default_int_handler,
        getsignal,
        signal,
    )

INTERRUPTED = 130  # what shells return for a command that was interrupted
LINE = b"stepcast: interrupted\n"


def end_on_interrupt() -> None:
    """Leave at once: an exception could be lost in a callback, or be shown as a traceback."""
    if getsignal(SIGINT) is not SIG_IGN:  # which a shell's background commands do
        signal(SIGINT, _end)


class Interruptible:
    """Where Ctrl-C is an exception after all: work that has something to tell of how far it came."""

    def __enter__(self) -> None:
        self.before = getsignal(SIGINT)
        if self.before is not SIG_IGN:
            signal(SIGINT, default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal(SIGINT, self.before)


def _end(number: int, frame: "FrameType | None") -> None:
    try:
        # Where nothing has been written, the writer may not be loaded, or not yet wholly.
        getattr(sys.modules.get("stepcast.outputs.files"), "discard_unfinished", int)()
        os.write(2, LINE)
    finally:
        os._exit(INTERRUPTED)
