"""Lists of ``data/*.txt``: lines under headings in brackets, with sizes made of names and with conditions.

Sizes are numbers and names, multiplied and added up (``2*inner``). All conditions after a question mark must be true,
those with an exclamation mark false; in a line of their own they hold for the lines below, up to the next such line.
"""

from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path

from stepcast.ir.types import DType

FOLDER = Path(__file__).parents[2] / "data"
FORMATS = {str(dtype): dtype for dtype in DType}
Find = Callable[[str], object]
Amount = float | str | tuple[tuple[float | str, ...], ...]
"""A number, a name, or a sum of products of these."""
Conditions = tuple[tuple[str, bool], ...]


@cache
def _split_lists(file: str) -> dict[str, str]:
    lists = f"\n{(FOLDER / file).read_text(encoding='utf-8')}".split("\n[")[1:]
    return {name: text for name, _, text in (part.partition("]") for part in lists)}


def list_names(file: str) -> tuple[str, ...]:
    """Return the headings of *file*."""
    return tuple(_split_lists(file))


def read_lines(file: str, name: str) -> list[tuple[str, Conditions]]:
    """Return the lines of a list with the conditions of each."""
    lines: list[tuple[str, Conditions]] = []
    shared: list[str] = []
    for line in _split_lists(file)[name].splitlines():
        text, mark, after = (part.strip() for part in line.partition("#")[0].partition("?"))
        if text:
            words = (*shared, *after.split())
            lines.append((text, tuple((word.removeprefix("!"), not word.startswith("!")) for word in words)))
        elif mark:
            shared = after.split()
    return lines


def read_amount(text: str) -> Amount:
    terms = tuple(tuple(map(_read_factor, term.split("*"))) for term in text.split("+"))
    return terms if len(terms) > 1 or len(terms[0]) > 1 else terms[0][0]


def _read_factor(word: str) -> float | str:
    """Return a number, or a name; that of a format is the bytes of its elements."""
    if word in FORMATS:
        return FORMATS[word].bytes
    return word if word[0].isalpha() else float(word) if "." in word else int(word)


def evaluate(amount: Amount, find: Find) -> float:
    """Return the number that *amount* is where *find* returns the values of names."""
    if isinstance(amount, tuple):
        return sum([prod([evaluate(factor, find) for factor in term]) for term in amount])
    if not isinstance(amount, str):
        return amount
    value = find(amount)
    assert isinstance(value, int | float | DType), f"{amount} is no number"
    return value.bytes if isinstance(value, DType) else value
