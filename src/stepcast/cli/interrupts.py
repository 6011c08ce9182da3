"""What verbs need to know of interrupts; the command's start, which loads nothing else, has it."""

import signal

from stepcast.cli.start import INTERRUPTED as INTERRUPTED
from stepcast.cli.start import end_on_interrupt as end_on_interrupt


class Interruptible:
    """Where Ctrl-C is an exception after all: work that has something to tell of how far it came."""

    def __enter__(self) -> None:
        self.before = signal.getsignal(signal.SIGINT)
        if self.before is not signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self.before)
