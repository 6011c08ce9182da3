"""Peak memory of each GPU in a log of repeated ``gpustat`` calls.

A call prints one line per GPU: ``[0] NVIDIA A40 | 48'C,   0 % |  8745 / 46068 MB |``. gpustat's MB are
MiB: it divides NVML's bytes by 1024 x 1024 (gpustat/core.py).
"""

import re

from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source
from stepcast.units import MIB

GPU = re.compile(
    r"^\[([0-9]{1,4})\] [^|\n]*\|[^|\n]*\| *([0-9]{1,9}) */ *([0-9]{1,9}) MB", re.MULTILINE | re.ASCII
)


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
