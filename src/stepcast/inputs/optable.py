"""Operator tables: one row per operator of one GPU, tab or comma separated.

Times are milliseconds, sizes are elements. A row ``X_grad`` carries the gradient reduction of operator X
and stands before it, so that the backward, which walks the rows in reverse, meets it just after X.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from stepcast.inputs.errors import FormatError
from stepcast.inputs.layers import layer_of, recorded_op
from stepcast.inputs.numbers import check_different, parse_amount, parse_count, shorten
from stepcast.inputs.simai.reader import KINDS
from stepcast.inputs.source import Source
from stepcast.ir.dtype import DType
from stepcast.ir.edits import LAYER_BLOCK
from stepcast.ir.group import Group
from stepcast.ir.work import Collective, Direction, Recorded, Transfer
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload
from stepcast.units import MS

PHASES = ("forward", "backward", "weight_grad")
FIELDS = ("compute_time", "comm_type", "comm_size")
COLUMNS = (
    "name",
    *(f"{phase}_{field}" for phase in PHASES for field in FIELDS),
    "process_time",
)
ELEMENT = DType.FP32
SUFFIXES = {"EP": Group.EP, "DP_EP": Group.EXPERT_DP}
WORDS = (
    "None, ALLREDUCE, ALLREDUCE_ASYNC, ALLGATHER, REDUCESCATTER, ALLTOALL, ALLTOALL_EP, "
    "ALLGATHER_DP_EP, REDUCESCATTER_DP_EP, SENDRECV"
)

Key = TypeVar("Key")
Value = TypeVar("Value")
MOST_KNOWN = 10_000

# A row of model layer i: transformer_h_0_ln_1, model_decoder_layers_0_fc1, encoder_layer_3_output ...
LAYER_ROW = re.compile(r"(?:^|_)(?:h|layers?|blocks?)_(?P<index>\d+)_")
# Layers of the GPT-2 family by hidden size (Radford et al. 2019, table 2).
GPT2_LAYERS = {768: 12, 1024: 24, 1280: 36, 1600: 48}


def looks_like(head: str) -> bool:
    first = head.split("\n", 1)[0]
    return "forward_compute_time" in first and "weight_grad_comm_size" in first


def read(source: Source) -> Workload:
    """The table as a one-stage workload of one micro-batch."""
    lines = source.each_line()
    header = next(lines, "")
    separator = "\t" if "\t" in header else ","
    columns, warnings = _columns(header.split(separator))
    parser = _RowParser(columns, separator)
    layers = parser.layers(lines)
    if not layers:
        raise FormatError("table has a header but no rows; expected one row per operator", line=1)
    if not parser.has_backward:
        warnings.append(
            "every backward time is 0: the writer left them out. "
            "Give --backward-factor 2 to take backward as twice forward (the usual ratio for matmuls)"
        )
    return _assemble(layers, warnings)


def _compute_s(ops: tuple[Op, ...]) -> float:
    return sum(op.work.duration_s for op in ops if isinstance(op.work, Recorded))


def _columns(names: list[str]) -> tuple[list[str], list[str]]:
    """The header's names, checked, and a warning for columns that are not ours."""
    names = [name.strip() for name in names]
    missing = [name for name in COLUMNS if name not in names]
    if missing:
        raise FormatError(f"header lacks {', '.join(missing)}; expected {', '.join(COLUMNS)}", line=1)
    check_different(names)
    if names[0] != "name":
        raise FormatError(f"first column is {shorten(names[0])}; expected 'name'", line=1)
    extra = [name for name in names if name not in COLUMNS]
    return names, [f"column {shorten(name)} is not known and was left out" for name in extra]


class _Cells(NamedTuple):
    """A row without its name."""

    forward: tuple[Op, ...]
    input_gradient: tuple[Op, ...]
    weight_gradient: tuple[Op, ...]
    process_s: float


class _RowParser:
    """Rows to layers. What was seen before is not parsed again: operators of a kind take equal times."""

    def __init__(self, columns: list[str], separator: str) -> None:
        self._columns, self._separator = columns, separator
        place = {name: at for at, name in enumerate(columns)}
        self._phases = [tuple(place[f"{phase}_{field}"] for field in FIELDS) for phase in PHASES]
        self._process = place["process_time"]
        self.has_backward = False
        self._rows: dict[str, _Cells] = {}
        self._times: dict[str, Op] = {}
        self._messages: dict[tuple[int, str, str], tuple[Op, ...]] = {}

    def layers(self, lines: Iterable[str]) -> list[Layer]:
        """A layer for each row; blank lines count and give none."""
        known, separator = self._rows, self._separator
        layers: list[Layer] = []
        add = layers.append
        for number, line in enumerate(lines, 2):
            name, _, rest = line.partition(separator)
            cells = known.get(rest)
            if cells is None:
                if not line.strip():
                    continue
                cells = _remember(known, rest, self._cells(line.split(separator), number))
            add(layer_of(name, *cells))
        return layers

    def _cells(self, row: list[str], line: int) -> _Cells:
        if len(row) != len(self._columns):
            raise FormatError(f"has {len(row)} columns; expected {len(self._columns)}", line=line)
        phases = []
        for phase, (time, word, size) in enumerate(self._phases):
            computed = self._times.get(row[time])
            if computed is None:
                duration_s = parse_amount(row[time].strip(), self._columns[time], line) * MS
                computed = _remember(self._times, row[time], recorded_op(duration_s))
            key = (phase, row[word], row[size])
            message = self._messages.get(key)
            if message is None:
                message = _remember(self._messages, key, _message(*key, line))
            phases.append((computed, *message))
        self.has_backward = self.has_backward or _compute_s(phases[1] + phases[2]) > 0
        process_s = parse_amount(row[self._process].strip(), "process_time", line) * MS
        return _Cells(phases[0], phases[1], phases[2], process_s)


