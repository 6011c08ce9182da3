"""Numbers on the command line: whole ones within limits, and finite ones."""

import argparse
import math
from collections.abc import Callable

# Far beyond what anyone builds, and little enough to be answered in seconds.
MOST_GPUS = 10_000_000
MOST_SEQUENCES = 1_000_000_000
MOST_TOKENS = 1_000_000_000
MOST_LAYERS = 10_000
MOST_RUNS = 1_000_000


def count(least: int, most: int) -> Callable[[str], int]:
    """A whole number from *least* to *most*, as an argparse type."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least:,} to {most:,}, not {text!r}"
            )
        return value

    return parse


gpu_count = count(1, MOST_GPUS)


def amount(text: str) -> float:
    """A finite number, zero or more, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"expected a number, zero or more, not {text!r}")
    return value
