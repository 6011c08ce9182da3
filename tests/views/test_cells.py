"""Cells of tables: the unit in a name decides how its value is shown."""

import pytest

from stepcast.views.cells import cells, keys, shown


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("busy_s", 0.25, "250.00 ms"),
        ("size_bytes", 3 * 2**20, "3.00 MiB"),
        ("busbw_bytes_per_s", 4e9, "4.00 GB/s"),
        ("busiest_share", 0.5, "50.0 %"),
        ("count,", 12345, "12,345"),
        ("count", 12345, 12345),
        ("busy_s", None, "-"),
    ],
)
def test_a_value_is_shown_by_the_unit_in_its_name(name: str, value: object, told: object) -> None:
    assert shown(name, value) == told


def test_rows_are_cells_to_read_and_keys_to_sort_by() -> None:
    rows = [{"stage": 1, "busy_s": 2.0, "count": 4000}]
    columns = ("stage busy_s", ("count", lambda row: f"{row['count']} times"), lambda row: "last")
    assert cells(rows, *columns) == [(1, "2.000 s", "4000 times", "last")]
    assert keys(rows, *columns) == [(1, 2.0, 4000, None)]
    assert cells(rows, "count,") == [("4,000",)]
    assert keys(rows, "count,") == [(4000,)]
