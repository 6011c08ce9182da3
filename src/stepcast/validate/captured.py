"""The transformers set by way of ``capture``: the same measured steps, each program traced, not generated.

Needs PyTorch and transformers; a row takes some seconds. It is measured when it is asked for by name.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepcast.forecast.captured import Spread, predict_captured
from stepcast.forecast.prediction import Prediction
from stepcast.hardware import load_cluster
from stepcast.ir.progress import report_progress
from stepcast.models.catalog import load_model
from stepcast.validate.scoreboard import Measurements, ScoredRow, unseen_share
from stepcast.validate.transformers import (
    CLUSTER,
    Peak,
    Record,
    measurements_of,
    said_model,
    setting_words,
    step_files,
    step_rows,
    visited,
)

if TYPE_CHECKING:
    from stepcast.pytorch.capture.program import CaptureOptions

# A process takes half a gigabyte and some seconds to load PyTorch.
MOST_WORKERS, ROWS_OF_A_WORKER = 8, 6
NOTES = (
    "steps of transformers 5.17 in PyTorch 2.11 on one H200; phases are those of the GPU's own clock",
    "captured without a GPU by PyTorch {} and transformers {}, whose code may differ",
)


def measure_folder(*folders: str) -> Measurements:
    """Every ``steps*.csv`` in *folders*, or that one file, with the configs beside."""
    from stepcast.pytorch.load import load_torch, load_transformers

    versions = load_torch("capture").__version__, load_transformers("capture").__version__
    rows: list[ScoredRow] = []
    skipped: Counter[str] = Counter()
    peaks: list[Peak] = []
    asked = list(visited([file for folder in folders for file in step_files(folder)]))
    with _workers(len(asked)) as map_each:
        found = iter(map_each(_compared, asked))
        for file, _ in report_progress(asked):
            own, own_peaks, why = next(found)
            if why:
                skipped[f"{file.name}: {why}"] += 1
            rows += own
            peaks += own_peaks
    return measurements_of(rows, skipped, peaks, (NOTES[0], NOTES[1].format(*versions)))


@contextmanager
def _workers(rows: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """``map`` by a process for each core, each of which loads PyTorch once; of a few rows by this one."""
    count = min(MOST_WORKERS, os.cpu_count() or 1, rows // ROWS_OF_A_WORKER)
    if count < 2:
        yield map
        return
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        yield pool.map


def _compared(asked: tuple[Path, Record]) -> tuple[list[ScoredRow], list[Peak], str]:
    """The rows of one step and its peak; or why there are none."""
    file, record = asked
    peaks: list[Peak] = []
    try:
        prediction, command = _predicted(record, file.parent)
    except ValueError as error:
        return [], [], str(error)
    return list(step_rows(record, prediction, command, peaks)), peaks, ""


def _predicted(record: Record, folder: Path) -> tuple[Prediction, str]:
    from stepcast.pytorch.capture.run import capture

    what, asked = said_model(record, folder), _asked(record, setting_words(record))
    zeros = _unseen(what, asked.batch * asked.seq)
    spread = Spread(zero_gradients=zeros)
    return predict_captured(capture(what, asked), load_cluster(CLUSTER), spread), _command(what, asked, zeros)


def _unseen(what: str, tokens: int) -> float:
    """The share of weights without a gradient, of a model that is known by its config."""
    try:
        return unseen_share(load_model(what), tokens)
    except ValueError:
        return 0.0


def _asked(record: Record, words: set[str]) -> "CaptureOptions":
    from stepcast.pytorch.capture.program import CaptureOptions

    return CaptureOptions(
        batch=int(record["batch"]),
        seq=int(record["seq"]),
        dtype="fp32" if "fp32" in words else "bf16",
        autocast="autocast" in words,
        checkpoint="checkpoint" in words,
        fused="fused" in words,
        # Which the library chose when it ran; a newer one may choose otherwise.
        attention=record.get("attention") or ("eager" if "attn-eager" in words else ""),
        experts=record.get("experts") or ("eager" if "experts-eager" in words else ""),
        compiled="compile" in words,
    )


def _command(what: str, asked: "CaptureOptions", zeros: float) -> str:
    words = ["stepcast capture", what, f"--batch {asked.batch} --seq {asked.seq} --dtype {asked.dtype}"]
    given = {
        "--autocast": asked.autocast,
        "--checkpoint": asked.checkpoint,
        "--no-fused-optimizer": not asked.fused,
        f"--attention {asked.attention}": bool(asked.attention),
        f"--experts {asked.experts}": bool(asked.experts),
        "--compiled": asked.compiled,
        f"--zero-gradients {zeros}": bool(zeros),
    }
    return " ".join([*words, *(word for word, wanted in given.items() if wanted), "--predict --gpu h200"])
