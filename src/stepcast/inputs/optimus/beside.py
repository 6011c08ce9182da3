"""Which files of a folder are logs, and what lies beside a log."""

import json
import os
from collections.abc import Callable, Sequence

from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source
from stepcast.inputs.table import read_as_one, recognise
from stepcast.ir.limits import LENGTHS
from stepcast.ir.runlog import RunLog

FORMAT = "optimus"
# Padded lengths of steps 1, 2, ... beside the logs, {"S": [...]}: the log does not print them.
LENGTHS_FILE = "seqlen_per_step.json"
# ``20251224_105911_TP1_DP1_PP8_MBS1_GBS32_log.txt`` has ``20251224_105911_gpustat_TP1_..._GBS32.log`` beside.
LOG_END, GPUSTAT_END, GPUSTAT = "_log.txt", ".log", "gpustat_"
STAMP_WORDS = 2


def read_logs(paths: Sequence[str], skip: Callable[[str, str], None]) -> list[RunLog]:
    """The OptimusPrime logs among *paths*; files of other kinds are passed over, bad logs are skipped."""
    logs = []
    for path in paths:
        source = Source(path)
        try:
            if recognise(source).name != FORMAT:
                continue
        except FormatError:
            continue
        try:
            logs.append(read_as_one([source], FORMAT)[1])
        except FormatError as error:
            skip(path, error.message)
    return logs


def lengths_beside(path: str) -> tuple[float, ...]:
    """The steps' padded lengths from the file beside a log; none where there is none."""
    file = os.path.join(os.path.dirname(path), LENGTHS_FILE)
    if not os.path.exists(file):
        return ()
    try:
        lengths = tuple(float(value) for value in json.loads(Source(file).data(LENGTHS))["S"])
    except FormatError:
        raise
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(
            f'is no list of lengths ({error}); expected {{"S": [88, 109, ...]}}', file
        ) from None
    if not all(0 < length < 1e9 for length in lengths):
        raise FormatError("has a length that is not above zero", file)
    return lengths


def gpustat_beside(path: str) -> str | None:
    folder, name = os.path.split(path)
    words = name.removesuffix(LOG_END).split("_")
    stamp, rest = words[:STAMP_WORDS], words[STAMP_WORDS:]
    file = os.path.join(folder, "_".join([*stamp, GPUSTAT + "_".join(rest)]) + GPUSTAT_END)
    return file if name.endswith(LOG_END) and os.path.exists(file) else None
