"""OptimusPrime training logs: the standard output of a pipeline-parallel PyTorch run, all ranks mixed.

The reader uses the settings printed at the start, ``[rank:R stage:S] ... forward time ... - step K`` with one
``layer[NAME]: total=T ms`` record per layer, and ``| epoch .. | ms/batch ..`` lines. The rest (warnings of
torchrun and NCCL, the graph) is skipped. Prints of two ranks are glued but never cut, so the text is searched
for complete patterns and line ends mean nothing.
"""

import json
import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from math import ceil

import numpy as np

from stepcast.inputs.source import FormatError, Source, expect, prefix_errors, read_words
from stepcast.inputs.table import read_as_one, recognise
from stepcast.ir.arrays import BoolArray, FloatArray, IntArray
from stepcast.ir.layout import Layout
from stepcast.ir.limits import LENGTHS, OPTIMUS
from stepcast.ir.measured import BatchTime, LayerTimes, RunLog
from stepcast.ir.types import dataclass
from stepcast.units import MIB, MS

WORDS = read_words("traces")
ONCE = {name: re.compile(pattern, re.ASCII) for name, pattern in WORDS["optimus"].items()}
PRINTS = {name: re.compile(pattern, re.ASCII) for name, pattern in WORDS["optimus_prints"].items()}
BEGINNINGS = WORDS["optimus_beginnings"]
NO_REPORT = -1
# Enough to learn from; a long log repeats itself.
MOST_LEARNT_FROM = 1000
# More reports than this are never open at once; what is older was damaged.
MOST_OPEN = 256
# A damaged log may have no more headers at all.
LONGEST_REPORT = 4096


def read(source: Source) -> RunLog:
    scan = _LogScan(source.slabs(errors="replace"))
    if not len(scan.ranks) and not scan.batches:
        raise FormatError(
            "holds no usable record; expected '[rank:R stage:S] transformer-block(module) forward time' with "
            "layer[...] records, or '| epoch ... | ms/batch ...' lines",
            source.path,
        )
    headers = np.flatnonzero(scan.sign < 0)
    # After another header, records may be the other's.
    is_separate: BoolArray = np.diff(headers, prepend=-2) > 1
    signatures = _learn_signatures(scan, headers, is_separate)
    report_of = np.full(len(scan.sign), NO_REPORT, dtype=np.int64)
    is_attributed = np.zeros(len(scan.sign), dtype=bool)
    for stage, signature in signatures.items():
        starts = headers[is_separate & (scan.stages == stage)]
        starts = starts[starts + len(signature) < len(scan.sign)]
        places = starts[:, None] + 1 + np.arange(len(signature))
        is_complete = (scan.sign[places] == np.array(signature)).all(axis=1)
        starts, places = starts[is_complete], places[is_complete]
        report_of[places] = scan.header_of[starts][:, None]
        is_attributed[places] = is_attributed[starts] = True
    counts = zip(scan.begun.items(), (len(headers), len(scan.sign) - len(headers), len(scan.batches)), strict=True)
    warnings = [f"{begun - read} damaged {name} left out" for (name, begun), read in counts if begun > read]
    ambiguous, orphans = _attribute_glued(scan, signatures, report_of, np.flatnonzero(~is_attributed))
    if orphans:
        warnings.append(f"{orphans} layer records belong to no report and are left out")
    if ambiguous:
        warnings.append(f"{ambiguous} glued records could be of several ranks of one stage; taken in order")
    warnings += _find_incomplete(scan, signatures, report_of)
    layout, sizes = _read_settings(scan, warnings)
    if "parameters" not in scan.once:
        warnings.append("the number of parameters is not printed")
    ends = {int(stage): name for stage, name in PRINTS["stage_end"].findall(scan.once.get("stage_ends", ""))}
    return RunLog(
        layout=layout,
        micro_batch=sizes["micro_batch"],
        micro_batches=sizes["micro_batches"],
        global_batch=sizes["global_batch"],
        parameters=int(scan.once.get("parameters", "0").replace(",", "")),
        layer_times=scan.layer_times(report_of),
        batches=tuple(scan.batches),
        blocks=len(scan.ranks),
        stage_ends=tuple(ends[stage] for stage in sorted(ends)),
        source=source.path,
        facts=scan.facts(),
        warnings=tuple(warnings),
    )


