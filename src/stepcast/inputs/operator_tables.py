"""Tables of measured operators in the layout of NVIDIA's aiconfigurator: one row per call, csv (also gzip) or parquet.

The columns are the source's own and differ by table; a row names its device, and sizes and latency are numbers.
"""

import os
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from stepcast.inputs.source import DATA, Source, open_table, prefix_errors, read_toml
from stepcast.ir.arrays import BoolArray, FloatArray, TextArray
from stepcast.ir.types import dataclass, require

ENDINGS = (".csv", ".csv.gz", ".parquet")


@dataclass(frozen=True, slots=True)
class OperatorTable:
    """Rows of one table, a column of text per name; *numbers* are the positions of the rows in their file."""

    name: str
    columns: Mapping[str, TextArray]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def take(self, rows: BoolArray) -> "OperatorTable":
        return OperatorTable(self.name, {name: column[rows] for name, column in self.columns.items()})

    def split(self, names: Sequence[str]) -> Iterator["OperatorTable"]:
        """Yield the rows that have the same words in the columns *names*, those that exist."""
        known = [self.columns[name] for name in names if name in self.columns]
        if not known or not len(self):
            yield self
            return
        labels = np.char.add(known[0], "")
        for column in known[1:]:
            labels = np.char.add(np.char.add(labels, "\0"), column)
        for label in np.unique(labels):
            yield self.take(labels == label)

    def word(self, *names: str) -> str:
        """Return the word that the rows share in the first of the columns *names* that exists; blank without one."""
        return next((str(self.columns[name][0]) for name in names if name in self.columns), "")

    def numbers(self, name: str, default: float | None = None) -> FloatArray:
        """Return a column of numbers; ValueError where it is missing (and there is no *default*) or holds others."""
        if name not in self.columns:
            if default is None:
                raise ValueError(f"{self.name}: the column {name} is missing")
            return np.full(len(self), default)
        try:
            values: FloatArray = self.columns[name].astype(np.float64)
        except ValueError:
            raise ValueError(f"{self.name}: {name} holds something that is no number") from None
        if not (np.isfinite(values).all() and (values >= 0).all()):
            raise ValueError(f"{self.name}: {name} holds a number that is negative or not finite")
        return values

    def counts(self, name: str, default: float | None = None) -> FloatArray:
        """Return a column of sizes, which are at least 1."""
        values = self.numbers(name, default)
        require(bool((values >= 1).all()), f"{self.name}: {name} holds a size below 1")
        return values


def find_operator_tables(place: str) -> list[str]:
    """Return the files of tables in a folder and the folders below it, or the one file *place*."""
    if not os.path.isdir(place):
        return [place]
    walked = (os.path.join(folder, name) for folder, _, names in os.walk(place) for name in names)
    return sorted(path for path in walked if path.endswith(ENDINGS))


def read_operator_table(path: str) -> OperatorTable:
    """Read one table; FormatError where it is none."""
    stem = os.path.basename(path)
    for ending in ENDINGS:
        stem = stem.removesuffix(ending)
    if path.endswith(".parquet"):
        columns = _read_parquet(path)
    else:
        names, rows = open_table(Source(path))
        columns = dict(zip(names, zip(*(cells for _, cells in rows), strict=True), strict=False))
    arrays = {name: np.array(column, dtype=np.str_) for name, column in columns.items()}
    return OperatorTable(read_toml(DATA / "rows" / "operators.toml").get(stem, stem), arrays)


def _read_parquet(path: str) -> dict[str, tuple[str, ...]]:
    try:
        import pyarrow.parquet
    except ImportError:
        raise ValueError(
            f"{path}: parquet needs pyarrow: pip install 'stepcast[parquet]', or convert it to csv"
        ) from None
    with prefix_errors("is no parquet file", path, (pyarrow.ArrowException, OSError)):
        table = pyarrow.parquet.read_table(path)
    return {
        name: tuple("" if value is None else str(value) for value in column.to_pylist())
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
