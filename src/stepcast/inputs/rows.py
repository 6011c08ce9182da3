"""Rows of text tables, separated by commas or tabs: their header, their cells, and the numbers in those."""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import COLUMNS

LARGEST_COUNT = 2**63 - 1


def parse_count(token: str, what: str, line: int | None, at_least: int = 0) -> int:
    """A whole number; ``16777216.0`` counts as one. *what* names the field in the error."""
    if token.isdigit() and token.isascii() and len(token) < 19:
        value = int(token)
    else:
        number = parse_amount(token, what, line)
        if not number.is_integer():
            raise FormatError(f"{what} is {token!r}; expected a whole number", line=line)
        value = int(token) if token.isdigit() and token.isascii() and len(token) < 20 else int(number)
    if value > LARGEST_COUNT:
        raise FormatError(f"{what} is {token}; expected less than 2^63", line=line)
    if value < at_least:
        raise FormatError(f"{what} is {token}; expected at least {at_least}", line=line)
    return value


def parse_amount(token: str, what: str, line: int | None) -> float:
    """A finite number, zero or more."""
    try:
        if not token.isascii() or "_" in token:
            raise ValueError
        value = float(token)
    except ValueError:
        raise FormatError(f"{what} is {shorten(token)}; expected a number", line=line) from None
    if not math.isfinite(value):
        raise FormatError(f"{what} is {token}; expected a finite number", line=line)
    if value < 0:
        raise FormatError(f"{what} is {token}; expected zero or more", line=line)
    return value


def shorten(text: str, limit: int = 40) -> str:
    """Return *text* quoted for an error message, cut where it is long."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


@dataclass(frozen=True, slots=True)
class SlabTable:
    """A table that is read in slabs of many lines, each with the number of its first line."""

    names: list[str]
    separator: str
    slabs: Iterator[tuple[int, str]]

    def rows(self, slab: str, first_line: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the line number and the cells of each row of *slab*; blank lines count and give none."""
        for number, line in enumerate(slab.split("\n"), first_line):
            if not line.strip():
                continue
            cells = line.split(self.separator)
            if len(cells) != len(self.names):
                raise FormatError(f"has {len(cells)} columns; expected {len(self.names)}", line=number)
            yield number, cells


def open_table(source: Source, needed: Sequence[str], expected: str) -> SlabTable:
    """Open a table with a header; FormatError where that lacks a *needed* column or repeats one."""
    slabs = source.slabs()
    header, _, rest = next(slabs, "").partition("\n")
    separator = "\t" if "\t" in header else ","
    names = [name.strip() for name in header.split(separator)]
    if missing := [name for name in needed if name not in names]:
        raise FormatError(f"header lacks {', '.join(missing)}; expected {expected}", line=1)
    if len(names) > COLUMNS.most:
        raise FormatError(COLUMNS.said, line=1)
    if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
        raise FormatError(f"header repeats {', '.join(map(shorten, repeated[:5]))}", line=1)
    return SlabTable(names, separator, _numbered(chain((rest,) if rest else (), slabs)))


def _numbered(slabs: Iterator[str]) -> Iterator[tuple[int, str]]:
    line = 2
    for slab in slabs:
        yield line, slab
        line += slab.count("\n")


def csv_rows(source: Source) -> Iterator[list[str]]:
    """The cells of each row, the header's first."""
    reader = csv.reader(f"{line}\n" for line in source.each_line())
    try:
        yield from reader
    except csv.Error as error:
        raise FormatError(f"{error}; expected comma-separated text", source.path, reader.line_num) from None


def csv_records(source: Source) -> tuple[list[str], Iterator[dict[str, str]]]:
    """The header's names, and each row by them; cells that are missing are empty."""
    rows = csv_rows(source)
    names = next(rows, [])
    return names, (dict(zip(names, [*row, *[""] * (len(names) - len(row))], strict=False)) for row in rows if row)


def draft_of(kind: type) -> Callable[[], Any]:
    """Return a plain class with the slots of the dataclass *kind*, whose objects may become that.

    The constructor of a frozen dataclass sets every field through a function call, which is slow for millions
    of values. The fields of a draft are assigned, and then its class; they must have been checked.
    """
    return type(f"{kind.__name__}Draft", (), {"__slots__": tuple(field.name for field in fields(kind))})
