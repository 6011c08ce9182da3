"""Logs of NVIDIA's nccl-tests: one collective timed over many sizes.

Layouts of version 1 to 2.20 are read by the names in the table's header: with or without a type, an
operation and a root, with `error` or `#wrong` columns, out of place and in place, and behind the tags that
mpirun and srun put before each line.
"""

import math
import re
from collections.abc import Iterable

from stepcast.inputs.kineto.reader import WORDS, collective_named, dtype_named
from stepcast.inputs.source import FormatError, Source, expect
from stepcast.ir.measured import CollectiveSweep, SweepRow
from stepcast.ir.work import CollectiveKind
from stepcast.units import US

LINES = {name: re.compile(pattern) for name, pattern in WORDS["nccl_tests"].items()}
# Lines outside the table that are used; a log may hold any number of others.
USED_LINES = re.compile("|".join(LINES[name].pattern for name in ("device", "shape", "program", "wrong")))
NEW_NAMES = WORDS["nccl_tests_names"]


def looks_like(head: str) -> bool:
    """Return whether it has the table's header, or the first lines that every version prints."""
    return LINES["header"].search(head) is not None or (LINES["shape"].search(head) is not None and "minBytes" in head)


def read(source: Source) -> CollectiveSweep:
    """Return the first table of the log; a warning counts those that follow it."""
    lines = enumerate(source.each_line(errors="replace"), 1)
    lines_before: list[str] = []
    for number, header in lines:
        text = _strip_tag(header)
        if LINES["header"].match(text):
            start = number
            break
        if USED_LINES.search(text):
            lines_before.append(text)
    else:
        raise FormatError("has no table; expected a header line with size, count, time, algbw and busbw", source.path)
    table = _SweepTable(text, source, is_tagged=LINES["tag"].match(header) is not None)
    table.read(lines)
    expect(table.rows, "has a table header but no rows; expected sizes and times", source.path, start)
    return table.sweep(lines_before)


def _strip_tag(line: str) -> str:
    return LINES["tag"].sub("", line, count=1).strip()


