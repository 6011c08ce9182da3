"""Standard output and standard error: the one place through which text reaches a terminal.

Whatever a verb prints is made visible here, and what the terminal's encoding lacks is replaced, so that no
name out of a file can steer the terminal or end the command.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from stepcast.cli.colour import FULL, painted, wants_colour
from stepcast.views.text import visible, visible_lines

# Stand for the terminal's own sequences until a text is written; Unicode keeps them for uses such as this.
BOLD, PLAIN = "\ufdd0", "\ufdd1"
SEQUENCES = {BOLD: "\033[1m", PLAIN: "\033[0m"}
CLEAR_LINE = "\r\033[K"
# Typography of ours and of the catalogue, as wide in ASCII.
ASCII = str.maketrans("…–—×µ·’“”", '~--xu.\'""')


class SafeStream:
    """A text stream that shows control characters and sends none; all else is the stream's own."""

    def __init__(self, stream: TextIO, plain: bool = False) -> None:
        self._stream = stream
        # Documents are shown as they are.
        self.paints = wants_colour(stream, plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        shown = text
        if self.paints or not (text.isascii() and text.isprintable()):
            shown = self._shown(text)
        self._stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def _shown(self, text: str) -> str:
        if BOLD in text and self.paints:
            parts = text.replace(PLAIN, BOLD).split(BOLD)
            marks = [SEQUENCES[character] for character in text if character in SEQUENCES]
            styled = zip(marks, map(visible_lines, parts[1:]), strict=True)
            text = visible_lines(parts[0]) + "".join(mark + part for mark, part in styled)
        else:
            text = visible_lines(text)
            if self.paints:
                text = painted(text, encodable(FULL, self._stream.encoding) == FULL)
        return encodable(text, self._stream.encoding)


def encodable(text: str, encoding: str | None) -> str:
    """*text* in the characters that *encoding* has."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


@contextlib.contextmanager
def shown_streams(plain: bool = False) -> Iterator[None]:
    """Everything printed meanwhile passes through :class:`Shown`, without colour where *plain*."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, SafeStream(out, plain)), cast(TextIO, SafeStream(err, plain))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


def heading(title: str) -> str:
    return f"{BOLD}{visible(title)}{PLAIN}" if getattr(sys.stdout, "paints", False) else visible(title)


@contextlib.contextmanager
def unpainted() -> Iterator[None]:
    """What is printed meanwhile is a document, and has no colours of ours."""
    stream: Any = sys.stdout
    before = getattr(stream, "paints", False)
    if before:
        stream.paints = False
    try:
        yield
    finally:
        if before:
            stream.paints = before


def terminal_width() -> int:
    """Columns to fill: the terminal's, within what reads well."""
    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 140))


def show_status(text: str) -> None:
    """*text* on a line that the next status overwrites; nothing where no person looks."""
    if sys.stderr.isatty():
        stream = getattr(sys.stderr, "_stream", sys.stderr)
        stream.write(CLEAR_LINE + encodable(visible(text)[: terminal_width() - 1], stream.encoding))
        stream.flush()


def open_closed_streams() -> None:
    """A stream that was closed before the start, as by ``>&-``, is None in Python."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open until the end


def discard_output() -> None:
    """Nothing more can be written; keep the interpreter from trying, and complaining, at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
