"""Lines of Megatron-LM rank traces: each is one operation with its sub-operations."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stepcast.inputs.kineto.columns import WORDS, collective_named, dtype_named
from stepcast.inputs.source import FormatError
from stepcast.ir.dataclass import dataclass
from stepcast.ir.dtype import DType
from stepcast.ir.layout import Group
from stepcast.ir.timeline import NONE, SpanKind
from stepcast.ir.work import Collective, CollectiveKind, Direction, Transfer, Work

# Sizes in the names of traces, fields of a word and a number in any order: Echo writes files such as
# ``wd8_tp2_pp4_numl40_bs2_..._rank7_....txt`` and ``wd8_tp1_pp2_exp4_expNum8_l8_bs1_...``, and folders such as
# ``pp2_tp1_exp4_expn8_dp4_nl8_hs1024_sl2048`` (fwyc0573/Megatron-LM, megatron/profiler).

FIELD = re.compile(r"(?:^|(?<=[_\-.]))([A-Za-z]{1,8})([0-9]{1,7})(?=[_\-.]|$)", re.ASCII)
NAMED_SIZES = {"wd": "world", "tp": "tp", "pp": "pp", "dp": "dp", "exp": "ep", "ep": "ep"}
NAMED_SIZES |= dict.fromkeys(("numl", "nl", "l"), "layers") | dict.fromkeys(("bs", "mbs"), "micro_batch")
# A name that gives fewer of these is not one of a run: l8.txt may be anything.
DEGREES = ("world", "tp", "pp")
FEWEST_DEGREES = 2


def file_name_hints(path: str) -> dict[str, int]:
    """Return sizes that the file's name gives, or else the name of its folder."""
    hints: dict[str, int] = {}
    for name in reversed(path.replace("\\", "/").split("/")[-2:]):
        sizes: dict[str, int] = {}
        for word, text in FIELD.findall(name):
            if word.lower() in NAMED_SIZES and int(text):
                sizes.setdefault(NAMED_SIZES[word.lower()], int(text))
        if sum(size in sizes for size in DEGREES) >= FEWEST_DEGREES:
            hints = {**sizes, **hints}
    dp = hints.pop("dp", 0)
    if dp and "tp" in hints and "pp" in hints:
        hints.setdefault("world", hints["tp"] * hints["pp"] * dp)
    return hints


# The words of a Megatron-LM rank trace: operations, groups, collectives, shapes and numbers.

# No trace lasts 30,000 years; what is beyond is a damaged number.
LARGEST_MS = 1e15
LARGEST_BYTES = 2**62

NUMBER = re.compile(r"[+-]?[0-9]{1,40}(?:\.[0-9]{0,40})?(?:[eE][+-]?[0-9]{1,3})?|nan|-?inf", re.ASCII)
COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)
SHAPE = re.compile(r"(?:torch\.Size\()?\[((?:[0-9]{1,15}(?:, ?[0-9]{1,15})*)?)\]\)?", re.ASCII)
FIELD_START = re.compile(r",(?=[A-Za-z_][A-Za-z0-9_]*=)")

# The peer of a transfer is so many stages up (+1) or down (-1) the pipeline.
TRANSFERS: dict[str, tuple[Direction, int]] = {
    "recv_forward": (Direction.RECEIVE, -1),
    "send_forward": (Direction.SEND, 1),
    "recv_backward": (Direction.RECEIVE, 1),
    "send_backward": (Direction.SEND, -1),
}
GROUPS = {word: Group(group) for group, words in WORDS["megatron_groups"].items() for word in words.split()}
# The group that an operation reduces over, used where its line names none.
REDUCTIONS = {f"{word}_allreduce": GROUPS[word] for word in ("dp", "ep", "pep", "ep_dp", "exp_dp")}
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


def parse_ms(word: str, text: str) -> float:
    """Return the milliseconds of field *word*; ``None`` (never measured) is zero."""
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
    """Return the sizes of ``[2048, 2, 5120]``; None where nothing is written."""
    if text in ("None", ""):
        return None
    match = SHAPE.fullmatch(text)
    if match is None:
        raise FormatError(f"input__shape is {text[:40]!r}; expected a list of whole numbers like [2048, 2, 5120]")
    return tuple(int(size) for size in match[1].split(",")) if match[1] else ()


