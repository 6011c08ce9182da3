"""Lines of Megatron-LM rank traces into columns.

A line is one operation with its sub-operations. Only duration, timestamp and micro-batch differ from
line to line; everything else repeats, so it is parsed once, kept as a Row and referred to by number.
"""

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from stepcast.inputs.errors import FormatError
from stepcast.inputs.megatron.words import (
    BUCKET,
    GROUPS,
    KINDS,
    Message,
    message_of,
    parse_count,
    parse_dtype,
    parse_fields,
    parse_ms,
    parse_shape,
)
from stepcast.ir.dtype import DType
from stepcast.ir.timeline import NONE, SpanKind

OPERATIONS_LANE = "ops"
SUB_OPERATIONS = ",sub_operations=["

LINE = re.compile(r"rank:([0-9]{1,7}):([A-Za-z_][A-Za-z0-9_]*)\((.*)", re.ASCII)
# The usual order of fields. Other orders and unusual numbers are read field by field.
USUAL_HEAD = re.compile(
    r"rank:([0-9]{1,7}):([A-Za-z_]\w*)\(stage_id=([0-9]{1,7}),batch_id=([0-9]{1,9}),mg_state=(\w+),"
    r"duration=([0-9]{1,14}(?:\.[0-9]{1,9})?),(.*),timestamp=([0-9]{1,14}(?:\.[0-9]{1,9})?)",
    re.ASCII,
)
USUAL_SUB = re.compile(
    r"(?:^|', ')trace_src_func=([^,'\"\\=]*),duration=([0-9]{1,14}(?:\.[0-9]{1,9})?),"
    r"timestamp=([0-9]{1,14}(?:\.[0-9]{1,9})?),([^'\"\\]*)",
    re.ASCII,
)
QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class Row:
    """What an operation or sub-operation is, without when it ran."""

    rank: int
    stage: int
    name: str
    lane: str
    kind: SpanKind
    is_operation: bool
    message: Message | None
    shape: tuple[int, ...] | None
    dtype: DType | None
    details: tuple[tuple[str, str], ...]

    def detail(self, word: str) -> str | None:
        return next((text for key, text in self.details if key == word), None)

    def marked(self, word: str, text: str) -> "Row":
        """The same row with one more detail."""
        return replace(self, details=(*self.details, (word, text)))


class SubRows(dict[tuple[str, str], int]):
    """Row numbers of one rank's sub-operations, by their text without times."""

    def __init__(self, table: "RowTable", rank: int, stage: int) -> None:
        super().__init__()
        self._table, self._rank, self._stage = table, rank, stage

    def __missing__(self, key: tuple[str, str]) -> int:
        fields = {"trace_src_func": key[0], **parse_fields(key[1])}
        number = self[key] = self.add(fields)
        return number

    def add(self, fields: dict[str, str]) -> int:
        shape = parse_shape(fields.pop("input__shape", "None"))
        dtype = parse_dtype(fields.get("input__dtype", "None"))
        group = fields.get("group", "None")
        name = fields.get("func_name", "None")
        if name in ("None", ""):
            name = fields.get("trace_src_func", "sub_operation")
        communicates = fields.get("comm_func", "None") not in ("None", "")
        row = Row(
            rank=self._rank,
            stage=self._stage,
            name=name,
            lane=GROUPS[group].value if group in GROUPS else group,
            kind=SpanKind.COMMUNICATION if communicates else SpanKind.OTHER,
            is_operation=False,
            message=message_of(name, fields, shape, dtype),
            shape=shape,
            dtype=dtype,
            details=_details(fields, shape),
        )
        return self._table.number_of(row)


@dataclass(slots=True)
class RowTable:
    """Every distinct Row, by number."""

    rows: list[Row] = field(default_factory=list)
    _numbers: dict[Row, int] = field(default_factory=dict)

    def add(self, row: Row) -> int:
        """A row known to be new: its text was not seen before."""
        self.rows.append(row)
        return len(self.rows) - 1

    def number_of(self, row: Row) -> int:
        number = self._numbers.setdefault(row, len(self.rows))
        if number == len(self.rows):
            self.rows.append(row)
        return number


def _details(fields: dict[str, str], shape: tuple[int, ...] | None) -> tuple[tuple[str, str], ...]:
    """What is not held elsewhere, names as in the file but for shape and dtype."""
    kept = [(word, text) for word, text in fields.items() if text != "None" and word != "input__dtype"]
    if shape is not None:
        kept.append(("shape", str(list(shape))))
    if fields.get("input__dtype", "None") != "None":
        kept.append(("dtype", fields["input__dtype"].removeprefix("torch.")))
    return tuple(kept)


