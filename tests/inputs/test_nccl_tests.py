"""Logs of nccl-tests: every layout of the table, who took part, and which collective it was."""

import pytest
from hypothesis import given

from stepcast.inputs.nccl_tests import looks_like, read
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import recognise
from stepcast.ir.measured import CollectiveSweep, SweepRow
from stepcast.ir.types import DType
from stepcast.ir.work import CollectiveKind
from stepcast.units import US
from tests.inputs.fuzz import FUZZ, check_reader, mutations
from tests.shared import DATA, needs_data

SHAPE = "# nThread 1 nGpus 1 minBytes 8 maxBytes 64 step: 2(factor) warmup iters: 5 iters: 20 validation: 1"
NEW_COLUMNS = "#  size  count  type  redop  root  time  algbw  busbw  #wrong  time  algbw  busbw  #wrong"
UNITS = "#  (B)  (elements)  (us)  (GB/s)  (GB/s)  (us)  (GB/s)  (GB/s)"
FOOTER = "# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 51.3\n#\n"


def devices(ranks: int = 8, per_node: int = 8, pid: str = "Pid  100 ", group: str = "") -> str:
    return "\n".join(
        f"#  Rank {rank:2d} {group}{pid}on node-{rank // per_node} device {rank % per_node} [0x0a] NVIDIA H200"
        for rank in range(ranks)
    )


def table(*rows: str, header: str = NEW_COLUMNS, listed: str | None = None, program: str = "") -> str:
    start = f"# nccl-tests version 2.17.6\n# Collective test starting: {program}\n" if program else ""
    parts = [start + SHAPE, "#\n# Using devices", devices() if listed is None else listed, "#", header, UNITS]
    return "\n".join([*parts, *rows, FOOTER])


def new_row(size: int = 1 << 30, operation: str = "sum", root: int = -1, ratio: float = 1.75) -> str:
    side = f"1000.5 100.00 {100 * ratio:.2f} 0"
    return f"  {size} {size // 4} float {operation} {root} {side} {side.replace('1000.5', '900')}"


def read_text(text: str) -> CollectiveSweep:
    return read(Source("nccl.log", text.encode()))


def test_new_layout() -> None:
    sweep = read_text(table(new_row(1 << 20), new_row(1 << 21), program="all_reduce_perf"))
    assert sweep.kind is CollectiveKind.ALL_REDUCE
    assert (sweep.ranks, sweep.nodes, sweep.device, sweep.dtype) == (8, 1, "NVIDIA H200", DType.FP32)
    assert sweep.rows == (SweepRow(1 << 20, 1000.5 * US, 900 * US), SweepRow(1 << 21, 1000.5 * US, 900 * US))
    assert not sweep.warnings


def test_gpus_of_a_thread() -> None:
    for shape, count in ((SHAPE.replace("nGpus 1", "nGpus 4"), 4), (SHAPE.replace("nGpus 1", "nGpus 99"), 8), ("#", 1)):
        assert read_text(table(new_row()).replace(SHAPE, shape)).ranks_per_thread == count


OLD = "#  size  count  type {} time  algbw  busbw  error  time  algbw  busbw  error"


@pytest.mark.parametrize(
    ("header", "row", "expected"),
    [
        (OLD.format(" redop "), "1024 256 float sum 9.5 40.00 70.00 1e-07 9.4 40.10 70.18 N/A", "all-reduce"),
        (OLD.format(" redop "), "1024 32 float sum 9.5 40.00 35.00 1e-07 9.4 40.10 35.09 N/A", "reduce-scatter"),
        (OLD.format(" redop root "), "1024 256 half sum 0 9.5 40.00 40.00 0e+00 9.4 40.10 40.10 0", "reduce"),
        (OLD.format(" root "), "1024 256 bfloat16 0 9.5 40.00 40.00 0e+00 9.4 40.10 40.10 0", "broadcast"),
        (OLD.format(""), "1024 32 int8 9.5 40.00 35.00 0e+00 9.4 40.10 35.09 0", None),
        (NEW_COLUMNS, "1024 32 float 9.5 40.00 35.00 0 9.4 40.10 35.09 0", FormatError),
        (NEW_COLUMNS, "1024 32 float -1 9.5 40.00 35.00 0 9.4 40.10 35.09 0", None),
        (NEW_COLUMNS, "1024 32 float none -1 9.5 40.00 35.00 0 9.4 40.10 35.09 N/A", None),
        (NEW_COLUMNS, "1024 32 float none 0 9.5 40.00 35.00 0 9.4 40.10 35.09 N/A", None),
        (NEW_COLUMNS, "1024 32 float none 0 9.5 40.00 40.00 0 9.4 40.10 40.10 N/A", "broadcast"),
        (
            "#  bytes  N  type  op  root  time  algbw  busbw  res  time  algbw  busbw  res",
            "1024 256 char sum -1 9.5 40.00 70.00 0 9.4 40.10 70.18 0",
            "all-reduce",
        ),
    ],
)
def test_layouts_and_kinds_without_a_program_name(
    header: str, row: str, expected: str | type[FormatError] | None
) -> None:
    text = table(row, header=header)
    if isinstance(expected, type):
        with pytest.raises(expected, match="columns"):
            read_text(text)
        return
    sweep = read_text(text)
    assert sweep.kind == expected
    assert sweep.rows == (SweepRow(1024, 9.5 * US, 9.4 * US),)
    assert bool(sweep.warnings) == (expected is None)


