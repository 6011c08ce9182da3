"""Measured operator times: a table with one measured call per row, tab or comma separated.

Columns are op, dtype, the sizes that the operator has (B, M, N, K of matmuls; B, S, heads, kv, D of
attention; rows, cols or numel of others) and ms, the time of one call.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field
from operator import eq
from typing import overload

import numpy as np

from stepcast.inputs.rows import Cells, SlabTable, open_table, parse_amount, parse_count, shorten
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.arrays import FloatArray, Int32Array, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.dtype import DType
from stepcast.ir.measured import OperatorTime, OperatorTimes
from stepcast.ir.work import Attention, Compute, ElementwiseKind, GroupedMatmul, Matmul, cast, elementwise
from stepcast.units import MS

# Rows are held as columns: a table of a million rows is a few arrays, not millions of objects. Rows are of one
# kind where operator, number format and the sizes given are the same; a kind holds the values of its sizes next
# to each other. A row becomes an OperatorTime when it is asked for.

SIZES = ("B", "M", "N", "K", "S", "heads", "kv", "D", "rows", "cols", "numel")
NEEDED = ("op", "dtype", "ms")
Row = Mapping[str, str]
KindKey = tuple[str, str, tuple[str, ...]]


class UnknownOperatorError(ValueError):
    """An operator that has no work of ours."""


@dataclass(slots=True)
class _OperatorKind:
    op: str
    dtype: str
    sizes: tuple[str, ...]
    values: "array[int]" = field(default_factory=lambda: array("q"))

    def row(self, index: int) -> Row:
        width = len(self.sizes)
        values = self.values[index * width : (index + 1) * width]
        return {"op": self.op, "dtype": self.dtype, **dict(zip(self.sizes, map(str, values), strict=True))}


class MeasuredOperators(Sequence[OperatorTime]):
    """Operators in the order of the file, each built when it is asked for."""

    def __init__(self, kinds: Sequence[_OperatorKind], codes: Int32Array, seconds: FloatArray) -> None:
        self._kinds, self._codes, self._seconds = kinds, codes, seconds
        self._indices = np.zeros(len(codes), dtype=np.int32)  # among the rows of its kind
        order = np.argsort(codes, kind="stable")
        counts = np.bincount(codes, minlength=len(kinds))
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        self._indices[order] = np.arange(len(codes)) - starts

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, index: int) -> OperatorTime: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[OperatorTime, ...]: ...
    def __getitem__(self, index: int | slice) -> OperatorTime | tuple[OperatorTime, ...]:
        if isinstance(index, slice):
            return tuple(self[row] for row in range(*index.indices(len(self))))
        kind = self._kinds[self._codes[index]]
        return OperatorTime(kind.op, read_works(kind.row(int(self._indices[index]))), float(self._seconds[index]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def kinds(self) -> Iterator[tuple[OperatorTime, Sequence[float]]]:
        """Yield the first row of each kind and the seconds of all, without building the others."""
        codes, firsts = np.unique(self._codes, return_index=True)
        for number in np.argsort(firsts).tolist():
            yield self[int(firsts[number])], self._seconds[self._codes == codes[number]].tolist()


class OperatorRows:
    """Collects rows: a slab at once if all its cells are plain, else row by row."""

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = columns
        self._sizes = [name for name in columns if name in SIZES]
        self._kinds: list[_OperatorKind] = []
        self._code_of: dict[KindKey, int] = {}  # -1 for an operator that is not known
        self._reasons: dict[KindKey, str] = {}
        self._codes: list[Int32Array] = []
        self._seconds: list[FloatArray] = []
        self.left_out: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._codes))

    def add(self, slab: str, separator: str) -> bool:
        """Add the rows of *slab*; False, and nothing added, where a cell is not as expected."""
        cells = Cells(slab, separator, len(self._columns))
        if not cells.plain:
            return False
        times_ms = cells.amounts(self._columns.index("ms"))
        sizes = {
            name: values for name in self._sizes if (values := cells.counts(self._columns.index(name))) is not None
        }
        if times_ms is None or len(sizes) < len(self._sizes):
            return False
        return self._add_columns(cells, sizes, times_ms * MS)

    def add_one_by_one(self, rows: Iterable[tuple[Row, float]]) -> None:
        """Add rows whose cells were checked, each with its seconds."""
        codes, times = array("i"), array("d")
        for row, seconds in rows:
            code = self._code(row, 1)
            if code >= 0:
                self._kinds[code].values.extend(int(row[name]) for name in _key(row)[2])
                codes.append(code)
                times.append(seconds)
        self._codes.append(np.array(codes, dtype=np.int32))
        self._seconds.append(np.array(times))

    def _add_columns(self, cells: Cells, sizes: dict[str, IntArray], seconds: FloatArray) -> bool:
        ops, of_op = cells.words(self._columns.index("op"))
        dtypes, of_dtype = cells.words(self._columns.index("dtype"))
        given = np.zeros(len(seconds), dtype=np.int64)
        for bit, values in enumerate(sizes.values()):
            given |= (values > 0).astype(np.int64) << bit
        marks = ((of_op * len(dtypes) + of_dtype) << len(SIZES)) | given
        _, firsts, inverse = np.unique(marks, return_index=True, return_inverse=True)
        rows = []
        for first in firsts.tolist():
            row = {"op": ops[of_op[first]].strip(), "dtype": dtypes[of_dtype[first]].strip()}
            row |= {name: str(values[first]) for name, values in sizes.items() if values[first]}
            if _key(row) not in self._code_of and not _is_complete(row):
                return False
            rows.append(row)
        codes = np.array([self._code(row, int(count)) for row, count in zip(rows, np.bincount(inverse), strict=True)])
        order = np.argsort(inverse, kind="stable")
        ends = np.cumsum(np.bincount(inverse))
        for number, (row, code) in enumerate(zip(rows, codes.tolist(), strict=True)):
            names = _key(row)[2]
            if code >= 0 and names:
                chosen = order[ends[number - 1] if number else 0 : ends[number]]
                block = np.stack([sizes[name][chosen] for name in names], axis=1)
                self._kinds[code].values.frombytes(block.tobytes())
        of_row = codes[inverse]
        self._codes.append(of_row[of_row >= 0].astype(np.int32))
        self._seconds.append(seconds[of_row >= 0])
        return True

    def _code(self, row: Row, count: int) -> int:
        """Return the number of *row*'s kind, *count* rows of which are added; -1 where they are left out."""
        key = _key(row)
        if key not in self._code_of:
            try:
                read_works(row)
                self._code_of[key] = len(self._kinds)
                self._kinds.append(_OperatorKind(*key))
            except UnknownOperatorError as error:
                self._code_of[key] = -1
                self._reasons[key] = str(error)
        code = self._code_of[key]
        if code < 0:
            self.left_out[self._reasons[key]] += count
        return code

    def operators(self) -> MeasuredOperators:
        codes = np.concatenate([np.zeros(0, dtype=np.int32), *self._codes])
        seconds = np.concatenate([np.zeros(0), *self._seconds])
        return MeasuredOperators(self._kinds, codes, seconds)


