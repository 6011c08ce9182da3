"""Numbers on the command line: whole ones within limits, and finite ones."""

import argparse
import math
from collections.abc import Callable

from stepcast.ir.limits import ELEMENTS, GPUS, LAYERS, RUNS, SEQUENCES, TOKENS

MOST_SEQUENCES = SEQUENCES.most
MOST_TOKENS = TOKENS.most
MOST_LAYERS = LAYERS.most
MOST_RUNS = RUNS.most
MOST_ELEMENTS = ELEMENTS.most


def count(least: int, most: int) -> Callable[[str], int]:
    """A whole number from *least* to *most*, as an argparse type."""

    def parse(text: str) -> int:
        try:
            value = int(text) if text.isascii() else least - 1
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"expected a whole number from {least:,} to {most:,}, not {text!r}"
            )
        return value

    return parse


gpu_count = count(1, GPUS.most)


def rate(text: str) -> float:
    """A finite number above zero, as an argparse type."""
    value = amount(text)
    if not value:
        raise argparse.ArgumentTypeError(f"expected a number above zero, not {text!r}")
    return value


def positive(meaning: Callable[[str], float]) -> Callable[[str], float]:
    """*meaning*, which raises ValueErrors, as an argparse type of values above zero."""

    def read(text: str) -> float:
        try:
            value = meaning(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text!r} is not above zero")
        return value

    return read


def price(text: str) -> float:
    """Of a GPU-hour: ``2.5`` or ``2.5/gpu-hour``, as an argparse type."""
    return amount(text.lower().removesuffix("/gpu-hour").removesuffix("/gpu-h").lstrip("$"))


def check_multiple(gpus: int, model_gpus: int) -> None:
    """GPUs come in whole copies of the model, of tp x cp x pp each."""
    if gpus % model_gpus:
        below, above = gpus // model_gpus * model_gpus, -(-gpus // model_gpus) * model_gpus
        near = f"{below:,} or {above:,}" if below else f"{above:,}"
        raise ValueError(
            f"{gpus:,} GPUs are not a multiple of tp x cp x pp = {model_gpus:,}: use --gpus {near}, "
            "or split the model otherwise"
        )


def amount(text: str) -> float:
    """A finite number, zero or more, as an argparse type."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"expected a number, zero or more, not {text!r}")
    return value
