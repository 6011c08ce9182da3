r"""Text of others as it may be shown: what would move a cursor, hide or turn text is spelt out.

Names, keys and descriptions come out of files that anyone may have written. A terminal obeys the control
characters in them, so they are written as ``\x1b`` or ``\u202e`` wherever they are shown.
"""

import re

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
    """One line of *text*, with nothing in it that a terminal would obey."""
    return text if text.isascii() and text.isprintable() else _ANY.sub(_spelt, text)


def visible_lines(text: str) -> str:
    """The same of text that has lines and columns of its own."""
    return _WITHIN_TEXT.sub(_spelt, text)


def _spelt(found: re.Match[str]) -> str:
    character = found[0]
    number = ord(character)
    if 0xDC80 <= number <= 0xDCFF:  # how Python keeps a byte that is no UTF-8
        number -= 0xDC00
    if number < 0x100:
        return SPELT.get(character, f"\\x{number:02x}")
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"


def message(text: str) -> str:
    """*text* as one line to be read by a person: what is overlong keeps its beginning and its end."""
    return _cut(_WORD.sub(lambda word: _cut(word[0], LONGEST_WORD), visible(text.strip())), LONGEST_MESSAGE)


def _cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    tail = most // 4
    return f"{text[: most - tail]}...[{len(text) - most:,} more]...{text[-tail:]}"