def _key(row: Row) -> KindKey:
    return row["op"], row["dtype"], tuple(name for name in SIZES if name in row)


def _is_complete(row: Row) -> bool:
    """Return whether *row* has all sizes that its operator needs; an unknown operator needs none."""
    try:
        read_works(row)
    except UnknownOperatorError:
        pass
    except ValueError:
        return False
    return True


K = ElementwiseKind
# The kernels of an operator: kind, and tensors of rows x columns read and written.
PASSES = {
    "add": ((K.ADD, 2, 1),),
    "gelu": ((K.GELU, 1, 1),),
    "dropout": ((K.DROPOUT, 1, 1),),
    "layernorm": ((K.LAYER_NORM, 1, 1),),
    "rmsnorm": ((K.RMS_NORM, 1, 1),),
    "softmax": ((K.SOFTMAX, 1, 1),),
    "embedding": ((K.EMBEDDING, 1, 1),),
    "adamw_fused": ((K.OPTIMIZER, 4, 3),),
    "silu_mul": ((K.SILU, 1, 1), (K.MUL, 2, 1)),
}
# Operators that begin with a cast to another format.
CASTS = {"cast_fp32": DType.FP32, "quantize_fp8": DType.FP8, "cross_entropy": DType.FP32}


def looks_like(head: str) -> bool:
    first = head.lstrip("\ufeff").split("\n", 1)[0].strip()
    names = [name.strip() for name in first.split("\t" if "\t" in first else ",")]
    return all(name in names for name in NEEDED)


def read(source: Source) -> OperatorTimes:
    """Return every row whose operator is known; the others are counted."""
    table = open_table(source, NEEDED, f"{', '.join(NEEDED)} and sizes")
    rows = OperatorRows(table.names)
    for line, slab in table.slabs:
        if not rows.add(slab, table.separator):
            rows.add_one_by_one(_check_rows(table, slab, line))
    if not len(rows) and not rows.left_out:
        raise FormatError("table has a header but no rows; expected one row per measured operator", line=1)
    return OperatorTimes(rows.operators(), source.path, left_out=rows.left_out)


def _check_rows(table: SlabTable, slab: str, first_line: int) -> Iterator[tuple[Row, float]]:
    """Yield the rows of *slab* with the used cells, and their seconds; errors name the line."""
    for number, cells in table.rows(slab, first_line):
        row = dict(zip(table.names, (cell.strip() for cell in cells), strict=True))
        seconds = parse_amount(row["ms"], "ms", number) * MS
        if not seconds:
            raise FormatError("ms is 0; expected the time of a call", line=number)
        used = {"op": row["op"], "dtype": row["dtype"]}
        with suppress(UnknownOperatorError):
            read_works(row, number, used)
        yield used, seconds


def read_works(row: Row, line: int | None = None, used: dict[str, str] | None = None) -> tuple[Compute, ...]:
    """Return the kernels of one measured call; UnknownOperatorError for an operator or format that is not known.

    The sizes that it takes are noted in *used*.
    """
    op = row["op"]
    if row["dtype"] not in set(DType):
        raise UnknownOperatorError(f"number format {shorten(row['dtype'])} is not known")
    dtype = DType(row["dtype"])
    sizes = _RowSizes(row, line, {} if used is None else used)
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
    if op not in PASSES and op not in CASTS:
        raise UnknownOperatorError(f"operator {shorten(op)} is not known")
    rows, columns = sizes.rows_and_columns()
    if op in PASSES:
        return tuple(elementwise(kind, rows, columns, reads, writes, dtype) for kind, reads, writes in PASSES[op])
    converted = cast(rows, columns, dtype, CASTS[op])
    if op != "cross_entropy":
        return (converted,)
    return converted, elementwise(K.CROSS_ENTROPY, rows, columns, 3, 1, DType.FP32)


class _RowSizes:
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
