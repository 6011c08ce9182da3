"""Protobuf's wire format, as much of it as Chakra needs: varints, fields, and AttributeProto.

Source of the encoding: protobuf.dev, "Encoding". Writing an execution trace needs no schema compiler, and
reading one in plain Python is fast enough when equal bytes are decoded once.
"""

import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from stepcast.ir.arrays import IntArray, UIntArray

# Bytes seen by numpy: eight from any place on as one number, and hashes of many runs at once.

WORD = 8
PADDING = bytes(2 * WORD)
# 2**64 over the golden ratio: multiplying by it spreads bits upwards, the shift brings them down again.
MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)
HALF = np.uint64(32)


def mixed(hashes: UIntArray, more: UIntArray) -> UIntArray:
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

    def bytes(self, at: IntArray) -> npt.NDArray[np.uint8]:
        return self._bytes[np.minimum(at, len(self._bytes) - 1)]

    def words(self, at: IntArray) -> UIntArray:
        """The eight bytes from each place on, little-endian."""
        words = self._words[np.minimum(at, self._last)]
        late = np.flatnonzero(at > self._last)
        if len(late):
            words[late] = self._end_words[np.minimum(at[late] - self._last, WORD + 1)]
        return words

    def hashes(self, starts: IntArray, ends: IntArray) -> UIntArray:
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


def name_hashes(names: Sequence[str]) -> UIntArray:
    """The hashes that runs of bytes with these names have."""
    encoded = [name.encode() for name in names]
    ends = np.cumsum([len(name) for name in encoded])
    starts = ends - [len(name) for name in encoded]
    return ByteView(b"".join(encoded)).hashes(starts, ends)


def row_hashes(columns: Sequence[npt.NDArray[np.generic]]) -> UIntArray:
    """A hash of each row of some columns of whole numbers."""
    hashes = np.zeros(len(columns[0]), dtype=np.uint64)
    for column in columns:
        hashes = mixed(hashes, column.astype(np.uint64, copy=False))
        # Zero would swallow the columns before it.
        hashes += MULTIPLIER
    return hashes


VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
TWO_64, TWO_63, TWO_32, TWO_31 = 2**64, 2**63, 2**32, 2**31


class WireError(ValueError):
    """Bytes that are not a protobuf message of the kind expected."""


class AttributeKind(IntEnum):
    """Value kinds of Chakra's AttributeProto: the field number of the single value; a list's is one more."""

    DOUBLE = 3
    FLOAT = 5
    INT32 = 7
    INT64 = 9
    UINT32 = 11
    UINT64 = 13
    SINT32 = 15
    SINT64 = 17
    FIXED32 = 19
    FIXED64 = 21
    SFIXED32 = 23
    SFIXED64 = 25
    BOOL = 27
    STRING = 29
    BYTES = 31


Scalar = float | int | bool | str | bytes
Value = Scalar | tuple[Scalar, ...] | None

STRUCTS = {
    AttributeKind.DOUBLE: struct.Struct("<d"),
    AttributeKind.FLOAT: struct.Struct("<f"),
    AttributeKind.FIXED32: struct.Struct("<I"),
    AttributeKind.FIXED64: struct.Struct("<Q"),
    AttributeKind.SFIXED32: struct.Struct("<i"),
    AttributeKind.SFIXED64: struct.Struct("<q"),
}
RANGES = {
    AttributeKind.INT32: (-TWO_31, TWO_31),
    AttributeKind.INT64: (-TWO_63, TWO_63),
    AttributeKind.UINT32: (0, TWO_32),
    AttributeKind.UINT64: (0, TWO_64),
    AttributeKind.SINT32: (-TWO_31, TWO_31),
    AttributeKind.SINT64: (-TWO_63, TWO_63),
}


def varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """The number at *at*, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data):
            raise WireError("ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (TWO_64 - 1), at
        shift += 7
        if shift > 63:
            raise WireError("a number is longer than ten bytes")


def field(number: int, wire: int) -> bytes:
    """The tag that precedes a field."""
    return varint(number << 3 | wire)


def number_field(number: int, value: int) -> bytes:
    return field(number, VARINT) + varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    return field(number, LENGTH) + varint(len(value)) + value


def delimited(message: bytes) -> bytes:
    """A message as it stands in a file of many."""
    return varint(len(message)) + message


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Every field of a message: number, wire type, and its number or bytes."""
    at, end = 0, len(data)
    while at < end:
        tag, at = read_varint(data, at)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise WireError("has a field numbered 0")
        value: int | bytes
        if wire == VARINT:
            value, at = read_varint(data, at)
        else:
            if wire == LENGTH:
                length, at = read_varint(data, at)
            elif wire in (FIXED64, FIXED32):
                length = 8 if wire == FIXED64 else 4
            else:
                raise WireError(f"has a field of wire type {wire}")
            if at + length > end:
                raise WireError("a field is longer than its message")
            value = data[at : at + length]
            at += length
        yield number, wire, value


