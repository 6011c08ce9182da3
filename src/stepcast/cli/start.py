"""Where the command begins: Ctrl-C ends it with one line, while it loads, computes, writes or ends.

It is answered before anything that takes time is loaded: this file imports what Python has loaded. What comes
before it, the start of the interpreter, is Python's own.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from signal import SIG_IGN, SIGINT, getsignal, signal
    from types import FrameType
else:
    from _signal import SIG_IGN, SIGINT, getsignal, signal  # the module around it first loads much of Python

INTERRUPTED = 130  # what shells return for a command that was interrupted
LINE = b"stepcast: interrupted\n"


def main() -> int:
    end_on_interrupt()
    from stepcast.cli.main import main as run

    return run()


def end_on_interrupt() -> None:
    """Leave at once: an exception could be lost in a callback, or be shown as a traceback."""
    if getsignal(SIGINT) is not SIG_IGN:  # which a shell's background commands do
        signal(SIGINT, _end)


def _end(number: int, frame: "FrameType | None") -> None:
    try:
        # Where nothing has been written, the writer may not be loaded, or not yet wholly.
        getattr(sys.modules.get("stepcast.outputs.files"), "discard_unfinished", int)()
        os.write(2, LINE)
    finally:
        os._exit(INTERRUPTED)
