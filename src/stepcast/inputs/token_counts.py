"""Counts of tokens in files: of training samples, counted or estimated from their text, and of experts."""

import json
import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import islice

import msgspec

from stepcast.inputs.source import FormatError, Source, expect, parse_amount, prefix_errors
from stepcast.ir.limits import CONFIG, DESCRIPTION
from stepcast.ir.types import Facts

SAMPLED = 20_000  # samples that are read of a file
TOKENISED = 2_000  # samples that a tokenizer reads of a file
CHARACTERS_PER_TOKEN = 4.0
COUNTS = ("length", "num_tokens", "n_tokens", "token_count", "tokens", "input_ids")
MOST_TOKENS = 1e9


def read_sample_lengths(path: str, tokenizer: str = "") -> tuple[list[float], bool]:
    """Return the tokens of each of a file's first samples, and whether any is estimated from characters.

    The file is JSON lines, a JSON list or Parquet; samples have token counts, token ids, or text in any field. With a
    *tokenizer*, all of their text is tokenised, without a chat template.
    """
    rows = _read_parquet(path) if path.endswith(".parquet") else _read_json(path)
    lengths, estimated = [], False
    if tokenizer:
        texts = [" ".join(_find_text(row)) for row in islice(rows, TOKENISED)]
        lengths = [max(1.0, float(len(ids))) for ids in _tokenise(texts, tokenizer, path)] if texts else []
        rows = iter(())
    for number, row in enumerate(islice(rows, SAMPLED), 1):
        value = next((row[name] for name in COUNTS if name in row), None)
        if isinstance(value, list):
            value = len(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            value, estimated = sum(map(len, _find_text(row))) / CHARACTERS_PER_TOKEN, True
        expect(0 <= value < MOST_TOKENS, f"sample {number} has {value} tokens", path)
        lengths.append(max(1.0, float(value)))
    expect(lengths, "holds no samples", path)
    return lengths, estimated


def _read_json(path: str) -> Iterator[Facts]:
    """Yield the objects of a file of JSON lines, or of one list."""
    source = Source(path)
    try:
        is_list = source.head.lstrip().startswith("[")
        lines = filter(str.strip, source.each_line())
        rows = json.loads(source.text(DESCRIPTION)) if is_list else map(json.loads, lines)
        for number, row in enumerate(rows, 1):
            expect(isinstance(row, dict), f"sample {number} is no JSON object", path)
            yield row
    except (ValueError, RecursionError) as error:
        raise error if isinstance(error, FormatError) else FormatError(f"not valid JSON: {error}", path) from None


def _read_parquet(path: str) -> Iterator[Facts]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise FormatError("reading Parquet needs the package pyarrow; or give JSON lines", path) from None
    with prefix_errors("not valid Parquet", path, (OSError,)):
        for batch in ParquetFile(path).iter_batches(1000):
            yield from batch.to_pylist()


def _tokenise(texts: list[str], tokenizer: str, path: str) -> list[list[int]]:
    """Return the token ids of *texts* by a tokenizer of transformers: a folder, or a name that it finds."""
    try:
        auto = import_module("transformers").AutoTokenizer
    except ImportError:
        raise FormatError("counting tokens needs the package transformers; or leave the tokenizer out", path) from None
    try:
        ids: list[list[int]] = auto.from_pretrained(tokenizer)(texts)["input_ids"]
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:200]
        raise FormatError(f"transformers cannot load the tokenizer {tokenizer!r}: {reason}", path) from None
    return ids


def _find_text(value: object, depth: int = 0) -> Iterator[str]:
    """Yield all text in *value*: prompts, answers, or messages of a conversation."""
    if isinstance(value, str):
        yield value
    elif depth < 10:
        for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
            yield from _find_text(part, depth + 1)


EXPECTED = "expected tokens per expert: one number per line, a JSON list, or an object with tokens_per_expert"


def read_expert_load(path: str | os.PathLike[str]) -> list[float]:
    """Return the tokens of each expert, or of each expert-parallel rank, in their order.

    The file holds one number per line, a JSON list, or a JSON object with ``tokens_per_expert``; the JSON of ``stepcast
    analyze`` of Megatron traces has ``expert_imbalance``, whose most uneven group is taken.
    """
    path = os.fspath(path)
    data = Source(path).data(CONFIG)
    with prefix_errors(EXPECTED, path, (msgspec.DecodeError, UnicodeDecodeError)):
        values = msgspec.json.decode(data) if data.lstrip()[:1] in (b"[", b"{") else data.decode().split()
    if isinstance(values, dict):
        groups = values.get("expert_imbalance")
        if isinstance(groups, list) and groups and isinstance(groups[0], dict):
            values = groups[0].get("tokens")
            values = list(values.values()) if isinstance(values, dict) else values
        else:
            values = values.get("tokens_per_expert")
    if not isinstance(values, Sequence) or isinstance(values, str | bytes) or len(values) < 2:
        raise FormatError(EXPECTED, path)
    with prefix_errors(EXPECTED, path):
        numbers = [parse_amount(str(value), "a count", None) for value in values]
    expect(sum(numbers) != 0, "all experts have 0 tokens", path)
    return numbers
