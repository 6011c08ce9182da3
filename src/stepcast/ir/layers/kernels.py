"""Layers and ops as all kinds of layers build them: memory-bound kernels, casts and collectives, and the kernels that
software runs for a part of a layer, one after another, from the lists of ``data/kernels.txt``.

A heading in brackets begins a list (see ``lists``), a line of it is a kernel::

    NAME: KIND READS WRITES FORMAT rows=SIZE columns=SIZE kernels=COUNT part=PART FLAGS ? CONDITIONS

It reads and writes so many tensors of *rows* x *columns* elements, one of each by default; all but the kind may be left
out. Names in sizes are those of values that the caller states, or of fields of `Sizes`, the model, the strategy or the
framework. A kind or a format may be such a name, too. Several reads
(``1,1,2``) are as many kernels, numbered from the number at the end of the name. After ``bytes``, reads and writes are
bytes of each element, a format counting as its own. A cast names ``FROM->TO`` instead (``as=FORMAT``: the format by
which it is priced), a ``matmul`` its rows, columns and depth, *batch* times. A line ``> LIST`` adds the kernels of
another list. All conditions after a question mark must be true, those with an exclamation mark false; in a line of
their own they hold for the lines below, up to the next such line.
"""

from functools import cache, lru_cache
from typing import NamedTuple

from stepcast.ir.architecture import Architecture
from stepcast.ir.framework import Framework
from stepcast.ir.layers.lists import FORMATS, Amount, Conditions, Find, evaluate, read_amount, read_lines
from stepcast.ir.layers.sizes import MASK_BYTES, Sizes
from stepcast.ir.layout import Group
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import DType, replace
from stepcast.ir.work import Collective, CollectiveKind, Elementwise, ElementwiseKind, Matmul, elementwise
from stepcast.ir.workload import Layer, Op, OpPart, Role

K = ElementwiseKind
C = CollectiveKind
FP32 = DType.FP32
Ops = tuple[Op, ...]


class PhaseOps(NamedTuple):
    """The ops of a forward, of its input gradient and of its weight gradient."""

    forward: Ops = ()
    input_gradient: Ops = ()
    weight_gradient: Ops = ()


def make_layer(role: Role, forward: Ops = (), input_gradient: Ops = (), weight_gradient: Ops = ()) -> Layer:
    """Return the layer of that *role*, which is its name."""
    return Layer(str(role), forward, input_gradient, weight_gradient, role=role)


def collective(
    name: str, kind: CollectiveKind, size_bytes: int, group: Group, blocking: bool = True, times: int = 1
) -> Op:
    return Op(name, _make_collective(kind, size_bytes, group, times), blocking, kernels=times)


_make_collective = lru_cache(maxsize=2**14)(Collective)
"""One object for equal collectives, whatever layers they belong to: prices are looked up by it."""


def stream_op(
    name: str,
    kind: ElementwiseKind,
    rows: int,
    columns: int,
    reads: float,
    writes: float,
    dtype: DType,
    backward: bool = False,
    *,
    kernels: int = 1,
    part: OpPart | None = None,
) -> Op:
    """Return an op that reads and writes *reads* and *writes* tensors of *rows* x *columns*."""
    return Op(name, elementwise(kind, rows, columns, reads, writes, dtype, backward), kernels=kernels, part=part)


def moved_op(
    name: str, kind: K, rows: int, columns: int, read: float, write: float, dtype: DType, kernels: int = 1
) -> Op:
    """Return an op that reads and writes so many bytes for each of *rows* x *columns* elements."""
    elements = float(rows * columns)
    return Op(name, Elementwise(kind, rows, columns, read * elements, write * elements, dtype=dtype), kernels=kernels)


def cast_op(name: str, rows: int, columns: int, before: DType, after: DType, counted_as: DType | None = None) -> Op:
    """Return the cast of *rows* x *columns* elements from one format to another."""
    return moved_op(name, K.CAST, rows, columns, before.bytes, after.bytes, counted_as or before)


FILE = "kernels.txt"
FLAGS = ("backward", "bytes", "host")
Value = float | DType | K
KINDS = {str(kind): kind for kind in K}


class KernelLine(NamedTuple):
    """A kernel of a list; without a *kind*, the *name* of another list whose kernels follow here."""

    name: str
    kind: K | str = ""
    reads: tuple[Amount, ...] = ()  # of each kernel; sizes of a product
    write: Amount = 0
    dtype: DType | str = "dtype"
    rows: Amount = 0
    columns: Amount = 0
    kernels: Amount = 1
    part: OpPart | None = None
    flags: frozenset[str] = frozenset()
    conditions: Conditions = ()


@cache
def _read_list(name: str) -> list[KernelLine]:
    return [
        (KernelLine(text[2:]) if text.startswith("> ") else _read_line(text))._replace(conditions=conditions)
        for text, conditions in read_lines(FILE, name)
    ]


