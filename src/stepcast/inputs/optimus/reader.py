"""OptimusPrime training logs: the standard output of a pipeline-parallel PyTorch run, all ranks mixed.

What is read: the settings printed at the start, ``[rank:R stage:S] ... forward time ... - step K`` with
one ``layer[NAME]: total=T ms`` record per layer, and ``| epoch .. | ms/batch ..`` lines. The rest
(warnings of torchrun and NCCL, the graph) is skipped. Prints of two ranks are glued but never cut, so the
text is searched for whole patterns and line ends mean nothing.
"""

import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.arrays import IntArray
from stepcast.ir.layout import Layout
from stepcast.ir.limits import OPTIMUS
from stepcast.ir.measured import BatchTime, LayerTimes, RunLog
from stepcast.units import MS

# Which report each layer record of an OptimusPrime log belongs to.
#
# Ranks print into one stream. A report is a header and one record per layer of its stage, but two ranks'
# prints are glued together, so that headers and records of several reports mix. What a stage reports, its
# signature, is the same sequence of (layer, ops) every step. It is learnt from reports that stand alone;
# a glued record then belongs to the oldest open report that expects it next.

NO_BLOCK = -1

# Enough to learn from; a long log repeats itself.
MOST_LEARNT_FROM = 1000
# More reports than this are never open at once; what is older was damaged.
MOST_OPEN = 256


@dataclass(frozen=True)
class Tokens:
    """Headers and records in the order of the log; ``sign`` numbers a record's (layer, ops), -1: a header.

    *header_of* numbers each token's header if it is one, *stages* and *ranks* are by header.
    """

    sign: IntArray
    header_of: IntArray
    ranks: IntArray
    stages: IntArray


@dataclass(frozen=True)
class Attribution:
    """The report of each token (-1: none, or itself a header), and what was doubtful."""

    block_of: IntArray
    signatures: dict[int, tuple[int, ...]]
    glued: int
    ambiguous: int
    orphans: int


@dataclass(slots=True)
class OpenBlock:
    number: int
    rank: int
    expected: tuple[int, ...]
    next: int = 0


def attribute(tokens: Tokens) -> Attribution:
    signatures = learn_signatures(tokens)
    block_of = np.full(len(tokens.sign), NO_BLOCK, dtype=np.int64)
    taken = take_whole_blocks(tokens, signatures, block_of)
    glued, ambiguous, orphans = take_glued_records(tokens, signatures, block_of, taken)
    return Attribution(block_of, signatures, glued, ambiguous, orphans)


def learn_signatures(tokens: Tokens) -> dict[int, tuple[int, ...]]:
    """What each stage reports: the commonest sequence of records between two headers."""
    headers = np.flatnonzero(tokens.sign < 0)
    if not len(headers):
        return {}
    ends = np.append(headers[1:], len(tokens.sign))
    alone = (ends - headers > 1) & (np.diff(headers, prepend=-2) > 1)
    signatures = {}
    for stage in np.unique(tokens.stages).tolist():
        found: Counter[tuple[int, ...]] = Counter()
        mine = np.flatnonzero(alone & (tokens.stages == stage))[:MOST_LEARNT_FROM]
        for start, end in zip(headers[mine].tolist(), ends[mine].tolist(), strict=True):
            if end - start <= 4096:  # a damaged log may have no more headers at all
                found[tuple(tokens.sign[start + 1 : end].tolist())] += 1
        if found:
            # Of equally common ones the first.
            signatures[stage] = max(found, key=found.__getitem__)
    return signatures


def take_whole_blocks(
    tokens: Tokens, signatures: dict[int, tuple[int, ...]], block_of: IntArray
) -> npt.NDArray[np.bool_]:
    """Attribute reports that stand alone; returns which tokens that settles, headers included."""
    taken = np.zeros(len(tokens.sign), dtype=bool)
    headers = np.flatnonzero(tokens.sign < 0)
    # After another header, records may be the other's.
    alone = np.diff(headers, prepend=-2) > 1
    for stage, signature in signatures.items():
        starts = headers[alone & (tokens.stages == stage)]
        starts = starts[starts + len(signature) < len(tokens.sign)]
        places = starts[:, None] + 1 + np.arange(len(signature))
        whole = (tokens.sign[places] == np.array(signature)).all(axis=1)
        starts, places = starts[whole], places[whole]
        block_of[places] = tokens.header_of[starts][:, None]
        taken[places] = True
        taken[starts] = True
    return taken


