"""Interrupts: Ctrl-C ends the command with one line, at any time.

The command handles Ctrl-C before it loads anything slow, so this module imports only what Python has loaded.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from signal import SIG_IGN, SIGINT, default_int_handler, getsignal, signal
    from types import FrameType
else:  # the module signal first loads much of Python
    from _signal import SIG_IGN, SIGINT, default_int_handler, getsignal, signal

INTERRUPTED = 130  # the exit status of interrupted commands in shells
LINE = b"stepcast: interrupted\n"


def end_on_interrupt() -> None:
    """End the process at once on Ctrl-C: an exception could be lost in a callback, or print a traceback."""
    if getsignal(SIGINT) is not SIG_IGN:  # background commands of a shell ignore it
        signal(SIGINT, _end)


def _end(number: int, frame: "FrameType | None") -> None:
    try:
        # If nothing was written, the writer may not be loaded, or only in part.
        getattr(sys.modules.get("stepcast.outputs.files"), "discard_unfinished", int)()
        os.write(2, LINE)
    finally:
        os._exit(INTERRUPTED)


class Interruptible:
    """A block in which Ctrl-C raises KeyboardInterrupt, for work that reports its progress."""

    def __enter__(self) -> None:
        self.before = getsignal(SIGINT)
        if self.before is not SIG_IGN:
            signal(SIGINT, default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal(SIGINT, self.before)