def _remember(known: dict[Key, Value], key: Key, value: Value) -> Value:
    """*value*, kept for the next time; a table of measured times, which all differ, is not kept whole."""
    if len(known) == MOST_KNOWN:
        known.clear()
    known[key] = value
    return value


def _message(phase: int, word: str, size: str, line: int) -> tuple[Op, ...]:
    """The communication at the end of a phase, if any."""
    word = word.strip()
    elements = parse_count(size.strip(), f"{PHASES[phase]}_comm_size", line)
    if word in ("None", "NONE", ""):
        return ()
    blocking = not word.endswith("_ASYNC")
    work = _communication(word.removesuffix("_ASYNC"), elements * int(ELEMENT.bytes), phase, blocking)
    if work is None:
        raise FormatError(f"unknown communication {shorten(word)}; expected one of {WORDS}", line=line)
    name = work.kind if isinstance(work, Collective) else work.direction
    return (Op(name, work, blocking),)


def _communication(word: str, size_bytes: int, phase: int, blocking: bool) -> Collective | Transfer | None:
    """Blocking exchanges outside the weight gradient are tensor parallel, the others reduce gradients."""
    if word == "SENDRECV":
        return Transfer(Direction.SEND, size_bytes)
    kind, _, suffix = word.partition("_")
    if kind not in KINDS or (suffix and suffix not in SUFFIXES):
        return None
    bare = Group.TP if blocking and phase < 2 else Group.DP
    return Collective(KINDS[kind], size_bytes, SUFFIXES.get(suffix, bare))


def _assemble(layers: list[Layer], warnings: list[str]) -> Workload:
    span = _one_layer(layers)
    notes: tuple[tuple[str, str], ...] = (("element_dtype", ELEMENT), ("lines", str(len(layers))))
    if span is None:
        body: tuple[Block, ...] = (Block(tuple(layers)),)
    else:
        start, end = span
        parts = [layers[:start], layers[start:end], layers[end:]]
        repeat = _guess_repeat(layers[start:end], warnings)
        at = sum(bool(part) for part in parts[:1])
        body = tuple(Block(tuple(part), repeat if part is parts[1] else 1) for part in parts if part)
        notes += ((LAYER_BLOCK, str(at)),)
    return Workload(stages=(Stage(body),), source="optable", notes=notes, warnings=tuple(warnings))


def _one_layer(layers: list[Layer]) -> tuple[int, int] | None:
    """Rows of the only model layer in the table, or None where there are none or several.

    The layer begins at its first row with a layer number and ends where a row of the same module tree
    (same prefix) stands outside the numbered layers, such as the final norm, or at the head.
    """
    matches = []
    for at, layer in enumerate(layers):
        name = layer.name
        # Looking for a word first is several times faster than the pattern alone.
        if ("h_" in name or "layer" in name or "block" in name) and (match := LAYER_ROW.search(name)):
            matches.append((at, match))
            if match["index"] != matches[0][1]["index"]:
                return None
    if not matches:
        return None
    start, first = matches[0]
    prefix = first.string[: first.start()]
    for at in range(matches[-1][0] + 1, len(layers)):
        name = layers[at].name
        if (prefix and name.startswith(prefix)) or name.startswith("lm_head"):
            return start, at
    return start, len(layers)


def _guess_repeat(rows: list[Layer], warnings: list[str]) -> int:
    """How often the layer repeats, by the hidden size its first norm shows, with a warning either way."""
    norm_elements = [
        op.work.size_bytes // int(ELEMENT.bytes)
        for layer in rows
        if "_h_" in layer.name and "ln" in layer.name
        for op in layer.input_gradient
        if isinstance(op.work, Collective)
    ]
    hidden = norm_elements[0] // 2 if norm_elements else 0
    if hidden in GPT2_LAYERS:
        count = GPT2_LAYERS[hidden]
        warnings.append(
            f"the table holds one model layer; its names and hidden size {hidden} are GPT-2's, "
            f"so it is run {count} times. State it with --repeat-layers N"
        )
        return count
    warnings.append("the table holds one model layer and runs it once; state how many with --repeat-layers N")
    return 1