def take_glued_records(
    tokens: Tokens, signatures: dict[int, tuple[int, ...]], block_of: IntArray, taken: npt.NDArray[np.bool_]
) -> tuple[int, int, int]:
    """Attribute the rest one by one; returns how many were glued, ambiguous, and nobody's."""
    glued = ambiguous = orphans = 0
    open_blocks: list[OpenBlock] = []
    rest = np.flatnonzero(~taken)
    for place, sign in zip(rest.tolist(), tokens.sign[rest].tolist(), strict=True):
        if sign < 0:
            number = int(tokens.header_of[place])
            rank = int(tokens.ranks[number])
            # A rank prints one report at a time.
            open_blocks = [block for block in open_blocks if block.rank != rank][-MOST_OPEN:]
            open_blocks.append(OpenBlock(number, rank, signatures.get(int(tokens.stages[number]), ())))
            continue
        waiting = [b for b in open_blocks if b.next < len(b.expected) and b.expected[b.next] == sign]
        if not waiting:
            # A record of this report was lost, or nothing is known of its stage.
            waiting = [b for b in open_blocks if sign in b.expected[b.next :]]
            waiting = waiting or [b for b in open_blocks[-1:] if not b.expected]
        if not waiting:
            orphans += 1
            continue
        block = waiting[0]
        ambiguous += len(waiting) > 1
        glued += 1
        block_of[place] = block.number
        if block.expected:
            block.next = block.expected.index(sign, block.next) + 1
            if block.next == len(block.expected):
                open_blocks.remove(block)
    return glued, ambiguous, orphans


# Every print of an OptimusPrime log that says something, found by pattern and kept as columns.

NUMBER = r"[0-9]{1,12}\.?[0-9]{0,9}"
# Few groups, because each one costs time for every print: a header is one, taken apart later.
REPORT = re.compile(
    r"layer\[([A-Za-z0-9_.]{1,80})\]: total=(" + NUMBER + r")ms, ops=([0-9]{1,9}), avg/op=" + NUMBER + "ms"
    r"|(\[rank:[0-9]{1,7} stage:[0-9]{1,7}\] transformer-block\(module\) forward time \(no send/recv\)"
    r" - step [0-9]{1,9})",
    re.ASCII,
)
RANK_AND_STAGE = re.compile(r"\[rank:([0-9]+) stage:([0-9]+)\]", re.ASCII)
BATCH = re.compile(
    r"\| epoch +([0-9]{1,9}) \| +([0-9]{1,9})/ *[0-9]{1,9} batches \| lr +[^|]{1,40}\| ms/batch +("
    + NUMBER
    + r") \| loss +("
    + NUMBER
    + r"|nan|inf) \|",
    re.ASCII,
)
# How each kind of print begins, to know how many are damaged.
BEGINNINGS = {
    "reports": "transformer-block(module) forward time",
    "layer records": "]: total=",
    "batch lines": "| ms/batch",
}
# Prints that are made once; the word each gets.
ONCE = {
    "world": re.compile(r"> World size: +([0-9]{1,9})(?![0-9])", re.ASCII),
    "gas": re.compile(r"> GAS: +([0-9]{1,9})(?![0-9])", re.ASCII),
    "gbs": re.compile(r"> GBS: +([0-9]{1,9})(?![0-9])", re.ASCII),
    "mbs": re.compile(r"> MBS: +([0-9]{1,9})(?![0-9])", re.ASCII),
    "tp": re.compile(r"> TP: +([0-9]{1,9})(?![0-9])", re.ASCII),
    "dp": re.compile(r"> DP: +([0-9]{1,9})(?![0-9])", re.ASCII),
    "pp": re.compile(r"> PP: +([0-9]{1,9})(?![0-9])", re.ASCII),
    "parameters": re.compile(r"> Total parameters in model: +([0-9]{1,3}(?:,[0-9]{3}){0,5})(?![0-9,])", re.ASCII),
    "data_size": re.compile(r"data_size=([0-9]{1,12})", re.ASCII),
    # Printed with --debug-batch: the samples that all ranks of the first stage took in a step.
    "taken": re.compile(
        r"effective_global_batch_used_by_stage0\(sum over stage0 ranks\)=([0-9]{1,12})(?![0-9])", re.ASCII
    ),
    "batches_per_epoch": re.compile(r"nbatches=([0-9]{1,12})", re.ASCII),
    "model_class": re.compile(r">> model class name: (\w{1,80})", re.ASCII),
    "elapsed_s": re.compile(r"Time elapsed: (" + NUMBER + ") sec", re.ASCII),
    "stage_ends": re.compile(r"first metadata_range: \[([^\]]{1,100000})\]"),
}
FINISHED = re.compile(r"\[rank:([0-9]{1,7}), run completed", re.ASCII)


