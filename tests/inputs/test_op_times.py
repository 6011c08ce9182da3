"""Measured operator times: what the rows mean, and that damaged files are refused in one line."""

import pytest
from hypothesis import given

from stepcast.inputs.op_times import read
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import recognise
from stepcast.ir.measured import OperatorTimes
from stepcast.ir.work import Elementwise
from tests.inputs.fuzz import FUZZ, check_reader, mutations
from tests.shared import ROOT

EXAMPLE = ROOT / "examples" / "operators-h200.csv"
FUZZ_SEED = b"".join(EXAMPLE.read_bytes().splitlines(keepends=True)[:16])


def test_the_example_holds_a_time_for_every_row() -> None:
    times = read(Source(EXAMPLE))
    assert isinstance(times, OperatorTimes)
    assert recognise(Source(EXAMPLE)).name == "op-times"
    assert len(EXAMPLE.read_text().splitlines()) - 1 >= len(times.operators) > 50
    assert all(row.seconds > 0 for row in times.operators)


def test_unknown_operators_are_counted_and_an_empty_table_is_refused() -> None:
    times = read(Source("ops.csv", b"op,dtype,ms\nteleport,bf16,1\nteleport,bf16,2\n"))
    assert (times.operators, sum(times.left_out.values())) == ((), 2)
    with pytest.raises(FormatError, match="no rows"):
        read(Source("ops.csv", b"op,dtype,ms\n"))


@pytest.mark.parametrize("word", ["-1", "nan", "1e400", "x"])
def test_impossible_times_are_refused_with_their_line(word: str) -> None:
    lines = EXAMPLE.read_text().splitlines()
    lines[3] = lines[3].rpartition(",")[0] + f",{word}"
    with pytest.raises(FormatError) as caught:
        read(Source("ops.csv", "\n".join(lines).encode()))
    assert caught.value.line == 4


@pytest.mark.parametrize(
    ("header", "message"),
    [("op,dtype,M", "header lacks ms"), ("op,dtype,ms,M,M", "header repeats 'M'"), ("", "header lacks op, dtype, ms")],
)
def test_wrong_headers_are_refused(header: str, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read(Source("ops.csv", f"{header}\n".encode()))


@FUZZ
@given(mutations(FUZZ_SEED))
def test_damaged_files_give_times_or_a_format_error(data: bytes) -> None:
    check_reader(read, data, OperatorTimes)


@pytest.mark.parametrize(
    ("name", "reads", "writes"),
    [
        ("add", 2, 1),
        ("gelu", 1, 1),
        ("dropout", 1, 1),
        ("layernorm", 1, 1),
        ("rmsnorm", 1, 1),
        ("softmax", 1, 1),
        ("embedding", 1, 1),
        ("adamw_fused", 4, 3),
        ("silu_mul", 3, 2),
    ],
)
def test_operators_read_and_write_their_operands(name: str, reads: int, writes: int) -> None:
    """In tensors of 8 rows of 16 elements in bf16; SwiGLU is two kernels."""
    works = read(Source("t.csv", f"op,dtype,ms,rows,cols,numel\n{name},bf16,1,8,16,128\n".encode())).operators[0].works
    moved = [work for work in works if isinstance(work, Elementwise)]
    tensor = 8 * 16 * moved[0].dtype.bytes
    assert sum(work.read_bytes for work in moved) == reads * tensor
    assert sum(work.write_bytes for work in moved) == writes * tensor
