"""Measured operator times: a table with one measured call per row, tab or comma separated.

Columns are op, dtype, the sizes that the operator has (B, M, N, K of matmuls; B, S, heads, kv, D of
attention; rows, cols or numel of others) and ms, the time of one call.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from stepcast.inputs.rows import Cells, SlabTable, open_table, parse_amount, parse_count, shorten
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.arrays import IntArray
from stepcast.ir.dtype import DType
from stepcast.ir.measured import OperatorTime, OperatorTimes
from stepcast.ir.work import Attention, Compute, ElementwiseKind, GroupedMatmul, Matmul, cast, elementwise
from stepcast.units import MS

# Rows of measured operators as columns: a table of a million rows is a few arrays, not millions of objects.
#
# Rows are of one kind where operator, number format and the sizes given are the same; a kind keeps the values
# of its sizes side by side. A row becomes an OperatorTime when it is asked for.

SIZES = ("B", "M", "N", "K", "S", "heads", "kv", "D", "rows", "cols", "numel")
Key = tuple[str, str, tuple[str, ...]]
WorksOf = Callable[[Mapping[str, str]], tuple[Compute, ...]]


class UnknownOperatorError(ValueError):
    """An operator that has no work of ours."""


@dataclass(slots=True)
class _Kind:
    op: str
    dtype: str
    sizes: tuple[str, ...]
    values: "array[int]" = field(default_factory=lambda: array("q"))

    def row(self, place: int) -> dict[str, str]:
        width = len(self.sizes)
        values = self.values[place * width : (place + 1) * width]
        named = zip(self.sizes, map(str, values), strict=True)
        return {"op": self.op, "dtype": self.dtype, **dict(named)}


class MeasuredOperators(Sequence[OperatorTime]):
    """Operators in the order of the file, each made when it is asked for."""

    def __init__(
        self, works_of: WorksOf, kinds: Sequence[_Kind], codes: npt.NDArray[np.int32], seconds: npt.NDArray[Any]
    ) -> None:
        self._works_of, self._kinds, self._codes, self._seconds = works_of, kinds, codes, seconds
        self._places = np.zeros(len(codes), dtype=np.int32)  # among the rows of its kind
        order = np.argsort(codes, kind="stable")
        counts = np.bincount(codes, minlength=len(kinds))
        starts = np.repeat(np.cumsum(counts) - counts, counts)
        self._places[order] = np.arange(len(codes)) - starts

    def __len__(self) -> int:
        return len(self._codes)

    @overload
    def __getitem__(self, at: int) -> OperatorTime: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[OperatorTime, ...]: ...
    def __getitem__(self, at: int | slice) -> OperatorTime | tuple[OperatorTime, ...]:
        if isinstance(at, slice):
            return tuple(self[index] for index in range(*at.indices(len(self))))
        kind = self._kinds[self._codes[at]]
        return OperatorTime(kind.op, self._works_of(kind.row(int(self._places[at]))), float(self._seconds[at]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_equal, self, other))

    __hash__ = None  # type: ignore[assignment]

    def kinds(self) -> Iterator[tuple[OperatorTime, Sequence[float]]]:
        """The first row of each kind and the seconds of all, without making the others."""
        codes, firsts = np.unique(self._codes, return_index=True)
        for at in np.argsort(firsts).tolist():
            yield self[int(firsts[at])], self._seconds[self._codes == codes[at]].tolist()


def _equal(one: object, other: object) -> bool:
    return one == other


class OperatorRows:
    """Collects rows, by the slab where all is as usual, else one by one."""

    def __init__(self, columns: Sequence[str], works_of: WorksOf) -> None:
        self._columns, self._works_of = columns, works_of
        self._sizes = [name for name in columns if name in SIZES]
        self._kinds: list[_Kind] = []
        self._code_of: dict[tuple[str, str, tuple[str, ...]], int] = {}  # -1 for an operator that is not known
        self._reasons: dict[Key, str] = {}
        self._codes: list[npt.NDArray[np.int32]] = []
        self._seconds: list[npt.NDArray[np.float64]] = []
        self.left_out: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._codes))

    def add(self, slab: str, separator: str) -> bool:
        """Add the rows of *slab*; False, and nothing added, where a cell is not as expected."""
        cells = Cells(slab, separator, len(self._columns))
        if not cells.plain:
            return False
        times_ms = cells.amounts(self._columns.index("ms"))
        sizes = {name: cells.counts(self._columns.index(name)) for name in self._sizes}
        if times_ms is None or any(values is None for values in sizes.values()):
            return False
        found = {name: values for name, values in sizes.items() if values is not None}
        return self._add_columns(cells, found, times_ms * MS)

    def add_one_by_one(self, rows: Iterable[tuple[Mapping[str, str], float]]) -> None:
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

    def _add_columns(self, cells: Cells, sizes: dict[str, IntArray], seconds: npt.NDArray[np.float64]) -> bool:
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
            if _key(row) not in self._code_of and not self._complete(row):
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

    def _complete(self, row: Mapping[str, str]) -> bool:
        """Whether *row* has all sizes that its operator needs; an unknown operator needs none."""
        try:
            self._works_of(row)
        except UnknownOperatorError:
            pass
        except ValueError:
            return False
        return True

    def _code(self, row: Mapping[str, str], count: int) -> int:
        """The number of *row*'s kind, *count* rows of which are added; -1 where they are left out."""
        key = _key(row)
        if key not in self._code_of:
            try:
                self._works_of(row)
                self._code_of[key] = len(self._kinds)
                self._kinds.append(_Kind(*key))
            except UnknownOperatorError as error:
                self._code_of[key] = -1
                self._reasons[key] = str(error)
        code = self._code_of[key]
        if code < 0:
            self.left_out[self._reasons[key]] += count
        return code

    def finished(self) -> MeasuredOperators:
        codes = np.concatenate([np.zeros(0, dtype=np.int32), *self._codes])
        seconds = np.concatenate([np.zeros(0), *self._seconds])
        self._codes, self._seconds = [], []
        return MeasuredOperators(self._works_of, self._kinds, codes, seconds)


