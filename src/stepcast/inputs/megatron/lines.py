"""Lines of Megatron-LM rank traces into columns.

A line is one operation with its sub-operations. Only duration, timestamp and micro-batch differ from
line to line; everything else repeats, so it is parsed once, kept as a Row and referred to by number.
"""

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from stepcast.inputs.source import FormatError
from stepcast.ir.dtype import DType
from stepcast.ir.group import Group
from stepcast.ir.timeline import NONE, SpanKind
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer, Work

# What the name of a Megatron-LM trace says of its run.
#
# Echo writes ``wd8_tp2_pp4_numl40_bs2_..._rank7_....txt``, ``wd8_tp1_pp2_exp4_expNum8_l8_bs1_...`` and
# folders such as ``pp2_tp1_exp4_expn8_dp4_nl8_hs1024_sl2048`` (fwyc0573/Megatron-LM, megatron/profiler):
# fields of a word and a number in any order.

FIELD = re.compile(r"(?:^|(?<=[_\-.]))([A-Za-z]{1,8})([0-9]{1,7})(?=[_\-.]|$)", re.ASCII)
WORDS = {
    "wd": "world",
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "exp": "ep",
    "ep": "ep",
    "numl": "layers",
    "nl": "layers",
    "l": "layers",
    "bs": "micro_batch",
    "mbs": "micro_batch",
}
# A name that gives fewer of these is not one of a run: l8.txt may be anything.
DEGREES = ("world", "tp", "pp")
FEWEST_DEGREES = 2


def file_name_hints(path: str) -> dict[str, int]:
    """Sizes that the file's name gives, or else the name of its folder."""
    hints: dict[str, int] = {}
    for name in reversed(path.replace("\\", "/").split("/")[-2:]):
        hints = {**_fields(name), **hints}
    dp = hints.pop("dp", 0)
    if dp and "tp" in hints and "pp" in hints:
        hints.setdefault("world", hints["tp"] * hints["pp"] * dp)
    return hints


def _fields(name: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for word, text in FIELD.findall(name):
        known = WORDS.get(word.lower())
        if known is not None and int(text):
            found.setdefault(known, int(text))
    return found if sum(word in found for word in DEGREES) >= FEWEST_DEGREES else {}


# The words of a Megatron-LM rank trace: operations, groups, collectives, shapes and numbers.

# No trace lasts 30,000 years; what is beyond is a damaged number.
LARGEST_MS = 1e15
LARGEST_BYTES = 2**62

NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?|nan|-?inf", re.ASCII)
COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)
SHAPE = re.compile(r"(?:torch\.Size\()?\[((?:[0-9]{1,15}(?:, ?[0-9]{1,15})*)?)\]\)?", re.ASCII)
FIELD_START = re.compile(r",(?=[A-Za-z_][A-Za-z0-9_]*=)")

# Where a transfer's peer is: stages up (+1) or down (-1) the pipeline.
TRANSFERS: dict[str, tuple[Direction, int]] = {
    "recv_forward": (Direction.RECEIVE, -1),
    "send_forward": (Direction.SEND, 1),
    "recv_backward": (Direction.RECEIVE, 1),
    "send_backward": (Direction.SEND, -1),
}
# The group that an operation reduces over, used where its line names none.
REDUCTIONS: dict[str, Group] = {
    "dp_allreduce": Group.DP,
    "ep_allreduce": Group.EMBEDDING,
    "pep_allreduce": Group.EMBEDDING,
    "ep_dp_allreduce": Group.EXPERT_DP,
    "exp_dp_allreduce": Group.EXPERT_DP,
}
BUCKET = "ddp_grad_comm"  # one gradient bucket, launched from within the backward pass
KINDS: dict[str, SpanKind] = {
    "get_batch": SpanKind.HOST,
    "forward_step": SpanKind.COMPUTE,
    "loss_func": SpanKind.COMPUTE,
    "backward_step": SpanKind.COMPUTE,
    "optimizer_step": SpanKind.COMPUTE,
    BUCKET: SpanKind.COMMUNICATION,
    **dict.fromkeys(TRANSFERS, SpanKind.COMMUNICATION),
    **dict.fromkeys(REDUCTIONS, SpanKind.COMMUNICATION),
}
# "ep" is the embedding group (first and last stage), "pep" the one of position embeddings; experts are "exp".
GROUPS: dict[str, Group] = {
    "tp": Group.TP,
    "cp": Group.CP,
    "dp": Group.DP,
    "pp": Group.PP,
    "ep": Group.EMBEDDING,
    "pep": Group.EMBEDDING,
    "exp": Group.EP,
    "ep_dp": Group.EXPERT_DP,
    "exp_dp": Group.EXPERT_DP,
}
COLLECTIVES: dict[str, CollectiveKind] = {
    "allreduce": CollectiveKind.ALL_REDUCE,
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "broadcast": CollectiveKind.BROADCAST,
    "allgather": CollectiveKind.ALL_GATHER,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "reducescatter": CollectiveKind.REDUCE_SCATTER,
    "all_to_all": CollectiveKind.ALL_TO_ALL,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "reduce": CollectiveKind.REDUCE,
    "gather": CollectiveKind.GATHER,
    "scatter": CollectiveKind.SCATTER,
    "barrier": CollectiveKind.BARRIER,
}
DTYPES: dict[str, DType] = {
    "float64": DType.FP64,
    "double": DType.FP64,
    "float32": DType.FP32,
    "float": DType.FP32,
    "float16": DType.FP16,
    "half": DType.FP16,
    "bfloat16": DType.BF16,
    "float8_e4m3fn": DType.FP8,
    "float8_e5m2": DType.FP8,
    "int64": DType.INT64,
    "long": DType.INT64,
    "int32": DType.INT32,
    "int": DType.INT32,
    "int16": DType.INT16,
    "int8": DType.INT8,
    "uint8": DType.INT8,
    "bool": DType.BOOL,
}