class TraceColumns:
    """One row per operation and sub-operation, in file order; an operation comes before its parts."""

    def __init__(self) -> None:
        self.table = RowTable()
        self.row_of = array("i")
        self.duration_ms = array("d")
        self.end_ms = array("d")
        self.micro_batch_of_operation = array("i")
        self.path_of_rank: dict[int, str] = {}
        self._operations: dict[tuple[str, ...], int] = {}
        self._sub_rows: dict[int, SubRows] = {}

    def add_file(self, path: str, lines: Iterable[str]) -> None:
        before = len(self.row_of)
        self._operations.clear()  # so that the first line of each rank claims it for this file
        for number, line in enumerate(lines, 1):
            try:
                if not self._add_usual(path, line) and line.strip():
                    self._add_any(path, line)
            except FormatError as error:
                raise FormatError(error.message, path, number) from None
        if len(self.row_of) == before:
            raise FormatError("holds no operation; expected lines rank:INT:operation(...)", path)

    def _add_usual(self, path: str, line: str) -> bool:
        """Read a line in the usual spelling; False (and nothing added) where it is not."""
        head, found, body = line.partition(SUB_OPERATIONS)
        match = USUAL_HEAD.fullmatch(head)
        if match is None or not found:
            return False
        parts: list[tuple[str, str, str, str]] = []
        if body != "])":
            if not (body.startswith("'") and body.endswith("'])")):
                return False
            inner = body[1:-3]
            parts = USUAL_SUB.findall(inner)
            # Every part was matched whole: nothing but the separators is quoted.
            separators = len(parts) - 1
            if inner.count("', '") != separators or inner.count("'") != 2 * separators:
                return False
        rank, name, stage, batch, state, duration, rest, timestamp = match.groups()
        key = (rank, name, stage, state, rest)
        number = self._operations.get(key)
        if number is None:
            fields = {"mg_state": state, **parse_fields(rest)}
            row = self._operation(path, int(rank), int(stage), name, fields)
            number = self._operations[key] = self.table.add(row)
        self.row_of.append(number)
        self.duration_ms.append(float(duration))
        self.end_ms.append(float(timestamp))
        self.micro_batch_of_operation.append(int(batch))
        if parts:
            sources, durations, timestamps, rests = zip(*parts, strict=True)
            self.row_of.extend(map(self._sub_rows[int(rank)].__getitem__, zip(sources, rests, strict=True)))
            self.duration_ms.extend(map(float, durations))
            self.end_ms.extend(map(float, timestamps))
        return True

    def _add_any(self, path: str, line: str) -> None:
        """Read a line field by field: other dialects, and what is wrong with damaged ones."""
        match = LINE.fullmatch(line.rstrip())
        if match is None:
            raise FormatError(f"found {line[:40]!r}; expected rank:INT:operation(field=value,...)")
        rank, name, text = int(match[1]), match[2], match[3]
        if not text.endswith(")"):
            raise FormatError(f"{name} is cut off; expected the line to end with ')'")
        head, found, body = text.partition(SUB_OPERATIONS)
        if found and not body.endswith("])"):
            raise FormatError(f"sub_operations of {name} is cut off; expected the line to end with '])'")
        fields = parse_fields(head if found else head[:-1])
        for word in ("stage_id", "duration", "timestamp"):
            if word not in fields:
                raise FormatError(f"{name} has no {word}; expected stage_id, duration and timestamp")
        stage = parse_count("stage_id", fields.pop("stage_id"))
        duration_ms = parse_ms("duration", fields.pop("duration"))
        end_ms = parse_ms("timestamp", fields.pop("timestamp"))
        batch = fields.pop("batch_id", fields.get("trigger_batch_id", "None"))
        micro_batch = NONE if batch == "None" else parse_count("batch_id", batch)
        number = self.table.number_of(self._operation(path, rank, stage, name, fields))
        parts = [self._part(rank, text) for text in _strings(body[:-2])] if found else []
        self.row_of.append(number)
        self.duration_ms.append(duration_ms)
        self.end_ms.append(end_ms)
        self.micro_batch_of_operation.append(micro_batch)
        for part, part_duration_ms, part_end_ms in parts:
            self.row_of.append(part)
            self.duration_ms.append(part_duration_ms)
            self.end_ms.append(part_end_ms)

    def _part(self, rank: int, text: str) -> tuple[int, float, float]:
        fields = parse_fields(text)
        if "duration" not in fields or "timestamp" not in fields:
            raise FormatError(f"a sub-operation has no duration or timestamp: {text[:40]!r}")
        duration_ms = parse_ms("duration", fields.pop("duration"))
        end_ms = parse_ms("timestamp", fields.pop("timestamp"))
        return self._sub_rows[rank].add(fields), duration_ms, end_ms

    def _operation(self, path: str, rank: int, stage: int, name: str, fields: dict[str, str]) -> Row:
        self._claim(path, rank, stage)
        shape = parse_shape(fields.pop("input__shape", "None"))
        dtype = parse_dtype(fields.get("input__dtype", "None"))
        if name == BUCKET and shape is None and "bucket_numel" in fields:
            shape = parse_shape(f"[{fields['bucket_numel']}]")
            dtype = parse_dtype(fields.get("grad_dtype", "None"))
        group = GROUPS.get(fields.get("group_kind", "None"))
        return Row(
            rank=rank,
            stage=stage,
            name=name,
            lane=group.value if name == BUCKET and group is not None else OPERATIONS_LANE,
            kind=KINDS.get(name, SpanKind.OTHER),
            is_operation=True,
            message=message_of(name, fields, shape, dtype),
            shape=shape,
            dtype=dtype,
            details=_details(fields, shape),
        )

    def _claim(self, path: str, rank: int, stage: int) -> None:
        """Each rank belongs to one file and one stage."""
        other = self.path_of_rank.setdefault(rank, path)
        if other != path:
            raise FormatError(f"rank {rank} is also in {other}; expected each rank of the run once")
        sub_rows = self._sub_rows.get(rank)
        if sub_rows is None:
            self._sub_rows[rank] = SubRows(self.table, rank, stage)
        elif sub_rows._stage != stage:
            raise FormatError(f"rank {rank} is on stage {stage}, but on stage {sub_rows._stage} before")


def _strings(text: str) -> list[str]:
    """The strings in the inside of a printed Python list."""
    strings, position = [], 0
    while position < len(text):
        match = QUOTED.match(text, position)
        if match is None:
            raise FormatError(
                f"sub_operations has {text[position : position + 40]!r}; expected a quoted string"
            )
        strings.append(ESCAPED.sub(r"\1", match[1] if match[1] is not None else match[2]))
        position = match.end()
        if position < len(text):
            if not text.startswith(", ", position):
                raise FormatError("sub_operations are not separated by ', '")
            position += 2
    return strings