class Signs(dict[tuple[str, str], int]):
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


class Origins(dict[str, tuple[int, int]]):
    """Rank and stage of a header, by its text before the step."""

    def __missing__(self, text: str) -> tuple[int, int]:
        match = RANK_AND_STAGE.match(text)
        assert match is not None
        origin = self[text] = (int(match[1]), int(match[2]))
        return origin


class LogScan:
    """All prints of a log, in order."""

    def __init__(self, pieces: Iterable[str]) -> None:
        self.signs = Signs()
        self._origins = Origins()
        self.batches: list[BatchTime] = []
        self.once: dict[str, str] = {}
        self.finished: set[int] = set()
        self.begun = dict.fromkeys(BEGINNINGS, 0)
        self._sign, self._total_ms = array("q"), array("d")
        self._ranks, self._stages, self._steps = array("q"), array("q"), array("q")
        for piece in pieces:
            self._add(piece)

    def _add(self, text: str) -> None:
        self._add_reports(text)
        for epoch, index, batch_ms, loss in BATCH.findall(text):
            self.batches.append(BatchTime(int(epoch), int(index), float(batch_ms) * MS, float(loss)))
        for word, pattern in ONCE.items():
            if word not in self.once and (match := pattern.search(text)):
                self.once[word] = match[1]
        self.finished.update(map(int, FINISHED.findall(text)))
        for what, mark in BEGINNINGS.items():
            self.begun[what] += text.count(mark)

    def _add_reports(self, text: str) -> None:
        found = REPORT.findall(text)
        if not found:
            return
        self._sign.extend([self.signs[row[0], row[2]] for row in found])
        self._total_ms.extend([float(row[1]) if row[1] else 0.0 for row in found])
        headers = [row[3].rpartition(" ") for row in found if row[3]]
        self._ranks.extend([self._origins[front][0] for front, _, _ in headers])
        self._stages.extend([self._origins[front][1] for front, _, _ in headers])
        self._steps.extend([int(step) for _, _, step in headers])

    @property
    def tokens(self) -> Tokens:
        sign = np.array(self._sign, dtype=np.int64)
        return Tokens(sign, np.cumsum(sign < 0) - 1, _column(self._ranks), _column(self._stages))

    @property
    def steps(self) -> npt.NDArray[np.int64]:
        """By header."""
        return _column(self._steps)

    @property
    def total_ms(self) -> npt.NDArray[np.float64]:
        return np.array(self._total_ms, dtype=np.float64)

    @property
    def damaged(self) -> dict[str, int]:
        """Prints that were begun but are not whole."""
        records = len(self._sign) - len(self._ranks)
        whole = {"reports": len(self._ranks), "layer records": records, "batch lines": len(self.batches)}
        lost = {what: count - whole[what] for what, count in self.begun.items()}
        return {what: count for what, count in lost.items() if count > 0}