class _SweepTable:
    """The rows of one table, and the used lines after them."""

    def __init__(self, header: str, source: Source, is_tagged: bool) -> None:
        self._columns = [NEW_NAMES.get(word, word) for word in header.lstrip("# ").split()]
        self._times = [index for index, word in enumerate(self._columns) if word == "time"]  # out of place, in place
        if len(self._times) != 2 or self._times[-1] + 2 >= len(self._columns):
            raise FormatError("the table's header needs time, algbw and busbw out of place and in place")
        self._source, self._is_tagged = source, is_tagged
        self.rows: list[SweepRow] = []
        # The fields of the largest size: its bandwidths have the most digits.
        self._largest: list[str] = []
        self._lines_after: list[str] = []
        self._others = 0  # tables that follow

    def read(self, lines: Iterable[tuple[int, str]]) -> None:
        largest, width = -1, len(self._columns)
        for number, line in lines:
            fields = (_strip_tag(line) if self._is_tagged else line).split()
            if not fields or not fields[0].isdecimal():
                text = _strip_tag(line)
                self._others += LINES["header"].match(text) is not None
                if USED_LINES.search(text):
                    self._lines_after.append(text)
                continue
            if self._others:
                continue
            if len(fields) == width - 1 and "redop" in self._columns:  # blank in all-gathers of 2.11
                fields.insert(self._columns.index("redop"), "none")
            if len(fields) < width:
                message = f"a row of {len(fields)} columns; expected the header's {width}"
                raise FormatError(message, self._source.path, number)
            try:
                times_s = [None if fields[i] == "N/A" else float(fields[i]) * US for i in self._times]
                row = SweepRow(int(fields[0]), times_s[0], times_s[1])
            except ValueError as error:
                message = f"{error}; expected a size in bytes and times in us"
                raise FormatError(message, self._source.path, number) from None
            self.rows.append(row)
            if row.size_bytes > largest:
                largest, self._largest = row.size_bytes, fields
        if self._others:
            self._lines_after = []

    def _value(self, column: str) -> str:
        """Return a field of the largest size; nothing where the table lacks its column."""
        return self._largest[self._columns.index(column)] if column in self._columns else ""

    def sweep(self, lines_before: list[str]) -> CollectiveSweep:
        warnings: list[str] = []
        shape = _first_match(LINES["shape"], lines_before)
        ranks, nodes, device = _participants(lines_before, shape, warnings)
        kind = self._kind([*lines_before, *self._lines_after], ranks, warnings)
        type_name = self._value("type")
        if self._others:
            warnings.append(f"{self._others} more tables follow the first; only the first is read")
        if wrong := _first_match(LINES["wrong"], self._lines_after):
            warnings.append(f"the test found {wrong[1]} wrong values")
        return CollectiveSweep(
            kind=kind,
            ranks=ranks,
            nodes=nodes,
            device=device,
            dtype=dtype_named(NEW_NAMES.get(type_name, type_name)),
            rows=tuple(self.rows),
            source=self._source.path,
            warnings=tuple(warnings),
            # ``nGpus``: the GPUs that each thread of each process drives.
            ranks_per_thread=min(ranks, max(1, int(shape[2]))) if shape else 1,
        )

    def _kind(self, lines: list[str], ranks: int, warnings: list[str]) -> CollectiveKind | None:
        """Return the kind by the program's name where the log prints it, else by bandwidths, operation and root."""
        if program := _first_match(LINES["program"], lines):
            named = None if program[1] == "sendrecv" else collective_named(program[1])
            kind = named if isinstance(named, CollectiveKind) else None
            unclear = f"{program[1]} is not a collective; its times are read all the same"
        else:
            kind = self._kind_by_bandwidth(ranks)
            unclear = "the log does not say which collective it timed, and its bandwidths fit several"
        warnings += [] if kind else [unclear]
        return kind

    def _kind_by_bandwidth(self, ranks: int) -> CollectiveKind | None:
        """Bus over algorithm bandwidth is 2(n-1)/n for all-reduce, (n-1)/n or 1 for others.

        Source: nccl-tests, doc/PERFORMANCE.md. For two ranks all-reduce's is 1, as reduce's, but that has a root.
        """
        if ranks < 2:
            return None
        try:
            algorithm, bus = map(float, self._largest[self._times[0] + 1 : self._times[0] + 3])
        except ValueError:
            return None
        if not algorithm or not math.isfinite(algorithm) or not math.isfinite(bus):
            return None
        reduces = self._value("redop") not in ("", "none")
        is_rooted = self._value("root")[:1] not in ("", "-")
        ratio, share = bus / algorithm, (ranks - 1) / ranks
        # Both bandwidths are printed with two decimals.
        slack = 0.02 / algorithm + 0.01
        if reduces and is_rooted:
            return CollectiveKind.REDUCE
        if reduces and abs(ratio - 2 * share) < slack:
            return CollectiveKind.ALL_REDUCE
        if reduces and abs(ratio - share) < slack:
            return CollectiveKind.REDUCE_SCATTER
        if is_rooted and abs(ratio - 1) < slack < 1 - share:
            return CollectiveKind.BROADCAST
        return None


def _first_match(pattern: re.Pattern[str], lines: list[str]) -> re.Match[str] | None:
    return next((match for match in map(pattern.search, lines) if match), None)


def _participants(lines: list[str], shape: re.Match[str] | None, warnings: list[str]) -> tuple[int, int, str]:
    """Return ranks, nodes and device name, of one group where the test split the ranks."""
    listed = [match for match in map(LINES["device"].match, lines) if match]
    if not listed:
        ranks = max(1, int(shape[1]) * int(shape[2])) if shape else 1
        warnings.append(f"the log lists no devices; {ranks} ranks in one process and one node are assumed")
        return ranks, 1, ""
    groups = {match[2] for match in listed}
    if len(groups) > 1:
        listed = [match for match in listed if match[2] == listed[0][2]]
        warnings.append(f"{len(groups)} groups ran at once; ranks and nodes are those of one")
    devices = dict.fromkeys(match[4].strip() for match in listed)
    if len(devices) > 1:
        warnings.append(f"the ranks have different devices: {', '.join(devices)}")
    return len({match[1] for match in listed}), len({match[3] for match in listed}), next(iter(devices))
