"""Checks that the hardware nouns make of themselves when they are built."""

import math


def require_positive(owner: object, *names: str) -> None:
    """Each named field of *owner* is a finite number above zero."""
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be finite and above zero, not {value!r}")


def require_amount(owner: object, *names: str) -> None:
    """Each named field of *owner* is a finite number, zero or more."""
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be finite and not negative, not {value!r}")


def require_count(owner: object, *names: str) -> None:
    """Each named field of *owner* is a whole number of at least one."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")