def attribute(name: str, kind: AttributeKind, value: Scalar | Sequence[Scalar]) -> bytes:
    """An AttributeProto message."""
    head = bytes_field(1, name.encode())
    if isinstance(value, list | tuple):
        return head + bytes_field(kind + 1, _packed(kind, value))
    assert not isinstance(value, Sequence) or isinstance(value, str | bytes)
    wire = LENGTH if kind >= AttributeKind.STRING else _wire(kind)
    body = _single(kind, value)
    return head + field(kind, wire) + (varint(len(body)) + body if wire == LENGTH else body)


def _wire(kind: AttributeKind) -> int:
    if kind in STRUCTS:
        return FIXED64 if STRUCTS[kind].size == 8 else FIXED32
    return VARINT


def _packed(kind: AttributeKind, values: Sequence[Scalar]) -> bytes:
    """The list message of *kind*: strings one by one, numbers packed."""
    if kind >= AttributeKind.STRING:
        return b"".join(bytes_field(1, _single(kind, value)) for value in values)
    packed = b"".join(_single(kind, value) for value in values)
    return bytes_field(1, packed) if packed else b""


def _single(kind: AttributeKind, value: Scalar) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    if kind in STRUCTS:
        try:
            return STRUCTS[kind].pack(value)
        except struct.error as error:
            raise WireError(f"{value} does not fit {kind.name.lower()}: {error}") from None
    number = int(value)
    low, high = RANGES.get(kind, (0, 2))
    if not low <= number < high:
        raise WireError(f"{number} does not fit {kind.name.lower()}")
    if kind in (AttributeKind.SINT32, AttributeKind.SINT64):
        return varint(number * 2 if number >= 0 else -number * 2 - 1)
    return varint(number & (TWO_64 - 1))


def read_attribute(data: bytes) -> tuple[str, Value]:
    """Name and value of an AttributeProto; the last value wins, as protobuf says."""
    name, value = "", None
    for number, wire, content in fields(data):
        if number == 1 and isinstance(content, bytes):
            name = text(content)
        elif 3 <= number <= 32:
            value = _read_value(number, wire, content)
    return name, value


def text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise WireError("a string is not UTF-8") from None


def _read_value(number: int, wire: int, content: int | bytes) -> Value:
    kind = AttributeKind(number - (number - 3) % 2)
    if number != kind:
        if not isinstance(content, bytes):
            raise WireError(f"attribute field {number} should be a list message")
        return tuple(value for item in fields(content) if item[0] == 1 for value in _items(kind, *item[1:]))
    expected = LENGTH if kind >= AttributeKind.STRING else _wire(kind)
    if wire != expected:
        raise WireError(f"attribute field {number} has wire type {wire}; expected {expected}")
    return _read_scalar(kind, content)


def _items(kind: AttributeKind, wire: int, content: int | bytes) -> Iterator[Scalar]:
    """The values of one entry of a list: one, or packed ones."""
    expected = LENGTH if kind >= AttributeKind.STRING else _wire(kind)
    if wire == expected:
        yield _read_scalar(kind, content)
    elif wire == LENGTH and isinstance(content, bytes):
        at = 0
        size = STRUCTS[kind].size if kind in STRUCTS else 0
        if size and len(content) % size:
            raise WireError("a packed list ends within a value")
        while at < len(content):
            if size:
                yield _read_scalar(kind, content[at : at + size])
                at += size
            else:
                value, at = read_varint(content, at)
                yield _read_scalar(kind, value)
    else:
        raise WireError(f"a list entry has wire type {wire}")


def _read_scalar(kind: AttributeKind, content: int | bytes) -> Scalar:
    if isinstance(content, bytes):
        if kind is AttributeKind.STRING:
            return text(content)
        if kind is AttributeKind.BYTES:
            return content
        value: float | int = STRUCTS[kind].unpack(content)[0]
        return value
    match kind:
        case AttributeKind.BOOL:
            return content != 0
        case AttributeKind.SINT32 | AttributeKind.SINT64:
            return content >> 1 if not content & 1 else -(content >> 1) - 1
        case AttributeKind.INT32 | AttributeKind.INT64:
            return content - TWO_64 if content >= TWO_63 else content
    return content
