"""Rows as files that tables are read from."""

import csv
import io
import sys
from typing import Any

import pytest

from stepcast.outputs.plain import columns_of, csv_bytes, table_bytes

ROWS: list[dict[str, Any]] = [{"a": 1, "b": None, "parts": {"x": 1}}, {"a": 2.5, "b": "x,y", "parts": {}}]


def test_csv_holds_what_rows_say() -> None:
    read = list(csv.DictReader(io.StringIO(table_bytes("rows.csv", ROWS).decode())))
    assert read == [{"a": "1", "b": ""}, {"a": "2.5", "b": "x,y"}]
    assert csv_bytes(("a", "b"), [(1, None)]) == b"a,b\n1,\n"
    assert columns_of(ROWS) == ["a", "b"]
    assert table_bytes("rows.csv", []) == b"\n"


def test_parquet_holds_the_same() -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet: pip install 'stepcast[parquet]'")
    read = parquet.read_table(io.BytesIO(table_bytes("rows.parquet", [{"a": 1, "b": "x"}])))
    assert read.to_pylist() == [{"a": 1, "b": "x"}]


def test_without_pyarrow_a_hint_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"parquet needs pyarrow: pip install 'stepcast\[parquet\]'"):
        table_bytes("rows.parquet", ROWS)
