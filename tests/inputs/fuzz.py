"""Damaged copies of a good file: what readers must survive."""

import re
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from stepcast.inputs.source import FormatError, Source

NASTY = (
    b"-1",
    b"NaN",
    b"inf",
    b"1e400",
    b"9" * 30,
    b"0",
    b"",
    b"\x00",
    b"\xff\xfe",
    b"\r\n",
    b"\t\t",
    b",,",
    b'"',
    b"[[[[",
    b"{",
    b"}",
    "é漢".encode(),
    b"1_000",
    b"0x10",
    b"None",
    b"99999999999999999999",
)
TOKEN = re.compile(rb"[A-Za-z0-9_.+-]+")

# A hundred cases of each reader, the same ones every time; ``make fuzz`` draws a hundred thousand.
FUZZ = settings(
    max_examples=100,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def mutations(seed: bytes) -> st.SearchStrategy[bytes]:
    """One to three random damages of *seed*."""
    tokens = [match.span() for match in TOKEN.finditer(seed)]
    lines = seed.splitlines(keepends=True)
    place = st.integers(0, max(0, len(seed) - 1))
    nasty = st.sampled_from(NASTY)

    def replace_token(data: bytes, which: int, word: bytes) -> bytes:
        start, end = tokens[which % len(tokens)] if tokens else (0, 0)
        return data[:start] + word + data[end:]

    def damage(data: bytes, kind: int, at: int, length: int, word: bytes) -> bytes:
        at = at % max(1, len(data))
        match kind:
            case 0:  # cut off
                return data[:at]
            case 1:  # lose a piece
                return data[:at] + data[at + length :]
            case 2:  # repeat a piece
                return data[: at + length] + data[at:]
            case 3:  # insert
                return data[:at] + word + data[at:]
            case 4:  # overwrite one byte
                return data[:at] + bytes([(data[at] + length) % 256]) + data[at + 1 :] if data else data
            case 5:  # lose a line
                which = at % max(1, len(lines))
                return b"".join(lines[:which] + lines[which + 1 :])
            case 6:  # swap two lines
                if len(lines) < 2:
                    return data
                first, second = at % len(lines), length % len(lines)
                swapped = list(lines)
                swapped[first], swapped[second] = swapped[second], swapped[first]
                return b"".join(swapped)
            case _:  # another word in place of one
                return replace_token(data, at, word)

    one = st.tuples(st.integers(0, 9), place, st.integers(1, 60), nasty)

    def apply(damages: list[tuple[int, int, int, bytes]]) -> bytes:
        data = seed
        for kind, at, length, word in damages:
            # Word and line damages look up places in the whole seed, so they come first or not at all.
            if kind >= 5 and data is not seed:
                kind = kind % 5
            data = damage(data, kind, at, length, word)
        return data

    return st.lists(one, min_size=1, max_size=3).map(apply)


def check_reader(read: Callable[[Source], Any], data: bytes, noun: type) -> None:
    """Damaged *data* gives a *noun* or a FormatError of one line, nothing else."""
    try:
        value = read(Source("damaged", data))
    except FormatError as error:
        text = str(error)
    else:
        assert isinstance(value, noun)
        text = ""
    assert "\n" not in text
