"""Operator tables: one row per operator of one GPU, tab or comma separated.

Times are milliseconds, sizes are elements. A row ``X_grad`` carries the gradient reduction of operator X
and comes before it, so that the backward, which walks the rows in reverse, meets it just after X.

Rows are read into columns: a table of a million rows is a few arrays, not millions of objects. Layers are
built when one is asked for, all of them, so that each stays the object that it is.
"""

import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from functools import partial
from itertools import chain, islice
from typing import Any, TypeVar, overload

import numpy as np

from stepcast.inputs.rows import Cells, SlabTable, draft_of, open_table, parse_amount, parse_count, shorten
from stepcast.inputs.simai import KINDS, SUFFIXES
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.dataclass import dataclass
from stepcast.ir.dtype import DType
from stepcast.ir.group import Group
from stepcast.ir.work import Collective, Direction, Recorded, Transfer
from stepcast.ir.workload import LAYER_BLOCK, Block, Layer, LayerTable, Op, Phase, Stage, Workload
from stepcast.units import MS

PHASES = tuple(Phase)
PHASE_NAMES = ("forward", "backward", "weight_grad")
FIELDS = ("compute_time", "comm_type", "comm_size")
COLUMNS = ("name", *(f"{phase}_{field}" for phase in PHASE_NAMES for field in FIELDS), "process_time")
ELEMENT = DType.FP32
WORDS = (
    "None, ALLREDUCE, ALLREDUCE_ASYNC, ALLGATHER, REDUCESCATTER, ALLTOALL, ALLTOALL_EP, "
    "ALLGATHER_DP_EP, REDUCESCATTER_DP_EP, SENDRECV"
)

# A row of model layer i: transformer_h_0_ln_1, model_decoder_layers_0_fc1, encoder_layer_3_output ...
LAYER_ROW = re.compile(r"(?:^|_)(?:h|layers?|blocks?)_(?P<index>\d+)_", re.MULTILINE)
LAYER_WORDS = ("\nh_", "_h_", "layer", "block")
FEW_CHARACTERS = 65_536  # read sooner row by row than by numpy
# Layers of the GPT-2 family by hidden size (Radford et al. 2019, table 2).
GPT2_LAYERS = {768: 12, 1024: 24, 1280: 36, 1600: 48}

Value = TypeVar("Value")
MOST_KNOWN = 10_000
SILENT = 0  # the code of a phase that ends with no message

Message = Callable[[int], Op]  # an op of so many elements
Messages = Sequence[Message | None]


def _phase_arrays(kind: str) -> "list[array[Any]]":
    return [array(kind) for _ in PHASES]


@dataclass
class OperatorColumns:
    """Rows so far, or some to be added; a column of *times*, *words* and *elements* for each phase."""

    names: list[str] = field(default_factory=list)  # many at once, joined by line feeds
    times_ms: "list[array[float]]" = field(default_factory=lambda: _phase_arrays("d"))
    words: "list[array[int]]" = field(default_factory=lambda: _phase_arrays("H"))
    elements: "list[array[int]]" = field(default_factory=lambda: _phase_arrays("q"))
    process_ms: "array[float]" = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.process_ms)

    def add(self, more: "OperatorColumns") -> None:
        self.names += more.names
        self.process_ms.extend(more.process_ms)
        for phase in range(len(PHASES)):
            self.times_ms[phase].extend(more.times_ms[phase])
            self.words[phase].extend(more.words[phase])
            self.elements[phase].extend(more.elements[phase])

    def names_from(self, start: int, stop: int | None = None) -> Iterator[str]:
        return islice(chain.from_iterable(slab.split("\n") for slab in self.names), start, stop)


