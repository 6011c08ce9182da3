"""Bytes seen by numpy: eight from any place on as one number, and hashes of many runs at once."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Offsets = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.uint64]

WORD = 8
PADDING = bytes(2 * WORD)
# 2**64 over the golden ratio: multiplying by it spreads bits upwards, the shift brings them down again.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)


def mixed(hashes: Numbers, more: Numbers) -> Numbers:
    """Hashes that also depend on *more*."""
    hashes = (hashes ^ more) * MULTIPLIER
    hashes ^= hashes >> HALF
    return hashes


class ByteView:
    """Reads *data* at many places. Past its end there are zeros."""

    def __init__(self, data: bytes) -> None:
        if len(data) < WORD:
            data = data + PADDING
        self._last = len(data) - WORD
        self._bytes = np.frombuffer(data, dtype=np.uint8)
        self._words = np.ndarray((self._last + 1,), dtype="<u8", buffer=data, strides=(1,))
        end = data[self._last :] + PADDING
        self._end_words = np.ndarray((WORD + 2,), dtype="<u8", buffer=end, strides=(1,))

    def bytes(self, at: Offsets) -> npt.NDArray[np.uint8]:
        return self._bytes[np.minimum(at, len(self._bytes) - 1)]

    def words(self, at: Offsets) -> Numbers:
        """The eight bytes from each place on, little-endian."""
        words = self._words[np.minimum(at, self._last)]
        late = np.flatnonzero(at > self._last)
        if len(late):
            words[late] = self._end_words[np.minimum(at[late] - self._last, WORD + 1)]
        return words

    def hashes(self, starts: Offsets, ends: Offsets) -> Numbers:
        """A hash of each run of bytes; equal runs, and hardly any others, have equal ones."""
        lengths = ends - starts
        hashes = lengths.astype(np.uint64)
        rows = np.arange(len(starts))
        at, left = starts, lengths
        while True:
            inside = left > 0
            if not inside.all():
                rows, at, left = rows[inside], at[inside], left[inside]
            if not len(rows):
                return hashes
            words = self.words(at)
            short = np.flatnonzero(left < WORD)
            if len(short):
                words[short] &= (np.uint64(1) << (left[short] * WORD).astype(np.uint64)) - np.uint64(1)
            hashes[rows] = mixed(hashes[rows], words)
            at, left = at + WORD, left - WORD


def name_hashes(names: Sequence[str]) -> Numbers:
    """The hashes that runs of bytes with these names have."""
    encoded = [name.encode() for name in names]
    ends = np.cumsum([len(name) for name in encoded])
    starts = ends - [len(name) for name in encoded]
    return ByteView(b"".join(encoded)).hashes(starts, ends)


def row_hashes(columns: Sequence[npt.NDArray[np.generic]]) -> Numbers:
    """A hash of each row of some columns of whole numbers."""
    hashes = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        hashes = mixed(hashes, column.astype(np.uint64, copy=False))
        # Zero would swallow the columns before it.
        hashes += MULTIPLIER
    return hashes
