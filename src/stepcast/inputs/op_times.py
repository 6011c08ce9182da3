"""Measured operator times: a table with one measured call per row, tab or comma separated.

Columns are op, dtype, the sizes that the operator has (B, M, N, K of matmuls; B, S, heads, kv, D of
attention; rows, cols or numel of others) and ms, the time of one call.
"""

from collections import Counter
from collections.abc import Mapping

from stepcast.inputs.source import (
    FormatError,
    Source,
    expect,
    open_table,
    parse_amount,
    parse_count,
    read_words,
    shorten,
)
from stepcast.ir.measured import OperatorTime, OperatorTimes
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Compute, ElementwiseKind, GroupedMatmul, Matmul, cast, usual_kernel
from stepcast.units import MS

NEEDED = ("op", "dtype", "ms")


class UnknownOperatorError(ValueError):
    """An operator that has no work of ours."""


WORDS = read_words("traces")
KERNELS = {op: tuple(map(ElementwiseKind, kinds.split())) for op, kinds in WORDS["operator_kernels"].items()}
CASTS = {op: DType(dtype) for op, dtype in WORDS["operator_casts"].items()}


def read(source: Source) -> OperatorTimes:
    """Return every row whose operator is known; the others are counted."""
    names, rows = open_table(source, NEEDED, f"{', '.join(NEEDED)} and sizes")
    operators: list[OperatorTime] = []
    left_out: Counter[str] = Counter()
    for number, cells in rows:
        row = dict(zip(names, (cell.strip() for cell in cells), strict=True))
        seconds = parse_amount(row["ms"], "ms", number) * MS
        expect(seconds, "ms is 0; expected the time of a call", line=number)
        try:
            operators.append(OperatorTime(row["op"], read_works(row, number), seconds))
        except UnknownOperatorError as error:
            left_out[str(error)] += 1
    expect(operators or left_out, "table has a header but no rows; expected one row per measured operator", line=1)
    return OperatorTimes(tuple(operators), source.path, left_out=left_out)


def read_works(row: Mapping[str, str], line: int | None = None) -> tuple[Compute, ...]:
    """Return the kernels of one measured call; UnknownOperatorError for an operator or format that is not known."""
    op = row["op"]
    if row["dtype"] not in set(DType):
        raise UnknownOperatorError(f"number format {shorten(row['dtype'])} is not known")
    dtype = DType(row["dtype"])

    def size(name: str, default: int | None = None) -> int:
        text = row.get(name, "")
        if text:
            return parse_count(text, name, line, at_least=1)
        if default is None:
            raise FormatError(f"{op} without {name}; expected a size", line=line)
        return default

    match op:
        case "linear" | "bmm":
            return (Matmul(size("M"), size("N"), size("K"), size("B", 1), dtype),)
        case "grouped_linear":
            groups = size("B")
            return (GroupedMatmul(size("M") * groups, size("N"), size("K"), groups, dtype),)
        case "sdpa_fwd" | "sdpa_bwd":
            seq, dim, heads = size("S"), size("D"), size("heads")
            kv_heads, batch = size("kv", heads), size("B", 1)
            return (Attention(batch, seq, seq, heads, kv_heads, dim, dim, True, op == "sdpa_bwd", dtype),)
    if op not in KERNELS and op not in CASTS:
        raise UnknownOperatorError(f"operator {shorten(op)} is not known")
    rows, columns = (size("rows", 1), size("cols")) if row.get("cols") else (1, size("numel"))
    if op in KERNELS:
        return tuple(usual_kernel(kind, rows, columns, dtype) for kind in KERNELS[op])
    converted = cast(rows, columns, dtype, CASTS[op])
    if op != "cross_entropy":
        return (converted,)
    return converted, usual_kernel(ElementwiseKind.CROSS_ENTROPY, rows, columns, DType.FP32)
