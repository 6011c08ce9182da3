"""Words of ``stepcast plan``: ``name=value`` pairs, shares, dates and rates."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from stepcast.questions.numbers import amount, positive


def pairs(option: str, text: str, known: Mapping[str, Callable[[str], Any]]) -> dict[str, Any]:
    """``name=value,...`` with each value read as *known* says."""
    found = {}
    for pair in text.split(","):
        name, equals, value = pair.partition("=")
        name = name.strip()
        if not equals or name not in known:
            raise ValueError(f"{option} {pair!r}: expected {', '.join(f'{each}=...' for each in known)}")
        try:
            found[name] = known[name](value.strip())
        except (ValueError, argparse.ArgumentTypeError) as error:
            raise ValueError(f"{option} {name}: {error}") from None
    return found


def need(option: str, said: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in said:
            raise ValueError(f"{option}: {name}=... is missing")


def above_zero(option: str, meaning: Callable[[str], float], text: str) -> float:
    try:
        value = meaning(text)
    except ValueError as error:
        raise ValueError(f"{option} {error}") from None
    if not value > 0:
        raise ValueError(f"{option} must be above zero")
    return value


def share(text: str) -> float:
    value = amount(text)
    if value > 1:
        raise ValueError(f"expected a share from 0 to 1, not {text!r}")
    return value


def pue(text: str) -> float:
    value = amount(text)
    if not 1 <= value <= 10:
        raise argparse.ArgumentTypeError(f"expected a ratio from 1 to 10, not {text!r}")
    return value


def bandwidth(text: str) -> float:
    from stepcast.hardware.quantity import Dimension, parse_quantity

    try:
        return positive(lambda words: parse_quantity(words, Dimension.RATE))(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def date(text: str) -> Any:
    import datetime

    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a date, such as 2027-01-31, not {text!r}") from None