def parse_fields(text: str) -> dict[str, str]:
    """Return ``a=1,b=x, y,c=2`` as a mapping: a comma ends a value only where ``word=`` follows."""
    fields: dict[str, str] = {}
    for part in FIELD_START.split(text):
        word, equals, value = part.partition("=")
        if not equals or not word.isidentifier():
            raise FormatError(f"found {part[:40]!r}; expected fields word=value separated by commas")
        if word in fields:
            raise FormatError(f"field {word} is given twice")
        fields[word] = value
    return fields


@dataclass(frozen=True, slots=True)
class TraceMessage:
    """Communication as the trace shows it: the bytes of the tensor that was handed in."""

    kind: CollectiveKind | None  # None: a transfer between stages
    input_bytes: int
    group: Group
    direction: Direction | None = None
    peer_offset: int = 0

    def work(self, ranks: int | None) -> Work:
        """Return it as work: an all-gather's complete buffer is *ranks* times what each rank hands in."""
        if self.kind is None:
            assert self.direction is not None
            return Transfer(self.direction, self.input_bytes, self.group, self.peer_offset)
        gathers = self.kind in (CollectiveKind.ALL_GATHER, CollectiveKind.GATHER)
        return Collective(self.kind, self.input_bytes * (ranks or 1 if gathers else 1), self.group)


def read_message(
    name: str, fields: dict[str, str], shape: tuple[int, ...] | None, dtype: DType | None
) -> TraceMessage | None:
    """Return what an operation or sub-operation sends, where its line states how much."""
    word = fields.get("comm_func", "None").replace("_", "")
    kind = collective_named(word)
    if word not in ("None", "") and not isinstance(kind, CollectiveKind):
        raise FormatError(f"unknown collective {word[:40]!r}; expected such as allreduce or all_to_all")
    if shape is None or dtype is None:
        return None
    elements = math.prod(shape)
    input_bytes = round(elements * dtype.bytes)
    if input_bytes > LARGEST_BYTES:
        raise FormatError(f"a tensor of {elements} elements is too large to be real")
    if name in TRANSFERS:
        direction, offset = TRANSFERS[name]
        return TraceMessage(None, input_bytes, Group.PP, direction, offset)
    group = GROUPS.get(fields.get("group", fields.get("group_kind", "None")), REDUCTIONS.get(name))
    kind = kind or (CollectiveKind.ALL_REDUCE if name in REDUCTIONS else None)
    return None if group is None or not isinstance(kind, CollectiveKind) else TraceMessage(kind, input_bytes, group)


OPERATIONS_LANE = "ops"
SUB_OPERATIONS = ",sub_operations=["

LINE = re.compile(r"rank:([0-9]{1,7}):([A-Za-z_][A-Za-z0-9_]*)\((.*)", re.ASCII)
QUOTED = re.compile(r"'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\"")
ESCAPED = re.compile(r"\\(.)")


@dataclass(frozen=True, slots=True)
class TraceRow:
    """An operation or sub-operation without its times."""

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
        """Return the same row with one more detail."""
        return replace(self, details=(*self.details, (word, text)))


def read_row(
    rank: int, stage: int, name: str, fields: dict[str, str], *, lane: str, kind: SpanKind, is_operation: bool
) -> TraceRow:
    """Return the row of an operation or sub-operation; details are the fields as the file names them."""
    shape = parse_shape(fields.pop("input__shape", "None"))
    dtype = dtype_named(fields.get("input__dtype", "None").removeprefix("torch."))
    if is_operation and name == BUCKET and shape is None and "bucket_numel" in fields:
        shape = parse_shape(f"[{fields['bucket_numel']}]")
        dtype = dtype_named(fields.get("grad_dtype", "None").removeprefix("torch."))
    details = [(word, text) for word, text in fields.items() if text != "None" and word != "input__dtype"]
    if shape is not None:
        details.append(("shape", str(list(shape))))
    if fields.get("input__dtype", "None") != "None":
        details.append(("dtype", fields["input__dtype"].removeprefix("torch.")))
    message = read_message(name, fields, shape, dtype)
    return TraceRow(rank, stage, name, lane, kind, is_operation, message, shape, dtype, tuple(details))


@dataclass(slots=True)
class TraceLine:
    """A row with its times; *operation* is the index of the operation that it is or belongs to."""

    row: TraceRow
    duration_ms: float
    end_ms: float
    micro_batch: int
    operation: int

    @property
    def start_ms(self) -> float:
        return self.end_ms - self.duration_ms


