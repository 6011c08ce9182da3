"""Constants for converting at the edges, and numbers as people read them.

Inside stepcast everything is SI: seconds, bytes, FLOP, and their ratios. A name says its unit
(``_s``, ``_bytes``, ``_flops``, ``_bytes_per_s``); a number without one is a count or a fraction.

Descriptions of hardware write quantities with their units: ``400 Gb/s``, ``80 GB``, ``2 us``.
"""

import math
import re
from collections.abc import Iterable
from enum import Enum

US = 1e-6  # seconds
MS = 1e-3  # seconds
NS = 1e-9  # seconds

KB, MB, GB, TB = 1e3, 1e6, 1e9, 1e12  # bytes
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40  # bytes

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0  # seconds

TFLOPS = 1e12  # FLOP per second

DEFAULT_CURRENCY = "$"
SMALL_AMOUNT = 1000  # smaller amounts of money and of hours are shown with two decimals

SIZES = {"B": 1.0, "kB": KB, "MB": MB, "GB": GB, "TB": TB, "KiB": KIB, "MiB": MIB, "GiB": GIB, "TiB": TIB}
BITS = {"Mb": MB / 8, "Gb": GB / 8, "Tb": TB / 8}
SIZE_UNITS = {unit.lower(): size for unit, size in SIZES.items()} | {"": 1.0, "k": KIB, "m": MIB, "g": GIB, "t": TIB}
DURATION_UNITS: dict[str, float] = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), MS),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1.0),
    **dict.fromkeys(("m", "min", "minute", "minutes"), MINUTE),
    **dict.fromkeys(("h", "hour", "hours"), HOUR),
    **dict.fromkeys(("d", "day", "days"), DAY),
    **dict.fromkeys(("w", "week", "weeks"), 7 * DAY),
}
COUNT_UNITS: dict[str, float] = {
    "": 1,
    **dict.fromkeys(("k", "thousand"), 1e3),
    **dict.fromkeys(("m", "mn", "million"), 1e6),
    **dict.fromkeys(("b", "g", "bn", "billion"), 1e9),
    **dict.fromkeys(("t", "tn", "trillion"), 1e12),
}


def _number_and_unit(text: str, units: dict[str, float], what: str) -> float:
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not {what}")
    value = float(match[1]) * units[match[2].lower()]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is too large")
    return value


def parse_size_bytes(text: str) -> int:
    """``1GiB``, ``64MB``, ``4096``: a size in bytes. A bare K, M, G or T is binary, as in nccl-tests."""
    return round(_number_and_unit(text, SIZE_UNITS, "a size; write a number with B, kB, MB, GB, KiB, MiB or GiB"))


def parse_duration_s(text: str) -> float:
    """``90``, ``30 s``, ``10m``, ``3 h``, ``54 days``: a duration in seconds."""
    return _number_and_unit(text, DURATION_UNITS, "a duration; write a number with s, m, h or d")


def parse_count(text: str) -> float:
    """``15T``, ``2.5B``, ``300M``, ``4096``: how many of something."""
    return _number_and_unit(text, COUNT_UNITS, "a count; write a number, with K, M, B or T behind it if large")


def format_duration(seconds: float) -> str:
    """A long time, in the unit a person would choose: minutes, hours, days."""
    for unit, name in ((DAY, "days"), (HOUR, "h"), (MINUTE, "min")):
        if abs(seconds) >= (2 if unit == DAY else 1) * unit:
            value = seconds / unit
            return f"{value:,.1f} {name}" if value < 1e6 else f"{value:.3g} {name}"
    return format_seconds(seconds)


def _in_units(amount: float, units: dict[str, float], template: str, smaller: str) -> str:
    """Return an amount in the largest of the *units* that it reaches, or as *smaller* says."""
    name = next((name for name, unit in units.items() if abs(amount) >= unit), None)
    return smaller.format(amount) if name is None else template.format(amount / units[name], name)


def format_short_count(count: float) -> str:
    """A large number with one letter for its size: 15.6T, 8.03B."""
    return _in_units(count, {"T": 1e12, "B": 1e9, "M": 1e6, "K": 1e3}, "{:.4g}{}", "{:.4g}")


def format_amount(amount: float) -> str:
    """A number of hours, dollars or the like; small ones have two decimals."""
    return f"{amount:,.0f}" if amount >= SMALL_AMOUNT else f"{amount:,.2f}"


def format_money(amount: float, currency: str | None, short: bool = False) -> str:
    """An amount of money: ``$2,926,600`` or ``2,926,600 EUR``; *short*: ``$2.927M``."""
    currency = currency or DEFAULT_CURRENCY
    number = format_amount(amount)
    if short and amount >= SMALL_AMOUNT:
        number = format_short_count(amount)
    return f"{number} {currency}" if currency[0].isalnum() else f"{currency}{number}"


def nearest(word: str, known: Iterable[str], most: int = 3, cutoff: float = 0.5) -> str:
    """Return ``; did you mean X or Y?`` where something known is close, else nothing."""
    from difflib import get_close_matches  # needed for mistakes alone

    close = get_close_matches(word, list(known), most, cutoff)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def format_seconds(seconds: float) -> str:
    """Three or four significant digits in the unit a person would choose."""
    if abs(seconds) >= HOUR:
        hours = seconds / HOUR
        return f"{hours:.2f} h" if abs(hours) < 1e6 else f"{hours:.3g} h"
    if abs(seconds) >= 1 or not seconds:
        return f"{seconds:.1f} s" if abs(seconds) >= 100 else f"{seconds:.3f} s" if seconds else "0 s"
    return _in_units(seconds, {"ms": MS, "us": US}, "{:.2f} {}", f"{seconds / NS:.2f} ns")


def format_bytes(size_bytes: float) -> str:
    """Binary units with two decimals; plain bytes below 1 KiB."""
    return _in_units(size_bytes, {"TiB": TIB, "GiB": GIB, "MiB": MIB, "KiB": KIB}, "{:.2f} {}", "{:g} B")


def format_rate(bytes_per_s: float) -> str:
    """Bandwidth in decimal units, as vendors and nccl-tests print it."""
    return _in_units(bytes_per_s, {"TB/s": TB, "GB/s": GB, "MB/s": MB, "kB/s": KB}, "{:.2f} {}", "{:.2f} B/s")


def format_count(count: float) -> str:
    """Whole numbers with thousands separators."""
    return f"{count:,.0f}"


def format_energy(mwh: float) -> str:
    """Return an energy in MWh, or in kWh if it is below ten of the former."""
    return f"{mwh:,.0f} MWh" if mwh >= 10 else f"{format_amount(1e3 * mwh)} kWh"


def format_percent(fraction: float, digits: int = 1) -> str:
    return f"{fraction * 100:z.{digits}f} %"


def format_change(fraction: float, digits: int = 1) -> str:
    """A relative difference with its sign; above a thousand per cent the factor."""
    if fraction >= 10:
        return f"{fraction + 1:,.0f}x"
    return f"{fraction * 100:+z.{digits}f} %"


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
    Dimension.RATE: '400 Gb/s" or "50 GB/s',
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
