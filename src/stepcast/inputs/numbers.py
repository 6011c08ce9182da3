"""Numbers in text files: digits as written, within what the rest of the program can hold."""

import math
from collections import Counter
from collections.abc import Sequence

from stepcast.inputs.errors import FormatError
from stepcast.ir.limits import COLUMNS

LARGEST_COUNT = 2**63 - 1


def parse_count(token: str, what: str, line: int | None, at_least: int = 0) -> int:
    """A whole number; ``16777216.0`` counts as one. *what* names the field in the error."""
    if token.isdigit() and token.isascii() and len(token) < 19:
        value = int(token)
    else:
        number = parse_amount(token, what, line)
        if not number.is_integer():
            raise FormatError(f"{what} is {token!r}; expected a whole number", line=line)
        value = int(token) if token.isdigit() and token.isascii() and len(token) < 20 else int(number)
    if value > LARGEST_COUNT:
        raise FormatError(f"{what} is {token}; expected less than 2^63", line=line)
    if value < at_least:
        raise FormatError(f"{what} is {token}; expected at least {at_least}", line=line)
    return value


def parse_amount(token: str, what: str, line: int | None) -> float:
    """A finite number, zero or more."""
    try:
        if not token.isascii() or "_" in token:
            raise ValueError
        value = float(token)
    except ValueError:
        raise FormatError(f"{what} is {shorten(token)}; expected a number", line=line) from None
    if not math.isfinite(value):
        raise FormatError(f"{what} is {token}; expected a finite number", line=line)
    if value < 0:
        raise FormatError(f"{what} is {token}; expected zero or more", line=line)
    return value


def check_different(names: Sequence[str]) -> None:
    """A FormatError where two columns of a header have one name, or there are more than any table has."""
    if len(names) > COLUMNS.most:
        raise FormatError(COLUMNS.said, line=1)
    if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
        raise FormatError(f"header repeats {', '.join(map(shorten, repeated[:5]))}", line=1)


def shorten(text: str, limit: int = 40) -> str:
    """*text* quoted for an error message, cut where it is long."""
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")
