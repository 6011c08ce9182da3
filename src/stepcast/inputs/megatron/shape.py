"""Which transformer has exactly this many parameters on a pipeline stage.

Gradient buffers of Megatron-LM hold the parameters of one tensor-parallel rank of one stage, so their
length is an equation in the sizes of the model. Parameters per layer and rank, with hidden size h, ffn
size f, key/value width k and tensor parallelism t:

    matrices  (2 h h + 2 h k + (g + 1) h f) / t      g = 2 for a gated MLP (SwiGLU), otherwise 1
    biases    (h + 2 k + g f) / t + 2 h              split with their columns; the two row-split ones whole
    norms     2 x 2 h (LayerNorm) or 2 x h (RMSNorm)

The first stage adds the word embedding shard and, where learnt, position embeddings; the last one the
output shard and a final norm.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

MOST_LAYERS_ON_A_STAGE = 256


@dataclass(frozen=True, slots=True)
class StageCount:
    """Parameters that one rank of a stage holds, as read."""

    stage: int
    parameters: int
    is_first: bool
    is_last: bool
    layers: int | None  # where its all-reduces tell


@dataclass(frozen=True, slots=True)
class Style:
    gated: bool
    bias: bool
    rms_norm: bool


# Most usual first: GPT, then Llama as Megatron-LM builds it with and without --disable-bias-linear.
STYLES = (
    Style(gated=False, bias=True, rms_norm=False),
    Style(gated=True, bias=False, rms_norm=True),
    Style(gated=True, bias=True, rms_norm=True),
    Style(gated=False, bias=False, rms_norm=False),
    Style(gated=False, bias=True, rms_norm=True),
    Style(gated=False, bias=False, rms_norm=True),
    Style(gated=True, bias=False, rms_norm=False),
    Style(gated=True, bias=True, rms_norm=False),
)
KV_GROUPINGS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Solution:
    """A model that explains every stage's parameter count exactly."""

    tp: int
    style: Style
    ffn: int
    kv_width: int
    learnt_positions: bool
    layers_on: tuple[tuple[int, int], ...]  # (stage, layers)


def solutions(
    counts: Sequence[StageCount],
    *,
    hidden: int,
    seq: int,
    vocab_shard: int | None,
    tensor_sizes: Iterable[int],
) -> list[Solution]:
    """Every usual model that fits all *counts*; with plain attention if any does, else with grouped keys."""
    needs_vocab = any(count.is_first or count.is_last for count in counts)
    if not counts or (needs_vocab and vocab_shard is None):
        return []
    sizes = [tp for tp in tensor_sizes if hidden % tp == 0]
    for grouping in KV_GROUPINGS:
        if hidden % grouping:
            continue
        found = [
            solution
            for tp in sizes
            for style in STYLES
            for positions in (seq, 0)
            for solution in _solve(counts, hidden, hidden // grouping, vocab_shard or 0, positions, tp, style)
        ]
        if found:
            return _distinct(found)
    return []


def _distinct(found: list[Solution]) -> list[Solution]:
    """Solutions that differ in something a stage's count can show (a middle stage shows no positions)."""
    kept: dict[tuple[object, ...], Solution] = {}
    for solution in found:
        key = (solution.tp, solution.style, solution.ffn, solution.kv_width, solution.layers_on)
        kept.setdefault(key, solution)
    return list(kept.values())


def _solve(
    counts: Sequence[StageCount],
    hidden: int,
    kv_width: int,
    vocab_shard: int,
    positions: int,
    tp: int,
    style: Style,
) -> Iterator[Solution]:
    """Solutions of one style: the first stage's count gives the ffn size, the others must agree."""
    norm = hidden if style.rms_norm else 2 * hidden

    def in_layers(count: StageCount) -> int:
        rest = count.parameters
        if count.is_first:
            rest -= (vocab_shard + positions) * hidden
        if count.is_last:
            rest -= norm + (0 if count.is_first else vocab_shard * hidden)
        return rest

    totals = [in_layers(count) for count in counts]
    if min(totals) <= 0:
        return
    known = counts[0].layers
    for layers in (known,) if known else range(1, MOST_LAYERS_ON_A_STAGE + 1):
        if totals[0] % layers:
            continue
        each = totals[0] // layers
        ffn = _ffn(each, hidden, kv_width, tp, style)
        if ffn is None or not _is_usual_ffn(ffn, hidden, tp, style, layers_known=known is not None):
            continue
        if any(total % each for total in totals):
            continue
        layers_on = tuple((count.stage, total // each) for count, total in zip(counts, totals, strict=True))
        if any(count.layers not in (None, on[1]) for count, on in zip(counts, layers_on, strict=True)):
            continue
        yield Solution(tp, style, ffn, kv_width, positions > 0, layers_on)


def _ffn(each: int, hidden: int, kv_width: int, tp: int, style: Style) -> int | None:
    """The ffn size of a layer with *each* parameters per rank, if it is whole."""
    columns = 2 if style.gated else 1
    fixed = 2 * hidden * hidden + 2 * hidden * kv_width
    fixed += 2 * tp * (hidden if style.rms_norm else 2 * hidden)
    per_ffn = (columns + 1) * hidden
    if style.bias:
        fixed += hidden + 2 * kv_width + 2 * tp * hidden
        per_ffn += columns
    rest = tp * each - fixed
    return rest // per_ffn if rest > 0 and rest % per_ffn == 0 else None


def _is_usual_ffn(ffn: int, hidden: int, tp: int, style: Style, *, layers_known: bool) -> bool:
    """Keep numbers people choose: 4 h, or a multiple of 64 (of 256 where the layers are unknown too)."""
    if ffn % tp:
        return False
    if ffn == 4 * hidden and not style.gated:
        return True
    if not layers_known and not style.gated:
        return False
    return ffn % (64 if layers_known else 256) == 0 and 2 * hidden <= ffn <= 8 * hidden