class OperatorLayers(LayerTable):
    """The rows from *start* to *stop* as layers; *messages* builds the op of a word, by its code."""

    def __init__(self, columns: OperatorColumns, messages: Messages, start: int, stop: int) -> None:
        self._columns, self._messages, self._start, self._stop = columns, messages, start, stop
        self._built: tuple[Layer, ...] | None = None

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, index: int) -> Layer: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Layer, ...]: ...
    def __getitem__(self, index: int | slice) -> Layer | tuple[Layer, ...]:
        return self._layers[index]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and self._layers == tuple(other)

    def __hash__(self) -> int:
        return hash(self._layers)

    def names(self) -> Iterator[str]:
        return self._columns.names_from(self._start, self._stop)

    def recorded_s(self, phase: Phase) -> float:
        return math.fsum(self._part(self._columns.times_ms[PHASES.index(phase)])) * MS

    def messages(self) -> Iterator[tuple[Phase, Op, int]]:
        """Yield messages in the order of the rows in which they are first seen."""
        firsts = []
        for number, phase in enumerate(PHASES):
            words = self._part(self._columns.words[number])
            if any(words):
                counts = Counter(zip(words, self._part(self._columns.elements[number]), strict=True))
                order = {code: words.index(code) for code in set(words)}
                firsts += [((order[key[0]], number), phase, key, count) for key, count in counts.items()]
        for _, phase, (code, elements), count in sorted(firsts, key=lambda first: first[0]):
            if (message := self._messages[code]) is not None:
                yield phase, message(elements), count

    def _part(self, column: Sequence[Value]) -> Sequence[Value]:
        return column if len(self) == len(column) else column[self._start : self._stop]

    @property
    def _layers(self) -> tuple[Layer, ...]:
        if self._built is None:
            phases = [self._ops(number) for number in range(len(PHASES))]
            process_s = (time_ms * MS for time_ms in self._part(self._columns.process_ms))
            self._built = tuple(map(build_layer, self.names(), *phases, process_s))
        return self._built

    def _ops(self, number: int) -> Iterator[tuple[Op, ...]]:
        """Yield the ops of each row; equal rows share them, as operators of a kind take equal times."""
        columns, known = self._columns, dict[tuple[float, int, int], tuple[Op, ...]]()
        times_ms = self._part(columns.times_ms[number])
        words, elements_of = self._part(columns.words[number]), self._part(columns.elements[number])
        for key in zip(times_ms, words, elements_of, strict=True):
            ops = known.get(key)
            if ops is None:
                time_ms, code, elements = key
                message = self._messages[code]
                more = () if message is None else (message(elements),)
                if len(known) == MOST_KNOWN:  # measured times may all differ
                    known.clear()
                ops = known[key] = (build_recorded(time_ms * MS), *more)
            yield ops


_LayerDraft, _OpDraft, _RecordedDraft = map(draft_of, (Layer, Op, Recorded))


def build_layer(
    name: str,
    forward: tuple[Op, ...],
    input_gradient: tuple[Op, ...],
    weight_gradient: tuple[Op, ...],
    process_s: float,
) -> Layer:
    """Return ``Layer(...)``, thrice as fast."""
    layer = _LayerDraft()
    layer.name = name
    layer.forward = forward
    layer.input_gradient = input_gradient
    layer.weight_gradient = weight_gradient
    layer.process_s = process_s
    layer.notes = ()
    layer.captured = False
    layer.role = None
    layer.__class__ = Layer
    finished: Layer = layer
    return finished


def build_recorded(duration_s: float) -> Op:
    """Return ``Op("", Recorded(duration_s))``, thrice as fast."""
    work = _RecordedDraft()
    work.duration_s = duration_s
    work.__class__ = Recorded
    op = _OpDraft()
    op.name = ""
    op.work = work
    op.blocking = True
    op.after = ()
    op.kernels = 1
    op.host_reads = False
    op.early = False
    op.part = None
    op.__class__ = Op
    finished: Op = op
    return finished


def looks_like(head: str) -> bool:
    first = head.split("\n", 1)[0]
    return "forward_compute_time" in first and "weight_grad_comm_size" in first