class _RecordSigns(dict[tuple[str, str], int]):
    """A number for each (layer, ops) of a record; -1 for a header, which has neither."""

    def __init__(self) -> None:
        super().__init__({("", ""): -1})
        self.layers: dict[str, int] = {}
        self.layer_of: list[int] = []
        self.ops_of: list[int] = []

    def __missing__(self, key: tuple[str, str]) -> int:
        number = self[key] = len(self.layer_of)
        self.layer_of.append(self.layers.setdefault(key[0], len(self.layers)))
        self.ops_of.append(int(key[1]))
        return number


@lru_cache(maxsize=100_000)
def _header_origin(text: str) -> tuple[int, int]:
    """Return rank and stage of a header, from its text before the step."""
    rank, stage = PRINTS["origin"].findall(text)[0]
    return int(rank), int(stage)


class _LogScan:
    """All prints of a log, in order; headers and layer records are scan.

    ``sign`` numbers a record's (layer, ops), -1: a header; *header_of* numbers each token's header if it is one;
    *ranks*, *stages* and *steps* are by header.
    """

    def __init__(self, pieces: Iterable[str]) -> None:
        self.batches: list[BatchTime] = []
        self.once: dict[str, str] = {}
        self._finished: set[int] = set()
        self.begun = dict.fromkeys(BEGINNINGS, 0)
        self._signs = _RecordSigns()
        self._sign, self._total_ms = array("q"), array("d")
        self._ranks, self._stages, self._steps = array("q"), array("q"), array("q")
        for piece in pieces:
            self._add(piece)
        columns = (self._sign, self._ranks, self._stages, self._steps)
        self.sign, self.ranks, self.stages, self.steps = (np.array(values, dtype=np.int64) for values in columns)
        self.header_of = np.cumsum(self.sign < 0) - 1

    def _add(self, text: str) -> None:
        if reports := PRINTS["report"].findall(text):
            self._sign.extend([self._signs[row[0], row[2]] for row in reports])
            self._total_ms.extend([float(row[1]) if row[1] else 0.0 for row in reports])
            headers = [row[3].rpartition(" ") for row in reports if row[3]]
            self._ranks.extend([_header_origin(front)[0] for front, _, _ in headers])
            self._stages.extend([_header_origin(front)[1] for front, _, _ in headers])
            self._steps.extend([int(step) for _, _, step in headers])
        for epoch, index, batch_ms, loss in PRINTS["batch"].findall(text):
            self.batches.append(BatchTime(int(epoch), int(index), float(batch_ms) * MS, float(loss)))
        for name, pattern in ONCE.items():
            if name not in self.once and (match := pattern.search(text)):
                self.once[name] = match[1]
        self._finished.update(map(int, PRINTS["finished"].findall(text)))
        for name, mark in BEGINNINGS.items():
            self.begun[name] += text.count(mark)

    def layer_times(self, report_of: IntArray) -> LayerTimes:
        used = np.flatnonzero(report_of != NO_REPORT)
        report_of, sign = report_of[used], self.sign[used]
        total_ms: FloatArray = np.array(self._total_ms, dtype=np.float64)
        return LayerTimes(
            layers=tuple(self._signs.layers),
            rank_of=self.ranks[report_of].astype(np.int32),
            stage_of=self.stages[report_of].astype(np.int32),
            step_of=self.steps[report_of].astype(np.int32),
            layer_of=np.array(self._signs.layer_of, dtype=np.int32)[sign],
            block_of=report_of.astype(np.int32),
            ops_of=np.array(self._signs.ops_of, dtype=np.int32)[sign],
            total_s=total_ms[used] * MS,
        )

    def facts(self) -> dict[str, object]:
        kinds: dict[str, type] = dict.fromkeys(("world", "data_size", "batches_per_epoch"), int)
        kinds |= {"elapsed_s": float, "model_class": str}
        values = {name: kind(self.once[name]) for name, kind in kinds.items() if name in self.once}
        return {"finished_ranks": len(self._finished), **values}


# Which report each layer record belongs to. Ranks print into one stream. A report is a header and one record
# per layer of its stage, but two ranks' prints are glued together, so that headers and records of several
# reports mix. The signature of a stage is the sequence of (layer, ops) that it reports every step. It is
# learnt from reports that are not mixed; a glued record then belongs to the oldest open report that expects it.


@dataclass(slots=True)
class _OpenReport:
    number: int
    rank: int
    expected: tuple[int, ...]
    next: int = 0


