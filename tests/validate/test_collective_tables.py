"""Public tables of collectives: how rows find their hardware, and how far predictions lie from them."""

import csv
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.cli.main import main
from stepcast.cost.collectives.route import Route
from stepcast.inputs.source import FormatError
from stepcast.units import GB, US
from stepcast.validate.collectives import (
    COLUMNS,
    CONSTANTS,
    FILE,
    TableRow,
    change_route,
    find_exclusion,
    load_table_folds,
    match_hardware,
    measure_tables,
    price_row,
    read_rows,
    row_route,
)
from stepcast.validate.scoreboard import Scoreboard, build_scoreboard
from tests.shared import DATA, ROOT, needs_data

FOLDER = DATA / "collectives"
GOOD = {
    "id": "lab-h100x16",
    "source": "lab/tables h100.log",
    "gpu": "H100",
    "nodes": "2",
    "ranks": "16",
    "network": "8 x 400 Gb/s InfiniBand",
    "ranks_per_thread": "1",
    "collective": "all-reduce",
    "size_bytes": str(2**30),
    "time_us": "4471",
    "time_oop_us": "4479",
    "time_ip_us": "4464",
    "status": "normal",
}


def line(**changes: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | GOOD | changes


def write(path: Path, *lines: Mapping[str, str]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)
    return path


def row_of(folder: Path, **changes: str) -> TableRow:
    return read_rows(str(write(folder / FILE, line(**changes))))[0]


def route(folder: Path, **changes: str) -> Route:
    return row_route(row_of(folder, **changes))


# ---- which hardware a row names ------------------------------------------------------------------------


def test_a_network_says_how_many_nics_of_which_rate_and_over_what(tmp_path: Path) -> None:
    infiniband = route(tmp_path)
    assert infiniband.inter_bytes_per_s == pytest.approx(8 * 50 * GB * 0.97)
    tcpxo = route(tmp_path, network="8 x 200 Gb/s GPUDirect-TCPXO (vendor spec)")
    assert tcpxo.inter_bytes_per_s == pytest.approx(8 * 25 * GB * 0.95)
    assert tcpxo.inter_latency_s > infiniband.inter_latency_s + 10 * US
    assert not infiniband.in_network_reduction
    assert route(tmp_path, network="8 x 400 Gb/s InfiniBand, SHARP").in_network_reduction


def test_a_rack_is_one_node_and_two_racks_are_two(tmp_path: Path) -> None:
    rack = route(tmp_path, gpu="GB200", nodes="18", ranks="72", network="NVLink domain of 72")
    assert (rack.nodes, rack.ranks_per_node) == (1, 72)
    racks = route(tmp_path, gpu="GB200", nodes="32", ranks="128", ranks_per_node="64", network="8 x 400 Gb/s RoCE")
    assert (racks.nodes, racks.ranks_per_node) == (2, 64)
    assert racks.inter_bytes_per_s == pytest.approx(64 * 2 * 50 * GB * 0.93)


def test_a_machine_may_have_an_entry_of_its_own(tmp_path: Path) -> None:
    echo = row_of(tmp_path, source="NetX-lab/Echo logs", gpu="A100-40", network="8 x 200 Gb/s InfiniBand")
    assert match_hardware(echo).cluster.name == "azure-nd-a100-v4"
    assert match_hardware(echo, own_entry=False).cluster.name == "dgx-a100"
    assert row_route(echo).inter_bytes_per_s < 0.7 * row_route(echo, own_entry=False).inter_bytes_per_s


def test_who_called_and_how_it_was_launched(tmp_path: Path) -> None:
    """PyTorch adds its own; a graph needs no launch; one process drives a node where nothing else is said."""
    inside = {"nodes": "1", "ranks": "8", "network": "NVSwitch"}
    plain = route(tmp_path, **inside)
    assert plain.call_overhead_s == 0
    assert plain.ranks_per_thread == 1
    assert route(tmp_path, notes="torch all_reduce_bench", **inside).call_overhead_s > 10 * US
    assert route(tmp_path, notes="half, CUDA graph", **inside).launch_overhead_s == 0
    assert route(tmp_path, ranks_per_thread="", **inside).ranks_per_thread == 8
    assert route(tmp_path, ranks_per_thread="").ranks_per_thread == 1


def test_sides_that_were_printed_are_those_that_are_priced(tmp_path: Path) -> None:
    gather = {"collective": "all-gather"}
    rows = [
        row_of(tmp_path, **gather, **sides)
        for sides in ({"time_oop_us": ""}, {}, {"time_ip_us": ""})  # in place, both, out of place
    ]
    inside, both, outside = (price_row(row, row_route(row)).seconds for row in rows)
    assert inside < both < outside
    assert both == pytest.approx((inside + outside) / 2)


def test_a_ring_that_was_forced_is_a_ring(tmp_path: Path) -> None:
    inside = {"nodes": "1", "ranks": "8", "network": "NVSwitch"}
    prices = [
        price_row(row, row_route(row))
        for row in (row_of(tmp_path, algo=algo, **inside) for algo in ("", "ring (NVLS off)", "ring forced"))
    ]
    assert [str(one.algorithm) for one in prices] == ["nvls", "ring", "ring"]


# ---- what is left out, and files that are no tables ----------------------------------------------------


def test_marked_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    lines = (
        line(),
        line(status="problem"),
        line(outlier="oop"),
        line(outlier="spike"),
        line(time_us=""),
        line(gpu="TPU"),
        line(nodes=""),
        line(nodes="1"),
    )
    found = measure_tables(str(write(tmp_path / FILE, *lines)))
    assert len(found.columns) == 1
    assert sum(found.skipped.values()) == 7
    assert sorted(found.skipped.values()) == [1, 1, 1, 1, 1, 2]
    reasons = " ".join(found.skipped)
    for word in ("problem", "outlier", "no time", "no cluster of TPU", "16 ranks on a node"):
        assert word in reasons


def test_the_csv_has_every_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path / FILE, line(), line(size_bytes="4096", time_us="30")), tmp_path / "out.csv"
    assert main(["validate", "--set", "collectives", "--data", str(path), "-o", str(out)]) == 0
    assert "left out" in capsys.readouterr().out
    with out.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["gpu from 1 MiB"] for row in rows] == ["H100 between nodes", ""]
    for row in rows:
        error = float(row["predicted_s"]) / float(row["measured_s"]) - 1
        assert float(row["error"]) == pytest.approx(error, abs=1e-5)


