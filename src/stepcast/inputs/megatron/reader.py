"""Megatron-LM rank traces: one line per operation that a rank ran in one traced iteration.

Written by the instrumented Megatron-LM of Echo (fwyc0573/Megatron-LM). Times are milliseconds; a
timestamp is the END of an operation on the host's clock, so clocks of two hosts are unrelated.
Every rank has a lane "ops" with its operations; their parts are on one lane per group ("tp", "dp", ...)
and name the operation as parent. Details have the file's words, and two marks of ours: ``fused_with`` on
the second line of one fused send and receive (count it once) and ``untimed`` where no time was taken.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from stepcast.inputs.megatron.config import infer
from stepcast.inputs.megatron.lines import BUCKET, KINDS, TRANSFERS, RankEvidence, TraceColumns, TraceRow
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.arrays import Int32Array
from stepcast.ir.dtype import DType
from stepcast.ir.group import Group
from stepcast.ir.timeline import NONE, Lane, Timeline
from stepcast.ir.work import CollectiveKind, Direction
from stepcast.units import MS

FIRST_LINE = re.compile(r"\s*rank:[0-9]+:[A-Za-z_]\w*\(\w+=", re.ASCII)


def looks_like(head: str) -> bool:
    """Return whether the text begins with an operation of a rank."""
    return FIRST_LINE.match(head) is not None


def read_run(sources: Sequence[Source]) -> Timeline:
    """Return all given ranks of one run as one Timeline."""
    columns = TraceColumns()
    seen: set[str] = set()
    for source in sources:
        if source.path in seen:
            raise FormatError("is given twice; expected each rank of the run once", source.path)
        seen.add(source.path)
        columns.add_file(source.path, source.each_line())
    return TimelineAssembly(columns).timeline(", ".join(source.path for source in sources[:3]))


class TimelineAssembly:
    """Columns with times in milliseconds, on their way to a Timeline."""

    def __init__(self, columns: TraceColumns) -> None:
        self.columns = columns
        self.rows: list[TraceRow] = self.columns.table.rows
        self.row_of: Int32Array = np.array(self.columns.row_of, dtype=np.int32)
        self.duration_ms = np.array(self.columns.duration_ms, dtype=np.float64)
        self.end_ms = np.array(self.columns.end_ms, dtype=np.float64)
        self.warnings: list[str] = []
        is_operation = self._by_row(lambda row: row.is_operation).astype(bool)
        self.rank_of = self._by_row(lambda row: row.rank)
        self.operations = np.flatnonzero(is_operation)
        # Number of the operation that each line is or belongs to.
        self.operation_of = np.cumsum(is_operation) - 1

    def _by_row(self, value: Callable[[TraceRow], int]) -> Int32Array:
        """Return a column computed once per distinct row."""
        return np.array([value(row) for row in self.rows], dtype=np.int32)[self.row_of]

    def _mark(self, indices: npt.NDArray[np.intp], word: str, text: Callable[[int], str]) -> None:
        for index in indices.tolist():
            row = self.rows[self.row_of[index]].marked(word, text(index))
            self.row_of[index] = self.columns.table.number_of(row)

    def timeline(self, source: str) -> Timeline:
        self._place_untimed()
        self._mark_fused()
        config = infer(self._evidence())
        self._warn_of_clocks()
        self._warn_of_unknown()
        parent_of = np.where(
            self._by_row(lambda row: row.is_operation) == 1, NONE, self.operations[self.operation_of]
        ).astype(np.int32)
        micro_batch_of = np.array(self.columns.micro_batch_of_operation, dtype=np.int32)[self.operation_of]
        names = {name: number for number, name in enumerate(dict.fromkeys(row.name for row in self.rows))}
        lanes = {lane: number for number, lane in enumerate(dict.fromkeys(map(_lane, self.rows)))}
        details = {words: number for number, words in enumerate(dict.fromkeys(row.details for row in self.rows))}
        messages = [row.message for row in self.rows]
        works = [message.work(config.layout.size(message.group)) if message else None for message in messages]
        table = {work: number for number, work in enumerate(dict.fromkeys(w for w in works if w is not None))}
        work_numbers = np.array([NONE if work is None else table[work] for work in works], dtype=np.int32)
        start_ms = self.end_ms - self.duration_ms
        origin_ms = float(start_ms.min())
        return Timeline(
            names=tuple(names),
            lanes=tuple(lanes),
            works=tuple(table),
            details=tuple(dict(words) for words in details),
            name_of=self._by_row(lambda row: names[row.name]),
            lane_of=self._by_row(lambda row: lanes[_lane(row)]),
            kind_of=self._by_row(lambda row: row.kind),
            work_of=work_numbers[self.row_of],
            detail_of=self._by_row(lambda row: details[row.details]),
            micro_batch_of=micro_batch_of,
            parent_of=parent_of,
            start_s=(start_ms - origin_ms) * MS,
            duration_s=self.duration_ms * MS,
            measured=True,
            source=source,
            origin_s=origin_ms * MS,
            layout=config.layout,
            stage_of_rank=config.stage_of_rank,
            facts=config.facts,
            warnings=(*config.warnings, *self.warnings),
        )

    def _place_untimed(self) -> None:
        """Place lines without a timestamp (profiled in isolation) after the line of their rank before them."""
        untimed = np.flatnonzero(self.end_ms == 0)
        if not len(untimed):
            return
        if len(untimed) == len(self.end_ms):
            raise FormatError("no operation has a timestamp; expected milliseconds of the host's clock")
        first_start_ms = float((self.end_ms - self.duration_ms)[self.end_ms > 0].min())
        for rank in np.unique(self.rank_of[untimed]).tolist():
            lines = np.flatnonzero(self.rank_of == rank)
            end_ms = self.end_ms[lines]
            before_ms = np.maximum.accumulate(end_ms)
            timed = end_ms > 0
            start_ms = (end_ms - self.duration_ms[lines])[timed].min() if timed.any() else first_start_ms
            placed_ms = np.where(before_ms > 0, before_ms, start_ms) + self.duration_ms[lines]
            self.end_ms[lines] = np.where(timed, end_ms, placed_ms)
        self._mark(untimed, "untimed", lambda _: "yes")
        self.warnings.append(f"{len(untimed)} lines have no timestamp; placed after the line before them")

    def _mark_fused(self) -> None:
        """Mark a fused send and receive: two neighbouring lines with the same duration and timestamp."""
        codes = {Direction.SEND: 1, Direction.RECEIVE: 2}
        code = self._by_row(lambda row: codes[TRANSFERS[row.name][0]] if row.name in TRANSFERS else 0)
        rank = self.rank_of
        now, before = self.operations[1:], self.operations[:-1]
        fused = (code[now] * code[before] == 2) & (rank[now] == rank[before])
        fused &= (self.duration_ms[now] == self.duration_ms[before]) & (self.end_ms[now] == self.end_ms[before])
        partner = dict(zip(now[fused].tolist(), before[fused].tolist(), strict=True))
        self._mark(now[fused], "fused_with", lambda index: self.rows[self.row_of[partner[index]]].name)

    def _evidence(self) -> list[RankEvidence]:
        in_forward = self._by_row(lambda row: row.is_operation and row.name == "forward_step")
        forward = in_forward[self.operations[self.operation_of]] == 1
        inside = np.bincount(self.row_of[forward], minlength=len(self.rows))
        counts = np.bincount(self.row_of, minlength=len(self.rows))
        batches = np.array(self.columns.micro_batch_of_operation, dtype=np.int32)
        is_forward = in_forward[self.operations] == 1
        ranks, order = np.unique(self.rank_of[self.operations], return_inverse=True)
        deepest = np.full(len(ranks), NONE, dtype=np.int32)
        np.maximum.at(deepest, order[is_forward], batches[is_forward])
        micro_batches = dict(zip(ranks.tolist(), (deepest + 1).tolist(), strict=True))
        rows_of: dict[int, list[tuple[TraceRow, int, int]]] = {}
        for row, count, within in zip(self.rows, counts.tolist(), inside.tolist(), strict=True):
            if count:
                rows_of.setdefault(row.rank, []).append((row, count, within))
        exchanges = self._exchanges(forward)
        return [
            replace(
                _rank_evidence(self.columns.path_of_rank[rank], rows_of[rank], micro_batches[rank]),
                exchanges=exchanges.get(rank),
            )
            for rank in sorted(rows_of)
        ]

    def _exchanges(self, forward: npt.NDArray[np.bool_]) -> dict[int, tuple[int, ...]]:
        """Return by rank the rows it hands to each all-to-all between experts within its forward passes."""
        between = self._by_row(lambda row: row.message is not None and row.message.group is Group.EP)
        rows = self._by_row(_exchanged_rows)
        handed: dict[int, list[int]] = {rank: [] for rank in np.unique(self.rank_of[between == 1]).tolist()}
        inside = (rows >= 0) & forward
        for rank, count in zip(self.rank_of[inside].tolist(), rows[inside].tolist(), strict=True):
            handed[rank].append(count)
        return {rank: tuple(counts) for rank, counts in handed.items()}

    def _warn_of_clocks(self) -> None:
        """Warn of ranks that never ran at the same time: not on one clock, or not in one iteration."""
        ranks, order = np.unique(self.rank_of, return_inverse=True)
        starts_ms = np.full(len(ranks), np.inf)
        ends_ms = np.full(len(ranks), -np.inf)
        np.minimum.at(starts_ms, order, self.end_ms - self.duration_ms)
        np.maximum.at(ends_ms, order, self.end_ms)
        spans = list(zip(starts_ms.tolist(), ends_ms.tolist(), ranks.tolist(), strict=True))
        spans.sort()
        latest = spans[0][1]
        for start_ms, end_ms, rank in spans[1:]:
            if start_ms > latest:
                self.warnings.append(
                    f"rank {rank} starts after others have ended: the ranks' clocks are not one, compare no "
                    "times between them"
                )
                return
            latest = max(latest, end_ms)

    def _warn_of_unknown(self) -> None:
        names = sorted({row.name for row in self.rows if row.is_operation and row.name not in KINDS})
        if names:
            self.warnings.append(f"unknown operations are shown as they are: {', '.join(names[:5])}")
        if any(map(_is_simulated, self.rows)):
            self.warnings.append("ranks were profiled one at a time (described as simulation): no communication")
        sizes = {row.detail("dtype") for row in self.rows if row.shape is not None and row.dtype is None}
        if sizes:
            self.warnings.append(f"bytes of unknown number formats are not counted: {', '.join(map(str, sizes))}")


def _exchanged_rows(row: TraceRow) -> int:
    """Return the tokens that *row* hands to an all-to-all between experts; -1 where it is none."""
    message = row.message
    if message is None or (message.kind, message.group) != (CollectiveKind.ALL_TO_ALL, Group.EP):
        return -1
    return row.shape[0] if row.shape is not None and len(row.shape) == 2 else -1


def _lane(row: TraceRow) -> Lane:
    return Lane(row.rank, row.lane)


def _is_simulated(row: TraceRow) -> bool:
    """Return whether it was profiled on one GPU that plays a rank of a large run; nothing was sent."""
    return row.is_operation and (row.detail("description") or "").startswith("simulation")


def _rank_evidence(path: str, rows: Sequence[tuple[TraceRow, int, int]], micro_batches: int) -> RankEvidence:
    """Return what one rank's distinct rows show; each comes with its count and its count inside forward passes."""
    transfer: tuple[int, int, int] | None = None
    tokens: tuple[int, int] | None = None
    embedding: tuple[int, int] | None = None
    embedded: tuple[int, ...] | None = None
    dtype: DType | None = None
    gradients: int | None = None
    buckets: dict[tuple[str | None, ...], int] = {}
    forwards = 0
    has_loss = is_simulated = False
    for row, count, _ in rows:
        shape = row.shape if row.shape and min(row.shape) > 0 else ()
        if row.name in TRANSFERS and len(shape) == 3:
            transfer, dtype = (shape[0], shape[1], shape[2]), dtype or row.dtype
        elif row.name in ("tokens", "labels") and len(shape) == 2:
            tokens = (shape[0], shape[1])
        elif row.name == "ep_allreduce" and len(shape) == 2:
            embedding = (shape[0], shape[1])
        elif row.name == "embedding_fwd" and len(shape) == 3:
            embedded, dtype = shape, dtype or row.dtype
        elif row.name == "dp_allreduce" and len(shape) == 1:
            gradients = shape[0]
        elif row.name == BUCKET and len(shape) == 1:
            numel = row.detail("bucket_numel_unpadded") or ""
            key = tuple(row.detail(word) for word in ("buffer_id", "bucket_id", "bucket_offset"))
            buckets[key] = int(numel) if numel.isdecimal() and len(numel) < 16 else shape[0]
        forwards += count if row.is_operation and row.name == "forward_step" else 0
        has_loss |= row.is_operation and row.name == "loss_func"
        is_simulated |= _is_simulated(row)
    hidden = transfer[2] if transfer else embedding[1] if embedding else embedded[2] if embedded else None
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
        gradients=sum(buckets.values()) if buckets else gradients,
        forward_reduces=reduces // forwards if forwards and (reduces or not is_simulated) else None,
        micro_batches=micro_batches,
        has_loss=has_loss,
    )


def _reduces_activations(row: TraceRow, hidden: int | None) -> bool:
    """Return whether a part of a forward pass is the all-reduce at the end of an attention or MLP block."""
    message = row.message
    if message is None or message.kind is not CollectiveKind.ALL_REDUCE or message.group is not Group.TP:
        return False
    return row.shape is not None and row.shape[-1:] == (hidden,) and row.name != "embedding_fwd"
