"""Cells of tables: how a value is shown follows from the unit that its name ends in."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from stepcast.units import format_bytes, format_count, format_percent, format_rate, format_seconds

Row = Mapping[str, Any]
Told = Callable[[Row], object]
Column = str | Told | tuple[str, Told]
"""Names of values, with blanks between them; or what tells a cell, and the name that it is sorted by."""

# The first that fits; a comma behind a name separates the thousands of a count.
SHOWN: Mapping[str, Callable[[Any], str]] = {
    "_bytes_per_s": format_rate,
    "_s": format_seconds,
    "bytes": format_bytes,
    "share": format_percent,
    "abs_error": format_percent,
    "mfu": format_percent,
    "goodput": format_percent,
    "reached": format_percent,
    ",": format_count,
}


def shown(name: str, value: Any) -> object:
    """*value* as a person reads it, and ``-`` where there is none."""
    if value is None:
        return "-"
    words = next((words for ending, words in SHOWN.items() if name.endswith(ending)), None)
    return words(value) if words else value


def cells(rows: Iterable[Row], *columns: Column) -> list[tuple[object, ...]]:
    """The cells of each row."""
    listed = list(_single(columns))
    return [tuple(tell(row) if tell else shown(name, row[name.rstrip(",")]) for name, tell in listed) for row in rows]


def keys(rows: Iterable[Row], *columns: Column) -> list[tuple[object, ...]]:
    """What the cells of each row are sorted by: the values themselves."""
    names = [name.rstrip(",") for name, _ in _single(columns)]
    return [tuple(row.get(name) for name in names) for row in rows]


def _single(columns: Iterable[Column]) -> Iterator[tuple[str, Told | None]]:
    for column in columns:
        if isinstance(column, str):
            yield from ((name, None) for name in column.split())
        else:
            yield column if isinstance(column, tuple) else ("", column)