def test_two_ranks_share_a_ratio_but_not_a_root() -> None:
    row = "1024 256 float sum 9.5 40.00 40.00 0 9.4 40.10 40.10 0"
    assert read_text(table(row, header=OLD.format(" redop "), listed=devices(2))).kind is CollectiveKind.ALL_REDUCE


@pytest.mark.parametrize(
    ("program", "kind"),
    [
        ("all_gather_perf", CollectiveKind.ALL_GATHER),
        ("alltoall_perf_mpi", CollectiveKind.ALL_TO_ALL),
        ("scatter_perf", CollectiveKind.SCATTER),
        ("sendrecv_perf", None),
    ],
)
def test_the_program_name_decides(program: str, kind: CollectiveKind | None) -> None:
    sweep = read_text(table(new_row(operation="none"), program=program))
    assert sweep.kind is kind
    assert bool(sweep.warnings) == (kind is None)
    concluded = table(new_row(operation="none")) + f"# Collective test concluded: {program}\n"
    assert read_text(concluded).kind is kind


def test_times_not_taken() -> None:
    sweep = read_text(table("1024 32 float none -1 9.5 0.1 0.1 0 N/A N/A N/A N/A", program="alltoall_perf"))
    assert sweep.rows == (SweepRow(1024, 9.5 * US, None),)


@pytest.mark.parametrize("tag", ["[1,0]<stdout>:", "[1,0]<stdout>: ", "0: ", "  0:"])
def test_tags_of_launchers(tag: str) -> None:
    text = table(new_row(), program="all_reduce_perf")
    tagged = "\n".join(tag + line for line in text.splitlines())
    assert read_text(tagged) == read_text(text)


def test_ranks_nodes_and_groups() -> None:
    assert read_text(table(new_row(), listed=devices(16, 8))).nodes == 2
    assert read_text(table(new_row(), listed=devices(16, 8, pid=""))).ranks == 16
    grouped = devices(4, 8, group="Group  0 ") + "\n" + devices(4, 8, group="Group  1 ")
    sweep = read_text(table(new_row(), listed=grouped))
    assert sweep.ranks == 4
    assert "2 groups" in sweep.warnings[0]


def test_what_else_a_log_may_hold() -> None:
    noise = "node-0:123:123 [0] NCCL INFO comm 0x1 rank 0\n\nNCCL version 2.29.3\n"
    text = noise + table(new_row(), noise.strip(), new_row(1 << 31), program="all_reduce_perf")
    assert len(read_text(text).rows) == 2
    assert "1 more tables" in " ".join(read_text(text + text).warnings)
    wrong = text.replace("values : 0 OK", "values : 3 FAILED")
    assert "3 wrong values" in " ".join(read_text(wrong).warnings)
    unlisted = table(new_row(), listed="#")
    assert "lists no devices" in read_text(unlisted).warnings[0]
    for shape, ranks in (("# nThread 2 nGpus 4 minBytes 8 maxBytes 64", 8), ("#", 1)):
        found = read_text(unlisted.replace(SHAPE, shape))
        assert (found.ranks, found.nodes, found.device) == (ranks, 1, "")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# nothing here\n", "no table"),
        (table(), "no rows"),
        (table("1024 256 float"), r":15: a row of 3 columns"),
        (table(new_row().replace("1000.5", "nan")), "nan; expected a size"),
        (table(new_row().replace("1000.5", "-3")), "expected a size"),
        (table(new_row().replace("900", "soon")), "expected a size"),
        (table(new_row(), header="# size count type time algbw"), "header needs"),
    ],
)
def test_bad_logs_are_named(text: str, expected: str) -> None:
    with pytest.raises(FormatError, match=expected):
        read_text(text)


@needs_data("nccl-tests")
@pytest.mark.parametrize(("ranks", "nodes", "count"), [(2, 1, 28), (8, 1, 28), (16, 2, 25), (64, 8, 23)])
def test_measured_logs(ranks: int, nodes: int, count: int) -> None:
    path = DATA / "nccl-tests" / f"nccl_{ranks}.log"
    assert recognise(Source(path)).name == "nccl-tests"
    sweep = read(Source(path))
    assert sweep.kind is CollectiveKind.ALL_REDUCE
    assert (sweep.ranks, sweep.nodes, len(sweep.rows)) == (ranks, nodes, count)
    assert (sweep.device, sweep.dtype) == ("A100-SXM4-40GB", DType.FP32)
    assert not sweep.warnings


def test_not_recognised() -> None:
    assert not looks_like("# size of the model\n# count 3\n")
    assert looks_like(table())
    assert looks_like("#  size  count  type  redop  root  time  algbw  busbw")  # the header alone
    assert looks_like("# nThread 1 nGpus 8 minBytes 8 maxBytes 1024")  # cut before the header
    assert not looks_like("# nThread 1 nGpus 8")


@FUZZ
@given(mutations(table(*(new_row(1 << power) for power in range(10, 20)), program="all_reduce_perf").encode()))
def test_damaged_logs_give_a_sweep_or_a_format_error(data: bytes) -> None:
    check_reader(read, data, CollectiveSweep)
