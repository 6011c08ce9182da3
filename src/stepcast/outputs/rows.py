"""Rows of values as a file: csv, or parquet where pyarrow is installed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def csv_bytes(names: Iterable[str], rows: Iterable[Iterable[object]]) -> bytes:
    """A line of *names*, then one for each row; what is None is blank."""
    import csv
    import io

    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue().encode()


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of the values that rows hold which are neither lists nor mappings."""
    names = dict.fromkeys(name for row in rows for name in row)
    nested = {name for row in rows for name, value in row.items() if isinstance(value, dict | list | tuple)}
    return [name for name in names if name not in nested]


def table_bytes(path: str, rows: Sequence[Mapping[str, Any]]) -> bytes:
    """*rows* by the ending of *path*, .csv or .parquet."""
    names = columns_of(rows)
    if not path.endswith(".parquet"):
        return csv_bytes(names, ([row.get(name) for name in names] for row in rows))
    import io

    check_parquet()
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    data = io.BytesIO()
    pyarrow.parquet.write_table(table, data)
    return data.getvalue()


def check_parquet() -> None:
    """Say before the work is done that parquet cannot be written."""
    from importlib.util import find_spec

    if find_spec("pyarrow") is None:
        raise ValueError("parquet needs pyarrow: pip install 'stepcast[parquet]', or name a .csv file")