def parse_ms(word: str, text: str) -> float:
    """The milliseconds of field *word*; ``None`` (never measured) is zero."""
    if text == "None":
        return 0.0
    if not NUMBER.fullmatch(text):
        raise FormatError(f"{word} is {text[:40]!r}; expected milliseconds, a number like 604.58")
    value = float(text)
    if not (0 <= value < LARGEST_MS):
        raise FormatError(f"{word} is {text[:40]}; expected milliseconds, zero or more and below 1e15")
    return value


def parse_count(word: str, text: str) -> int:
    if not COUNT.fullmatch(text):
        raise FormatError(f"{word} is {text[:40]!r}; expected a whole number")
    return int(text)


def parse_shape(text: str) -> tuple[int, ...] | None:
    """``[2048, 2, 5120]``; None where nothing is written."""
    if text in ("None", ""):
        return None
    match = SHAPE.fullmatch(text)
    if match is None:
        raise FormatError(f"input__shape is {text[:40]!r}; expected a list of whole numbers like [2048, 2, 5120]")
    return tuple(int(size) for size in match[1].split(",")) if match[1] else ()


def parse_fields(text: str) -> dict[str, str]:
    """``a=1,b=x, y,c=2`` as a mapping: a comma ends a value only where ``word=`` follows."""
    fields: dict[str, str] = {}
    for part in FIELD_START.split(text):
        word, equals, value = part.partition("=")
        if not equals or not word.isidentifier():
            raise FormatError(f"found {part[:40]!r}; expected fields word=value separated by commas")
        if word in fields:
            raise FormatError(f"field {word} is given twice")
        fields[word] = value
    return fields


def parse_dtype(text: str) -> DType | None:
    return DTYPES.get(text.removeprefix("torch."))


def tensor_bytes(elements: int, dtype: DType) -> int:
    size_bytes = round(elements * dtype.bytes)
    if size_bytes > LARGEST_BYTES:
        raise FormatError(f"a tensor of {elements} elements is too large to be real")
    return size_bytes


@dataclass(frozen=True, slots=True)
class TraceMessage:
    """Communication as the trace shows it: the bytes of the tensor that was handed in."""

    kind: CollectiveKind | None  # None: a transfer between stages
    input_bytes: int
    group: Group
    direction: Direction | None = None
    peer_offset: int = 0

    def work(self, ranks: int | None) -> Work:
        """As work: an all-gather's whole buffer is *ranks* times what each rank hands in."""
        if self.kind is None:
            assert self.direction is not None
            return Transfer(self.direction, self.input_bytes, self.group, self.peer_offset)
        gathers = self.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)
        return Collective(self.kind, self.input_bytes * (ranks or 1 if gathers else 1), self.group)


