"""Seconds of fused (flash) attention.

Work is counted in scores: each is a dot product of the head dimension, an exponential, and its share of the
weighted sum. The exponential runs on slower units, so it is charged as extra operations per score; that is
why small heads reach less of the peak. Query tiles are handed to the multiprocessors one by one, under a
causal mask of unequal length, and the last one to finish keeps the GPU waiting.

Operation counts: Dao, FlashAttention-2 (2023), section 3: two products forward, five backward.
"""

from dataclasses import dataclass

import numpy as np

from stepcast.cost.rates import Number, Rates

QUERY_TILE = 128


@dataclass(frozen=True, slots=True)
class AttentionFit:
    """Learnt separately for forward and backward."""

    efficiency: float  # of the matrix peak, in the inner loop
    flops_per_score: float  # softmax work, in matrix operations of the same duration
    tail: float  # share of the longest query tile during which the others wait
    memory_exposure: float  # share of reading and writing the tensors that nothing hides
    latency_s: float  # beyond the launch; backward is several kernels
    # Of that time, what others take: kernels within a step, heads wider than usual, pairs that a tensor says
    # (over all pairs without one), probabilities of which some are dropped.
    in_step: float = 1.0
    wide: float = 1.0
    masked: float = 1.0
    dropping: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.efficiency <= 1:
            raise ValueError(f"efficiency must lie between 0 and 1, not {self.efficiency!r}")


def attention_s(
    batch: Number,
    query_len: Number,
    key_len: Number,
    heads: Number,
    kv_heads: Number,
    head_dim: Number,
    value_dim: Number,
    causal: Number,
    backward: Number,
    element_bytes: Number,
    rates: Rates,
    fit: AttentionFit,
) -> Number:
    """Seconds of one attention kernel (or the kernels of one backward), launch latency left out."""
    rows = np.ceil(query_len / QUERY_TILE) * QUERY_TILE
    keys = np.ceil(key_len / QUERY_TILE) * QUERY_TILE
    # A causal mask over as many queries as keys leaves half, and the tiles on the diagonal are whole.
    seen = np.where(causal, np.maximum(keys - 0.5 * (rows - QUERY_TILE), 0.5 * (keys + QUERY_TILE)), keys)
    scores = batch * heads * rows * seen
    head, value = _tiled(head_dim), _tiled(value_dim)
    flops = np.where(backward, 6.0 * head + 4.0 * value, 2.0 * head + 2.0 * value)
    rate = rates.peak_flops * fit.efficiency
    per_score_s = (flops + fit.flops_per_score) / rate
    longest_s = QUERY_TILE * keys * per_score_s * rates.sms
    memory_s = (
        attention_bytes(batch, query_len, key_len, heads, kv_heads, head_dim, value_dim, backward, element_bytes)
        / rates.bandwidth_bytes_per_s
    )
    return scores * per_score_s + fit.tail * longest_s + fit.memory_exposure * memory_s


def _tiled(width: Number) -> Number:
    """Heads between 64 and 128 wide run in tiles of 128; half of what these are wider is time lost: those of
    Phi-3, 96 wide, take 1.14 and 1.06 times as long as others' of 128 for as many operations.
    """
    return np.where((np.asarray(width) > 64) & (np.asarray(width) < 128), (width + 128) / 2, width)


def attention_bytes(
    batch: Number,
    query_len: Number,
    key_len: Number,
    heads: Number,
    kv_heads: Number,
    head_dim: Number,
    value_dim: Number,
    backward: Number,
    element_bytes: Number,
) -> Number:
    """Forward reads q, k, v and writes the output.

    Backward also reads the output and its gradient and writes dq twice (an fp32 sum, then rounded); with
    shared key heads, dk and dv are first written per query head.
    """
    queries = batch * query_len * heads * (head_dim + value_dim) * element_bytes
    pairs = batch * key_len * kv_heads * (head_dim + value_dim) * element_bytes
    per_head = np.where(kv_heads < heads, 2.0 * queries, 0.0)
    return np.where(backward, 4.0 * queries + 2.0 * pairs + per_head, queries + pairs)