def read(source: Source) -> Workload:
    """Return the table as a one-stage workload of one micro-batch."""
    table = open_table(source, COLUMNS, ", ".join(COLUMNS))
    if table.names[0] != "name":
        raise FormatError(f"first column is {shorten(table.names[0])}; expected 'name'", line=1)
    extra = [name for name in table.names if name not in COLUMNS]
    warnings = [f"column {shorten(name)} is not known and was left out" for name in extra]
    rows = _OperatorTable(table)
    for line, slab in table.slabs:
        rows.add(slab, line)
    columns = rows.columns
    if not len(columns):
        raise FormatError("table has a header but no rows; expected one row per operator", line=1)
    if not any(map(any, columns.times_ms[1:])):
        warnings.append(
            "every backward time is 0: the writer left them out. "
            "Give --backward-factor 2 to take backward as twice forward (the usual ratio for matmuls)"
        )
    return _assemble(columns, rows.messages, warnings)


class _OperatorTable:
    """Turns rows into columns: a slab at once if all its cells are plain, else row by row, to name the wrong line."""

    def __init__(self, table: SlabTable) -> None:
        self._table = table
        self._phases = [tuple(table.names.index(f"{phase}_{field}") for field in FIELDS) for phase in PHASE_NAMES]
        self._process = table.names.index("process_time")
        self._codes: list[dict[str, int]] = [{} for _ in PHASES]
        self.messages: list[Message | None] = [None]
        self.columns = OperatorColumns()

    def add(self, slab: str, first_line: int) -> None:
        self.columns.add(self._plain(slab) or self._checked(slab, first_line))

    def _plain(self, slab: str) -> OperatorColumns | None:
        """Return all rows of *slab* at once, or None if some cell is not plain and needs a check."""
        if len(slab) < FEW_CHARACTERS:
            return None

        def fill(column: "array[Any]", values: object) -> None:
            column.frombytes(np.ascontiguousarray(values, dtype=column.typecode).tobytes())

        cells = Cells(slab, self._table.separator, len(self._table.names))
        if not cells.plain:
            return None
        decimals = cells.decimals(*(time for time, _, _ in self._phases), self._process)
        if decimals is None:
            return None
        columns = OperatorColumns([cells.pick(0).decode().replace(self._table.separator, "\n")[:-1]])
        for phase, (time, word, size) in enumerate(self._phases):
            texts, of_row = cells.words(word)
            codes, elements = [self._code(phase, text) for text in texts], cells.whole_numbers(size)
            if None in codes or elements is None:
                return None
            fill(columns.times_ms[phase], decimals[time])
            fill(columns.words[phase], np.array(codes)[of_row])
            fill(columns.elements[phase], elements)
        fill(columns.process_ms, decimals[self._process])
        return columns

    def _checked(self, slab: str, first_line: int) -> OperatorColumns:
        """Return the rows of *slab*, looked at one by one."""
        names: list[str] = []
        rows = OperatorColumns()
        header = self._table.names
        for number, row in self._table.rows(slab, first_line):
            names.append(row[0])
            for phase, (time, word, size) in enumerate(self._phases):
                rows.times_ms[phase].append(parse_amount(row[time].strip(), header[time], number))
                rows.elements[phase].append(parse_count(row[size].strip(), header[size], number))
                code = self._code(phase, row[word])
                if code is None:
                    text = shorten(row[word].strip())
                    raise FormatError(f"unknown communication {text}; expected one of {WORDS}", line=number)
                rows.words[phase].append(code)
            rows.process_ms.append(parse_amount(row[self._process].strip(), "process_time", number))
        rows.names += ["\n".join(names)] if names else []
        return rows

    def _code(self, phase: int, word: str) -> int | None:
        """Return the number of a word as written, in a phase; None where it is not known."""
        codes = self._codes[phase]
        if word not in codes:
            plain = word.strip()
            if plain in ("None", "NONE", ""):
                codes[word] = SILENT
            elif plain in codes and plain != word:
                codes[word] = codes[plain]
            elif (message := _find_message(phase, plain)) is not None:
                codes[plain] = codes[word] = len(self.messages)
                self.messages.append(message)
            else:
                return None
        return codes[word]


def _find_message(phase: int, word: str) -> Message | None:
    """Return what builds the communication at the end of a phase; None for an unknown word."""
    blocking = not word.endswith("_ASYNC")
    stem = word.removesuffix("_ASYNC")
    return partial(_build_op, stem, phase, blocking) if _communication(stem, 0, phase, blocking) else None