def _key(row: Mapping[str, str]) -> Key:
    return row["op"], row["dtype"], tuple(name for name in SIZES if name in row)


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
    table = open_table(source, NEEDED, f"{', '.join(NEEDED)} and sizes")
    rows = OperatorRows(table.names, works_of)
    for line, slab in table.slabs:
        if not rows.add(slab, table.separator):
            rows.add_one_by_one(_checked(table, slab, line))
    if not len(rows) and not rows.left_out:
        raise FormatError("table has a header but no rows; expected one row per measured operator", line=1)
    return OperatorTimes(rows.finished(), source.path, left_out=rows.left_out)


def _checked(table: SlabTable, slab: str, first_line: int) -> Iterator[tuple[Row, float]]:
    """Yield the rows of *slab* with what is used of them, and their seconds; says which line is wrong."""
    for number, cells in table.rows(slab, first_line):
        row = dict(zip(table.names, (cell.strip() for cell in cells), strict=True))
        seconds = parse_amount(row["ms"], "ms", number) * MS
        if not seconds:
            raise FormatError("ms is 0; expected the time of a call", line=number)
        used = {"op": row["op"], "dtype": row["dtype"]}
        with suppress(UnknownOperatorError):
            works_of(row, number, used)
        yield used, seconds


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
    return (elementwise(kind, *sizes.rows_and_columns(), reads, writes, dtype),)


def _mixed(op: str, rows: int, columns: int, dtype: DType) -> tuple[Compute, ...]:
    """Operators of two kernels, and casts, which read one format and write another."""
    match op:
        case "silu_mul":
            return elementwise(K.SILU, rows, columns, 1, 1, dtype), elementwise(K.MUL, rows, columns, 2, 1, dtype)
        case "cast_fp32":
            return (cast(rows, columns, dtype, DType.FP32),)
        case "quantize_fp8":
            return (cast(rows, columns, dtype, DType.FP8),)
        case _:
            raised = cast(rows, columns, dtype, DType.FP32)
            return raised, elementwise(K.CROSS_ENTROPY, rows, columns, 3, 1, DType.FP32)


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
