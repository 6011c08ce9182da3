"""Tokens of each expert, or of each expert-parallel rank, from a file.

A file holds one number per line, a JSON list, or a JSON object with ``tokens_per_expert``; the JSON of ``stepcast
analyze`` of Megatron traces has ``expert_imbalance``, whose most uneven group is taken.
"""

import math
import os
from collections.abc import Sequence

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import CONFIG

EXPECTED = "expected tokens per expert: one number per line, a JSON list, or an object with tokens_per_expert"


def read_expert_load(path: str | os.PathLike[str]) -> list[float]:
    """Return the tokens of each expert (or rank) in their order."""
    path = os.fspath(path)
    data = Source(path).data(CONFIG)
    try:
        values = msgspec.json.decode(data) if data.lstrip()[:1] in (b"[", b"{") else data.decode().split()
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{EXPECTED} ({error})", path) from None
    if isinstance(values, dict):
        groups = values.get("expert_imbalance")
        if isinstance(groups, list) and groups and isinstance(groups[0], dict):
            values = groups[0].get("tokens")
            values = list(values.values()) if isinstance(values, dict) else values
        else:
            values = values.get("tokens_per_expert")
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) < 2:
        raise FormatError(EXPECTED, path)
    numbers = []
    for value in values:
        try:
            number = float(value) if not isinstance(value, bool) else math.nan
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number >= 0):
            raise FormatError(f"{EXPECTED}, not {str(value)[:40]!r}", path)
        numbers.append(number)
    if sum(numbers) == 0:
        raise FormatError("all experts have 0 tokens", path)
    return numbers
