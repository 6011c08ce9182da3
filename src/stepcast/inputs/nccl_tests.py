"""Logs of NVIDIA's nccl-tests: one collective timed over many sizes.

Layouts of version 1 to 2.20 are read by the names in the table's header: with or without a type, an
operation and a root, with `error` or `#wrong` columns, out of place and in place, and behind the tags that
mpirun and srun put before each line.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from stepcast.inputs.kineto.process_groups import dtype_named
from stepcast.inputs.rows import draft_of
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.measured import CollectiveSweep, SweepRow
from stepcast.ir.work import CollectiveKind
from stepcast.units import US

# mpirun --tag-output and srun --label.
TAG = re.compile(r"^(?:\[\d+,\d+\](?:<\w+>|\[[^\]]*\])?:|\s*\d+:(?=\s*(?:#|\d)))")
HEADER = re.compile(r"#\s*(?:size|bytes)\s+(?:count|N)\s.*\balgbw\b")
DEVICE = re.compile(
    r"#\s*Rank\s+(\d+)(?:\s+Group\s+(\d+))?(?:\s+Pid\s+\d+)?\s+on\s+(\S+)\s+device\s+\d+\s+\[[^\]]*\]\s*(.*)"
)
SHAPE = re.compile(r"#\s*nThreads?:?\s+(\d+)\s+nGpus:?\s+(\d+)\b")
PROGRAM = re.compile(
    r"\b(all_reduce|all_gather|reduce_scatter|alltoallv?|broadcast|reduce|gather|scatter|sendrecv|hypercube)_perf"
)
WRONG = re.compile(r"Out of bounds values\s*:\s*([1-9]\d*)")
# Lines beside the table that are looked at; a log may hold any number of others.
TELLING = re.compile("|".join(pattern.pattern for pattern in (DEVICE, SHAPE, PROGRAM, WRONG)))
KIND_OF_PROGRAM = {
    "all_reduce": CollectiveKind.ALL_REDUCE,
    "all_gather": CollectiveKind.ALL_GATHER,
    "reduce_scatter": CollectiveKind.REDUCE_SCATTER,
    "alltoall": CollectiveKind.ALL_TO_ALL,
    "alltoallv": CollectiveKind.ALL_TO_ALL,
    "broadcast": CollectiveKind.BROADCAST,
    "reduce": CollectiveKind.REDUCE,
    "gather": CollectiveKind.GATHER,
    "scatter": CollectiveKind.SCATTER,
}
COLUMN_NAMES = {"bytes": "size", "N": "count", "op": "redop", "cputime": "time", "res": "error"}
ROW_EXPECTED = "expected a size in bytes and times in us"
# Version 1 used C's names for the types.
VERSION_1_TYPES = {"char": "int8", "int": "int32"}


def looks_like(head: str) -> bool:
    """The table's header, or the first lines that every version prints."""
    return HEADER.search(head) is not None or (SHAPE.search(head) is not None and "minBytes" in head)


@dataclass(frozen=True, slots=True)
class _Table:
    """Where things stand in a row, from the header's words."""

    width: int
    kind_at: int | None
    operation_at: int | None
    root_at: int | None
    times_at: tuple[int, ...]

    @classmethod
    def of(cls, header: str) -> "_Table":
        words = [COLUMN_NAMES.get(word, word) for word in header.lstrip("# ").split()]
        times_at = tuple(index for index, word in enumerate(words) if word == "time")
        if len(times_at) != 2 or times_at[-1] + 2 >= len(words):
            raise FormatError("the table's header needs time, algbw and busbw out of place and in place")
        return cls(
            width=len(words),
            kind_at=_find(words, "type"),
            operation_at=_find(words, "redop"),
            root_at=_find(words, "root"),
            times_at=times_at,
        )


def read(source: Source) -> CollectiveSweep:
    """The first table of the log; a warning says how many follow it."""
    lines = enumerate(source.each_line(errors="replace"), 1)
    before, header, start = _find_table(lines, source)
    table = _Table.of(_untagged(header))
    rows = _Rows(table, source, tagged=TAG.match(header) is not None)
    after, others = rows.read(lines)
    if not rows.found:
        raise FormatError("has a table header but no rows; expected sizes and times", source.path, start)
    return _sweep(source, before, after, table, rows.found, rows.telling, others)


