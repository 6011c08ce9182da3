"""Every print of an OptimusPrime log that says something, found by pattern and kept as columns."""

import re
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from stepcast.inputs.optimus.blocks import Tokens
from stepcast.ir.runlog import BatchTime
from stepcast.units import MS

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
    "parameters": re.compile(
        r"> Total parameters in model: +([0-9]{1,3}(?:,[0-9]{3}){0,5})(?![0-9,])", re.ASCII
    ),
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


class Scan:
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
