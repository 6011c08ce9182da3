"""Protobuf's wire format, as much of it as Chakra needs: varints, fields, and AttributeProto.

Source of the encoding: protobuf.dev, "Encoding". Writing an execution trace needs no schema compiler, and
reading one in plain Python is fast enough when equal bytes are decoded once.
"""

import struct
from collections.abc import Iterator
from enum import IntEnum

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """Bytes that are not a protobuf message of the kind expected."""


class AttributeKind(IntEnum):
    """Value kinds of Chakra's AttributeProto: the field number of the single value; a list's is one more."""

    DOUBLE, FLOAT, INT32, INT64, UINT32, UINT64, SINT32, SINT64 = range(3, 18, 2)
    FIXED32, FIXED64, SFIXED32, SFIXED64, BOOL, STRING, BYTES = range(19, 32, 2)


Scalar = float | int | bool | str | bytes
Value = Scalar | tuple[Scalar, ...] | None

STRUCTS = {
    AttributeKind[name]: struct.Struct(f"<{code}")
    for name, code in zip(("DOUBLE", "FLOAT", "FIXED32", "FIXED64", "SFIXED32", "SFIXED64"), "dfIQiq", strict=True)
}
SIGNED = (AttributeKind.SINT32, AttributeKind.SINT64)
WIRES = dict.fromkeys(AttributeKind, VARINT) | {AttributeKind.STRING: LENGTH, AttributeKind.BYTES: LENGTH}
WIRES |= {kind: FIXED64 if packed.size == 8 else FIXED32 for kind, packed in STRUCTS.items()}


def varint(value: int) -> bytes:
    if value < 128:
        return bytes((value,))
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """Return the number at *position*, and where it ends."""
    value = shift = 0
    while True:
        if position >= len(data):
            raise WireError("ends within a number")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (2**64 - 1), position
        shift += 7
        if shift > 63:
            raise WireError("a number is longer than ten bytes")


def field(number: int, wire: int) -> bytes:
    """Return the tag that precedes a field."""
    return varint(number << 3 | wire)


def number_field(number: int, value: int) -> bytes:
    return field(number, VARINT) + varint(value)


def bytes_field(number: int, value: bytes) -> bytes:
    return field(number, LENGTH) + delimit(value)


def delimit(message: bytes) -> bytes:
    """Return a message as a file of many holds it."""
    return varint(len(message)) + message


def fields(data: bytes) -> Iterator[tuple[int, int, int | bytes]]:
    """Yield every field of a message: number, wire type, and its number or bytes."""
    position, end = 0, len(data)
    while position < end:
        tag, position = read_varint(data, position)
        number, wire = tag >> 3, tag & 7
        if number == 0:
            raise WireError("has a field numbered 0")
        if wire == VARINT:
            value, position = read_varint(data, position)
            yield number, wire, value
            continue
        if wire == LENGTH:
            length, position = read_varint(data, position)
        elif wire in (FIXED64, FIXED32):
            length = 8 if wire == FIXED64 else 4
        else:
            raise WireError(f"has a field of wire type {wire}")
        if position + length > end:
            raise WireError("a field is longer than its message")
        yield number, wire, data[position : position + length]
        position += length


def bytes_in(data: bytes, field_number: int) -> Iterator[bytes]:
    """Yield the messages, texts or fixed numbers in the field *field_number*."""
    return (content for number, _, content in fields(data) if number == field_number and isinstance(content, bytes))


def attribute(name: str, kind: AttributeKind, value: int | str | bytes) -> bytes:
    """Return an AttributeProto message of a text, or of a whole number in one of the plain kinds."""
    head = bytes_field(1, name.encode())
    if not isinstance(value, int):
        return head + bytes_field(kind, value.encode() if isinstance(value, str) else value)
    if not -(2**63) <= value < 2**64:
        raise WireError(f"{value} does not fit {kind.name.lower()}")
    return head + number_field(kind, value & (2**64 - 1))


def read_attribute(data: bytes) -> tuple[str, Value]:
    """Return name and value of an AttributeProto; the last value wins, as protobuf says."""
    name = ""
    value: Value = None
    for number, wire, content in fields(data):
        if number == 1 and isinstance(content, bytes):
            name = text(content)
        if not 3 <= number <= 32:
            continue
        kind = AttributeKind(number - (number - 3) % 2)
        if number == kind:
            if wire != WIRES[kind]:
                raise WireError(f"attribute field {number} has wire type {wire}; expected {WIRES[kind]}")
            value = _read_scalar(kind, content)
        elif isinstance(content, bytes):
            value = tuple(item for entry in fields(content) if entry[0] == 1 for item in _read_items(kind, *entry[1:]))
        else:
            raise WireError(f"attribute field {number} should be a list message")
    return name, value


def text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise WireError("a string is not UTF-8") from None


def _read_items(kind: AttributeKind, wire: int, content: int | bytes) -> Iterator[Scalar]:
    """Yield the values of one entry of a list: one, or packed ones."""
    if wire == WIRES[kind]:
        yield _read_scalar(kind, content)
    elif wire != LENGTH or not isinstance(content, bytes):
        raise WireError(f"a list entry has wire type {wire}")
    elif kind in STRUCTS:
        if len(content) % STRUCTS[kind].size:
            raise WireError("a packed list ends within a value")
        yield from (value for (value,) in STRUCTS[kind].iter_unpack(content))
    else:
        position = 0
        while position < len(content):
            value, position = read_varint(content, position)
            yield _read_scalar(kind, value)


def _read_scalar(kind: AttributeKind, content: int | bytes) -> Scalar:
    if isinstance(content, bytes):
        if kind is AttributeKind.STRING:
            return text(content)
        if kind is AttributeKind.BYTES:
            return content
        value: float | int = STRUCTS[kind].unpack(content)[0]
        return value
    if kind is AttributeKind.BOOL:
        return content != 0
    if kind in SIGNED:
        return content >> 1 if not content & 1 else -(content >> 1) - 1
    if kind in (AttributeKind.INT32, AttributeKind.INT64):
        return content - 2**64 if content >= 2**63 else content
    return content