class TraceLines:
    """The operations of several files, each followed by its parts."""

    def __init__(self) -> None:
        self.lines: list[TraceLine] = []
        self.path_of_rank: dict[int, str] = {}
        self._stage_of_rank: dict[int, int] = {}

    def add_file(self, path: str, lines: Iterable[str]) -> None:
        before = len(self.lines)
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    self._add(path, line)
            except FormatError as error:
                raise FormatError(error.message, path, number) from None
        if len(self.lines) == before:
            raise FormatError("holds no operation; expected lines rank:INT:operation(...)", path)

    def _add(self, path: str, line: str) -> None:
        match = LINE.fullmatch(line.rstrip())
        if match is None:
            raise FormatError(f"found {line[:40]!r}; expected rank:INT:operation(field=value,...)")
        rank, name, text = int(match[1]), match[2], match[3]
        if not text.endswith(")"):
            raise FormatError(f"{name} is cut off; expected the line to end with ')'")
        head, separator, body = text.partition(SUB_OPERATIONS)
        if separator and not body.endswith("])"):
            raise FormatError(f"sub_operations of {name} is cut off; expected the line to end with '])'")
        fields = parse_fields(head if separator else head[:-1])
        for word in ("stage_id", "duration", "timestamp"):
            if word not in fields:
                raise FormatError(f"{name} has no {word}; expected stage_id, duration and timestamp")
        stage = parse_count("stage_id", fields.pop("stage_id"))
        times = _pop_times(fields)
        batch = fields.pop("batch_id", fields.get("trigger_batch_id", "None"))
        micro_batch = NONE if batch == "None" else parse_count("batch_id", batch)
        other = self.path_of_rank.setdefault(rank, path)
        if other != path:
            raise FormatError(f"rank {rank} is also in {other}; expected each rank of the run once")
        if self._stage_of_rank.setdefault(rank, stage) != stage:
            raise FormatError(f"rank {rank} is on stage {stage}, but on stage {self._stage_of_rank[rank]} before")
        group, operation = GROUPS.get(fields.get("group_kind", "None")), len(self.lines)
        lane = group.value if name == BUCKET and group is not None else OPERATIONS_LANE
        kind = KINDS.get(name, SpanKind.OTHER)
        row = read_row(rank, stage, name, fields, lane=lane, kind=kind, is_operation=True)
        self.lines.append(TraceLine(row, *times, micro_batch, operation))
        for part in _parse_strings(body[:-2]) if separator else ():
            fields = parse_fields(part)
            if "duration" not in fields or "timestamp" not in fields:
                raise FormatError(f"a sub-operation has no duration or timestamp: {part[:40]!r}")
            times = _pop_times(fields)
            self.lines.append(TraceLine(_read_part(rank, stage, fields), *times, micro_batch, operation))


def _pop_times(fields: dict[str, str]) -> tuple[float, float]:
    return parse_ms("duration", fields.pop("duration")), parse_ms("timestamp", fields.pop("timestamp"))


def _read_part(rank: int, stage: int, fields: dict[str, str]) -> TraceRow:
    group, name = fields.get("group", "None"), fields.get("func_name", "None")
    if name in ("None", ""):
        name = fields.get("trace_src_func", "sub_operation")
    kind = SpanKind.COMMUNICATION if fields.get("comm_func", "None") not in ("None", "") else SpanKind.OTHER
    lane = GROUPS[group].value if group in GROUPS else group
    return read_row(rank, stage, name, fields, lane=lane, kind=kind, is_operation=False)


def _parse_strings(text: str) -> list[str]:
    """Return the strings in the inside of a printed Python list."""
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


@dataclass(frozen=True, slots=True)
class RankEvidence:
    """The sizes of the run that one rank's operations show."""

    rank: int
    stage: int
    path: str
    transfer: tuple[int, ...] | None  # sequence, micro-batch, hidden
    tokens: tuple[int, ...] | None  # micro-batch, sequence
    word_embedding: tuple[int, ...] | None  # this rank's rows of the vocabulary, hidden
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
    """Check that ranks share the tensors between stages, the batch and each stage's parameters."""
    for name, title in (("transfer", "tensors between stages"), ("tokens", "batches"), ("hidden", "hidden sizes")):
        values = [(rank, value) for rank in ranks if (value := getattr(rank, name)) is not None]
        for rank, value in values[1:]:
            first, expected = values[0]
            if value != expected:
                raise FormatError(
                    f"rank {rank.rank} has {title} of {value}, but rank {first.rank} of {expected}; expected "
                    "ranks of one run",
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
    """Return the sizes that all file names agree on; nothing where a file has no such name."""
    hints = [file_name_hints(rank.path) for rank in ranks]
    return {name: size for name, size in hints[0].items() if all(other.get(name) == size for other in hints)}
