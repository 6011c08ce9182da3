"""Opening what is to be read; long readings show their progress on standard error, where a person looks."""

import os
import sys
import time
from functools import lru_cache
from typing import BinaryIO

from stepcast.cli.streams import show_status
from stepcast.inputs.source import Progress, Source, read_most
from stepcast.ir.limits import PIPE

# Smaller files are read before anybody wonders.
SMALLEST_BYTES = 32 * 2**20
EVERY_S = 0.1
BAR_WIDTH = 30


STANDARD_INPUT = "-"


def open_source(path: str) -> Source:
    """The file at *path*, or standard input for ``-``; a large file shows how far it has been read."""
    if path == STANDARD_INPUT:
        if sys.stdin.isatty():
            print("reading standard input; end it with Ctrl-D", file=sys.stderr)
        return Source("standard input", _whole(sys.stdin.buffer))
    return Source(path, progress=_bar(path))


@lru_cache(maxsize=1)
def _whole(stream: BinaryIO) -> bytes:
    """All of *stream*, which can be read only once and is asked for by name more than once."""
    return read_most(stream, PIPE, "standard input")


def _bar(path: str) -> Progress | None:
    if not sys.stderr.isatty() or not os.path.isfile(path) or os.path.getsize(path) < SMALLEST_BYTES:
        return None
    size, last = os.path.getsize(path), [time.monotonic()]

    def show(done: int) -> None:
        now = time.monotonic()
        if now - last[0] < EVERY_S and done < size:
            return
        last[0] = now
        filled = BAR_WIDTH * done // size
        bar = "#" * filled + "." * (BAR_WIDTH - filled)
        text = f"{os.path.basename(path)[:30]} {bar} {done / 1e6:,.0f} of {size / 1e6:,.0f} MB"
        show_status("" if done >= size else text)

    return show