def _read_line(text: str) -> KernelLine:
    name, _, rest = text.rpartition(":")
    kind, *words = rest.split()
    options = dict(word.split("=") for word in words if "=" in word)
    assert options.keys() <= {"rows", "columns", "kernels", "part", "as"}, text
    flags = frozenset(word for word in words if word in FLAGS)
    plain = [word for word in words if word not in flags and "=" not in word]
    counted, part = options.get("as", "dtype"), OpPart(options["part"]) if "part" in options else None
    defaults = {"rows": "rows", "columns": "columns", "kernels": "1"}
    rows, columns, kernels = (read_amount(options.get(key, default)) for key, default in defaults.items())
    sizes = rows, columns, kernels
    if kind == "matmul":
        amounts = tuple(map(read_amount, plain))
        return KernelLine(name, kind, amounts, 0, FORMATS.get(counted, counted), *sizes, part)
    if plain and "->" in plain[0]:
        before, after = plain[0].split("->")
        plain, flags = [before, after, options.get("as", before)], flags | {"bytes"}
    reads, write, dtype = (*plain, *("1", "1", "dtype")[len(plain) :])
    amounts, kernel = tuple(map(read_amount, reads.split(","))), KINDS.get(kind, kind)
    return KernelLine(name, kernel, amounts, read_amount(write), FORMATS.get(dtype, dtype), *sizes, part, flags)


def list_kernels(
    name: str, sizes: Sizes, rows: int, columns: int, dtype: DType, prefix: str = "", **values: Value
) -> Ops:
    """Return the kernels of the list *name* for *rows* x *columns* elements of *dtype*; names are those of *values*, or
    what *sizes* know. The names of the kernels begin with *prefix*.
    """
    known: dict[str, object] = {"mask": MASK_BYTES, "batch": 1, **values}
    known |= {"rows": rows, "columns": columns, "dtype": dtype}
    owners = (sizes, sizes.model, sizes.strategy, sizes.framework)

    def find(word: str) -> object:
        if word not in known:
            known[word] = getattr(owners[_owner_of(word)], word)
        return known[word]

    truths = tuple([bool(find(word)) for word in _condition_words(name)])
    ops: list[Op] = []
    for line in _select_lines(name, truths):
        _add_kernels(ops, line, find, f"{prefix} {line.name}".strip() if prefix else line.name)
    return tuple(ops)


def list_phases(
    name: str, sizes: Sizes, rows: int, columns: int, dtype: DType, prefix: str = "", **values: Value
) -> tuple[Ops, Ops]:
    """Return the kernels of the list *name* and of the list of its gradient."""
    forward = list_kernels(name, sizes, rows, columns, dtype, prefix, **values)
    return forward, list_kernels(f"{name} gradient", sizes, rows, columns, dtype, prefix, **values)


@cache
def _owner_of(word: str) -> int:
    """Return which of sizes, model, strategy and framework has a field of that name."""
    return [hasattr(owner, word) for owner in (Sizes, Architecture, Strategy, Framework)].index(True)


@cache
def _condition_words(name: str) -> tuple[str, ...]:
    """Return the words of all conditions of a list and of those that it adds."""
    words: dict[str, None] = {}
    for line in _read_list(name):
        words |= dict.fromkeys(word for word, _ in line.conditions)
        words |= {} if line.kind else dict.fromkeys(_condition_words(line.name))
    return tuple(words)


@lru_cache(maxsize=4096)
def _select_lines(name: str, truths: tuple[bool, ...]) -> tuple[KernelLine, ...]:
    """Return the lines of a list whose conditions hold where its words have these *truths*."""
    holds = dict(zip(_condition_words(name), truths, strict=True))
    lines: list[KernelLine] = []
    for line in _read_list(name):
        if all(holds[word] is wanted for word, wanted in line.conditions):
            inner = () if line.kind else tuple(holds[word] for word in _condition_words(line.name))
            lines += (line,) if line.kind else _select_lines(line.name, inner)
    return tuple(lines)


def _add_kernels(ops: list[Op], line: KernelLine, find: Find, name: str) -> None:
    dtype = line.dtype if isinstance(line.dtype, DType) else find(line.dtype)
    kernels = int(evaluate(line.kernels, find))
    assert isinstance(dtype, DType), line
    if line.kind == "matmul":
        m, n, k, batch = (int(evaluate(size, find)) for size in (*line.reads, "batch"))
        ops.append(Op(name, Matmul(m, n, k, batch, dtype), kernels=kernels, part=line.part))
        return
    kind = line.kind if isinstance(line.kind, K) else find(line.kind)
    assert isinstance(kind, K), line
    rows, columns, flags = int(evaluate(line.rows, find)), int(evaluate(line.columns, find)), line.flags
    write, op_name = evaluate(line.write, find), name
    for number, amount in enumerate(line.reads):
        read = evaluate(amount, find)
        if len(line.reads) > 1:
            stem, _, start = name.rpartition(" ")
            op_name = f"{stem} {int(start) + number}"
        if "bytes" in flags:
            op, host_reads = moved_op(op_name, kind, rows, columns, read, write, dtype, kernels), "host" in flags
            ops.append(replace(op, part=line.part, host_reads=host_reads) if line.part or host_reads else op)
        else:
            backward = "backward" in flags
            op = stream_op(op_name, kind, rows, columns, read, write, dtype, backward, kernels=kernels, part=line.part)
            ops.append(op)
