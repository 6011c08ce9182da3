"""Text tables, separated by commas or tabs: their header, their rows, and cells read column by column."""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import numpy as np

from stepcast.inputs.chakra.protobuf import WORD, ByteView
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.dataclass import dataclass
from stepcast.ir.limits import COLUMNS

LARGEST_COUNT = 2**63 - 1


def parse_count(token: str, name: str, line: int | None, at_least: int = 0) -> int:
    """Return a whole number; ``16777216.0`` counts as one. *name* is the field in the error."""
    if token.isdigit() and token.isascii() and len(token) < 19:
        value = int(token)
    else:
        number = parse_amount(token, name, line)
        if not number.is_integer():
            raise FormatError(f"{name} is {token!r}; expected a whole number", line=line)
        value = int(token) if token.isdigit() and token.isascii() and len(token) < 20 else int(number)
    if value > LARGEST_COUNT:
        raise FormatError(f"{name} is {token}; expected less than 2^63", line=line)
    if value < at_least:
        raise FormatError(f"{name} is {token}; expected at least {at_least}", line=line)
    return value


def parse_amount(token: str, name: str, line: int | None) -> float:
    """Return a finite number, zero or more."""
    try:
        if not token.isascii() or "_" in token:
            raise ValueError
        value = float(token)
    except ValueError:
        raise FormatError(f"{name} is {shorten(token)}; expected a number", line=line) from None
    if not math.isfinite(value):
        raise FormatError(f"{name} is {token}; expected a finite number", line=line)
    if value < 0:
        raise FormatError(f"{name} is {token}; expected zero or more", line=line)
    return value


def shorten(text: str, limit: int = 40) -> str:
    """Return *text* quoted for an error message, cut where it is long."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


@dataclass(frozen=True, slots=True)
class SlabTable:
    """A table that is read in slabs of many lines, each with the number of its first line."""

    names: list[str]
    separator: str
    slabs: Iterator[tuple[int, str]]

    def rows(self, slab: str, first_line: int) -> Iterator[tuple[int, list[str]]]:
        """Yield the line number and the cells of each row of *slab*; blank lines count and give none."""
        for number, line in enumerate(slab.split("\n"), first_line):
            if not line.strip():
                continue
            cells = line.split(self.separator)
            if len(cells) != len(self.names):
                raise FormatError(f"has {len(cells)} columns; expected {len(self.names)}", line=number)
            yield number, cells


def open_table(source: Source, needed: Sequence[str], expected: str) -> SlabTable:
    """Open a table with a header; FormatError where that lacks a *needed* column or repeats one."""
    slabs = source.slabs()
    header, _, rest = next(slabs, "").partition("\n")
    separator = "\t" if "\t" in header else ","
    names = [name.strip() for name in header.split(separator)]
    if missing := [name for name in needed if name not in names]:
        raise FormatError(f"header lacks {', '.join(missing)}; expected {expected}", line=1)
    if len(names) > COLUMNS.most:
        raise FormatError(COLUMNS.message, line=1)
    if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
        raise FormatError(f"header repeats {', '.join(map(shorten, repeated[:5]))}", line=1)
    return SlabTable(names, separator, _number_slabs(chain((rest,) if rest else (), slabs)))


def _number_slabs(slabs: Iterator[str]) -> Iterator[tuple[int, str]]:
    line = 2
    for slab in slabs:
        yield line, slab
        line += slab.count("\n")


def csv_rows(source: Source) -> Iterator[list[str]]:
    """Yield the cells of each row, the header's first."""
    reader = csv.reader(f"{line}\n" for line in source.each_line())
    try:
        yield from reader
    except csv.Error as error:
        raise FormatError(f"{error}; expected comma-separated text", source.path, reader.line_num) from None


def csv_records(source: Source) -> tuple[list[str], Iterator[dict[str, str]]]:
    """Return the header's names, and each row by them; cells that are missing are empty."""
    rows = csv_rows(source)
    names = next(rows, [])
    return names, (dict(zip(names, [*row, *[""] * (len(names) - len(row))], strict=False)) for row in rows if row)


def draft_of(kind: type) -> Callable[[], Any]:
    """Return a plain class with the slots of the dataclass *kind*, whose objects may become that.

    The constructor of a frozen dataclass sets every field through a function call, which is slow for millions
    of values. The fields of a draft are assigned, and then its class; they must have been checked.
    """
    return type(f"{kind.__name__}Draft", (), {"__slots__": tuple(field.name for field in fields(kind))})


NEWLINE, POINT, ZERO = 10, ord("."), ord("0")

# Such whole numbers, and such powers of ten, are exact as floating-point numbers, and so is their quotient.
MOST_EXACT_DIGITS = 15
MOST_DIGITS = 18
PLAIN = b"0123456789.eE+-\t,\n"  # of a decimal, and what ends it
TO_BLANK = bytes.maketrans(b"\t,\n", b"   ")


