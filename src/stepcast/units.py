"""Constants for converting at the edges, and numbers as people read them.

Inside stepcast everything is SI: seconds, bytes, FLOP, and their ratios. A name says its unit
(``_s``, ``_bytes``, ``_flops``, ``_bytes_per_s``); a number without one is a count or a fraction.
"""

import math
import re

US = 1e-6  # seconds
MS = 1e-3  # seconds
NS = 1e-9  # seconds

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12  # bytes
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40  # bytes

TFLOPS = 1e12  # FLOP per second

SIZE_UNITS: dict[str, float] = {
    "": 1,
    "b": 1,
    "kb": KB,
    "mb": MB,
    "gb": GB,
    "tb": TB,
    "k": KIB,
    "m": MIB,
    "g": GIB,
    "t": TIB,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}


def parse_size_bytes(text: str) -> int:
    """``1GiB``, ``64MB``, ``4096``: a size in bytes. A bare K, M, G or T is binary, as in nccl-tests."""
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].lower() if match else ""
    if match is None or unit not in SIZE_UNITS:
        raise ValueError(f"{text!r} is not a size; write a number with B, kB, MB, GB, KiB, MiB or GiB")
    size = float(match[1]) * SIZE_UNITS[unit]
    if not math.isfinite(size):
        raise ValueError(f"{text!r} is too large for a size")
    return round(size)


def format_seconds(seconds: float) -> str:
    """Three or four significant digits in the unit a person would choose."""
    size = abs(seconds)
    if size >= 3600:
        hours = seconds / 3600
        return f"{hours:.2f} h" if size < 3.6e9 else f"{hours:.3g} h"
    if size >= 100:
        return f"{seconds:.1f} s"
    if size >= 1:
        return f"{seconds:.3f} s"
    if size >= MS:
        return f"{seconds / MS:.2f} ms"
    if size >= US or size == 0:
        return f"{seconds / US:.2f} us"
    return f"{seconds / NS:.2f} ns"


def format_bytes(size_bytes: float) -> str:
    """Binary units with two decimals; plain bytes below 1 KiB."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes:g} B"


def format_rate(bytes_per_s: float) -> str:
    """Bandwidth in decimal units, as vendors and nccl-tests print it."""
    for unit, name in ((TB, "TB/s"), (GB, "GB/s"), (MB, "MB/s"), (KB, "kB/s")):
        if abs(bytes_per_s) >= unit:
            return f"{bytes_per_s / unit:.2f} {name}"
    return f"{bytes_per_s:.2f} B/s"


def format_count(count: float) -> str:
    """Whole numbers with thousands separators."""
    return f"{count:,.0f}"


def format_percent(fraction: float) -> str:
    return f"{fraction * 100:.1f} %"
