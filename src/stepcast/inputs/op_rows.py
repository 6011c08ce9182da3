"""Rows of measured operators as columns: a table of a million rows is a few arrays, not millions of objects.

Rows are of one kind where operator, number format and the sizes given are the same; a kind keeps the values
of its sizes side by side. A row becomes an OperatorTime when it is asked for.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from stepcast.inputs.cells import Cells, Counts
from stepcast.ir.operator_times import OperatorTime
from stepcast.ir.work import Compute
from stepcast.units import MS

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
        self,
        works_of: WorksOf,
        kinds: Sequence[_Kind],
        codes: npt.NDArray[np.int32],
        seconds: npt.NDArray[Any],
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
        return OperatorTime(
            kind.op, self._works_of(kind.row(int(self._places[at]))), float(self._seconds[at])
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(_equal, self, other))

    __hash__ = None  # type: ignore[assignment]

    def groups(self) -> Iterator[tuple[OperatorTime, npt.NDArray[Any]]]:
        """The first row of each kind and the seconds of all, without making the others."""
        for code in range(len(self._kinds)):
            rows = np.flatnonzero(self._codes == code)
            if len(rows):
                yield self[int(rows[0])], self._seconds[rows]


def _equal(one: object, other: object) -> bool:
    return one == other


class OperatorRows:
    """Collects rows, by the slab where all is as usual, else one by one."""

    def __init__(self, columns: Sequence[str], works_of: WorksOf) -> None:
        self._columns, self._works_of = columns, works_of
        self._sizes = [name for name in columns if name in SIZES]
        self._kinds: list[_Kind] = []
        self._code_of: dict[
            tuple[str, str, tuple[str, ...]], int
        ] = {}  # -1 for an operator that is not known
        self._reasons: dict[Key, str] = {}
        self._codes: list[npt.NDArray[np.int32]] = []
        self._seconds: list[npt.NDArray[np.float64]] = []
        self.left_out: Counter[str] = Counter()

    def __len__(self) -> int:
        return sum(map(len, self._codes))

    def add(self, slab: str, separator: str) -> bool:
        """Add the rows of *slab*; False, and nothing added, where a cell is not as expected."""
        if not slab:
            return True
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

    def _add_columns(self, cells: Cells, sizes: dict[str, Counts], seconds: npt.NDArray[np.float64]) -> bool:
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
        codes = np.array(
            [self._code(row, int(count)) for row, count in zip(rows, np.bincount(inverse), strict=True)]
        )
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