def _learn_signatures(scan: _LogScan, headers: IntArray, is_separate: BoolArray) -> dict[int, tuple[int, ...]]:
    """Return the commonest sequence of records between two headers of each stage."""
    ends = np.append(headers[1:], len(scan.sign))
    signatures = {}
    for stage in np.unique(scan.stages).tolist():
        rows = np.flatnonzero(is_separate & (ends - headers > 1) & (scan.stages == stage))[:MOST_LEARNT_FROM]
        spans = zip(headers[rows].tolist(), ends[rows].tolist(), strict=True)
        records = (scan.sign[start + 1 : end].tolist() for start, end in spans if end - start <= LONGEST_REPORT)
        if sequences := Counter(map(tuple, records)):
            signatures[stage] = sequences.most_common(1)[0][0]  # of equally common ones the first
    return signatures


def _attribute_glued(
    scan: _LogScan, signatures: dict[int, tuple[int, ...]], report_of: IntArray, rest: IntArray
) -> tuple[int, int]:
    """Attribute the *rest* one by one; return how many were ambiguous, and how many belong to no report."""
    ambiguous = orphans = 0
    open_reports: list[_OpenReport] = []
    for place, sign in zip(rest.tolist(), scan.sign[rest].tolist(), strict=True):
        if sign < 0:
            number = int(scan.header_of[place])
            rank = int(scan.ranks[number])
            # A rank prints one report at a time.
            open_reports = [report for report in open_reports if report.rank != rank][-MOST_OPEN:]
            open_reports.append(_OpenReport(number, rank, signatures.get(int(scan.stages[number]), ())))
            continue
        waiting = [r for r in open_reports if r.next < len(r.expected) and r.expected[r.next] == sign]
        if not waiting:
            # A record of this report was lost, or nothing is known of its stage.
            waiting = [r for r in open_reports if sign in r.expected[r.next :]]
            waiting = waiting or [r for r in open_reports[-1:] if not r.expected]
        if not waiting:
            orphans += 1
            continue
        report = waiting[0]
        ambiguous += len(waiting) > 1
        report_of[place] = report.number
        if report.expected:
            report.next = report.expected.index(sign, report.next) + 1
            if report.next == len(report.expected):
                open_reports.remove(report)
    return ambiguous, orphans


def _find_incomplete(scan: _LogScan, signatures: dict[int, tuple[int, ...]], report_of: IntArray) -> list[str]:
    """Describe what reports lack, and which are missing or printed twice."""
    reports, warnings = len(scan.ranks), []
    if not reports:
        return ["no layer times are printed"]
    counts = np.bincount(report_of[report_of >= 0], minlength=reports)
    expected_lines = np.array([len(signatures.get(stage, (0,))) for stage in scan.stages.tolist()])
    if short := int((counts < expected_lines).sum()):
        warnings.append(f"{short} of {reports} reports lack a layer record")
    # Every rank that reports at all should do so every step.
    expected = len(set(scan.ranks.tolist())) * len(set(scan.steps.tolist()))
    distinct = len(set((scan.ranks * 10**9 + scan.steps).tolist()))
    if distinct < expected:
        warnings.append(f"{expected - distinct} of {expected} reports (rank and step) are missing")
    if reports > distinct:
        warnings.append(f"{reports - distinct} reports (rank and step) are printed twice")
    return warnings