def _column(values: "array[int]") -> npt.NDArray[np.int64]:
    column: npt.NDArray[Any] = np.array(values, dtype=np.int64)
    return column


# The prints of an OptimusPrime log into a RunLog.

STAGE_END = re.compile(r"\(([0-9]{1,6}), '([A-Za-z0-9_.]{1,200})'\)")


def read_log(pieces: Iterable[str], path: str) -> RunLog:
    """The log whose text is *pieces*, cut only between lines."""
    scan = LogScan(pieces)
    tokens = scan.tokens
    if not len(tokens.ranks) and not scan.batches:
        raise FormatError(
            "holds no usable record; expected '[rank:R stage:S] transformer-block(module) forward time' with "
            "layer[...] records, or '| epoch ... | ms/batch ...' lines",
            path,
        )
    attribution = attribute(tokens)
    warnings = [f"{count} damaged {what} left out" for what, count in scan.damaged.items()]
    warnings += doubts(tokens, scan.steps, attribution)
    layout, sizes = settle(scan.once, tokens, warnings)
    if "parameters" not in scan.once:
        warnings.append("the number of parameters is not printed")
    return RunLog(
        layout=layout,
        micro_batch=sizes["micro_batch"],
        micro_batches=sizes["micro_batches"],
        global_batch=sizes["global_batch"],
        parameters=int(scan.once.get("parameters", "0").replace(",", "")),
        layer_times=layer_times(scan, tokens, attribution),
        batches=tuple(scan.batches),
        blocks=len(tokens.ranks),
        stage_ends=stage_ends(scan.once.get("stage_ends", "")),
        source=path,
        facts=other_facts(scan),
        warnings=tuple(warnings),
    )


def layer_times(scan: LogScan, tokens: Tokens, attribution: Attribution) -> LayerTimes:
    kept = np.flatnonzero(attribution.block_of != NO_BLOCK)
    block_of, sign = attribution.block_of[kept], tokens.sign[kept]
    return LayerTimes(
        layers=tuple(scan.signs.layers),
        rank_of=tokens.ranks[block_of].astype(np.int32),
        stage_of=tokens.stages[block_of].astype(np.int32),
        step_of=scan.steps[block_of].astype(np.int32),
        layer_of=np.array(scan.signs.layer_of, dtype=np.int32)[sign],
        block_of=block_of.astype(np.int32),
        ops_of=np.array(scan.signs.ops_of, dtype=np.int32)[sign],
        total_s=scan.total_ms[kept] * MS,
    )


def doubts(tokens: Tokens, steps: npt.NDArray[np.int64], attribution: Attribution) -> list[str]:
    """What is missing or could not be attributed for certain."""
    blocks = len(tokens.ranks)
    warnings = []
    if attribution.orphans:
        warnings.append(f"{attribution.orphans} layer records belong to no report and are left out")
    if attribution.ambiguous:
        warnings.append(f"{attribution.ambiguous} glued records could be of several ranks of one stage; taken in order")
    if not blocks:
        return [*warnings, "no layer times are printed"]
    found = np.bincount(attribution.block_of[attribution.block_of >= 0], minlength=blocks)
    wanted = {stage: len(signature) for stage, signature in attribution.signatures.items()}
    short = int((found < np.array([wanted.get(stage, 1) for stage in tokens.stages.tolist()])).sum())
    if short:
        warnings.append(f"{short} of {blocks} reports lack a layer record")
    # Every rank that reports at all should do so every step.
    expected = len(set(tokens.ranks.tolist())) * len(set(steps.tolist()))
    distinct = len(set((tokens.ranks * 10**9 + steps).tolist()))
    if distinct < expected:
        warnings.append(f"{expected - distinct} of {expected} reports (rank and step) are missing")
    if blocks > distinct:
        warnings.append(f"{blocks - distinct} reports (rank and step) are printed twice")
    return warnings