@settings(max_examples=50)
@given(st.dictionaries(st.sampled_from(COLUMNS), st.text(max_size=12), max_size=6))
def test_damaged_rows_are_told_or_read(tmp_path_factory: pytest.TempPathFactory, damage: dict[str, str]) -> None:
    path = write(tmp_path_factory.getbasetemp() / FILE, line(**damage))  # written anew by every example
    with suppress(FormatError):
        found = measure_tables(str(path))
        assert len(found.columns) + sum(found.skipped.values()) <= 1


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"\xff\xfe\x00", b"id,source\n"])
def test_other_files_are_no_tables(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(FormatError):
        measure_tables(str(tmp_path))


# ---- how good it is ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def board() -> Scoreboard:
    return build_scoreboard(measure_tables(str(FOLDER)))


@needs_data("collectives")
def test_errors_as_the_page_has_them(board: Scoreboard) -> None:
    assert board.summary is not None
    assert board.summary.rows == 735
    assert sum(board.skipped.values()) == 91
    assert board.selections["1 MiB and more"].mean_abs_error <= 0.065
    assert board.selections["below 1 MiB"].mean_abs_error <= 0.09
    kinds = board.groups["gpu from 1 MiB"]
    for name in ("H100 in a node", "H100 between nodes", "H200 in a node"):
        assert kinds[name].mean_abs_error <= 0.06, name
    for name, one in kinds.items():
        assert one.mean_abs_error <= 0.15, name


@needs_data("collectives")
def test_machines_that_took_part_in_no_fit(board: Scoreboard) -> None:
    """The tables of one machine are predicted by what those of the others give."""
    assert board.figures["left out, 1 MiB and more"] <= 0.16
    assert board.figures["left out, 1 MiB and more"] > board.selections["1 MiB and more"].mean_abs_error
    rows = [row for row in read_rows(str(FOLDER / FILE)) if find_exclusion(row) is None]
    assert {row.system for row in rows} == set(load_table_folds())


@needs_data("collectives")
def test_the_listed_constants_are_those_that_ship() -> None:
    """Every row's route, with each constant set to its listed value, is the route of the catalogue."""
    listed = {constant.name: constant.value for constant in CONSTANTS}
    for row in read_rows(str(FOLDER / FILE)):
        if find_exclusion(row) is None:
            shipped, changed = row_route(row), change_route(row, listed)
            sizes = [price_row(row, each).seconds for each in (shipped, changed)]
            assert sizes[0] == pytest.approx(sizes[1], rel=1e-9), row.table


@needs_data("collectives")
def test_the_page_has_these_figures(board: Scoreboard) -> None:
    page = (ROOT / "docs" / "collectives-tables.md").read_text(encoding="utf-8")
    for name, one in board.groups["gpu from 1 MiB"].items():
        unseen = board.figures[f"left out, {name}"]
        assert f"| {name} | {one.rows} | {one.mean_abs_error:.1%} | {unseen:.1%} |".replace("%", " %") in page
    large, small = board.selections["1 MiB and more"], board.selections["below 1 MiB"]
    assert f"| together | {large.rows} | {large.mean_abs_error:.1%} |".replace("%", " %") in page
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    in_sample = f"(in-sample {large.mean_abs_error:.1%} and {small.mean_abs_error:.1%})".replace("%", " %")
    assert in_sample in readme
