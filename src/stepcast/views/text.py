"""Plain-text building blocks: tables and fact lists that fit a terminal."""

import re
import textwrap
from collections.abc import Iterable, Sequence

GAP = "  "
# A number as people write it, with a unit: 1,024   3.5 GiB   -12 %   46.59 GB/s   $1,024
NUMBER = re.compile(r"[-+]?[$\u20ac\u00a3\u00a5]?[\d,.]+(e[-+]?\d+)?( ?[A-Za-z%/]+)?")


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], width: int = 100, whole: Sequence[int] = ()) -> str:
    """Return aligned columns: numbers to the right, words to the left; the widest word column is cut first.

    Columns in *whole* never do: names that someone has to type.
    """
    cells = [[visible(str(cell)) for cell in row] for row in rows]
    sizes = [max([len(head), *(len(row[index]) for row in cells)]) for index, head in enumerate(headers)]
    columns = ([row[index] for row in cells] for index in range(len(headers)))
    numeric = [all(cell in ("", "-") or NUMBER.fullmatch(cell) for cell in column) for column in columns]
    # The widest word columns are narrowed until the row fits, never below eight characters.
    words = [index for index, right in enumerate(numeric) if not right and index not in whole and sizes[index] > 8]
    while words and sum(sizes) + len(GAP) * (len(sizes) - 1) > width:
        sizes[max(words, key=lambda index: sizes[index])] -= 1
        words = [index for index in words if sizes[index] > 8]

    def line(row: Sequence[str]) -> str:
        parts = [
            fit(cell, size).rjust(size) if right else fit(cell, size).ljust(size)
            for cell, size, right in zip(row, sizes, numeric, strict=True)
        ]
        return GAP.join(parts).rstrip()

    rule = GAP.join("-" * size for size in sizes)
    return "\n".join([line(list(headers)), rule, *(line(row) for row in cells)])


def facts(pairs: Iterable[tuple[str, object]], width: int = 100) -> str:
    """Return ``name   value`` lines; long values continue under their own column."""
    listed = [(visible(name), str(value)) for name, value in pairs]
    column = max((len(name) for name, _ in listed), default=0)
    lines = []
    for name, value in listed:
        pieces = wrap(value, max(20, width - column - len(GAP)))
        lines.append(f"{name.ljust(column)}{GAP}{pieces[0]}".rstrip())
        lines += [" " * column + GAP + piece for piece in pieces[1:]]
    return "\n".join(lines)


def wrap(text: str, width: int) -> list[str]:
    """Return *text* in lines of at most *width* where its words allow."""
    return textwrap.wrap(visible(" ".join(text.split())), width, break_long_words=False, break_on_hyphens=False) or [""]


def bullet(text: str, mark: str, width: int = 100) -> str:
    """Return a wrapped paragraph after *mark*."""
    pieces = wrap(text, width - len(mark))
    return "\n".join([mark + pieces[0], *(" " * len(mark) + piece for piece in pieces[1:])])


def fit(text: str, size: int) -> str:
    """Return *text*, cut to *size* characters."""
    return text if len(text) <= size else text[: size - 1] + "…"


# Text of others as it may be shown: what would move a cursor, hide or turn text is spelt out.
#
# Names, keys and descriptions come out of files that anyone may have written. A terminal obeys the control
# characters in them, so they are written as ``\x1b`` or ``\u202e`` wherever they are shown.

# Control characters but those that part lines and columns, marks that turn the direction of text, bytes of
# file names that are no text (as lone surrogates), and what Unicode keeps for a program's own use.
UNSEEN = (
    "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ufdd0-\ufdef\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f"
)
_ANY = re.compile(f"[\t\n{UNSEEN}]")
_WITHIN_TEXT = re.compile(f"[{UNSEEN}]")
_WORD = re.compile(r"\S+")
SPELT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}

LONGEST_WORD = 200
LONGEST_MESSAGE = 2000


def visible(text: str) -> str:
    """Return one line of *text* without characters that a terminal would obey."""
    return text if text.isascii() and text.isprintable() else _ANY.sub(_spelt, text)


def visible_lines(text: str) -> str:
    """Return text with its lines and columns, without characters that a terminal would obey."""
    return _WITHIN_TEXT.sub(_spelt, text)


def _spelt(match: re.Match[str]) -> str:
    character = match[0]
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # how Python keeps a byte that is no UTF-8
        number -= 0xDC00
    if number < 0x100:
        return SPELT.get(character, f"\\x{number:02x}")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def message(text: str) -> str:
    """Return *text* as one line for a person; overlong text keeps its beginning and its end."""
    short_words = _WORD.sub(lambda word: cut_middle(word[0], LONGEST_WORD), visible(text.strip()))
    return cut_middle(short_words, LONGEST_MESSAGE)


def cut_middle(text: str, most: int, dots: str = "...") -> str:
    """Return the beginning and the end of an overlong text."""
    tail = most // 4
    if len(text) <= most:
        return text
    return f"{text[: most - tail]}{dots}[{len(text) - most:,} more]{dots}{text[-tail:]}"