def settle(once: dict[str, str], tokens: Tokens, warnings: list[str]) -> tuple[Layout, dict[str, int]]:
    """Layout and batch sizes as printed; what is missing follows from the rest, with a warning."""
    stages = int(tokens.stages.max()) + 1 if len(tokens.stages) else 1
    words = ("world", "tp", "dp", "pp", "mbs", "gbs", "gas")
    printed = {word: int(once[word]) for word in words if int(once.get(word, "0")) > 0}
    tp, dp, pp = printed.get("tp", 1), printed.get("dp", 1), printed.get("pp", stages)
    micro_batch = printed.get("mbs", 1)
    micro_batches = printed.get("gas", max(1, printed.get("gbs", 1) // (micro_batch * dp)))
    global_batch = printed.get("gbs", micro_batch * micro_batches * dp)
    missing = [word.upper() for word in words if word not in printed]
    if missing:
        warnings.append(f"not printed, taken from the rest or as 1: {', '.join(missing)}")
    if printed.get("world", tp * dp * pp) != tp * dp * pp:
        warnings.append(f"world size {printed['world']} is not TP {tp} x DP {dp} x PP {pp}")
    if stages > pp:
        warnings.append(f"stage {stages - 1} reported, but PP is {pp}")
    ran = samples_taken(once, dp, global_batch)
    if global_batch != micro_batch * micro_batches * dp:
        warnings.append(f"GBS {global_batch} is not MBS {micro_batch} x GAS {micro_batches} x DP {dp}")
    if ran != global_batch:
        # A rank cuts what it takes into GAS micro-batches, whatever MBS says (get_input of schedule.py).
        micro_batch = ceil(ran / (dp * micro_batches))
        warnings.append(
            f"GBS {global_batch} and MBS {printed.get('mbs', 1)} are printed, but a step took {ran} samples: "
            f"read as {micro_batches} micro-batches of {micro_batch}"
        )
    sizes = {"micro_batch": micro_batch, "micro_batches": micro_batches, "global_batch": ran}
    try:
        OPTIMUS.check(pp * micro_batches)
        return Layout(tp=tp, dp=dp, pp=pp), sizes
    except ValueError as error:
        raise FormatError(str(error)) from None


def samples_taken(once: dict[str, str], dp: int, global_batch: int) -> int:
    """By all ranks in a step: as a rank counted them, or as the length of an epoch shows.

    A loader over one of *dp* equal shares of the data has as many batches as its batch size makes of them;
    *global_batch* where that is one such size.
    """
    if int(once.get("taken", "0")) > 0:
        return int(once["taken"])
    batches = int(once.get("batches_per_epoch", "0"))
    share = ceil(int(once.get("data_size", "0")) / dp)
    if not 0 < batches <= share or batches == ceil(share / max(1, global_batch // dp)):
        return global_batch
    return dp * ceil(share / batches)


def stage_ends(text: str) -> tuple[str, ...]:
    ends = {int(stage): name for stage, name in STAGE_END.findall(text)}
    return tuple(ends[stage] for stage in sorted(ends))


def other_facts(scan: LogScan) -> dict[str, Any]:
    facts: dict[str, Any] = {"finished_ranks": len(scan.finished)}
    for word in ("world", "data_size", "batches_per_epoch"):
        if word in scan.once:
            facts[word] = int(scan.once[word])
    if "elapsed_s" in scan.once:
        facts["elapsed_s"] = float(scan.once["elapsed_s"])
    if "model_class" in scan.once:
        facts["model_class"] = scan.once["model_class"]
    return facts


MARKS = re.compile(
    r"> Total parameters in model: [0-9]|> GAS: [0-9]|transformer-block\(module\) forward time"
    r"|\| epoch +[0-9]+ \| +[0-9]+/ *[0-9]+ batches \|"
)


def looks_like(head: str) -> bool:
    """Whether the first part of the text has a print that only this program makes."""
    return MARKS.search(head) is not None


def read(source: Source) -> "RunLog":
    # Recognising a file must not load numpy.

    return read_log(source.slabs(errors="replace"), source.path)
