"""Operator tables: one row per operator of one GPU, tab or comma separated.

Times are milliseconds, sizes are elements. A row ``X_grad`` carries the gradient reduction of operator X
and stands before it, so that the backward, which walks the rows in reverse, meets it just after X.
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain

from stepcast.inputs.errors import FormatError
from stepcast.inputs.numbers import check_different, parse_amount, parse_count, shorten
from stepcast.inputs.operator_rows import SILENT, Columns, Messages, OperatorLayers
from stepcast.inputs.simai.reader import KINDS
from stepcast.inputs.source import Source
from stepcast.ir.dtype import DType
from stepcast.ir.edits import LAYER_BLOCK
from stepcast.ir.group import Group
from stepcast.ir.work import Collective, Direction, Transfer
from stepcast.ir.workload import Block, Op, Stage, Workload

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

# A row of model layer i: transformer_h_0_ln_1, model_decoder_layers_0_fc1, encoder_layer_3_output ...
LAYER_ROW = re.compile(r"(?:^|_)(?:h|layers?|blocks?)_(?P<index>\d+)_", re.MULTILINE)
LAYER_WORDS = ("\nh_", "_h_", "layer", "block")
FEW_CHARACTERS = 65_536  # read sooner row by row than numpy is loaded
# Layers of the GPT-2 family by hidden size (Radford et al. 2019, table 2).
GPT2_LAYERS = {768: 12, 1024: 24, 1280: 36, 1600: 48}


def looks_like(head: str) -> bool:
    first = head.split("\n", 1)[0]
    return "forward_compute_time" in first and "weight_grad_comm_size" in first


def read(source: Source) -> Workload:
    """The table as a one-stage workload of one micro-batch."""
    slabs = source.slabs()
    header, _, rest = next(slabs, "").partition("\n")
    separator = "\t" if "\t" in header else ","
    names, warnings = _columns(header.split(separator))
    rows = _Rows(names, separator)
    line = 2
    for slab in chain((rest,) if rest else (), slabs):
        rows.add(slab, line)
        line += slab.count("\n")
    columns = rows.columns
    if not len(columns):
        raise FormatError("table has a header but no rows; expected one row per operator", line=1)
    if not any(map(any, columns.times_ms[1:])):
        warnings.append(
            "every backward time is 0: the writer left them out. "
            "Give --backward-factor 2 to take backward as twice forward (the usual ratio for matmuls)"
        )
    return _assemble(columns, rows.messages, warnings)


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


class _Rows:
    """Rows to columns, by the slab where all is as usual, else one by one, to say which line is wrong."""

    def __init__(self, names: list[str], separator: str) -> None:
        self._names, self._separator = names, separator
        place = {name: at for at, name in enumerate(names)}
        time, word, size = ([place[f"{phase}_{field}"] for phase in PHASES] for field in FIELDS)
        self._phases = list(zip(time, word, size, strict=True))
        self._process = place["process_time"]
        self._codes: list[dict[str, int]] = [{} for _ in PHASES]
        self.messages: list[Callable[[int], Op] | None] = [None]
        self.columns = Columns()

    def add(self, slab: str, first: int) -> None:
        self.columns.add(self._plain(slab) or self._checked(slab, first))

    def _plain(self, slab: str) -> Columns | None:
        if len(slab) < FEW_CHARACTERS:
            return None
        from stepcast.inputs.operator_slab import plain_columns

        width = len(self._names)
        return plain_columns(slab, self._separator, width, self._phases, self._process, self._code)

    def _checked(self, slab: str, first: int) -> Columns:
        """Row by row; blank lines count and give none."""
        names: list[str] = []
        rows = Columns()
        for number, line in enumerate(slab.split("\n"), first):
            if not line.strip():
                continue
            row = line.split(self._separator)
            if len(row) != len(self._names):
                raise FormatError(f"has {len(row)} columns; expected {len(self._names)}", line=number)
            names.append(row[0])
            for phase, (time, word, size) in enumerate(self._phases):
                rows.times_ms[phase].append(parse_amount(row[time].strip(), self._names[time], number))
                rows.elements[phase].append(parse_count(row[size].strip(), self._names[size], number))
                code = self._code(phase, row[word])
                if code is None:
                    said = shorten(row[word].strip())
                    raise FormatError(f"unknown communication {said}; expected one of {WORDS}", line=number)
                rows.words[phase].append(code)
            rows.process_ms.append(parse_amount(row[self._process].strip(), "process_time", number))
        rows.names += ["\n".join(names)] if names else []
        return rows

    def _code(self, phase: int, word: str) -> int | None:
        """The number of a word as written, in a phase; None where it is not known."""
        codes = self._codes[phase]
        if word not in codes:
            said = word.strip()
            if said in ("None", "NONE", ""):
                codes[word] = SILENT
            elif said in codes and said != word:
                codes[word] = codes[said]
            elif (message := _message(phase, said)) is not None:
                codes[said] = codes[word] = len(self.messages)
                self.messages.append(message)
            else:
                return None
        return codes[word]


def _message(phase: int, word: str) -> Callable[[int], Op] | None:
    """What makes the communication at the end of a phase of so many elements; None for an unknown word."""
    blocking = not word.endswith("_ASYNC")
    stem = word.removesuffix("_ASYNC")
    return partial(_op, stem, phase, blocking) if _communication(stem, 0, phase, blocking) else None


def _op(stem: str, phase: int, blocking: bool, elements: int) -> Op:
    work = _communication(stem, elements * int(ELEMENT.bytes), phase, blocking)
    assert work is not None
    return Op(work.kind if isinstance(work, Collective) else work.direction, work, blocking)


def _communication(word: str, size_bytes: int, phase: int, blocking: bool) -> Collective | Transfer | None:
    """Blocking exchanges outside the weight gradient are tensor parallel, the others reduce gradients."""
    if word == "SENDRECV":
        return Transfer(Direction.SEND, size_bytes)
    kind, _, suffix = word.partition("_")
    if kind not in KINDS or (suffix and suffix not in SUFFIXES):
        return None
    bare = Group.TP if blocking and phase < 2 else Group.DP
    return Collective(KINDS[kind], size_bytes, SUFFIXES.get(suffix, bare))


def _assemble(columns: Columns, messages: Messages, warnings: list[str]) -> Workload:
    span = _one_layer(columns)
    notes: tuple[tuple[str, str], ...] = (("element_dtype", ELEMENT), ("lines", str(len(columns))))
    start, end = span or (0, len(columns))
    repeat = 1
    if span is not None:
        repeat = _guess_repeat(columns, messages, start, end, warnings)
        notes += ((LAYER_BLOCK, str(int(start > 0))),)
    parts = ((0, start, 1), (start, end, repeat), (end, len(columns), 1))
    body = tuple(
        Block(OperatorLayers(columns, messages, first, last), times)
        for first, last, times in parts
        if first < last
    )
    return Workload(stages=(Stage(body),), source="optable", notes=notes, warnings=tuple(warnings))


def _one_layer(columns: Columns) -> tuple[int, int] | None:
    """Rows of the only model layer in the table, or None where there are none or several.

    The layer begins at its first row with a layer number and ends where a row of the same module tree
    (same prefix) stands outside the numbered layers, such as the final norm, or at the head.
    """
    found: list[tuple[int, str, str]] = []
    for each in _numbered(columns):
        found[1:] = [each]  # the first and the latest
    if not found or found[0][2] != found[-1][2]:
        return None
    start, prefix, _ = found[0]
    last = found[-1][0]
    for at, name in enumerate(columns.names_from(last + 1), last + 1):
        if (prefix and name.startswith(prefix)) or name.startswith("lm_head"):
            return start, at
    return start, len(columns)


def _numbered(columns: Columns) -> Iterator[tuple[int, str, str]]:
    """Rows with a layer number: place, what stands before it, number; up to the second number."""
    before, number = 0, None
    for slab in (f"\n{names}" for names in columns.names):
        at = counted = 1
        # Looking for a word first is several times faster than the pattern alone.
        likely = any(word in slab for word in LAYER_WORDS)
        while likely and (match := LAYER_ROW.search(slab, at)):
            begin = slab.rfind("\n", 0, match.start()) + 1
            before, counted = before + slab.count("\n", counted, begin), begin
            yield before, slab[begin : match.start()], match["index"]
            if number not in (None, match["index"]):
                return
            number = match["index"]
            if (at := slab.find("\n", match.end())) < 0:
                break
        before += slab.count("\n", counted) + 1


def _guess_repeat(columns: Columns, messages: Messages, start: int, end: int, warnings: list[str]) -> int:
    """How often the layer repeats, by the hidden size its first norm shows, with a warning either way."""
    named = enumerate(columns.names_from(start, end), start)
    norms = (at for at, name in named if "_h_" in name and "ln" in name)
    reduced = (at for at in norms if _is_collective(messages[columns.words[1][at]]))
    hidden = next((columns.elements[1][at] // 2 for at in reduced), 0)
    if hidden in GPT2_LAYERS:
        count = GPT2_LAYERS[hidden]
        warnings.append(
            f"the table holds one model layer; its names and hidden size {hidden} are GPT-2's, "
            f"so it is run {count} times. State it with --repeat-layers N"
        )
        return count
    warnings.append("the table holds one model layer and runs it once; state how many with --repeat-layers N")
    return 1


def _is_collective(message: Callable[[int], Op] | None) -> bool:
    return message is not None and isinstance(message(0).work, Collective)