def _build_op(stem: str, phase: int, blocking: bool, elements: int) -> Op:
    work = _communication(stem, elements * int(ELEMENT.bytes), phase, blocking)
    assert work is not None
    return Op(work.kind if isinstance(work, Collective) else work.direction, work, blocking)


def _communication(word: str, size_bytes: int, phase: int, blocking: bool) -> Collective | Transfer | None:
    """Return the work: blocking exchanges outside the weight gradient are tensor parallel, others reduce gradients."""
    if word == "SENDRECV":
        return Transfer(Direction.SEND, size_bytes)
    kind, _, suffix = word.partition("_")
    if kind not in KINDS or (suffix and suffix not in SUFFIXES):
        return None
    bare = Group.TP if blocking and phase < 2 else Group.DP
    return Collective(KINDS[kind], size_bytes, SUFFIXES.get(suffix, bare))


def _assemble(columns: OperatorColumns, messages: Messages, warnings: list[str]) -> Workload:
    span = _find_layer(columns)
    notes: tuple[tuple[str, str], ...] = (("element_dtype", ELEMENT), ("lines", str(len(columns))))
    start, end = span or (0, len(columns))
    repeat = 1
    if span is not None:
        repeat = _guess_repeat(columns, messages, start, end, warnings)
        notes += ((LAYER_BLOCK, str(int(start > 0))),)
    parts = ((0, start, 1), (start, end, repeat), (end, len(columns), 1))
    body = tuple(
        Block(OperatorLayers(columns, messages, first, last), times) for first, last, times in parts if first < last
    )
    return Workload(stages=(Stage(body),), source="optable", notes=notes, warnings=tuple(warnings))


def _find_layer(columns: OperatorColumns) -> tuple[int, int] | None:
    """Return the rows of the only model layer in the table, or None where there are none or several.

    The layer begins at its first row with a layer number and ends where a row of the same module tree (same
    prefix) is outside the numbered layers, such as the final norm, or at the head.
    """
    ends: list[tuple[int, str, str]] = []
    for numbered in _numbered_rows(columns):
        ends[1:] = [numbered]  # the first and the latest
    if not ends or ends[0][2] != ends[-1][2]:
        return None
    start, prefix, _ = ends[0]
    last = ends[-1][0]
    for row, name in enumerate(columns.names_from(last + 1), last + 1):
        if (prefix and name.startswith(prefix)) or name.startswith("lm_head"):
            return start, row
    return start, len(columns)


def _numbered_rows(columns: OperatorColumns) -> Iterator[tuple[int, str, str]]:
    """Yield rows with a layer number: index, the name before it, number; up to the second number."""
    before, number = 0, None
    for slab in (f"\n{names}" for names in columns.names):
        position = counted = 1
        # Looking for a word first is several times faster than the pattern alone.
        is_likely = any(word in slab for word in LAYER_WORDS)
        while is_likely and (match := LAYER_ROW.search(slab, position)):
            begin = slab.rfind("\n", 0, match.start()) + 1
            before, counted = before + slab.count("\n", counted, begin), begin
            yield before, slab[begin : match.start()], match["index"]
            if number not in (None, match["index"]):
                return
            number = match["index"]
            if (position := slab.find("\n", match.end())) < 0:
                break
        before += slab.count("\n", counted) + 1


def _guess_repeat(columns: OperatorColumns, messages: Messages, start: int, end: int, warnings: list[str]) -> int:
    """Return how often the layer repeats, by the hidden size its first norm shows, with a warning either way."""
    hidden = 0
    for row, name in enumerate(columns.names_from(start, end), start):
        message = messages[columns.words[1][row]] if "_h_" in name and "ln" in name else None
        if message is not None and isinstance(message(0).work, Collective):
            hidden = columns.elements[1][row] // 2
            break
    if hidden in GPT2_LAYERS:
        count = GPT2_LAYERS[hidden]
        warnings.append(
            f"the table holds one model layer; its names and hidden size {hidden} are GPT-2's, "
            f"so it is run {count} times. State it with --repeat-layers N"
        )
        return count
    warnings.append("the table holds one model layer and runs it once; state how many with --repeat-layers N")
    return 1