def message_of(
    name: str, fields: dict[str, str], shape: tuple[int, ...] | None, dtype: DType | None
) -> TraceMessage | None:
    """What an operation or sub-operation sends, where its line says how much."""
    word = fields.get("comm_func", "None")
    if word not in ("None", "") and word not in COLLECTIVES:
        raise FormatError(f"unknown collective {word[:40]!r}; expected one of {', '.join(COLLECTIVES)}")
    if shape is None or dtype is None:
        return None
    input_bytes = tensor_bytes(math.prod(shape), dtype)
    group = GROUPS.get(fields.get("group", fields.get("group_kind", "None")), REDUCTIONS.get(name))
    if name in TRANSFERS:
        direction, offset = TRANSFERS[name]
        return TraceMessage(None, input_bytes, Group.PP, direction, offset)
    kind = COLLECTIVES.get(word, CollectiveKind.ALL_REDUCE if name in REDUCTIONS else None)
    return None if group is None or kind is None else TraceMessage(kind, input_bytes, group)


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
class TraceRow:
    """What an operation or sub-operation is, without when it ran."""

    rank: int
    stage: int
    name: str
    lane: str
    kind: SpanKind
    is_operation: bool
    message: TraceMessage | None
    shape: tuple[int, ...] | None
    dtype: DType | None
    details: tuple[tuple[str, str], ...]

    def detail(self, word: str) -> str | None:
        return next((text for key, text in self.details if key == word), None)

    def marked(self, word: str, text: str) -> "TraceRow":
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
        row = TraceRow(
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

    rows: list[TraceRow] = field(default_factory=list)
    _numbers: dict[TraceRow, int] = field(default_factory=dict)

    def add(self, row: TraceRow) -> int:
        """A row known to be new: its text was not seen before."""
        self.rows.append(row)
        return len(self.rows) - 1

    def number_of(self, row: TraceRow) -> int:
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

    def _operation(self, path: str, rank: int, stage: int, name: str, fields: dict[str, str]) -> TraceRow:
        self._claim(path, rank, stage)
        shape = parse_shape(fields.pop("input__shape", "None"))
        dtype = parse_dtype(fields.get("input__dtype", "None"))
        if name == BUCKET and shape is None and "bucket_numel" in fields:
            shape = parse_shape(f"[{fields['bucket_numel']}]")
            dtype = parse_dtype(fields.get("grad_dtype", "None"))
        group = GROUPS.get(fields.get("group_kind", "None"))
        return TraceRow(
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
            raise FormatError(f"sub_operations has {text[position : position + 40]!r}; expected a quoted string")
        strings.append(ESCAPED.sub(r"\1", match[1] if match[1] is not None else match[2]))
        position = match.end()
        if position < len(text):
            if not text.startswith(", ", position):
                raise FormatError("sub_operations are not separated by ', '")
            position += 2
    return strings


# What each rank of a Megatron-LM trace shows of its run, and whether ranks can be of one run.


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """What one rank's operations show of the run."""

    rank: int
    stage: int
    path: str
    transfer: tuple[int, int, int] | None  # sequence, micro-batch, hidden
    tokens: tuple[int, int] | None  # micro-batch, sequence
    word_embedding: tuple[int, int] | None  # this rank's rows of the vocabulary, hidden
    hidden: int | None
    dtype: DType | None
    gradients: int | None
    forward_reduces: int | None  # activations reduced over tp in one forward pass; None: not traced
    micro_batches: int
    has_loss: bool
    # Rows that each all-to-all between experts of a forward pass is handed; None: experts do not communicate.
    exchanges: tuple[int, ...] | None = None

    @property
    def is_last(self) -> bool:
        return self.has_loss or (self.stage > 0 and self.word_embedding is not None)


def check_same_run(ranks: Sequence[RankEvidence]) -> None:
    """Ranks of one run share the tensors between stages, the batch and each stage's parameters."""
    for word, what in (("transfer", "tensors between stages"), ("tokens", "batches"), ("hidden", "hidden sizes")):
        seen = [rank for rank in ranks if getattr(rank, word) is not None]
        for rank in seen[1:]:
            if getattr(rank, word) != getattr(seen[0], word):
                raise FormatError(
                    f"rank {rank.rank} has {what} of {getattr(rank, word)}, but rank {seen[0].rank} of "
                    f"{getattr(seen[0], word)}; expected ranks of one run",
                    rank.path,
                )
    first_on: dict[int, RankEvidence] = {}
    for rank in ranks:
        other = first_on.setdefault(rank.stage, rank)
        if None not in (rank.gradients, other.gradients) and rank.gradients != other.gradients:
            raise FormatError(
                f"rank {rank.rank} has {rank.gradients} gradients, but rank {other.rank} of the same stage "
                f"{other.gradients}; expected ranks of one run",
                rank.path,
            )
    last = min((rank for rank in ranks if rank.is_last), key=lambda rank: rank.stage, default=None)
    later = None if last is None else next((rank for rank in ranks if rank.stage > last.stage), None)
    if last is not None and later is not None:
        raise FormatError(
            f"rank {later.rank} is on stage {later.stage}, but stage {last.stage} of rank {last.rank} is the "
            "last one; expected ranks of one run",
            later.path,
        )


def common_hints(ranks: Sequence[RankEvidence]) -> dict[str, int]:
    """What all file names agree on; nothing where a file has no such name."""
    each = [file_name_hints(rank.path) for rank in ranks]
    return {word: value for word, value in each[0].items() if all(one.get(word) == value for one in each)}
