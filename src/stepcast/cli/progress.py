"""Opening files, with a progress bar for large ones on a terminal."""

import os
import sys
import time
from functools import lru_cache
from typing import BinaryIO

from stepcast.cli.streams import show_status
from stepcast.inputs.source import Progress, Source, read_most
from stepcast.ir.limits import PIPE

# Smaller files need no progress bar.
SMALLEST_BYTES = 32 * 2**20
EVERY_S = 0.1
LONG_S = 1.0
MOVING = "###"
BAR_WIDTH = 30


STANDARD_INPUT = "-"


def open_source(path: str) -> Source:
    """Open the file at *path*, or standard input for ``-``; a large file shows its progress."""
    if path == STANDARD_INPUT:
        if sys.stdin.isatty():
            print("reading standard input; end it with Ctrl-D", file=sys.stderr)
        return Source("standard input", _read_all(sys.stdin.buffer))
    return Source(path, progress=_bar(path))


@lru_cache(maxsize=1)
def _read_all(stream: BinaryIO) -> bytes:
    """Return all of *stream*, which can be read only once."""
    return read_most(stream, PIPE, "standard input")


class ProgressBar:
    """A progress bar with the time left, shown after one second on a terminal."""

    def __init__(self, label: str, unit: str = "") -> None:
        self.label, self.unit = label, unit
        self.began = self.last = time.monotonic()

    def __call__(self, done: float, total: float, text: str = "") -> None:
        now = time.monotonic()
        if done >= total:
            show_status("")
        elif now - self.began >= LONG_S and now - self.last >= EVERY_S:
            self.last = now
            left = (now - self.began) * (total - done) / done if done else None
            words = text or f"{done:,.0f} of {total:,.0f}{self.unit}"
            show_status(bar_text(self.label, done, total, words, left))


def bar_text(label: str, done: float, total: float, text: str, left_s: float | None = None) -> str:
    """Return ``name [####......] 3 of 9, 12 s left``."""
    filled = int(BAR_WIDTH * done / total) if total else 0
    left = "" if left_s is None else f", {left_s:,.0f} s left"
    return f"{label} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}{left}"


def moving_text(label: str, ticks: int, text: str) -> str:
    """Return a bar that moves, for work of unknown length."""
    start = ticks % (BAR_WIDTH - len(MOVING) + 1)
    return f"{label} [{'.' * start}{MOVING}{'.' * (BAR_WIDTH - len(MOVING) - start)}] {text}"


def _bar(path: str) -> Progress | None:
    if not sys.stderr.isatty() or not os.path.isfile(path) or os.path.getsize(path) < SMALLEST_BYTES:
        return None
    size, bar = os.path.getsize(path), ProgressBar(os.path.basename(path)[:30], " MB")
    return lambda done: bar(done / 1e6, size / 1e6)
