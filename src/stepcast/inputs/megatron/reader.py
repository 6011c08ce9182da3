"""Megatron-LM rank traces: one line per operation that a rank ran in one traced iteration.

Written by the instrumented Megatron-LM of Echo (fwyc0573/Megatron-LM). Times are milliseconds; a
timestamp is the END of an operation on the host's clock, so clocks of two hosts are unrelated.
Every rank has a lane "ops" with its operations; their parts are on one lane per group ("tp", "dp", ...)
and name the operation as parent. Details have the file's words, and two marks of ours: ``fused_with`` on
the second line of one fused send and receive (count it once) and ``untimed`` where no time was taken.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from stepcast.inputs.kineto.reader import WORDS, collective_named, dtype_named
from stepcast.inputs.megatron.config import RankEvidence, infer
from stepcast.inputs.source import FormatError, Source, expect, parse_amount
from stepcast.ir.layout import Group
from stepcast.ir.timeline import NONE, SpanKind, Timeline, TimelineBuilder
from stepcast.ir.types import DType, dataclass, group_by_key
from stepcast.ir.work import GATHERS, Collective, CollectiveKind, Direction, Transfer
from stepcast.units import MS

# No trace lasts 30,000 years; what is beyond is a damaged number.
LARGEST_MS = 1e15
LARGEST_BYTES = 2**62

COUNT = re.compile(r"[0-9]{1,9}", re.ASCII)
SHAPE = re.compile(r"(?:torch\.Size\()?\[((?:[0-9]{1,15}(?:, ?[0-9]{1,15})*)?)\]\)?", re.ASCII)
FIELD_START = re.compile(r",(?=[A-Za-z_][A-Za-z0-9_]*=)")

# The direction of a transfer, and how many stages up or down the pipeline its peer is.
TRANSFERS = {
    name: (Direction(way), int(stages))
    for name, (way, stages) in ((name, words.split()) for name, words in WORDS["megatron_transfers"].items())
}
GROUPS = {word: Group(group) for group, words in WORDS["megatron_groups"].items() for word in words.split()}
# The group that an operation reduces over, used where its line names none.
REDUCTIONS = {f"{word}_allreduce": GROUPS[word] for word in ("dp", "ep", "pep", "ep_dp", "exp_dp")}
BUCKET = "ddp_grad_comm"  # one gradient bucket, launched from within the backward pass
KINDS = {name: SpanKind[kind.upper()] for kind, names in WORDS["megatron_operations"].items() for name in names.split()}
KINDS |= dict.fromkeys((*TRANSFERS, *REDUCTIONS), SpanKind.COMMUNICATION)


def pop_times(fields: dict[str, str]) -> tuple[float, float]:
    """Take the milliseconds of duration and timestamp out of *fields*; ``None`` (never measured) is zero."""
    times = []
    for word in ("duration", "timestamp"):
        text = fields.pop(word)
        times.append(0.0 if text == "None" else parse_amount(text, f"{word} in milliseconds", None))
        expect(times[-1] < LARGEST_MS, f"{word} is {text[:40]}; expected milliseconds below 1e15")
    return times[0], times[1]


def parse_count(word: str, text: str) -> int:
    expect(COUNT.fullmatch(text), f"{word} is {text[:40]!r}; expected a whole number")
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
        expect(word not in fields, f"field {word} is given twice")
        fields[word] = value
    return fields


def read_message(
    name: str, fields: dict[str, str], shape: tuple[int, ...] | None, dtype: DType | None
) -> Collective | Transfer | None:
    """Return what an operation or sub-operation sends, by the tensor handed in, where its line states how much."""
    word = fields.get("comm_func", "None").replace("_", "")
    kind = collective_named(word)
    if word not in ("None", "") and not isinstance(kind, CollectiveKind):
        raise FormatError(f"unknown collective {word[:40]!r}; expected such as allreduce or all_to_all")
    if shape is None or dtype is None:
        return None
    elements = math.prod(shape)
    input_bytes = round(elements * dtype.bytes)
    expect(input_bytes <= LARGEST_BYTES, f"a tensor of {elements} elements is too large to be real")
    if name in TRANSFERS:
        direction, offset = TRANSFERS[name]
        return Transfer(direction, input_bytes, Group.PP, offset)
    group = GROUPS.get(fields.get("group", fields.get("group_kind", "None")), REDUCTIONS.get(name))
    kind = kind or (CollectiveKind.ALL_REDUCE if name in REDUCTIONS else None)
    return None if group is None or not isinstance(kind, CollectiveKind) else Collective(kind, input_bytes, group)


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
    message: Collective | Transfer | None
    shape: tuple[int, ...] | None
    dtype: DType | None
    details: tuple[tuple[str, str], ...]

    def detail(self, word: str) -> str | None:
        return next((text for key, text in self.details if key == word), None)

    def is_collective(self, kind: CollectiveKind, group: Group) -> bool:
        return isinstance(self.message, Collective) and (self.message.kind, self.message.group) == (kind, group)

    @property
    def is_simulated(self) -> bool:
        """Return whether it was profiled on one GPU that plays a rank of a large run; nothing was sent."""
        return self.is_operation and (self.detail("description") or "").startswith("simulation")


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

    def add(self, path: str, line: str) -> None:
        match = LINE.fullmatch(line.rstrip())
        if match is None:
            raise FormatError(f"found {line[:40]!r}; expected rank:INT:operation(field=value,...)")
        rank, name, text = int(match[1]), match[2], match[3]
        expect(text.endswith(")"), f"{name} is cut off; expected the line to end with ')'")
        head, separator, body = text.partition(",sub_operations=[")
        if separator and not body.endswith("])"):
            raise FormatError(f"sub_operations of {name} is cut off; expected the line to end with '])'")
        fields = parse_fields(head if separator else head[:-1])
        if missing := [word for word in ("stage_id", "duration", "timestamp") if word not in fields]:
            raise FormatError(f"{name} has no {missing[0]}; expected stage_id, duration and timestamp")
        stage = parse_count("stage_id", fields.pop("stage_id"))
        times = pop_times(fields)
        batch = fields.pop("batch_id", fields.get("trigger_batch_id", "None"))
        micro_batch = NONE if batch == "None" else parse_count("batch_id", batch)
        known_path = self.path_of_rank.setdefault(rank, path)
        expect(known_path == path, f"rank {rank} is also in {known_path}; expected each rank of the run once")
        if self._stage_of_rank.setdefault(rank, stage) != stage:
            raise FormatError(f"rank {rank} is on stage {stage}, but on stage {self._stage_of_rank[rank]} before")
        known_group, operation = GROUPS.get(fields.get("group_kind", "None")), len(self.lines)
        lane = known_group.value if name == BUCKET and known_group is not None else "ops"
        kind = KINDS.get(name, SpanKind.OTHER)
        row = read_row(rank, stage, name, fields, lane=lane, kind=kind, is_operation=True)
        self.lines.append(TraceLine(row, *times, micro_batch, operation))
        for part in _parse_strings(body[:-2]) if separator else ():
            fields = parse_fields(part)
            if "duration" not in fields or "timestamp" not in fields:
                raise FormatError(f"a sub-operation has no duration or timestamp: {part[:40]!r}")
            times, group, name = pop_times(fields), fields.get("group", "None"), fields.get("func_name", "None")
            if name in ("None", ""):
                name = fields.get("trace_src_func", "sub_operation")
            kind = SpanKind.COMMUNICATION if fields.get("comm_func", "None") not in ("None", "") else SpanKind.OTHER
            lane = GROUPS[group].value if group in GROUPS else group
            row = read_row(rank, stage, name, fields, lane=lane, kind=kind, is_operation=False)
            self.lines.append(TraceLine(row, *times, micro_batch, operation))


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
            expect(text.startswith(", ", position), "sub_operations are not separated by ', '")
            position += 2
    return strings


# Tensors that show the sizes of a run, with their dimensions.
DIMENSIONS = {"transfer": 3, "tokens": 2, "ep_allreduce": 2, "embedding_fwd": 3, "dp_allreduce": 1, BUCKET: 1}


def read_run(sources: Sequence[Source]) -> Timeline:
    """Return all given ranks of one run as one Timeline."""
    trace = TraceLines()
    seen: set[str] = set()
    for source in sources:
        expect(source.path not in seen, "is given twice; expected each rank of the run once", source.path)
        seen.add(source.path)
        before = len(trace.lines)
        for number, text in enumerate(source.each_line(), 1):
            try:
                if text.strip():
                    trace.add(source.path, text)
            except FormatError as error:
                raise FormatError(error.message, source.path, number) from None
        expect(len(trace.lines) > before, "holds no operation; expected lines rank:INT:operation(...)", source.path)
    lines = trace.lines
    warnings = list(_place_untimed(lines))
    _mark_fused(lines)
    evidence = [
        _rank_evidence(trace.path_of_rank[rank], rank_lines, [lines[line.operation].row.name for line in rank_lines])
        for rank, rank_lines in _by_rank(lines).items()
    ]
    config = infer(evidence)
    warnings += [*_doubt_clocks(lines), *_doubt_words([line.row for line in lines])]
    builder, origin_ms = TimelineBuilder(), min(line.start_ms for line in lines)
    for line in lines:
        row, message = line.row, line.row.message
        if isinstance(message, Collective) and message.kind in GATHERS:
            # The size of its complete buffer: that of the parts that all ranks hand in.
            message = replace(message, size_bytes=message.size_bytes * (config.layout.size(message.group) or 1))
        builder.add(
            row.name,
            builder.lane(row.rank, row.lane),
            (line.start_ms - origin_ms) * MS,
            line.duration_ms * MS,
            kind=row.kind,
            work=message,
            details=row.details,
            micro_batch=line.micro_batch,
            parent=NONE if row.is_operation else line.operation,
        )
    return builder.build(
        measured=True,
        source=", ".join(source.path for source in sources[:3]),
        layout=config.layout,
        stage_of_rank={rank.rank: rank.stage for rank in evidence},
        facts=config.facts,
        warnings=(*config.warnings, *warnings),
        rebase=False,
    )


def _by_rank(lines: Iterable[TraceLine]) -> dict[int, list[TraceLine]]:
    return dict(sorted(group_by_key((line.row.rank, line) for line in lines).items()))


def _place_untimed(lines: Sequence[TraceLine]) -> Iterator[str]:
    """Place lines without a timestamp (profiled in isolation) after the line of their rank before them."""
    timed = [line for line in lines if line.end_ms]
    expect(timed, "no operation has a timestamp; expected milliseconds of the host's clock")
    if len(timed) == len(lines):
        return
    starts_ms = {rank: min(line.start_ms for line in rank_lines) for rank, rank_lines in _by_rank(timed).items()}
    first_start_ms = min(starts_ms.values())
    for rank, rank_lines in _by_rank(lines).items():
        before_ms = 0.0
        for line in rank_lines:
            if line.end_ms:
                before_ms = max(before_ms, line.end_ms)
            else:
                line.end_ms = (before_ms or starts_ms.get(rank, first_start_ms)) + line.duration_ms
                line.row = replace(line.row, details=(*line.row.details, ("untimed", "yes")))
    yield f"{len(lines) - len(timed)} lines have no timestamp; placed after the line before them"


def _mark_fused(lines: Sequence[TraceLine]) -> None:
    """Mark a fused send and receive: two neighbouring lines with the same duration and timestamp."""
    operations = [line for line in lines if line.row.is_operation]
    for before, now in pairwise(operations):
        ways = {TRANSFERS[line.row.name][0] for line in (before, now) if line.row.name in TRANSFERS}
        times = {(line.row.rank, line.duration_ms, line.end_ms) for line in (before, now)}
        if len(ways) == 2 and len(times) == 1:
            now.row = replace(now.row, details=(*now.row.details, ("fused_with", before.row.name)))


def _doubt_clocks(lines: Sequence[TraceLine]) -> Iterator[str]:
    """Warn of ranks that never ran at the same time: not on one clock, or not in one iteration."""
    spans = [
        (min(line.start_ms for line in rank_lines), max(line.end_ms for line in rank_lines), rank)
        for rank, rank_lines in _by_rank(lines).items()
    ]
    latest_ms = min(spans)[1]
    for start_ms, end_ms, rank in sorted(spans):
        if start_ms > latest_ms:
            clocks = "the ranks' clocks are not one, compare no times between them"
            yield f"rank {rank} starts after others have ended: {clocks}"
            return
        latest_ms = max(latest_ms, end_ms)


def _doubt_words(rows: Sequence[TraceRow]) -> Iterator[str]:
    if names := sorted({row.name for row in rows if row.is_operation and row.name not in KINDS}):
        yield f"unknown operations are shown as they are: {', '.join(names[:5])}"
    if any(row.is_simulated for row in rows):
        yield "ranks were profiled one at a time (described as simulation): no communication"
    if formats := {row.detail("dtype") for row in rows if row.shape is not None and row.dtype is None}:
        yield f"bytes of unknown number formats are not counted: {', '.join(map(str, formats))}"


def _rank_evidence(path: str, lines: Sequence[TraceLine], operations: Sequence[str]) -> RankEvidence:
    """Return the sizes that one rank's lines show; *operations* names the operation of each."""
    rows = dict.fromkeys(line.row for line in lines)
    forward = [line for line, name in zip(lines, operations, strict=True) if name == "forward_step"]
    shapes: dict[str, tuple[int, ...]] = {}  # the last of each name
    dtype: DType | None = None
    buckets: dict[tuple[str | None, ...], int] = {}
    for row in rows:
        shape, name = row.shape or (), "transfer" if row.name in TRANSFERS else row.name
        name = "tokens" if name == "labels" else name
        if min(shape, default=0) > 0 and len(shape) == DIMENSIONS.get(name):
            shapes[name] = shape
            dtype = dtype or (row.dtype if name in ("transfer", "embedding_fwd") else None)
            if name == BUCKET:
                numel = row.detail("bucket_numel_unpadded") or ""
                key = tuple(row.detail(word) for word in ("buffer_id", "bucket_id", "bucket_offset"))
                buckets[key] = int(numel) if numel.isdecimal() and len(numel) < 16 else shape[0]
    transfer, tokens, embedding = (shapes.get(name) for name in ("transfer", "tokens", "ep_allreduce"))
    wide = transfer or embedding or shapes.get("embedding_fwd")
    hidden = wide[-1] if wide else None
    # All-reduces at the end of an attention or MLP block.
    reducing = {
        row: row.dtype
        for row in rows
        if row.is_collective(CollectiveKind.ALL_REDUCE, Group.TP) and row.shape and row.shape[-1] == hidden
        if row.name != "embedding_fwd"
    }
    batches = [line.micro_batch for line in forward if line.row.is_operation]
    reduces = sum(line.row in reducing for line in forward)
    is_simulated = any(row.is_simulated for row in rows)
    exchanges = None
    if any(row.message is not None and row.message.group is Group.EP for row in rows):
        sent = (line.row for line in forward if line.row.is_collective(CollectiveKind.ALL_TO_ALL, Group.EP))
        exchanges = tuple(row.shape[0] for row in sent if row.shape is not None and len(row.shape) == 2)
    return RankEvidence(
        rank=lines[0].row.rank,
        stage=lines[0].row.stage,
        path=path,
        transfer=transfer,
        tokens=tokens,
        word_embedding=embedding,
        hidden=hidden,
        dtype=dtype or next(iter(reducing.values()), None),
        gradients=sum(buckets.values()) if buckets else shapes.get("dp_allreduce", (None,))[0],
        forward_reduces=reduces // len(batches) if batches and (reduces or not is_simulated) else None,
        micro_batches=max(batches, default=NONE) + 1,
        has_loss=any(row.is_operation and row.name == "loss_func" for row in rows),
        exchanges=exchanges,
    )
