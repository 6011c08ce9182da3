"""Pickles of plain values, read without Python's unpickler.

Read are the opcodes that PyTorch's flight recorder and ``pickle.dumps`` (protocols 2 to 5) write for dictionaries,
lists, tuples, text, integers of 64 bits, floats, booleans and None. Any other opcode is refused, so nothing can be
imported or called. Keys are text or integers. The result is walked once, where values that are referred to again
count each time: a few bytes cannot expand into many values, and no value contains itself.
"""

import pickletools

from stepcast.inputs.source import FormatError, expect
from stepcast.ir.limits import SHARED_VALUES

MOST_DEEP = 100
CHARACTERS_OF_A_VALUE = 64  # longer text counts as several values
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
VALUES = ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8")
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
FILLS = {"APPEND": 1, "SETITEM": 2, "APPENDS": None, "SETITEMS": None}  # values, None: those since the last mark


class _PickleReader:
    """The stack machine of pickles, with the opcodes of plain values alone."""

    def __init__(self) -> None:
        self.stack: list[object] = []
        self.below: list[list[object]] = []  # stacks under the marks
        self.memo: dict[int, object] = {}

    def pop(self, count: int | None) -> list[object]:
        """Return so many values, or those since the last mark, and go on with the ones before it."""
        if count is None:
            expect(self.below, "lacks the mark before several values")
            values, self.stack = self.stack, self.below.pop()
            return values
        expect(len(self.stack) >= count, "takes a value where there is none")
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def run(self, name: str, argument: object, place: int) -> None:
        """Run one opcode."""
        if name in CONSTANTS:
            self.stack.append(CONSTANTS[name])
        elif name in VALUES:
            if isinstance(argument, int) and not -(2**63) <= argument < 2**63:
                raise FormatError("has an integer of more than 64 bits")
            self.stack.append(argument)
        elif name == "MARK":
            expect(len(self.below) < MOST_DEEP, "is nested too deeply")
            self.below.append(self.stack)
            self.stack = []
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            self.stack.append([] if name == "EMPTY_LIST" else {})
        elif name in TUPLES or name == "TUPLE":
            values = tuple(self.pop(TUPLES.get(name)))
            self.stack.append(values)
        elif name in FILLS:
            self.fill(self.pop(FILLS[name]), name)
        elif name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
            (value,) = self.pop(1)
            self.memo[argument if isinstance(argument, int) else len(self.memo)] = value
            self.stack.append(value)
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self.memo:
                raise FormatError(f"refers to value {argument}, which it does not hold")
            self.stack.append(self.memo[argument])
        elif name not in ("PROTO", "FRAME", "STOP"):
            raise FormatError(f"opcode {name} at byte {place}: only plain values are read, no code")

    def fill(self, values: list[object], name: str) -> None:
        """Add *values* to the list or dictionary below them."""
        container = self.stack[-1] if self.stack else None
        if name.startswith("APPEND") and isinstance(container, list):
            container.extend(values)
        elif name.startswith("SETITEM") and isinstance(container, dict):
            keys = values[::2]
            if len(values) % 2 or not all(type(key) in (str, int) for key in keys):
                raise FormatError("has a dictionary whose keys are not text or integers")
            container.update(zip(keys, values[1::2], strict=True))
        else:
            raise FormatError("adds values to one that is no list or dictionary")


def _count_values(value: object, counted: int, depth: int) -> int:
    """Return *counted* plus the number of values inside *value*; raise an error beyond the limits."""
    expect(depth <= MOST_DEEP, "is nested too deeply")
    counted += 1 + (len(value) // CHARACTERS_OF_A_VALUE if isinstance(value, str) else 0)
    SHARED_VALUES.check(counted)
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        counted = _count_values(inner, counted, depth + 1)
    return counted


def load_plain_pickle(data: bytes) -> object:
    """Return the plain value that *data* holds; raise a FormatError if it holds anything else or too much."""
    reader = _PickleReader()
    try:
        for opcode, argument, place in pickletools.genops(data):
            if opcode.name == "FRAME" and isinstance(argument, int) and argument > len(data):
                raise FormatError("is cut off")
            reader.run(opcode.name, argument, place or 0)
    except (ValueError, OverflowError) as error:
        raise error if isinstance(error, FormatError) else FormatError(f"is no pickle: {error}") from None
    expect(len(reader.stack) == 1 and not reader.below, "holds no single value")
    _count_values(reader.stack[0], -len(data), 0)
    return reader.stack[0]
