"""Pickles of plain values, read without Python's unpickler.

Read are the opcodes that PyTorch's flight recorder and ``pickle.dumps`` (protocols 2 to 5) write for dictionaries,
lists, tuples, text, integers of 64 bits, floats, booleans and None. Any other opcode is refused, so nothing can be
imported or called. Keys are text or integers. A container that is referred to again cannot change any more: no value
contains itself, and references are counted with all that they stand for, so that few bytes cannot stand for much.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from stepcast.inputs.source import FormatError
from stepcast.ir.limits import SHARED_VALUES

PROTOCOLS = (2, 3, 4, 5)
MOST_DEEP = 100
LONGEST_INTEGER_BYTES = 8
CHARACTERS_OF_A_VALUE = 64  # longer text counts as several values where it is referred to again


class _ContainerSize(NamedTuple):
    values: int
    depth: int


class _PickleReader:
    """The stack machine of pickles, with the opcodes of plain values alone."""

    def __init__(self, data: bytes) -> None:
        self.data, self.position = data, 0
        self.stack: list[Any] = []
        self.below: list[list[Any]] = []  # stacks under the marks
        self.memo: dict[int, Any] = {}
        self.sizes: dict[int, _ContainerSize] = {}  # by identity; a new container replaces a freed one's entry
        self.fixed: set[int] = set()  # containers that are referred to again
        self.shared = 0

    def load(self) -> object:
        if self.data[:1] != b"\x80" or self.take(2)[1] not in PROTOCOLS:
            raise FormatError(f"expected a pickle of protocol {PROTOCOLS[0]} to {PROTOCOLS[-1]}")
        operations = {code: getattr(self, name) for code, name in OPERATIONS.items()}
        operations |= {code: self._constant(value) for code, value in CONSTANTS.items()}
        operations |= {code: self._tuple_of(count) for count, code in enumerate(b")\x85\x86\x87")}
        while (code := self.take(1)[0]) != ord("."):
            operation = operations.get(code)
            if operation is None:
                raise FormatError(
                    f"opcode {bytes([code])!r} at byte {self.position - 1}: only plain values are read, no code"
                )
            operation()
        if len(self.stack) != 1 or self.below:
            raise FormatError("holds no single value")
        return self.stack[0]

    # ---- bytes ----------------------------------------------------------------------------------------

    def take(self, count: int) -> bytes:
        taken = self.data[self.position : self.position + count]
        if len(taken) < count:
            raise FormatError("is cut off")
        self.position += count
        return taken

    def number(self, layout: str) -> int:
        value: int = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def pop(self) -> Any:
        if not self.stack:
            raise FormatError("takes a value where there is none")
        return self.stack.pop()

    def take_marked(self) -> list[Any]:
        """Return the values since the last mark, and go on with those before it."""
        if not self.below:
            raise FormatError("lacks the mark before several values")
        values, self.stack = self.stack, self.below.pop()
        return values

    # ---- values ---------------------------------------------------------------------------------------

    def _constant(self, value: object) -> Callable[[], None]:
        return lambda: self.stack.append(value)

    def frame(self) -> None:
        if self.number("<Q") > len(self.data) - self.position:
            raise FormatError("is cut off")

    def mark(self) -> None:
        if len(self.below) >= MOST_DEEP:
            raise FormatError("is nested too deeply")
        self.below.append(self.stack)
        self.stack = []

    def integer_1(self) -> None:
        self.stack.append(self.number("<B"))

    def integer_2(self) -> None:
        self.stack.append(self.number("<H"))

    def integer_4(self) -> None:
        self.stack.append(self.number("<i"))

    def long_integer(self) -> None:
        size = self.number("<B")
        if size > LONGEST_INTEGER_BYTES:
            raise FormatError(f"has an integer of more than {8 * LONGEST_INTEGER_BYTES} bits")
        self.stack.append(int.from_bytes(self.take(size), "little", signed=True))

    def real(self) -> None:
        self.stack.append(self.number(">d"))

    def text_1(self) -> None:
        self.text("<B")

    def text_4(self) -> None:
        self.text("<I")

    def text_8(self) -> None:
        self.text("<Q")

    def text(self, layout: str) -> None:
        try:
            self.stack.append(self.take(self.number(layout)).decode("utf-8", "surrogatepass"))
        except UnicodeDecodeError as error:
            raise FormatError(f"has text that is not UTF-8: {error.reason}") from None

    # ---- containers -----------------------------------------------------------------------------------

    def empty_list(self) -> None:
        self.put_container([])

    def empty_dictionary(self) -> None:
        self.put_container({})

    def tuple_of_marked(self) -> None:
        self.put_tuple(self.take_marked())

    def _tuple_of(self, count: int) -> Callable[[], None]:
        return lambda: self.put_tuple([self.pop() for _ in range(count)][::-1])

    def put_tuple(self, values: list[Any]) -> None:
        self.put_container(tuple(values))
        self.grow(self.stack[-1], values)

    def put_container(self, container: object) -> None:
        self.sizes[id(container)] = _ContainerSize(1, 1)
        self.stack.append(container)

    def append(self) -> None:
        self.extend([self.pop()])

    def append_marked(self) -> None:
        self.extend(self.take_marked())

    def extend(self, values: list[Any]) -> None:
        self.changeable(list).extend(values)
        self.grow(self.stack[-1], values)

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.update([key, value])

    def set_marked_items(self) -> None:
        self.update(self.take_marked())

    def update(self, values: list[Any]) -> None:
        keys = values[::2]
        if len(values) % 2 or not all(type(key) in (str, int) for key in keys):
            raise FormatError("has a dictionary whose keys are not text or integers")
        self.changeable(dict).update(zip(keys, values[1::2], strict=True))
        self.grow(self.stack[-1], values)

    def changeable(self, kind: type) -> Any:
        container = self.stack[-1] if self.stack else None
        if type(container) is not kind or id(container) in self.fixed:
            raise FormatError("changes a value that is complete")
        return container

    def grow(self, container: object, values: list[Any]) -> None:
        """Add *values* to the size of *container*."""
        size, depth = self.sizes[id(container)]
        for value in values:
            if type(value) in CONTAINERS:
                inner = self.sizes[id(value)]
                size, depth = size + inner.values, max(depth, inner.depth + 1)
            else:
                size += 1
        if depth > MOST_DEEP:
            raise FormatError("is nested too deeply")
        self.sizes[id(container)] = _ContainerSize(size, depth)

    # ---- references -----------------------------------------------------------------------------------

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.top()

    def put_1(self) -> None:
        self.memo[self.number("<B")] = self.top()

    def put_4(self) -> None:
        self.memo[self.number("<I")] = self.top()

    def top(self) -> Any:
        if not self.stack:
            raise FormatError("takes a value where there is none")
        return self.stack[-1]

    def get_1(self) -> None:
        self.refer(self.number("<B"))

    def get_4(self) -> None:
        self.refer(self.number("<I"))

    def refer(self, index: int) -> None:
        if index not in self.memo:
            raise FormatError(f"refers to value {index}, which it does not hold")
        value = self.memo[index]
        if type(value) in CONTAINERS:
            self.fixed.add(id(value))
            self.shared += self.sizes[id(value)].values
        else:
            self.shared += 1 + (len(value) // CHARACTERS_OF_A_VALUE if type(value) is str else 0)
        SHARED_VALUES.check(self.shared)
        self.stack.append(value)


CONTAINERS = (list, dict, tuple)
CONSTANTS: dict[int, object] = {ord("N"): None, 0x88: True, 0x89: False}
OPERATIONS = {
    0x95: "frame", ord("("): "mark", ord("K"): "integer_1", ord("M"): "integer_2", ord("J"): "integer_4",
    0x8A: "long_integer", ord("G"): "real", 0x8C: "text_1", ord("X"): "text_4", 0x8D: "text_8", ord("]"): "empty_list",
    ord("}"): "empty_dictionary", ord("t"): "tuple_of_marked", ord("a"): "append",
    ord("e"): "append_marked", ord("s"): "set_item", ord("u"): "set_marked_items", 0x94: "memoize",
    ord("q"): "put_1", ord("r"): "put_4", ord("h"): "get_1", ord("j"): "get_4",
}  # fmt: skip


def load_plain_pickle(data: bytes) -> object:
    """Return the plain value that *data* holds; raise a FormatError if it holds anything else or too much."""
    return _PickleReader(data).load()
