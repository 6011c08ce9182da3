"""Comma-separated files with a header, row by row."""

import csv
from collections.abc import Iterator

from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source


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
    return names, (
        dict(zip(names, [*row, *[""] * (len(names) - len(row))], strict=False)) for row in rows if row
    )