class Cells:
    """Rows of *width* cells, read column by column with numpy; every row ends with a line feed.

    A column that is not as plain as expected gives None, and the caller looks at it row by row, to take it or to
    name what is wrong.
    """

    def __init__(self, text: str, separator: str, width: int) -> None:
        data = (text if text.endswith("\n") else text + "\n").encode()
        self._data = data
        self._view = ByteView(data)
        self._letters = letters = np.frombuffer(data, dtype=np.uint8)
        ends = np.flatnonzero((letters == ord(separator)) | (letters == NEWLINE))
        self.plain = text.isascii() and len(ends) % width == 0
        if self.plain:
            grid = ends.reshape(-1, width)
            self.plain = bool(np.all(letters[grid[:, -1]] == NEWLINE)) and data.count(b"\n") == len(grid)
            self._ends = grid
            starts = np.concatenate([[0], ends[:-1] + 1])
            self._starts = starts.reshape(-1, width)

    def __len__(self) -> int:
        return len(self._ends)

    def _column(self, index: int) -> tuple[IntArray, IntArray]:
        starts = np.ascontiguousarray(self._starts[:, index])
        return starts, np.ascontiguousarray(self._ends[:, index]) - starts

    def words(self, index: int) -> tuple[Sequence[str], IntArray]:
        """Return the distinct texts of a column, and which one each row has; sooner where all are the same."""
        if (text := self._constant(index)) is not None:
            return [text], np.zeros(len(self), dtype=np.int64)
        starts, lengths = self._column(index)
        hashes = self._view.hashes(starts, starts + lengths)
        _, firsts, of_row = np.unique(hashes, return_index=True, return_inverse=True)
        texts = [self._data[starts[row] : starts[row] + lengths[row]].decode() for row in firsts.tolist()]
        return texts, of_row

    def _constant(self, index: int) -> str | None:
        """Return the text that every cell of a column has, where it is short and the same."""
        starts, lengths = self._column(index)
        length = int(lengths[0])
        if length > WORD or bool(np.any(lengths != length)):
            return None
        words = self._view.words(starts) << np.uint64(WORD * (WORD - length)) if length else starts
        same = bool(np.all(words == words[0]))
        return self._data[starts[0] : starts[0] + length].decode() if same else None

    def pick(self, *columns: int) -> bytes:
        """Return the cells of these columns, row by row, each with the separator behind it."""
        chosen = np.isin(np.arange(self._ends.shape[1]), columns)
        lengths = (self._ends - self._starts + 1).ravel()
        letters: bytes = self._letters[np.repeat(np.tile(chosen, len(self)), lengths)].tobytes()
        return letters

    def decimals(self, *columns: int) -> dict[int, FloatArray] | None:
        """Return the numbers of these columns, finite and not below zero, read at once."""
        zeros = {index: np.zeros(len(self)) for index in columns if self._constant(index) in ("0", "0.0")}
        columns = tuple(index for index in columns if index not in zeros)
        if not columns:
            return zeros
        text = self.pick(*columns)
        if text.translate(None, PLAIN):
            return None
        try:
            values = np.fromstring(text.translate(TO_BLANK), sep=" ")
        except (ValueError, DeprecationWarning):  # a cell that is no number
            return None
        if len(values) != len(columns) * len(self) or not bool(np.all((values >= 0) & np.isfinite(values))):
            return None
        return zeros | dict(zip(sorted(columns), values.reshape(len(self), -1).T, strict=True))

    def whole_numbers(self, index: int) -> IntArray | None:
        """Return the whole numbers of a column, zero or more."""
        starts, lengths = self._column(index)
        return self._digits(starts, lengths) if lengths.all() else None

    def counts(self, index: int) -> IntArray | None:
        """Return the whole numbers of a column, 0 where a cell is empty; a zero that is written out is not plain."""
        starts, lengths = self._column(index)
        values = self._digits(starts, lengths)
        return None if values is None or bool(np.any((values == 0) & (lengths > 0))) else values

    def amounts(self, index: int) -> FloatArray | None:
        """Return the decimal numbers of a column, all of them above zero."""
        starts, lengths = self._column(index)
        if not lengths.all() or lengths.max() > MOST_EXACT_DIGITS + 1:
            return None
        point = lengths.copy()  # where the decimal point is; at the end where there is none
        for digit in range(int(lengths.max())):
            here = (self._view.bytes(starts + digit) == POINT) & (digit < lengths) & (point == lengths)
            point[here] = digit
        whole = self._digits(starts, point)
        after = np.maximum(lengths - point - 1, 0)
        part = self._digits(starts + point + 1, after)
        digits = lengths - (point < lengths)
        if whole is None or part is None or digits.max() > MOST_EXACT_DIGITS or not digits.all():
            return None
        scale = 10**after
        values: FloatArray = (whole * scale + part) / scale
        return values if bool(values.all()) else None

    def _digits(self, starts: IntArray, lengths: IntArray) -> IntArray | None:
        """Return the number that so many digits from each start on are; None where one is no digit."""
        values = np.zeros(len(starts), dtype=np.int64)
        if lengths.max(initial=0) > MOST_DIGITS:
            return None
        for digit in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > digit)
            digits = self._view.bytes(starts[rows] + digit).astype(np.int64) - ZERO
            if digits.min() < 0 or digits.max() > 9:
                return None
            values[rows] = values[rows] * 10 + digits
        return values
