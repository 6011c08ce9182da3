"""Measured operator times: a table with one measured call per row, tab or comma separated.

Columns are op, dtype, the sizes that the operator has (B, M, N, K of matmuls; B, S, heads, kv, D of
attention; rows, cols or numel of others) and ms, the time of one call.
"""

from collections import Counter
from collections.abc import Mapping

from stepcast.inputs.source import FormatError, Source, open_table, parse_amount, parse_count, shorten
from stepcast.ir.dtype import DType
from stepcast.ir.measured import OperatorTime, OperatorTimes
from stepcast.ir.work import Attention, Compute, ElementwiseKind, GroupedMatmul, Matmul, cast, usual_kernel
from stepcast.units import MS

NEEDED = ("op", "dtype", "ms")
Row = Mapping[str, str]


class UnknownOperatorError(ValueError):
    """An operator that has no work of ours."""


K = ElementwiseKind
# The kernels of an operator.
KERNELS: dict[str, tuple[K, ...]] = {kind: (kind,) for kind in (K.ADD, K.GELU, K.DROPOUT, K.SOFTMAX, K.EMBEDDING)}
KERNELS |= {"layernorm": (K.LAYER_NORM,), "rmsnorm": (K.RMS_NORM,), "adamw_fused": (K.OPTIMIZER,)}
KERNELS["silu_mul"] = (K.SILU, K.MUL)
# Operators that begin with a cast to another format.
CASTS = {"cast_fp32": DType.FP32, "quantize_fp8": DType.FP8, "cross_entropy": DType.FP32}


def read(source: Source) -> OperatorTimes:
    """Return every row whose operator is known; the others are counted."""
    names, rows = open_table(source, NEEDED, f"{', '.join(NEEDED)} and sizes")
    operators: list[OperatorTime] = []
    left_out: Counter[str] = Counter()
    for number, cells in rows:
        row = dict(zip(names, (cell.strip() for cell in cells), strict=True))
        seconds = parse_amount(row["ms"], "ms", number) * MS
        if not seconds:
            raise FormatError("ms is 0; expected the time of a call", line=number)
        try:
            operators.append(OperatorTime(row["op"], read_works(row, number), seconds))
        except UnknownOperatorError as error:
            left_out[str(error)] += 1
    if not operators and not left_out:
        raise FormatError("table has a header but no rows; expected one row per measured operator", line=1)
    return OperatorTimes(tuple(operators), source.path, left_out=left_out)


def read_works(row: Row, line: int | None = None) -> tuple[Compute, ...]:
    """Return the kernels of one measured call; UnknownOperatorError for an operator or format that is not known."""
    op = row["op"]
    if row["dtype"] not in set(DType):
        raise UnknownOperatorError(f"number format {shorten(row['dtype'])} is not known")
    dtype = DType(row["dtype"])
    sizes = _RowSizes(row, line)
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
    if op not in KERNELS and op not in CASTS:
        raise UnknownOperatorError(f"operator {shorten(op)} is not known")
    rows, columns = (sizes.optional("rows"), sizes["cols"]) if row.get("cols") else (1, sizes["numel"])
    if op in KERNELS:
        return tuple(usual_kernel(kind, rows, columns, dtype) for kind in KERNELS[op])
    converted = cast(rows, columns, dtype, CASTS[op])
    if op != "cross_entropy":
        return (converted,)
    return converted, usual_kernel(K.CROSS_ENTROPY, rows, columns, DType.FP32)


class _RowSizes:
    """The size columns of one row as whole numbers."""

    def __init__(self, row: Row, line: int | None) -> None:
        self._row, self._line = row, line

    def __getitem__(self, name: str) -> int:
        text = self._row.get(name, "")
        if not text:
            raise FormatError(f"{self._row['op']} without {name}; expected a size", line=self._line)
        return parse_count(text, name, self._line, at_least=1)

    def optional(self, name: str, default: int = 1) -> int:
        return self[name] if self._row.get(name) else default
