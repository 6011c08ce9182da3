"""Pickles of plain values, read without Python's unpickler.

Read are the opcodes that PyTorch's flight recorder and ``pickle.dumps`` (protocols 2 to 5) write for dictionaries,
lists, tuples, text, integers of 64 bits, floats, booleans and None. Any other opcode is refused, so nothing can be
imported or called. Keys are text or integers. The result is walked once, where values that are referred to again
count each time: a few bytes cannot expand into many values, and no value contains itself.
"""

import struct

from stepcast.inputs.source import FormatError
from stepcast.ir.limits import SHARED_VALUES

PROTOCOLS = (2, 3, 4, 5)
MOST_DEEP = 100
LONGEST_INTEGER_BYTES = 8
CHARACTERS_OF_A_VALUE = 64  # longer text counts as several values
# Opcodes by what they do; numbers and lengths in the layouts of the struct module.
CONSTANTS: dict[int, object] = {ord("N"): None, 0x88: True, 0x89: False}
NUMBERS = {ord("K"): "<B", ord("M"): "<H", ord("J"): "<i", ord("G"): ">d"}
TEXTS = {0x8C: "<B", ord("X"): "<I", 0x8D: "<Q"}
PUTS, GETS = {ord("q"): "<B", ord("r"): "<I"}, {ord("h"): "<B", ord("j"): "<I"}
TUPLES = {code: count for count, code in enumerate(b")\x85\x86\x87")}
LONG_INTEGER, FRAME, MEMOIZE, MARK, LIST, DICTIONARY, TUPLE = 0x8A, 0x95, 0x94, *b"(]}t"
APPEND, APPENDS, SET_ITEM, SET_ITEMS, STOP = b"aesu."


class _PickleReader:
    """The stack machine of pickles, with the opcodes of plain values alone."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0
        self.stack: list[object] = []
        self.below: list[list[object]] = []  # stacks under the marks
        self.memo: dict[int, object] = {}

    def take(self, count: int) -> bytes:
        taken = self.data[self.position : self.position + count]
        if len(taken) < count:
            raise FormatError("is cut off")
        self.position += count
        return taken

    def number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def pop(self, count: int) -> list[object]:
        if len(self.stack) < count:
            raise FormatError("takes a value where there is none")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def pop_marked(self) -> list[object]:
        """Return the values since the last mark, and go on with those before it."""
        if not self.below:
            raise FormatError("lacks the mark before several values")
        values, self.stack = self.stack, self.below.pop()
        return values

    def load(self) -> object:
        if self.data[:1] != b"\x80" or self.take(2)[1] not in PROTOCOLS:
            raise FormatError(f"expected a pickle of protocol {PROTOCOLS[0]} to {PROTOCOLS[-1]}")
        while (code := self.take(1)[0]) != STOP:
            self.run(code)
        if len(self.stack) != 1 or self.below:
            raise FormatError("holds no single value")
        return self.stack[0]

    def run(self, code: int) -> None:
        """Run one opcode."""
        if code in CONSTANTS:
            self.stack.append(CONSTANTS[code])
        elif code in NUMBERS:
            self.stack.append(self.number(NUMBERS[code]))
        elif code in TEXTS:
            try:
                self.stack.append(self.take(self.number(TEXTS[code])).decode("utf-8", "surrogatepass"))
            except UnicodeDecodeError as error:
                raise FormatError(f"has text that is not UTF-8: {error.reason}") from None
        elif code == LONG_INTEGER:
            size = self.number("<B")
            if size > LONGEST_INTEGER_BYTES:
                raise FormatError(f"has an integer of more than {8 * LONGEST_INTEGER_BYTES} bits")
            self.stack.append(int.from_bytes(self.take(size), "little", signed=True))
        elif code == FRAME:
            if self.number("<Q") > len(self.data) - self.position:
                raise FormatError("is cut off")
        elif code == MARK:
            if len(self.below) >= MOST_DEEP:
                raise FormatError("is nested too deeply")
            self.below.append(self.stack)
            self.stack = []
        elif code in (LIST, DICTIONARY):
            self.stack.append([] if code == LIST else {})
        elif code in TUPLES or code == TUPLE:
            values = tuple(self.pop_marked() if code == TUPLE else self.pop(TUPLES[code]))
            self.stack.append(values)
        elif code in (APPEND, APPENDS, SET_ITEM, SET_ITEMS):
            self.fill(self.pop_marked() if code in (APPENDS, SET_ITEMS) else self.pop(1 + (code == SET_ITEM)), code)
        elif code in PUTS or code == MEMOIZE:
            index = self.number(PUTS[code]) if code in PUTS else len(self.memo)
            (self.memo[index],) = value = self.pop(1)
            self.stack += value
        elif code in GETS:
            index = self.number(GETS[code])
            if index not in self.memo:
                raise FormatError(f"refers to value {index}, which it does not hold")
            self.stack.append(self.memo[index])
        else:
            place = self.position - 1
            raise FormatError(f"opcode {bytes([code])!r} at byte {place}: only plain values are read, no code")

    def fill(self, values: list[object], code: int) -> None:
        """Add *values* to the list or dictionary below them."""
        container = self.stack[-1] if self.stack else None
        if code in (APPEND, APPENDS) and isinstance(container, list):
            container.extend(values)
        elif code in (SET_ITEM, SET_ITEMS) and isinstance(container, dict):
            keys = values[::2]
            if len(values) % 2 or not all(type(key) in (str, int) for key in keys):
                raise FormatError("has a dictionary whose keys are not text or integers")
            container.update(zip(keys, values[1::2], strict=True))
        else:
            raise FormatError("adds values to one that is no list or dictionary")


def _count_values(value: object, counted: int, depth: int) -> int:
    """Return *counted* plus the number of values inside *value*; raise an error beyond the limits."""
    if depth > MOST_DEEP:
        raise FormatError("is nested too deeply")
    counted += 1 + (len(value) // CHARACTERS_OF_A_VALUE if isinstance(value, str) else 0)
    SHARED_VALUES.check(counted)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        counted = _count_values(inner, counted, depth + 1)
    return counted


def load_plain_pickle(data: bytes) -> object:
    """Return the plain value that *data* holds; raise a FormatError if it holds anything else or too much."""
    value = _PickleReader(data).load()
    _count_values(value, -len(data), 0)
    return value
