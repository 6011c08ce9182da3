"""Checks that values make of themselves when they are built."""

import math


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with *message* unless *condition* holds."""
    if not condition:
        raise ValueError(message)


def require_counts(owner: object, at_least: int, *names: str) -> None:
    """Check that each named field of *owner* is an int of *at_least* or more."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < at_least:
            raise ValueError(f"{name} must be a whole number of at least {at_least}, not {value!r}")


def require_amounts(owner: object, *names: str) -> None:
    """Check that each named field of *owner* is a finite number, zero or more."""
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number, zero or more, not {value!r}")
