"""Measured operator times: a table with one measured call per row, tab or comma separated.

Columns are op, dtype, the sizes that the operator has (B, M, N, K of matmuls; B, S, heads, kv, D of
attention; rows, cols or numel of others) and ms, the time of one call.
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import chain

from stepcast.inputs.errors import FormatError
from stepcast.inputs.numbers import check_different, parse_amount, parse_count, shorten
from stepcast.inputs.op_rows import OperatorRows, UnknownOperatorError
from stepcast.inputs.source import Source
from stepcast.ir.dtype import DType
from stepcast.ir.kernels import cast
from stepcast.ir.operator_times import OperatorTimes
from stepcast.ir.work import Attention, Compute, ElementwiseKind, GroupedMatmul, Matmul, streamed
from stepcast.units import MS

K = ElementwiseKind
NEEDED = ("op", "dtype", "ms")
Row = Mapping[str, str]
# Kind, and tensors of rows x columns read and written.
STREAMS = {
    "add": (K.ADD, 2, 1),
    "gelu": (K.GELU, 1, 1),
    "dropout": (K.DROPOUT, 1, 1),
    "layernorm": (K.LAYER_NORM, 1, 1),
    "rmsnorm": (K.RMS_NORM, 1, 1),
    "softmax": (K.SOFTMAX, 1, 1),
    "embedding": (K.EMBEDDING, 1, 1),
    "adamw_fused": (K.OPTIMIZER, 4, 3),
}


def looks_like(head: str) -> bool:
    first = head.lstrip("\ufeff").split("\n", 1)[0].strip()
    names = [name.strip() for name in first.split("\t" if "\t" in first else ",")]
    return all(name in names for name in NEEDED)


def read(source: Source) -> OperatorTimes:
    """Every row whose operator is known; the others are counted."""
    slabs = source.slabs()
    header, _, rest = next(slabs, "").partition("\n")
    separator = "\t" if "\t" in header else ","
    columns = _columns(header.split(separator))
    rows = OperatorRows(columns, works_of)
    line = 2
    for slab in chain((rest,), slabs):
        if not rows.add(slab, separator):
            rows.add_one_by_one(_checked(slab, separator, columns, line))
        line += slab.count("\n")
    if not len(rows) and not rows.left_out:
        raise FormatError("table has a header but no rows; expected one row per measured operator", line=1)
    return OperatorTimes(rows.finished(), source.path, left_out=rows.left_out)


def _checked(slab: str, separator: str, columns: list[str], first: int) -> Iterator[tuple[Row, float]]:
    """The rows of *slab* with what is used of them, and their seconds; says which line is wrong."""
    for number, line in enumerate(slab.split("\n"), start=first):
        if not line.strip():
            continue
        cells = line.split(separator)
        if len(cells) != len(columns):
            raise FormatError(f"has {len(cells)} columns; expected {len(columns)}", line=number)
        row = dict(zip(columns, (cell.strip() for cell in cells), strict=True))
        seconds = parse_amount(row["ms"], "ms", number) * MS
        if not seconds:
            raise FormatError("ms is 0; expected the time of a call", line=number)
        used = {"op": row["op"], "dtype": row["dtype"]}
        with suppress(UnknownOperatorError):
            works_of(row, number, used)
        yield used, seconds


def _columns(names: list[str]) -> list[str]:
    """The header's names, checked."""
    names = [name.strip() for name in names]
    if missing := [name for name in NEEDED if name not in names]:
        raise FormatError(
            f"header lacks {', '.join(missing)}; expected {', '.join(NEEDED)} and sizes", line=1
        )
    check_different(names)
    return names


def works_of(row: Row, line: int | None = None, used: dict[str, str] | None = None) -> tuple[Compute, ...]:
    """The kernels of one measured call; UnknownOperatorError for an operator or format that is not known.

    The sizes that it takes are noted in *used*.
    """
    op = row["op"]
    if row["dtype"] not in set(DType):
        raise UnknownOperatorError(f"number format {shorten(row['dtype'])} is not known")
    dtype = DType(row["dtype"])
    sizes = _Sizes(row, line, {} if used is None else used)
    match op:
        case "linear" | "bmm":
            return (Matmul(sizes["M"], sizes["N"], sizes["K"], sizes.optional("B"), dtype),)
        case "grouped_linear":
            groups = sizes["B"]
            return (GroupedMatmul(sizes["M"] * groups, sizes["N"], sizes["K"], groups, dtype),)
        case "sdpa_fwd" | "sdpa_bwd":
            seq, dim, heads = sizes["S"], sizes["D"], sizes["heads"]
            kv_heads = sizes.optional("kv", heads)
            backward = op == "sdpa_bwd"
            batch = sizes.optional("B")
            return (Attention(batch, seq, seq, heads, kv_heads, dim, dim, True, backward, dtype),)
        case "silu_mul" | "cast_fp32" | "quantize_fp8" | "cross_entropy":
            return _mixed(op, *sizes.rows_and_columns(), dtype)
    if op not in STREAMS:
        raise UnknownOperatorError(f"operator {shorten(op)} is not known")
    kind, reads, writes = STREAMS[op]
    return (streamed(kind, *sizes.rows_and_columns(), reads, writes, dtype),)


def _mixed(op: str, rows: int, columns: int, dtype: DType) -> tuple[Compute, ...]:
    """Operators of two kernels, and casts, which read one format and write another."""
    match op:
        case "silu_mul":
            return streamed(K.SILU, rows, columns, 1, 1, dtype), streamed(K.MUL, rows, columns, 2, 1, dtype)
        case "cast_fp32":
            return (cast(rows, columns, dtype, DType.FP32),)
        case "quantize_fp8":
            return (cast(rows, columns, dtype, DType.FP8),)
        case _:
            raised = cast(rows, columns, dtype, DType.FP32)
            return raised, streamed(K.CROSS_ENTROPY, rows, columns, 3, 1, DType.FP32)


class _Sizes:
    """The size columns of one row as whole numbers."""

    def __init__(self, row: Row, line: int | None, used: dict[str, str]) -> None:
        self._row, self._line, self._used = row, line, used

    def __getitem__(self, name: str) -> int:
        text = self._row.get(name, "")
        if not text:
            raise FormatError(f"{self._row['op']} without {name}; expected a size", line=self._line)
        value = parse_count(text, name, self._line, at_least=1)
        self._used[name] = str(value)
        return value

    def optional(self, name: str, default: int = 1) -> int:
        return self[name] if self._row.get(name) else default

    def rows_and_columns(self) -> tuple[int, int]:
        if self._row.get("cols"):
            return self.optional("rows"), self["cols"]
        return 1, self["numel"]
