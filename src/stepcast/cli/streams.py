"""Standard output and standard error: the one place through which text reaches a terminal.

Everything that a verb prints is made visible here, and characters that the terminal's encoding lacks are
replaced, so that no name from a file can control the terminal or end the command. Colours repeat what the words
say; NO_COLOR, --plain and simple terminals leave them out.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from stepcast.views.text import visible, visible_lines

# Placeholders for terminal sequences until a text is written; Unicode reserves them for such uses.
BOLD_MARK, PLAIN_MARK = "\ufdd0", "\ufdd1"
SEQUENCES = {BOLD_MARK: "\033[1m", PLAIN_MARK: "\033[0m"}
CLEAR_LINE = "\r\033[K"
# Typography of ours and of the catalogue, as wide in ASCII.
ASCII = str.maketrans("…–—×µ·’“”", '~--xu.\'""')
RESET = "\033[0m"
BOLD, DIM, RED, GREEN, YELLOW, BLUE, CYAN = (f"\033[{code}m" for code in (1, 2, 31, 32, 33, 34, 36))
FULL_BLOCK = "\u2588"
RULES: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern, re.MULTILINE), style)
    for pattern, style in (
        (r"^(?:stepcast: )", RED),
        (r"^(?:warning: |incomplete\b)", YELLOW),
        (r"^(?:defaults used:|note: )", DIM),
        (r"^-+(?:  -+)*$", DIM),
        (r"\bDOES NOT FIT\b", BOLD + RED),
        (r"(?<=: )fits(?= \(|$)", GREEN),
        (r"(?<=^step  )[ ]*\S.*$", BOLD),
        (r"(?<=^takes  )[ ]*\S.*$", BOLD),
        (r"^wrote .*$", CYAN),
    )
)
BARS = re.compile(r"(?<=[ ]{2})#+$", re.MULTILINE)


class SafeStream:
    """A text stream that shows control characters instead of sending them; the rest is the stream's own."""

    def __init__(self, stream: TextIO, plain: bool = False) -> None:
        self._stream = stream
        # False while a document is printed, which has no colours.
        refused = plain or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self.paints = not refused and stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        shown = self._make_safe(text) if self.paints or not (text.isascii() and text.isprintable()) else text
        self._stream.write(shown)
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def _make_safe(self, text: str) -> str:
        if BOLD_MARK in text and self.paints:
            parts = text.replace(PLAIN_MARK, BOLD_MARK).split(BOLD_MARK)
            marks = [SEQUENCES[character] for character in text if character in SEQUENCES]
            styled = zip(marks, map(visible_lines, parts[1:]), strict=True)
            text = visible_lines(parts[0]) + "".join(mark + part for mark, part in styled)
        else:
            text = visible_lines(text)
            if self.paints:
                text = paint(text, to_encoding(FULL_BLOCK, self._stream.encoding) == FULL_BLOCK)
        return to_encoding(text, self._stream.encoding)


def paint(text: str, blocks: bool) -> str:
    """Return *text* with its styles; bars use *blocks* if the terminal has them."""
    for pattern, style in RULES:
        text = pattern.sub(lambda match, style=style: f"{style}{match[0]}{RESET}", text)  # type: ignore[misc]
    full = FULL_BLOCK if blocks else "#"
    return BARS.sub(lambda match: f"{BLUE}{full * len(match[0])}{RESET}", text)


def to_encoding(text: str, encoding: str | None) -> str:
    """Return *text* in the characters that *encoding* has."""
    encoding = encoding or "utf-8"
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        return text.translate(ASCII).encode(encoding, "backslashreplace").decode(encoding)
    return text


@contextlib.contextmanager
def safe_streams(plain: bool = False) -> Iterator[None]:
    """Print through :class:`SafeStream` inside the block, without colours if *plain*."""
    out, err = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = cast(TextIO, SafeStream(out, plain)), cast(TextIO, SafeStream(err, plain))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = out, err


def heading(title: str) -> str:
    return f"{BOLD_MARK}{visible(title)}{PLAIN_MARK}" if getattr(sys.stdout, "paints", False) else visible(title)


@contextlib.contextmanager
def unpainted() -> Iterator[None]:
    """Print without colours inside the block, for documents."""
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
    """Return the columns to fill: those of the terminal, within limits that read well."""
    import shutil  # needed where something is written for people

    return max(60, min(shutil.get_terminal_size((100, 24)).columns, 140))


def show_status(text: str) -> None:
    """Show *text* on a line that the next status overwrites, if standard error is a terminal."""
    if sys.stderr.isatty():
        stream = getattr(sys.stderr, "_stream", sys.stderr)
        stream.write(CLEAR_LINE + to_encoding(visible(text)[: terminal_width() - 1], stream.encoding))
        stream.flush()


waiting_notes: list[str] = []  # lines for standard error at the end of a command that succeeds


def print_waiting_notes() -> None:
    for line in waiting_notes:
        print(line, file=sys.stderr)
    waiting_notes.clear()


def open_closed_streams() -> None:
    """Open streams that were closed before the start, as by ``>&-``, and are None in Python."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  # open until the end


def discard_output() -> None:
    """Discard all output from now on, so that the interpreter does not complain about it at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
