"""Documents as JSON, captured programs as JSON of our own, and rows as csv or parquet."""

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from importlib.util import find_spec

import msgspec

from stepcast.ir.captured import Captured


def write(document: object) -> bytes:
    """Return any document as JSON: dataclasses become objects that name their type, arrays become lists."""
    return msgspec.json.format(msgspec.json.encode(to_plain(document)), indent=1) + b"\n"


def to_plain(value: object) -> object:
    """Return *value* as dicts, lists, numbers and strings."""
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | {
            field.name: to_plain(getattr(value, field.name)) for field in fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):
        return value.tolist()
    assert isinstance(value, Iterable)
    return [to_plain(item) for item in value]


def write_captured(captured: Captured) -> bytes:
    """Return a captured program: each distinct work and layer once, the repeats by their numbers."""
    from stepcast.inputs.captured import FORMAT, VERSION
    from stepcast.inputs.chakra.record import record_workload

    record = {"format": FORMAT, "version": VERSION, "workload": record_workload(captured.workload)}
    fields = {name: getattr(captured, name) for name in captured.__slots__ if name != "workload"}
    return msgspec.json.encode(record | fields) + b"\n"


def toml_rows(table: Mapping[str, object]) -> str:
    """Return a line for each value of a TOML table; None is left out, text in brackets is a list as it is."""
    return "".join(
        f"{json.dumps(name) if '.' in name else name} = "
        f"{value if isinstance(value, str) and value.startswith('[') else json.dumps(value)}\n"
        for name, value in table.items()
        if value is not None
    )


def csv_bytes(names: Iterable[str], rows: Iterable[Iterable[object]]) -> bytes:
    """Return a line of *names*, then one for each row; None is blank."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue().encode()


def columns_of(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the names of the values that rows hold which are neither lists nor mappings."""
    names = dict.fromkeys(name for row in rows for name in row)
    nested = {name for row in rows for name, value in row.items() if isinstance(value, dict | list | tuple)}
    return [name for name in names if name not in nested]


def table_bytes(path: str, rows: Sequence[Mapping[str, object]]) -> bytes:
    """Return *rows* by the ending of *path*, .csv or .parquet."""
    names = columns_of(rows)
    if not path.endswith(".parquet"):
        return csv_bytes(names, ([row.get(name) for name in names] for row in rows))
    check_parquet()
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: [row.get(name) for row in rows] for name in names})
    data = io.BytesIO()
    pyarrow.parquet.write_table(table, data)
    return data.getvalue()


def check_parquet() -> None:
    """Raise a ValueError before the work is done if parquet cannot be written."""
    if find_spec("pyarrow") is None:
        raise ValueError("parquet needs pyarrow: pip install 'stepcast[parquet]', or name a .csv file")
