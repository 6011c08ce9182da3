"""Readers of numbers: whole numbers within limits, shares, prices and other finite ones.

A reader takes text and raises a ValueSpellingError.
"""

import argparse
import math
import re
from collections.abc import Callable, Sequence

from stepcast.ir.limits import ELEMENTS, GPUS, LAYERS, RUNS, SEQUENCES, TOKENS


class ValueSpellingError(argparse.ArgumentTypeError, ValueError):
    """A value that cannot be read; a ValueError whose message argparse shows as it is."""


MOST_SEQUENCES = SEQUENCES.most
MOST_TOKENS = TOKENS.most
MOST_LAYERS = LAYERS.most
MOST_RUNS = RUNS.most
MOST_ELEMENTS = ELEMENTS.most


def count(least: int, most: int, kilo: int = 0) -> Callable[[str], int]:
    """Return a reader of whole numbers from *least* to *most*; ``16,384`` is one.

    With *kilo*, a k after the number multiplies it by that and an m by its square: 8k tokens are 8,192.
    """
    sizes = {"": 1} | ({"k": kilo, "m": kilo**2} if kilo else {})

    def parse(text: str) -> int:
        value = least - 1
        if text.isascii() and (match := COUNT.fullmatch(text.strip().lower())) and match[2] in sizes:
            number = float(match[1].replace(",", "").replace("_", "")) * sizes[match[2]]
            value = int(number) if number.is_integer() else value
        if not least <= value <= most:
            raise ValueSpellingError(f"expected a whole number from {least:,} to {most:,}, not {text!r}")
        return value

    return parse


# 1024, 16,384 or 1_024, 1.5k; an exact number of digits where it has no letter.
COUNT = re.compile(r"([+-]?[0-9]{1,3}(?:,[0-9]{3})+|[+-]?[0-9][0-9_]{0,30}(?:\.[0-9]+(?=[km]))?)\s?([km]?)")
BINARY = 1024
gpu_count = count(1, GPUS.most, BINARY)


def rate(text: str) -> float:
    """Read a finite number above zero."""
    value = amount(text)
    if not value:
        raise ValueSpellingError(f"expected a number above zero, not {text!r}")
    return value


def positive(meaning: Callable[[str], float]) -> Callable[[str], float]:
    """Return a reader of values above zero that reads them by *meaning*."""

    def read(text: str) -> float:
        try:
            value = meaning(text)
        except ValueError as error:
            raise ValueSpellingError(str(error)) from None
        if not value > 0:
            raise ValueSpellingError(f"{text!r} is not above zero")
        return value

    return read


def share(text: str) -> float:
    """Read a share from 0 to below 1, as ``10%`` or ``0.1``."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        raise ValueSpellingError(f"{text!r} is not a share; expected such as 10% or 0.1") from None
    if not 0 <= value < 1:
        raise ValueSpellingError(f"{text!r} is not a share from 0 to below 1, such as 10% or 0.1")
    return value


PRICED = re.compile(r"\s*(usd|\$)?\s*(/|per)?\s*((gpu|accelerator)?[-/ ]*(hour|hr|h))?$")
LONGEST_CURRENCY = 8
FOREIGN = re.compile(r"eur|gbp|\u20ac|\u00a3")


def price(text: str) -> float | str:
    """Read the price of a GPU-hour: ``2.5``, ``2.5/gpu-hour``, or ``auto`` for that of the catalogue."""
    if text.strip().lower() == "auto":
        return "auto"
    if match := FOREIGN.search(text.lower()):
        raise ValueSpellingError(f"{text!r}: give the number here and --currency {match[0].upper()}")
    return amount(PRICED.sub("", text.strip().lower().lstrip("$")))


def currency(text: str) -> str:
    """Read a currency: a symbol or a short code, such as ``$`` or ``EUR``."""
    name = text.strip()
    if not 0 < len(name) <= LONGEST_CURRENCY or re.search(r"[\d\s]", name):
        raise ValueSpellingError(f"expected a symbol or a code, such as $ or EUR, not {text!r}")
    return name


def check_multiple(gpus: int, model_gpus: int, others: Sequence[str] = (), splits: bool = True) -> None:
    """Raise a ValueError unless the GPUs are a multiple of tp x cp x pp; suggest *others*.

    Without *splits*, the model cannot be split as asked for, and the suggestions are *others* alone.
    """
    if gpus % model_gpus:
        below, above = gpus // model_gpus * model_gpus, -(-gpus // model_gpus) * model_gpus
        near = f"{below:,} or {above:,}" if below else f"{above:,}"
        tries = [f"--gpus {near}", *(others or ["other sizes of --tp, --cp or --pp"])][not splits and bool(others) :]
        raise ValueError(
            f"{gpus:,} GPUs are not a multiple of tp x cp x pp = {model_gpus:,}: use {', or '.join(tries)}"
        )


def amount(text: str) -> float:
    """Read a finite number, zero or more."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise ValueSpellingError(f"expected a number, zero or more, not {text!r}")
    return value