def _find_table(lines: Iterator[tuple[int, str]], source: Source) -> tuple[list[str], str, int]:
    """The untagged lines before the header that say something, the header and its number."""
    before: list[str] = []
    for number, line in lines:
        text = _untagged(line)
        if HEADER.match(text):
            return before, line, number
        if TELLING.search(text):
            before.append(text)
    raise FormatError("has no table; expected a header line with size, count, time, algbw and busbw", source.path)


class _Rows:
    """The rows of one table."""

    def __init__(self, table: _Table, source: Source, tagged: bool) -> None:
        self._table, self._source, self._tagged = table, source, tagged
        self.found: list[SweepRow] = []
        # The fields of the largest size: its bandwidths have the most digits.
        self.telling: list[str] = []

    def read(self, lines: Iterable[tuple[int, str]]) -> tuple[list[str], int]:
        """All rows; the lines after them that say something, and how many other tables follow."""
        table, tagged, add = self._table, self._tagged, self.found.append
        width, time_at, other_time_at = table.width, table.times_at[0], table.times_at[-1]
        largest, others = -1, 0
        after: list[str] = []
        for number, line in lines:
            fields = (_untagged(line) if tagged else line).split()
            if not fields or not fields[0].isdecimal():
                text = _untagged(line)
                others += HEADER.match(text) is not None
                if TELLING.search(text):
                    after.append(text)
                continue
            if others:
                continue
            if len(fields) == width and fields[other_time_at] != "N/A":
                try:
                    row = sweep_row(int(fields[0]), float(fields[time_at]) * US, float(fields[other_time_at]) * US)
                except ValueError as error:
                    raise FormatError(f"{error}; {ROW_EXPECTED}", self._source.path, number) from None
            else:
                row, fields = _odd_row(fields, table, self._source, number)
            add(row)
            if row.size_bytes > largest:
                largest, self.telling = row.size_bytes, fields
        return [] if others else after, others


_RowDraft = draft_of(SweepRow)


def sweep_row(size_bytes: int, out_of_place_s: float, in_place_s: float) -> SweepRow:
    """``SweepRow(...)`` of numbers read from text, twice as fast."""
    if not (0.0 <= out_of_place_s < math.inf and 0.0 <= in_place_s < math.inf):
        return SweepRow(size_bytes, out_of_place_s, in_place_s)  # says what is wrong
    row = _RowDraft()
    row.size_bytes = size_bytes
    row.out_of_place_s = out_of_place_s
    row.in_place_s = in_place_s
    row.__class__ = SweepRow
    finished: SweepRow = row
    return finished


def _untagged(line: str) -> str:
    return TAG.sub("", line, count=1).strip()


def _odd_row(fields: list[str], table: _Table, source: Source, line: int) -> tuple[SweepRow, list[str]]:
    """A row with a time missing, or a blank operation (all-gather of 2.11), which is put back."""
    if len(fields) == table.width - 1 and table.operation_at is not None:
        fields = [*fields[: table.operation_at], "none", *fields[table.operation_at :]]
    if len(fields) < table.width:
        raise FormatError(f"a row of {len(fields)} columns; expected the header's {table.width}", source.path, line)
    try:
        times_s = [_seconds(fields[index]) for index in table.times_at[:2]]
        return SweepRow(int(fields[0]), times_s[0], times_s[1]), fields
    except ValueError as error:
        raise FormatError(f"{error}; {ROW_EXPECTED}", source.path, line) from None


def _seconds(word: str) -> float | None:
    return None if word == "N/A" else float(word) * US


