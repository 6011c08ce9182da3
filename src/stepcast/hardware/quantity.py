"""Numbers with their units, as the catalogue writes them: ``400 Gb/s``, ``80 GB``, ``2 us``."""

import math
import re
from enum import Enum

from stepcast.units import GB, GIB, KB, KIB, MB, MIB, MS, NS, TB, TFLOPS, TIB, US

SIZES = {"B": 1.0, "kB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
BITS = {"Mb": MB / 8, "Gb": GB / 8, "Tb": TB / 8}


class Dimension(Enum):
    """The dimension of a quantity."""

    SIZE = "size"
    RATE = "rate"
    TIME = "time"
    FLOPS = "flops"
    FREQUENCY = "frequency"
    POWER = "power"


# The units that a dimension may be written in, and their values in SI.
UNITS: dict[Dimension, dict[str, float]] = {
    Dimension.SIZE: SIZES,
    Dimension.RATE: {
        **{f"{unit}/s": size for unit, size in (SIZES | BITS).items()},
        **{f"{unit}it/s": size for unit, size in BITS.items()},
    },
    Dimension.TIME: {"s": 1.0, "ms": MS, "us": US, "µs": US, "ns": NS},
    Dimension.FLOPS: {"GFLOP/s": 1e9, "TFLOP/s": TFLOPS, "PFLOP/s": 1e15},
    Dimension.FREQUENCY: {"Hz": 1.0, "MHz": 1e6, "GHz": 1e9},
    Dimension.POWER: {"W": 1.0, "kW": 1e3},
}
# Other spellings of one unit, in any letter case: sizes have no bits, and bps is bits.
SPELLINGS: dict[Dimension, dict[str, str]] = {
    Dimension.SIZE: {unit.lower(): unit for unit in SIZES} | {"g": "GiB", "m": "MiB", "t": "TiB"},
    Dimension.RATE: {f"{unit.lower()}ps": f"{unit}/s" for unit in BITS}
    | {f"{unit.lower()}e": f"{unit}/s" for unit in BITS},
    Dimension.TIME: {"usec": "us", "msec": "ms", "nsec": "ns", "sec": "s"},
    Dimension.FLOPS: {f"{unit}flop{end}": f"{unit.upper()}FLOP/s" for unit in "gtp" for end in ("s", "/s")},
    Dimension.FREQUENCY: {"mhz": "MHz", "ghz": "GHz", "hz": "Hz"},
    Dimension.POWER: {"w": "W", "kw": "kW", "watt": "W", "watts": "W"},
}
EXAMPLES = {
    Dimension.SIZE: "80 GB",
    Dimension.RATE: "400 Gb/s or 50 GB/s",
    Dimension.TIME: "2 us",
    Dimension.FLOPS: "989 TFLOP/s",
    Dimension.FREQUENCY: "1980 MHz",
    Dimension.POWER: "700 W",
}
# Orders of magnitude around all hardware there is: beyond them no time or share is a number to go by.
LIMITS = {
    Dimension.SIZE: (1.0, 1e18, "1 B to 1,000,000 TB"),
    Dimension.RATE: (KB, 1e18, "1 kB/s to 1,000,000 TB/s"),
    Dimension.TIME: (1e-15, 100.0, "0, or 0.000001 ns to 100 s"),
    Dimension.FLOPS: (1e6, 1e21, "0.001 GFLOP/s to 1,000,000 PFLOP/s"),
    Dimension.FREQUENCY: (1e3, 1e12, "1,000 Hz to 1,000 GHz"),
    Dimension.POWER: (1e-3, 1e6, "0.001 W to 1,000 kW"),
}


def parse_quantity(value: object, dimension: Dimension) -> float:
    """Return *value* in SI; a ValueError says what is wrong with it. Letter case counts: b is a bit, B a byte."""
    example = f'write it like "{EXAMPLES[dimension]}"'
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        raise ValueError(f"{value!r} has no unit; {example}")
    match = re.fullmatch(r"\s*([-+]?[0-9][0-9_]*(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)\s*(\S*)\s*", str(value))
    if not isinstance(value, str) or match is None:
        raise ValueError(f"{value!r} is not a number with a unit; {example}")
    if not match[2]:
        raise ValueError(f"{value!r} has no unit; {example}")
    unit = match[2] if match[2] in UNITS[dimension] else _normalise_unit(match[2], dimension)
    if unit not in UNITS[dimension]:
        raise ValueError(f"{value!r} has unknown unit {match[2]!r}; {example}")
    number = float(match[1])
    if not math.isfinite(number) or number < 0:
        raise ValueError(f"{value!r} must not be negative or infinite")
    size, (least, most, limits) = number * UNITS[dimension][unit], LIMITS[dimension]
    if size and not least <= size <= most:
        raise ValueError(f"{value!r} is beyond anything built; expected {limits}")
    return size


def _normalise_unit(word: str, dimension: Dimension) -> str:
    """Return *word* as the table of units has it, such as Gb/s for Gbps; GBps is bytes."""
    if dimension is Dimension.RATE and word.endswith(("Bps", "B/sec", "b/sec")):
        return f"{word.removesuffix('ps').removesuffix('/sec')}/s"
    return SPELLINGS[dimension].get(word.lower(), word)
