"""Lengths of samples, and the sequences that a data loader makes of them: padded, grouped by length or packed.

Padded batches are as long as their longest sample. Grouped ones are made of samples that are about as long, of which
the loader sorts some batches at a time (transformers, trainer_pt_utils.py, get_length_grouped_indices). Packed
sequences hold several samples, each attending to itself alone, chosen best fit decreasing (TRL, data_utils.py,
pack_dataset; Axolotl, utils/samplers/multipack.py).

A distribution is ``mean=600,max=4096`` (log-normal; ``std`` is the mean unless given), a histogram
``256:0.3,1024:0.7`` of lengths and weights, or a file: JSON lines, JSON or Parquet with token counts, token ids or
text. ``data.jsonl@TOKENIZER`` counts the tokens of its text with a tokenizer of transformers.
"""

import os
from functools import lru_cache

import numpy as np

from stepcast.inputs.token_counts import CHARACTERS_PER_TOKEN, SAMPLED, read_sample_lengths
from stepcast.ir.arrays import FloatArray
from stepcast.ir.types import dataclass
from stepcast.questions.choices import ValueSpellingError
from stepcast.units import format_percent

SIMULATED_STEPS = 400
LEAST_SAMPLES, MOST_SAMPLES = 100_000, 4_000_000  # samples in them: few have another mean than all
SORTED_BATCHES = 50  # transformers, trainer_pt_utils.py: mega_batch_mult


@dataclass(frozen=True)
class SampleLengths:
    """Lengths of some samples in tokens, and a sentence about their source."""

    tokens: FloatArray
    source: str


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The sequences of a step: the length that decides its time, the longest, the tokens of a packed document, as
    attention sees them, how many samples one holds, and the share of its tokens that are theirs.
    """

    seq: int
    longest: int
    document: int
    samples_per_sequence: float
    filled: float
    description: str


def read_lengths(text: str) -> SampleLengths:
    """Return the lengths that *text* describes; raise a ValueSpellingError if it describes none."""
    path, _, tokenizer = text.partition("@") if not os.path.isfile(text) else (text, "", "")
    if os.path.isfile(path):
        return _read_file(path, tokenizer, os.stat(path).st_mtime_ns)
    fields = [part.partition(":" if ":" in text else "=") for part in text.split(",")]
    try:
        numbers = {name.strip(): float(value) for name, _, value in fields}
        if "mean" in numbers and not numbers.keys() - {"mean", "std", "max"}:
            return _draw_lengths(numbers["mean"], numbers.get("std", numbers["mean"]), numbers.get("max"))
        weights = {float(name): value for name, value in numbers.items()}
    except ValueError:
        weights = {}
    values, shares = np.array(list(weights)), np.array(list(weights.values()))
    if not len(values) or not (values >= 1).all() or not (shares >= 0).all() or not 0 < shares.sum() < np.inf:
        missing = "there is no such file; " if path.endswith((".jsonl", ".json", ".parquet")) else ""
        raise ValueSpellingError(
            f"{text!r}: {missing}expected mean=600,max=4096, a histogram such as 256:0.3,1024:0.7, or a .jsonl, .json "
            "or .parquet file"
        )
    tokens = values[np.searchsorted(np.cumsum(shares) / shares.sum(), (np.arange(SAMPLED) + 0.5) / SAMPLED)]
    return SampleLengths(tokens.astype(np.float64), "a histogram of lengths")


def _draw_lengths(mean: float, std: float, longest: float | None) -> SampleLengths:
    if not (mean >= 1 and std >= 0 and (longest is None or longest >= mean)):
        raise ValueSpellingError("lengths need a mean of at least 1, a std of 0 or more, and a max above the mean")
    variance = np.log1p((std / mean) ** 2)
    tokens = np.random.default_rng(0).lognormal(np.log(mean) - variance / 2, np.sqrt(variance), SAMPLED)
    tokens = np.clip(np.rint(tokens), 1, longest)
    return SampleLengths(tokens, f"log-normal lengths with mean {mean:,.0f} and standard deviation {std:,.0f}")


@lru_cache(maxsize=8)
def _read_file(path: str, tokenizer: str, changed_ns: int) -> SampleLengths:
    lengths, estimated = read_sample_lengths(path, tokenizer)
    counted = f"{CHARACTERS_PER_TOKEN:.0f} characters per token" if estimated else "their token counts"
    if tokenizer:
        counted = f"the tokenizer {os.path.basename(tokenizer.rstrip('/'))}, without a chat template"
    return SampleLengths(np.array(lengths), f"{len(lengths):,} samples of {os.path.basename(path)}, by {counted}")


def shape_batches(
    lengths: SampleLengths, batching: str, seq: int, micro_batch: int, rounds: int, replicas: int, multiple: int = 8
) -> BatchShape:
    """Return the sequences of at most *seq* tokens that a loader makes for *rounds* micro-batches of *replicas*.

    Ranks wait for each other at the end of a step, so its time is that of the rank with the longest sum; *seq* of the
    result is that sum over its rounds, on average over simulated steps.
    """
    tokens = np.minimum(lengths.tokens, seq)
    cut = float(np.mean(lengths.tokens > seq))
    mean = float(tokens.mean())
    about = f"{lengths.source}; mean {mean:,.0f}" + (f", {format_percent(cut, 0)} cut at {seq:,}" if cut else "")
    if batching == "packed":
        filled = _pack(tokens, seq)
        document = round(float((tokens**2).mean() / mean))
        samples_each = filled * seq / mean
        inside = f"{format_percent(filled, 0)} filled with {samples_each:.1f} samples each"
        text = f"packed sequences of {seq:,} tokens, {inside} ({about})"
        return BatchShape(seq, seq, document, samples_each, filled, text)
    # As many ranks as are simulated in reasonable time: the slowest of more is hardly slower.
    ranks = max(1, min(replicas, MOST_SAMPLES // (SIMULATED_STEPS * micro_batch * rounds)))
    together = max(1, SORTED_BATCHES // ranks) if batching == "grouped" else 1
    steps = max(SIMULATED_STEPS, LEAST_SAMPLES // (ranks * rounds * micro_batch)) // together * together
    samples = np.random.default_rng(0).choice(tokens, (steps, ranks * rounds, micro_batch))
    if batching == "grouped":
        samples = np.sort(samples.reshape(steps // together, -1), axis=1).reshape(samples.shape)
    padded = samples.max(axis=2)
    # Consecutive batches go to different ranks.
    of_rank = padded.reshape(steps, rounds, ranks).mean(axis=1)
    waiting, average = float(of_rank.max(axis=1).mean()), float(padded.mean())
    longest = int(min(seq, tokens.max()))
    length = min(seq, -(-round(waiting) // multiple) * multiple)
    share = f"{format_percent(mean / average, 0)} of them samples"
    text = f"{batching} batches of {average:,.0f} tokens on average, {share} ({about})"
    if waiting > average * 1.01:
        text += f"; the slowest of {replicas:,} ranks has {format_percent(waiting / average - 1, 0)} more"
    return BatchShape(length, max(length, longest), 0, 1.0, mean / length, text)


def _pack(tokens: FloatArray, seq: int) -> float:
    """Return the share of packed sequences that samples fill, the longest first, each where it fits best."""
    rest: list[float] = []
    chosen = np.sort(np.random.default_rng(0).choice(tokens, 1000))[::-1]
    for length in chosen:
        fitting = [(room, index) for index, room in enumerate(rest) if room >= length]
        if fitting:
            rest[min(fitting)[1]] -= length
        else:
            rest.append(seq - length)
    return float(chosen.sum() / (len(rest) * seq))
