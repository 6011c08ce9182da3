"""Cells of a table of plain text, read column by column with numpy.

What is not as plain as expected gives None, and the caller looks at it row by row, to take it or to say what
is wrong.
"""

from collections.abc import Sequence

import numpy as np

from stepcast.inputs.chakra.protobuf import WORD, ByteView
from stepcast.ir.arrays import FloatArray, IntArray

NEWLINE, POINT, ZERO = 10, ord("."), ord("0")

# Such whole numbers, and such powers of ten, are exact as floating-point numbers, and so is their quotient.
MOST_EXACT_DIGITS = 15
MOST_DIGITS = 18
PLAIN = b"0123456789.eE+-\t,\n"  # of a decimal, and what ends it
TO_BLANK = bytes.maketrans(b"\t,\n", b"   ")


class Cells:
    """Rows of *width* cells; every row ends with a line feed."""

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

    def _column(self, at: int) -> tuple[IntArray, IntArray]:
        starts = np.ascontiguousarray(self._starts[:, at])
        return starts, np.ascontiguousarray(self._ends[:, at]) - starts

    def words(self, at: int) -> tuple[Sequence[str], IntArray]:
        """The distinct texts of a column, and which one each row has."""
        starts, lengths = self._column(at)
        hashes = self._view.hashes(starts, starts + lengths)
        _, firsts, of_row = np.unique(hashes, return_index=True, return_inverse=True)
        texts = [self._data[starts[row] : starts[row] + lengths[row]].decode() for row in firsts.tolist()]
        return texts, of_row

    def constant(self, at: int) -> str | None:
        """The text that every cell of a column has, where it is short and the same."""
        starts, lengths = self._column(at)
        length = int(lengths[0])
        if length > WORD or bool(np.any(lengths != length)):
            return None
        words = self._view.words(starts) << np.uint64(WORD * (WORD - length)) if length else starts
        same = bool(np.all(words == words[0]))
        return self._data[starts[0] : starts[0] + length].decode() if same else None

    def picked(self, *columns: int) -> bytes:
        """The cells of these columns, row by row, each with what ends it."""
        width = self._ends.shape[1]
        chosen = np.isin(np.arange(width), columns)
        lengths = (self._ends - self._starts + 1).ravel()
        kept = np.repeat(np.tile(chosen, len(self)), lengths)
        picked: bytes = self._letters[kept].tobytes()
        return picked

    def decimals(self, *columns: int) -> dict[int, FloatArray] | None:
        """Numbers of these columns, finite and not below zero, read at once."""
        zeros = {at: np.zeros(len(self)) for at in columns if self.constant(at) in ("0", "0.0")}
        columns = tuple(at for at in columns if at not in zeros)
        if not columns:
            return zeros
        text = self.picked(*columns)
        if text.translate(None, PLAIN):
            return None
        try:
            values = np.fromstring(text.translate(TO_BLANK), sep=" ")
        except (ValueError, DeprecationWarning):  # a cell that is no number
            return None
        if len(values) != len(columns) * len(self) or not bool(np.all((values >= 0) & np.isfinite(values))):
            return None
        return zeros | dict(zip(sorted(columns), values.reshape(len(self), -1).T, strict=True))

    def whole(self, at: int) -> IntArray | None:
        """Whole numbers of a column, zero or more."""
        starts, lengths = self._column(at)
        if not lengths.all() or lengths.max() > MOST_DIGITS:
            return None
        return self._digits(starts, lengths)

    def counts(self, at: int) -> IntArray | None:
        """Whole numbers of a column, 0 where a cell is empty; a zero that is written out is not plain."""
        starts, lengths = self._column(at)
        values = np.zeros(len(starts), dtype=np.int64)
        rows = np.flatnonzero(lengths)
        if not len(rows):
            return values
        if lengths.max() > MOST_DIGITS:
            return None
        number = self._digits(starts[rows], lengths[rows])
        if number is None or not number.all():
            return None
        values[rows] = number
        return values

    def amounts(self, at: int) -> FloatArray | None:
        """Decimal numbers of a column, all of them above zero."""
        starts, lengths = self._column(at)
        if not lengths.all() or lengths.max() > MOST_EXACT_DIGITS + 1:
            return None
        point = lengths.copy()  # where the decimal point is; at the end where there is none
        for digit in range(int(lengths.max())):
            here = (self._view.bytes(starts + digit) == POINT) & (digit < lengths) & (point == lengths)
            point[here] = digit
        whole = self._digits(starts, point)
        after = np.maximum(lengths - point - 1, 0)
        part = self._digits(starts + point + 1, after)
        if whole is None or part is None or bool(np.any(lengths - (point < lengths) > MOST_EXACT_DIGITS)):
            return None
        if bool(np.any(lengths - (point < lengths) == 0)):
            return None
        scale = 10**after
        values: FloatArray = (whole * scale + part) / scale
        return values if bool(values.all()) else None

    def _digits(self, starts: IntArray, lengths: IntArray) -> IntArray | None:
        """The number that so many digits from each place on are; None where one is no digit."""
        values = np.zeros(len(starts), dtype=np.int64)
        for digit in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > digit)
            found = self._view.bytes(starts[rows] + digit).astype(np.int64) - ZERO
            if found.min() < 0 or found.max() > 9:
                return None
            values[rows] = values[rows] * 10 + found
        return values
