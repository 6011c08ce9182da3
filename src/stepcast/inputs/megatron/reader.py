"""Megatron-LM rank traces: one line per operation that a rank ran in one traced iteration.

Written by the instrumented Megatron-LM of Echo (fwyc0573/Megatron-LM). Times are milliseconds; a
timestamp is the END of an operation on the host's clock, so clocks of two hosts are unrelated.
Every rank has a lane "ops" with its operations; their parts are on one lane per group ("tp", "dp", ...)
and name the operation as parent. Details have the file's words, and two marks of ours: ``fused_with`` on
the second line of one fused send and receive (count it once) and ``untimed`` where no time was taken.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from stepcast.inputs.megatron.config import infer
from stepcast.inputs.megatron.lines import BUCKET, KINDS, TRANSFERS, RankEvidence, TraceLine, TraceLines, TraceRow
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.dtype import DType
from stepcast.ir.layout import Group
from stepcast.ir.timeline import NONE, Timeline, TimelineBuilder
from stepcast.ir.work import CollectiveKind
from stepcast.units import MS

# Tensors that show the sizes of a run, with their dimensions.
DIMENSIONS = {"transfer": 3, "tokens": 2, "ep_allreduce": 2, "embedding_fwd": 3, "dp_allreduce": 1, BUCKET: 1}


def read_run(sources: Sequence[Source]) -> Timeline:
    """Return all given ranks of one run as one Timeline."""
    trace = TraceLines()
    seen: set[str] = set()
    for source in sources:
        if source.path in seen:
            raise FormatError("is given twice; expected each rank of the run once", source.path)
        seen.add(source.path)
        trace.add_file(source.path, source.each_line())
    lines = trace.lines
    warnings = list(_place_untimed(lines))
    _mark_fused(lines)
    evidence = _evidence(trace)
    config = infer(evidence)
    warnings += [*_doubt_clocks(lines), *_doubt_words([line.row for line in lines])]
    builder, origin_ms = TimelineBuilder(), min(line.start_ms for line in lines)
    for line in lines:
        row, message = line.row, line.row.message
        builder.add(
            row.name,
            builder.lane(row.rank, row.lane),
            (line.start_ms - origin_ms) * MS,
            line.duration_ms * MS,
            kind=row.kind,
            work=message.work(config.layout.size(message.group)) if message else None,
            details=row.details,
            micro_batch=line.micro_batch,
            parent=NONE if row.is_operation else line.operation,
        )
    timeline = builder.build(
        measured=True,
        source=", ".join(source.path for source in sources[:3]),
        layout=config.layout,
        stage_of_rank={rank.rank: rank.stage for rank in evidence},
        facts=config.facts,
        warnings=(*config.warnings, *warnings),
        rebase=False,
    )
    return replace(timeline, origin_s=origin_ms * MS)


def _by_rank(lines: Iterable[TraceLine]) -> dict[int, list[TraceLine]]:
    ranks: dict[int, list[TraceLine]] = {}
    for line in lines:
        ranks.setdefault(line.row.rank, []).append(line)
    return dict(sorted(ranks.items()))


def _place_untimed(lines: Sequence[TraceLine]) -> Iterator[str]:
    """Place lines without a timestamp (profiled in isolation) after the line of their rank before them."""
    timed = [line for line in lines if line.end_ms]
    if not timed:
        raise FormatError("no operation has a timestamp; expected milliseconds of the host's clock")
    if len(timed) == len(lines):
        return
    starts_ms = {rank: min(line.start_ms for line in own) for rank, own in _by_rank(timed).items()}
    first_start_ms = min(starts_ms.values())
    for rank, own in _by_rank(lines).items():
        before_ms = 0.0
        for line in own:
            if line.end_ms:
                before_ms = max(before_ms, line.end_ms)
            else:
                line.end_ms = (before_ms or starts_ms.get(rank, first_start_ms)) + line.duration_ms
                line.row = line.row.marked("untimed", "yes")
    yield f"{len(lines) - len(timed)} lines have no timestamp; placed after the line before them"


def _mark_fused(lines: Sequence[TraceLine]) -> None:
    """Mark a fused send and receive: two neighbouring lines with the same duration and timestamp."""
    operations = [line for line in lines if line.row.is_operation]
    before_names = [line.row.name for line in operations]
    for before, now, name in zip(operations, operations[1:], before_names, strict=False):
        ways = {TRANSFERS[line.row.name][0] for line in (before, now) if line.row.name in TRANSFERS}
        times = {(line.row.rank, line.duration_ms, line.end_ms) for line in (before, now)}
        if len(ways) == 2 and len(times) == 1:
            now.row = now.row.marked("fused_with", name)


def _evidence(trace: TraceLines) -> list[RankEvidence]:
    evidence = []
    for rank, own in _by_rank(trace.lines).items():
        inside = [line for line in own if trace.lines[line.operation].row.name == "forward_step"]
        batches = [line.micro_batch for line in inside if line.row.is_operation]
        within, exchanges = Counter(line.row for line in inside), None
        if any(line.row.message is not None and line.row.message.group is Group.EP for line in own):
            exchanges = tuple(count for line in inside if (count := _exchanged_rows(line.row)) >= 0)
        rows = [(row, count, within[row]) for row, count in Counter(line.row for line in own).items()]
        found = _rank_evidence(trace.path_of_rank[rank], rows, max(batches, default=NONE) + 1)
        evidence.append(replace(found, exchanges=exchanges))
    return evidence


def _doubt_clocks(lines: Sequence[TraceLine]) -> Iterator[str]:
    """Warn of ranks that never ran at the same time: not on one clock, or not in one iteration."""
    spans = [
        (min(line.start_ms for line in own), max(line.end_ms for line in own), rank)
        for rank, own in _by_rank(lines).items()
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
    if any(map(_is_simulated, rows)):
        yield "ranks were profiled one at a time (described as simulation): no communication"
    if formats := {row.detail("dtype") for row in rows if row.shape is not None and row.dtype is None}:
        yield f"bytes of unknown number formats are not counted: {', '.join(map(str, formats))}"


def _exchanged_rows(row: TraceRow) -> int:
    """Return the tokens that *row* hands to an all-to-all between experts; -1 where it is none."""
    message = row.message
    if message is None or (message.kind, message.group) != (CollectiveKind.ALL_TO_ALL, Group.EP):
        return -1
    return row.shape[0] if row.shape is not None and len(row.shape) == 2 else -1


def _is_simulated(row: TraceRow) -> bool:
    """Return whether it was profiled on one GPU that plays a rank of a large run; nothing was sent."""
    return row.is_operation and (row.detail("description") or "").startswith("simulation")


def _rank_evidence(path: str, rows: Sequence[tuple[TraceRow, int, int]], micro_batches: int) -> RankEvidence:
    """Return what one rank's distinct rows show; each comes with its count and its count inside forward passes."""
    shapes: dict[str, tuple[int, ...]] = {}  # the last of each name
    dtype: DType | None = None
    buckets: dict[tuple[str | None, ...], int] = {}
    for row, _, _ in rows:
        shape, name = row.shape or (), "transfer" if row.name in TRANSFERS else row.name
        name = "tokens" if name == "labels" else name
        if min(shape, default=0) > 0 and len(shape) == DIMENSIONS.get(name):
            shapes[name] = shape
            dtype = dtype or (row.dtype if name in ("transfer", "embedding_fwd") else None)
            if name == BUCKET:
                numel = row.detail("bucket_numel_unpadded") or ""
                key = tuple(row.detail(word) for word in ("buffer_id", "bucket_id", "bucket_offset"))
                buckets[key] = int(numel) if numel.isdecimal() and len(numel) < 16 else shape[0]
    forwards = sum(count for row, count, _ in rows if row.is_operation and row.name == "forward_step")
    transfer, tokens, embedding = (shapes.get(name) for name in ("transfer", "tokens", "ep_allreduce"))
    wide = transfer or embedding or shapes.get("embedding_fwd")
    hidden = wide[-1] if wide else None
    is_simulated = any(_is_simulated(row) for row, _, _ in rows)
    reduces = sum(within for row, _, within in rows if _reduces_activations(row, hidden))
    if dtype is None:
        dtype = next((row.dtype for row, _, _ in rows if _reduces_activations(row, hidden)), None)
    return RankEvidence(
        rank=rows[0][0].rank,
        stage=rows[0][0].stage,
        path=path,
        transfer=transfer,
        tokens=tokens,
        word_embedding=embedding,
        hidden=hidden,
        dtype=dtype,
        gradients=sum(buckets.values()) if buckets else shapes.get("dp_allreduce", (None,))[0],
        forward_reduces=reduces // forwards if forwards and (reduces or not is_simulated) else None,
        micro_batches=micro_batches,
        has_loss=any(row.is_operation and row.name == "loss_func" for row, _, _ in rows),
    )


def _reduces_activations(row: TraceRow, hidden: int | None) -> bool:
    """Return whether a part of a forward pass is the all-reduce at the end of an attention or MLP block."""
    message = row.message
    if message is None or message.kind is not CollectiveKind.ALL_REDUCE or message.group is not Group.TP:
        return False
    return row.shape is not None and row.shape[-1:] == (hidden,) and row.name != "embedding_fwd"
