"""Text tables, separated by commas or tabs: their header, their rows, and numbers in their cells."""

import csv
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import COLUMNS

LARGEST_COUNT = 2**63 - 1


def parse_count(token: str, name: str, line: int | None, at_least: int = 0) -> int:
    """Return a whole number; ``16777216.0`` counts as one. *name* is the field in the error."""
    if token.isdigit() and token.isascii() and len(token) < 19:
        value = int(token)
    else:
        number = parse_amount(token, name, line)
        if not number.is_integer():
            raise FormatError(f"{name} is {token!r}; expected a whole number", line=line)
        value = int(token) if token.isdigit() and token.isascii() and len(token) < 20 else int(number)
    if value > LARGEST_COUNT:
        raise FormatError(f"{name} is {token}; expected less than 2^63", line=line)
    if value < at_least:
        raise FormatError(f"{name} is {token}; expected at least {at_least}", line=line)
    return value


def parse_amount(token: str, name: str, line: int | None) -> float:
    """Return a finite number, zero or more."""
    try:
        if not token.isascii() or "_" in token:
            raise ValueError
        value = float(token)
    except ValueError:
        raise FormatError(f"{name} is {shorten(token)}; expected a number", line=line) from None
    if not math.isfinite(value):
        raise FormatError(f"{name} is {token}; expected a finite number", line=line)
    if value < 0:
        raise FormatError(f"{name} is {token}; expected zero or more", line=line)
    return value


def shorten(text: str, limit: int = 40) -> str:
    """Return *text* quoted for an error message, cut where it is long."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


Rows = Iterator[tuple[int, list[str]]]  # the line number and the cells of each row


def open_table(source: Source, needed: Sequence[str], expected: str) -> tuple[list[str], Rows]:
    """Return a table's column names and rows; FormatError where the header lacks a *needed* column or repeats one."""
    lines = source.each_line()
    header = next(lines, "")
    separator = "\t" if "\t" in header else ","
    names = [name.strip() for name in header.split(separator)]
    if missing := [name for name in needed if name not in names]:
        raise FormatError(f"header lacks {', '.join(missing)}; expected {expected}", line=1)
    if len(names) > COLUMNS.most:
        raise FormatError(COLUMNS.message, line=1)
    if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
        raise FormatError(f"header repeats {', '.join(map(shorten, repeated[:5]))}", line=1)
    return names, _split_rows(lines, separator, len(names))


def _split_rows(lines: Iterator[str], separator: str, width: int) -> Rows:
    """Yield the rows; blank lines count and give none."""
    for number, line in enumerate(lines, 2):
        if line.strip():
            cells = line.split(separator)
            if len(cells) != width:
                raise FormatError(f"has {len(cells)} columns; expected {width}", line=number)
            yield number, cells


def csv_rows(source: Source) -> Iterator[list[str]]:
    """Yield the cells of each row, the header's first."""
    reader = csv.reader(f"{line}\n" for line in source.each_line())
    try:
        yield from reader
    except csv.Error as error:
        raise FormatError(f"{error}; expected comma-separated text", source.path, reader.line_num) from None


def csv_columns(source: Source, names: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the line and the cells of the columns *names* of each row; FormatError where one is missing."""
    rows = csv_rows(source)
    heads = [name.strip().lstrip("\ufeff") for name in next(rows, [])]
    if missing := [name for name in names if name not in heads]:
        raise FormatError(f"column {missing[0]} is missing", source.path, 1)
    places = [heads.index(name) for name in names]
    for line, row in enumerate(rows, 2):
        if row and len(row) <= max(places):
            raise FormatError(f"has {len(row)} columns; expected {len(heads)}", source.path, line)
        if row:
            yield line, [row[place] for place in places]


def csv_records(source: Source) -> tuple[list[str], Iterator[dict[str, str]]]:
    """Return the header's names, and each row by them; cells that are missing are empty."""
    rows = csv_rows(source)
    names = next(rows, [])
    return names, (dict(zip(names, [*row, *[""] * (len(names) - len(row))], strict=False)) for row in rows if row)