def _number(word: str) -> float | None:
    try:
        value = float(word)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _sweep(
    source: Source,
    before: list[str],
    after: list[str],
    table: _Table,
    rows: list[SweepRow],
    telling: list[str],
    others: int,
) -> CollectiveSweep:
    warnings: list[str] = []
    ranks, nodes, device = _participants(before, warnings)
    kind = _kind([*before, *after], table, telling, ranks, warnings)
    type_name = telling[table.kind_at] if telling and table.kind_at is not None else ""
    if others:
        warnings.append(f"{others} more tables follow the first; only the first is read")
    wrong = next((match for match in map(WRONG.search, after) if match), None)
    if wrong:
        warnings.append(f"the test found {wrong[1]} wrong values")
    return CollectiveSweep(
        kind=kind,
        ranks=ranks,
        nodes=nodes,
        device=device,
        dtype=dtype_named(VERSION_1_TYPES.get(type_name, type_name)),
        rows=tuple(rows),
        source=source.path,
        warnings=tuple(warnings),
        ranks_per_thread=_ranks_per_thread(before, ranks),
    )


def _ranks_per_thread(before: list[str], ranks: int) -> int:
    """``nGpus``: the GPUs that each thread of each process drives."""
    shape = next((match for match in map(SHAPE.match, before) if match), None)
    return min(ranks, max(1, int(shape[2]))) if shape else 1


def _participants(before: list[str], warnings: list[str]) -> tuple[int, int, str]:
    """Ranks, nodes and device name, of one group where the test split the ranks."""
    found = [match for match in map(DEVICE.match, before) if match]
    groups = {match[2] for match in found}
    if len(groups) > 1:
        first = found[0][2]
        found = [match for match in found if match[2] == first]
        warnings.append(f"{len(groups)} groups ran at once; ranks and nodes are those of one")
    if found:
        devices = dict.fromkeys(match[4].strip() for match in found)
        if len(devices) > 1:
            warnings.append(f"the ranks have different devices: {', '.join(devices)}")
        return len({match[1] for match in found}), len({match[3] for match in found}), next(iter(devices))
    shape = next((match for match in map(SHAPE.match, before) if match), None)
    ranks = max(1, int(shape[1]) * int(shape[2])) if shape else 1
    warnings.append(f"the log lists no devices; {ranks} ranks in one process and one node are assumed")
    return ranks, 1, ""


def _kind(lines: list[str], table: _Table, fields: list[str], ranks: int, warnings: list[str]) -> CollectiveKind | None:
    """From the program's name where the log prints it, else from bandwidths, operation and root."""
    program = next((match for match in map(PROGRAM.search, lines) if match), None)
    if program:
        kind = KIND_OF_PROGRAM.get(program[1])
        if kind is None:
            warnings.append(f"{program[1]} is not a collective; its times are read all the same")
        return kind
    kind = _kind_by_bandwidth(table, fields, ranks)
    if kind is None:
        warnings.append("the log does not say which collective it timed, and its bandwidths fit several")
    return kind


def _kind_by_bandwidth(table: _Table, fields: list[str], ranks: int) -> CollectiveKind | None:
    """Bus over algorithm bandwidth is 2(n-1)/n for all-reduce, (n-1)/n or 1 for others.

    Source: nccl-tests, doc/PERFORMANCE.md. For two ranks all-reduce's is 1, as reduce's, but that has a root.
    """
    if not fields or ranks < 2:
        return None
    column = table.times_at[0]
    algorithm, bus = _number(fields[column + 1]), _number(fields[column + 2])
    if not algorithm or bus is None:
        return None
    reduces = table.operation_at is not None and fields[table.operation_at] != "none"
    rooted = table.root_at is not None and not fields[table.root_at].startswith("-")
    ratio, share = bus / algorithm, (ranks - 1) / ranks
    # Both bandwidths are printed with two decimals.
    slack = 0.02 / algorithm + 0.01
    if reduces and rooted:
        return CollectiveKind.REDUCE
    if reduces and abs(ratio - 2 * share) < slack:
        return CollectiveKind.ALL_REDUCE
    if reduces and abs(ratio - share) < slack:
        return CollectiveKind.REDUCE_SCATTER
    if rooted and abs(ratio - 1) < slack < 1 - share:
        return CollectiveKind.BROADCAST
    return None


def _find(words: list[str], word: str) -> int | None:
    return words.index(word) if word in words else None
