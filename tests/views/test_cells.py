"""Cells of tables: the unit in a name decides how its value is shown."""

import pytest

from stepcast.views.view import Cell, format_by_name, table_of


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("busy_s", 0.25, "250.00 ms"),
        ("size_bytes", 3 * 2**20, "3.00 MiB"),
        ("busbw_bytes_per_s", 4e9, "4.00 GB/s"),
        ("busiest_share", 0.5, "50.0 %"),
        ("count,", 12345, "12,345"),
        ("count", 12345, "12345"),
        ("busy_s", None, "-"),
    ],
)
def test_a_value_is_shown_by_the_unit_in_its_name(name: str, value: object, told: object) -> None:
    assert format_by_name(name, value) == told


def test_rows_are_cells_to_read_and_keys_to_sort_by() -> None:
    rows = [{"stage": 1, "busy_s": 2.0, "count": 4000}]
    columns = {
        "stage": "stage",
        "busy": "busy_s",
        "count": ("count", lambda row: f"{row['count']} times"),
        "last": lambda row: "last",
    }
    (cells,) = table_of("Stages", rows, columns).cells  # type: ignore[arg-type]
    assert cells == [Cell("1", 1), Cell("2.000 s", 2.0), Cell("4000 times", 4000), Cell("last")]
    assert table_of("Stages", rows, {"count": "count,"}).cells == [[Cell("4,000", 4000)]]
