"""Kernels that software runs for a part of a layer, one after another, from the lists of ``data/kernels.txt``.

A heading in brackets begins a list, a line of it is a kernel::

    NAME: KIND READS WRITES FORMAT rows=SIZE columns=SIZE kernels=COUNT part=PART FLAGS ? CONDITIONS

It reads and writes so many tensors of *rows* x *columns* elements, one of each by default. All but the kind
may be left out. Sizes are numbers and names of values that the caller states, multiplied and added up (``2*inner``); a
kind or a format may be such a name, too. Several reads (``1,1,2``) are as many kernels, numbered from the number at
the end of the name. After ``bytes``, reads and writes are bytes of each element, a format counting as its own. A cast
names ``FROM->TO`` instead (``as=FORMAT``: the format by which it is priced), a ``matmul`` its rows, columns and depth,
*batch* times. A line ``> LIST`` adds the kernels of another list. All conditions after a question mark must be
true, those with an exclamation mark false; in a line of their own they hold for the lines below, up to the
next such line.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from math import prod
from pathlib import Path
from typing import NamedTuple, TypeVar

from stepcast.ir.dataclass import replace
from stepcast.ir.dtype import DType
from stepcast.ir.layers.ops import K, Ops, moved_op, stream_op
from stepcast.ir.work import Matmul
from stepcast.ir.workload import Op, OpPart

FILE = Path(__file__).parents[2] / "data" / "kernels.txt"
Value = float | DType | K
FLAGS = ("backward", "bytes", "host")
Named = TypeVar("Named", DType, K)


class KernelLine(NamedTuple):
    """A line of a list, or where it has no *kind* the list of which it is the name."""

    name: str
    kind: str = ""
    amounts: tuple[str, ...] = ()  # what it reads and writes, in tensors or bytes; sizes of a product
    dtype: str = "dtype"
    options: Mapping[str, str] = {}
    flags: frozenset[str] = frozenset()
    conditions: tuple[str, ...] = ()


@cache
def _split_lists() -> dict[str, str]:
    lists = f"\n{FILE.read_text(encoding='utf-8')}".split("\n[")[1:]
    return {name: text for name, _, text in (part.partition("]") for part in lists)}


@cache
def _read_list(name: str) -> list[KernelLine]:
    lines: list[KernelLine] = []
    shared: tuple[str, ...] = ()
    for line in _split_lists()[name].splitlines():
        text, mark, conditions = (part.strip() for part in line.partition("#")[0].partition("?"))
        if text:
            entry = KernelLine(text[2:]) if text.startswith("> ") else _read_line(text)
            lines.append(entry._replace(conditions=(*shared, *conditions.split())))
        elif mark:
            shared = tuple(conditions.split())
    return lines


def _read_line(text: str) -> KernelLine:
    name, _, rest = text.rpartition(":")
    kind, *words = rest.split()
    options = dict(word.split("=") for word in words if "=" in word)
    flags = frozenset(word for word in words if word in FLAGS)
    plain = [word for word in words if word not in flags and "=" not in word]
    if plain and "->" in plain[0]:
        before, after = plain[0].split("->")
        return KernelLine(name, kind, (before, after), options.get("as", before), options, flags | {"bytes"})
    if kind == "matmul":
        return KernelLine(name, kind, tuple(plain), options.get("as", "dtype"), options)
    reads, writes, dtype = (*plain, *("1", "1", "dtype")[len(plain) :])
    return KernelLine(name, kind, (reads, writes), dtype, options, flags)


def list_kernels(name: str, rows: int, columns: int, dtype: DType, prefix: str = "", **values: Value) -> Ops:
    """Return the kernels of the list *name* for *rows* x *columns* elements of *dtype* and the *values* of its names.

    Their names begin with *prefix*.
    """
    return tuple(_build_list(name, {**values, "rows": rows, "columns": columns, "dtype": dtype}, prefix))


def _build_list(name: str, known: Mapping[str, Value], prefix: str) -> Iterator[Op]:
    for line in _read_list(name):
        if not all(bool(known[word.removeprefix("!")]) is not word.startswith("!") for word in line.conditions):
            continue
        if line.kind:
            yield from _build_kernels(line, known, f"{prefix} {line.name}".strip())
        else:
            yield from _build_list(line.name, known, prefix)


def _build_kernels(line: KernelLine, known: Mapping[str, Value], name: str) -> Iterator[Op]:
    dtype, options, flags = _name(line.dtype, known, DType), line.options, line.flags
    kernels = _whole(options.get("kernels", "1"), known)
    part = OpPart(options["part"]) if "part" in options else None
    if line.kind == "matmul":
        m, n, k = (_whole(size, known) for size in line.amounts)
        yield Op(name, Matmul(m, n, k, _whole("batch", known), dtype), kernels=kernels, part=part)
        return
    rows, columns = (_whole(options.get(side, side), known) for side in ("rows", "columns"))
    shape = _name(line.kind, known, K), rows, columns
    reads, write = line.amounts[0].split(","), _amount(line.amounts[1], known)
    stem, _, start = name.rpartition(" ")
    for number, text in enumerate(reads):
        own, read = name if len(reads) == 1 else f"{stem} {int(start) + number}", _amount(text, known)
        if "bytes" in flags:
            op = moved_op(own, *shape, read, write, dtype, kernels=kernels)
            yield replace(op, host_reads=True) if "host" in flags else op
        else:
            yield stream_op(own, *shape, read, write, dtype, "backward" in flags, kernels=kernels, part=part)


def _amount(text: str, known: Mapping[str, Value]) -> float:
    """Return the value of a sum of products."""
    return sum(prod(_factor(word, known) for word in term.split("*")) for term in text.split("+"))


def _factor(word: str, known: Mapping[str, Value]) -> float:
    if word not in known:
        return DType(word).bytes if word[0].isalpha() else float(word) if "." in word else int(word)
    value = known[word]
    assert not isinstance(value, K), f"{word} is a kind of kernel, not a number"
    return value.bytes if isinstance(value, DType) else value


def _whole(text: str, known: Mapping[str, Value]) -> int:
    return int(_amount(text, known))


def _name(word: str, known: Mapping[str, Value], kind: type[Named]) -> Named:
    """Return the kind of kernel or the format that *word* is, or is the name of."""
    value = known.get(word, word)
    return value if isinstance(value, kind) else kind(word)
