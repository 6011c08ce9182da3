"""Which files of a folder are logs, and what lies beside a log."""

import json
import os
import re
from collections.abc import Callable, Sequence

from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import read_as_one, recognise
from stepcast.ir.limits import LENGTHS
from stepcast.ir.measured import RunLog
from stepcast.units import MIB

# Peak memory of each GPU in a log of repeated ``gpustat`` calls.
#
# A call prints one line per GPU: ``[0] NVIDIA A40 | 48'C,   0 % |  8745 / 46068 MB |``. gpustat's MB are
# MiB: it divides NVML's bytes by 1024 x 1024 (gpustat/core.py).

GPU = re.compile(r"^\[([0-9]{1,4})\] [^|\n]*\|[^|\n]*\| *([0-9]{1,9}) */ *([0-9]{1,9}) MB", re.MULTILINE | re.ASCII)


def looks_like(head: str) -> bool:
    return GPU.search(head) is not None


def read_gpustat(source: Source) -> tuple[int, ...]:
    """Most bytes in use on each GPU, by GPU number."""
    peaks_mib: dict[int, int] = {}
    for text in source.slabs(errors="replace"):
        for gpu, used, total in GPU.findall(text):
            if int(used) > int(total):
                raise FormatError(f"GPU {gpu} uses {used} of {total} MB; expected at most all", source.path)
            peaks_mib[int(gpu)] = max(peaks_mib.get(int(gpu), 0), int(used))
    if not peaks_mib:
        raise FormatError(
            "holds no GPU; expected lines like '[0] NVIDIA A40 | 48'C, 0 % | 0 / 46068 MB |'", source.path
        )
    absent = sorted(set(range(max(peaks_mib) + 1)) - set(peaks_mib))
    if absent:
        raise FormatError(f"GPU {absent[0]} is never shown, but GPU {max(peaks_mib)} is", source.path)
    return tuple(peaks_mib[gpu] * MIB for gpu in sorted(peaks_mib))


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
        raise FormatError(f'is no list of lengths ({error}); expected {{"S": [88, 109, ...]}}', file) from None
    if not all(0 < length < 1e9 for length in lengths):
        raise FormatError("has a length that is not above zero", file)
    return lengths


def gpustat_beside(path: str) -> str | None:
    folder, name = os.path.split(path)
    words = name.removesuffix(LOG_END).split("_")
    stamp, rest = words[:STAMP_WORDS], words[STAMP_WORDS:]
    file = os.path.join(folder, "_".join([*stamp, GPUSTAT + "_".join(rest)]) + GPUSTAT_END)
    return file if name.endswith(LOG_END) and os.path.exists(file) else None
