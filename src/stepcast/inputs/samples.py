"""Files of training samples: how many tokens each has, counted or estimated from its text."""

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.limits import DESCRIPTION

SAMPLED = 20_000  # samples that are read of a file
CHARACTERS_PER_TOKEN = 4.0
COUNTS = ("length", "num_tokens", "n_tokens", "token_count", "tokens", "input_ids")
MOST_TOKENS = 1e9


def read_sample_lengths(path: str) -> tuple[list[float], bool]:
    """Return the tokens of each of a file's first samples, and whether any is estimated from characters.

    The file is JSON lines, a JSON list or Parquet; samples have token counts, token ids, or text in any field.
    """
    rows = _read_parquet(path) if path.endswith(".parquet") else _read_json(path)
    lengths, estimated = [], False
    for number, row in enumerate(islice(rows, SAMPLED), 1):
        value = next((row[name] for name in COUNTS if name in row), None)
        if isinstance(value, list):
            value = len(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            value, estimated = _count_characters(row) / CHARACTERS_PER_TOKEN, True
        if not 0 <= value < MOST_TOKENS:
            raise FormatError(f"sample {number} has {value} tokens", path)
        lengths.append(max(1.0, float(value)))
    if not lengths:
        raise FormatError("holds no samples", path)
    return lengths, estimated


def _read_json(path: str) -> Iterator[Mapping[str, Any]]:
    """Yield the objects of a file of JSON lines, or of one list."""
    source = Source(path)
    try:
        is_list = source.head.lstrip().startswith("[")
        lines = filter(str.strip, source.each_line())
        rows = json.loads(source.text(DESCRIPTION)) if is_list else map(json.loads, lines)
        for number, row in enumerate(rows, 1):
            if not isinstance(row, dict):
                raise FormatError(f"sample {number} is no JSON object", path)
            yield row
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, FormatError) else FormatError(f"not valid JSON: {error}", path) from None


def _read_parquet(path: str) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise FormatError("reading Parquet needs the package pyarrow; or give JSON lines", path) from None
    try:
        for batch in ParquetFile(path).iter_batches(1000):
            yield from batch.to_pylist()
    except OSError as error:
        raise FormatError(f"not valid Parquet: {error}", path) from None


def _count_characters(value: object, depth: int = 0) -> int:
    """Return the characters of all text in *value*: prompts, answers, or messages of a conversation."""
    if isinstance(value, str):
        return len(value)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return sum(_count_characters(part, depth + 1) for part in inner) if depth < 10 else 0