def _read_settings(scan: _LogScan, warnings: list[str]) -> tuple[Layout, dict[str, int]]:
    """Return layout and batch sizes as printed; what is missing follows from the rest, with a warning."""
    once, stages = scan.once, int(scan.stages.max()) + 1 if len(scan.stages) else 1
    names = ("world", "tp", "dp", "pp", "mbs", "gbs", "gas")
    printed = {name: int(once[name]) for name in names if int(once.get(name, "0")) > 0}
    tp, dp, pp = printed.get("tp", 1), printed.get("dp", 1), printed.get("pp", stages)
    micro_batch = printed.get("mbs", 1)
    micro_batches = printed.get("gas", max(1, printed.get("gbs", 1) // (micro_batch * dp)))
    global_batch = printed.get("gbs", micro_batch * micro_batches * dp)
    missing = [name.upper() for name in names if name not in printed]
    if missing:
        warnings.append(f"not printed, taken from the rest or as 1: {', '.join(missing)}")
    if printed.get("world", tp * dp * pp) != tp * dp * pp:
        warnings.append(f"world size {printed['world']} is not TP {tp} x DP {dp} x PP {pp}")
    if stages > pp:
        warnings.append(f"stage {stages - 1} reported, but PP is {pp}")
    # The samples of all ranks in a step: as a rank counted them, or as the length of an epoch shows. A loader over one
    # of *dp* equal shares of the data has as many batches as its batch size makes of them.
    batches, share = int(once.get("batches_per_epoch", "0")), ceil(int(once.get("data_size", "0")) / dp)
    samples = int(once.get("taken", "0"))
    if samples <= 0:
        usual = ceil(share / max(1, global_batch // dp))
        samples = dp * ceil(share / batches) if 0 < batches <= share and batches != usual else global_batch
    if global_batch != micro_batch * micro_batches * dp:
        warnings.append(f"GBS {global_batch} is not MBS {micro_batch} x GAS {micro_batches} x DP {dp}")
    if samples != global_batch:
        # A rank cuts what it takes into GAS micro-batches, whatever MBS says (get_input of schedule.py).
        micro_batch = ceil(samples / (dp * micro_batches))
        warnings.append(
            f"GBS {global_batch} and MBS {printed.get('mbs', 1)} are printed, but a step took {samples} samples: "
            f"read as {micro_batches} micro-batches of {micro_batch}"
        )
    sizes = {"micro_batch": micro_batch, "micro_batches": micro_batches, "global_batch": samples}
    OPTIMUS.check(pp * micro_batches)
    return Layout(tp=tp, dp=dp, pp=pp), sizes


# Padded lengths of steps 1, 2, ..., {"S": [...]}: the log does not print them.
LENGTHS_FILE = "seqlen_per_step.json"
# ``20251224_105911_TP1_DP1_PP8_MBS1_GBS32_log.txt`` comes with ``20251224_105911_gpustat_TP1_..._GBS32.log``.
LOG_END, GPUSTAT_END, GPUSTAT = "_log.txt", ".log", "gpustat_"


def read_logs(paths: Sequence[str], skip: Callable[[str, str], None]) -> list[RunLog]:
    """Return the OptimusPrime logs among *paths*; files of other kinds are passed over, bad logs are skipped."""
    logs = []
    for path in paths:
        source = Source(path)
        try:
            if recognise(source).name != "optimus":
                continue
        except FormatError:
            continue
        try:
            logs.append(read_as_one([source], "optimus")[1])
        except FormatError as error:
            skip(path, error.message)
    return logs


def read_step_lengths(path: str) -> tuple[float, ...]:
    """Return the steps' padded lengths from the file next to a log; none where there is none."""
    file = os.path.join(os.path.dirname(path), LENGTHS_FILE)
    if not os.path.exists(file):
        return ()
    data = Source(file).data(LENGTHS)
    damage = (ValueError, KeyError, TypeError, RecursionError)
    with prefix_errors('is no list of lengths such as {"S": [88, 109, ...]}', file, damage):
        lengths = tuple(float(value) for value in json.loads(data)["S"])
    expect(all(0 < length < 1e9 for length in lengths), "has a length that is not above zero", file)
    return lengths


def find_gpustat(path: str) -> str | None:
    """Return the gpustat log that belongs to the training log at *path*, if there is one."""
    folder, name = os.path.split(path)
    words = name.removesuffix(LOG_END).split("_")
    stamp, rest = words[:2], words[2:]
    file = os.path.join(folder, "_".join([*stamp, GPUSTAT + "_".join(rest)]) + GPUSTAT_END)
    return file if name.endswith(LOG_END) and os.path.exists(file) else None


def read_gpustat(source: Source) -> tuple[int, ...]:
    """Return the most bytes in use on each GPU, by GPU number."""
    peaks_mib: dict[int, int] = {}
    for text in source.slabs(errors="replace"):
        for gpu, used, total in PRINTS["gpustat"].findall(text):
            if int(used) > int(total):
                raise FormatError(f"GPU {gpu} uses {used} of {total} MB; expected at most all", source.path)
            peaks_mib[int(gpu)] = max(peaks_mib.get(int(gpu), 0), int(used))
    expect(peaks_mib, "holds no GPU; expected lines like '[0] NVIDIA A40 | 48'C, 0 % | 0 / 46068 MB |'", source.path)
    absent = sorted(set(range(max(peaks_mib) + 1)) - set(peaks_mib))
    if absent:
        raise FormatError(f"GPU {absent[0]} is never shown, but GPU {max(peaks_mib)} is", source.path)
    return tuple(peaks_mib[gpu] * MIB for gpu in sorted(peaks_mib))
