"""What decides how much a layer keeps, beside its model and its kind."""

from dataclasses import dataclass
from functools import lru_cache

from stepcast.ir.coded import falls_back, fuses_attention, masks_window, widens_softmax
from stepcast.ir.dtype import FP32_BYTES, DType
from stepcast.ir.framework import MEGATRON_CORE, Framework, Kernels, SelectiveRule, SsmKernels
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation, FeedForward, LayerParts, Mixer, NormKind, PositionKind, QkNorm
from stepcast.ir.recurrent import DeltaRule, Scan, SelectiveScan, delta_rule_of, scan_of
from stepcast.ir.strategy import ContextKind, RecomputeKind, RecomputeModule, Strategy


@dataclass(frozen=True, slots=True)
class SavedShape:
    tokens: int
    seq: int
    batch: int
    tp: int
    outer: int  # ways in which tokens outside tensor-parallel regions are split
    cp: int
    expert_tp: int
    element: float
    stream: float  # bytes of an element of the residual stream
    matmul: float  # bytes of an element as a matmul keeps its input
    flash: bool
    mask: float  # bytes of an element of dropout's mask; 0 without dropout
    activated: float  # bytes of an element of an activation's input, as fused kernels keep it
    kernels: Kernels
    alternate: bool  # every second matmul is recomputed
    modules: frozenset[RecomputeModule]  # which the backward runs again
    routed: float  # rows at the busiest expert rank per token and chosen expert
    written: bool = False  # modules of transformers, which keep what each of their operations needs
    masked: bool = False  # attention by a mask, for a window
    wide_softmax: bool = False  # of attention that is written out
    score: float = 0.0  # bytes of an element of its square
    eager_ssm: bool = False  # scans of Mamba-2 as PyTorch operations
    copies: bool = False  # autocast casts the input of each product by itself
    context: ContextKind = ContextKind.RING  # how context-parallel ranks exchange keys and values

    @property
    def plain(self) -> bool:
        return self.kernels is Kernels.PLAIN


# Bytes that an MLP or experts keep from their forward until their backward.


def mlp_kept(model: Model, shape: SavedShape, rows: float, inner: float) -> float:
    """Activation inputs and output: the second matmul keeps the latter."""
    if shape.kernels is Kernels.FUSED:
        return rows * inner * ((2 if model.gated else 1) * shape.activated + shape.matmul)
    sides = (3 if shape.plain else 2) if model.gated else 1
    if model.activation is Activation.RELU and not model.gated:
        return rows * inner * shape.element  # its own result, which the second product needs too, is enough
    if shape.written and model.activation is Activation.GELU_NEW:
        # Its input, both factors of the last product and the tanh; autocast has them in fp32.
        return rows * inner * (4 * shape.stream + shape.element)
    return rows * inner * (sides + 1) * shape.element


def activated(model: Model, shape: SavedShape, rows: float, inner: float) -> float:
    """Of that, what the activation and its gate made."""
    inputs = 2 if model.gated else 1
    kept = shape.activated if shape.kernels is Kernels.FUSED else shape.element
    return mlp_kept(model, shape, rows, inner) - rows * inner * inputs * kept


def mlp_transient(model: Model, shape: SavedShape, rows: float, inner: float) -> float:
    return rows * inner * shape.element * (2 if model.gated else 1)


def experts_kept(model: Model, shape: SavedShape) -> float:
    """Tokens in the order of the experts, and the experts' own activations.

    Megatron-LM weights inside the activation; a plain loop keeps each result before and after its weight.
    """
    experts = model.experts
    assert experts is not None
    width = experts.latent or model.hidden
    rows = _expert_rows(model, shape)
    gathered = rows * shape.expert_tp
    kept = gathered * width * shape.matmul
    if shape.kernels is not Kernels.FUSED:
        kept += rows * width * shape.element * 2
    kept += mlp_kept(model, shape, gathered, experts.ffn / shape.expert_tp)
    kept += shape.tokens / shape.outer * experts.count * FP32_BYTES * 2  # router logits and probabilities
    if experts.latent:
        kept += shape.tokens / shape.outer * experts.latent * shape.element
    if experts.shared_ffn:
        kept += mlp_kept(model, shape, shape.tokens, experts.shared_ffn / shape.tp)
    return kept


def experts_activated(model: Model, shape: SavedShape) -> float:
    experts = model.experts
    assert experts is not None
    gathered = _expert_rows(model, shape) * shape.expert_tp
    return activated(model, shape, gathered, experts.ffn / shape.expert_tp)


def _expert_rows(model: Model, shape: SavedShape) -> float:
    assert model.experts is not None
    return shape.tokens / shape.outer * model.experts.top_k * shape.routed


def experts_transient(model: Model, shape: SavedShape) -> float:
    experts = model.experts
    assert experts is not None
    rows = _expert_rows(model, shape) * shape.expert_tp
    if shape.plain:  # one expert at a time
        rows /= experts.count
    width = experts.latent or model.hidden
    return rows * (experts.ffn / shape.expert_tp * (2 if model.gated else 1) + width) * shape.element


# Bytes a Mamba-2 block keeps and needs for a moment, between its projections.
#
# mamba_ssm's training path keeps what the in-projection gave (z, x, B, C, dt) and the scan's result before its
# gate; the convolution's result, chunk products and chunk states are computed again backward. The norm by
# groups keeps its input and one root per group, the out-projection its own. On an H200 the sum is what PyTorch
# reports to within a thousandth, and the backward's peak to within 4 % unless the block is too small to fill
# the GPU (tests/cost/test_memory_mamba.py).
# Megatron-LM's selective recomputation takes none of it unless told.


def mamba_shape(model: Model, tokens: int, batch: int, tp: int, cp: int) -> Scan:
    """The scan on one rank: *tokens* are those of a micro-batch before ranks exchange them for heads."""
    hybrid = model.hybrid
    assert hybrid is not None
    return scan_of(hybrid, batch, max(1, tokens * cp // batch), tp * cp, backward=True)


def mamba_kept(scan: Scan, element: float, matmul: float) -> float:
    """From the in-projection's result to the out-projection's input, which is kept in *matmul* bytes."""
    tokens = scan.batch * scan.seq
    projected = 2 * scan.inputs + 2 * scan.shared + tokens * scan.heads
    scanned = 2 * scan.inputs  # before the gate, and after it: the norm's input
    return (projected + scanned) * element + scan.inputs * matmul + tokens * scan.groups * FP32_BYTES


def mamba_transient(scan: Scan, element: float) -> float:
    """Gradient of the projection; the convolution's result and its gradient; that of the scan's result. On
    top, whichever is more: states and their gradients, in fp32 and rounded, while they run backward, or
    both rounded while gradients of chunk products (before and after their sum over heads), B and C are made.
    """
    tokens = scan.batch * scan.seq
    projected = 2 * scan.inputs + 2 * scan.shared + tokens * scan.heads
    convolved = 2 * (scan.inputs + 2 * scan.shared)
    running = scan.states * 2 * (FP32_BYTES + element) + scan.squares * FP32_BYTES
    products = scan.states * 2 * element + (3 * scan.squares + 2 * scan.shared) * FP32_BYTES
    return (projected + convolved + scan.inputs) * element + max(running, products)


def eager_mamba_kept(scan: Scan, element: float, matmul: float) -> float:
    """Return the bytes that autograd saves where the scan runs as PyTorch operations.

    In fp32: for each pair of tokens of a chunk the decay, the score and their product; B, C and the decayed
    B of every head; x, x dt, what is read from the states, and five tensors of gate and norm; the states of
    chunks before and after they are summed. On an H200 the scan's share is what PyTorch reports to within
    1 % (tests/generate/test_mamba_eager.py).
    """
    return eager_scan_kept(scan) + _around_eager_scan(scan, element, matmul)


def eager_scan_kept(scan: Scan) -> float:
    tokens, chunks = padded_tokens(scan)
    rows = tokens * scan.heads
    states = scan.batch * (2 * chunks + 1) * scan.heads * scan.head_dim * scan.state
    return FP32_BYTES * (rows * (3 * scan.chunk + 3 * scan.state + 3 * scan.head_dim) + states)


def _around_eager_scan(scan: Scan, element: float, matmul: float) -> float:
    tokens = scan.batch * scan.seq
    projected = 2 * scan.inputs + 2 * scan.shared + tokens * scan.heads
    convolved = scan.inputs + 2 * scan.shared
    return (projected + convolved) * element + scan.inputs * (5 * FP32_BYTES + matmul)


def eager_mamba_transient(scan: Scan) -> float:
    """Return the bytes of the two largest products, one for each factor, that a backward makes at once."""
    tokens, _ = padded_tokens(scan)
    rows = tokens * scan.heads
    pairs = scan.chunk * max(scan.state, scan.head_dim)
    return 2 * FP32_BYTES * rows * max(pairs, scan.head_dim * scan.state)


def padded_tokens(scan: Scan) -> tuple[int, int]:
    """Return the tokens of a micro-batch, with sequences padded to complete chunks, and their chunks."""
    chunks = -(-scan.seq // scan.chunk)
    return scan.batch * chunks * scan.chunk, chunks


# Bytes that gated delta nets and Mamba blocks of the first version keep between their projections, and need
# for a moment in their backward.
#
# flash-linear-attention keeps queries and keys as they are normed, values, decays summed along a chunk and the
# solved system of each chunk, and computes states again. mamba_ssm's selective scan keeps its inputs, its
# result before the gate and the states at every 2,048th token.

# Tokens between those whose states the selective scan keeps (csrc/selective_scan/selective_scan.cpp).
SCAN_CHUNK = 2048


def rule_saved(rule: DeltaRule, element: float) -> float:
    """What flash-linear-attention keeps of its own, its result included: queries and keys as they are normed,
    the solved systems, decays summed along a chunk, and the roots of both norms.
    """
    narrow = 2 * rule.keys + rule.inputs + rule.rows * rule.chunk
    return narrow * element + 3 * rule.rows * FP32_BYTES


def scan_saved(scan: SelectiveScan, element: float) -> float:
    """What mamba_ssm keeps of its own: the result before its gate and after it, and in fp32 states in
    between, twice: what they were, and what they had been multiplied by.
    """
    states = scan.batch * -(-scan.seq // SCAN_CHUNK) * scan.channels * scan.state
    return 2 * scan.inputs * element + 2 * states * FP32_BYTES


def delta_kept(model: Model, tokens: int, batch: int, tp: int, cp: int, element: float, matmul: float) -> float:
    """From the in-projection's result to the out-projection's input, which is kept in *matmul* bytes: the
    convolution's input and the gate, copied out of it; values and strengths; what the rule keeps; what decays
    are made of, in fp32; the norm's root.
    """
    delta, ways = model.delta, tp * cp
    assert delta is not None
    rule = delta_rule_of(delta, batch, max(1, tokens * cp // batch), ways)
    convolved = rule.batch * rule.seq * delta.channels / ways
    narrow = convolved + 2 * rule.inputs + rule.rows
    wide = 3 * rule.rows * FP32_BYTES
    return narrow * element + rule_saved(rule, element) + wide + rule.inputs * matmul


def delta_transient(model: Model, tokens: int, batch: int, tp: int, cp: int, element: float) -> float:
    """Gradient of the projection; states of all chunks and their gradients; what the system solved and its
    gradients; gradients of queries, keys and values.
    """
    delta, ways = model.delta, tp * cp
    assert delta is not None
    rule = delta_rule_of(delta, batch, max(1, tokens * cp // batch), ways)
    projected = rule.batch * rule.seq * delta.projected / ways
    return (projected + 2 * rule.states + 5 * rule.keys + 4 * rule.inputs) * element


def selective_kept(model: Model, tokens: int, batch: int, element: float) -> float:
    """From the in-projection's result to the out-projection's input, which is the scan's: the projection, the
    convolved channels, time step, B and C before and after their norms, and the time steps of channels.
    """
    own = model.selective
    assert own is not None
    scan = SelectiveScan(batch, max(1, tokens // batch), own.inner, own.state)
    narrow = own.steps * (2 if own.normed else 1)
    return tokens * (4 * own.inner + narrow) * element + scan_saved(scan, element)


def selective_transient(model: Model, tokens: int, element: float) -> float:
    """Gradients of the channels, time steps, gate and the projection."""
    own = model.selective
    assert own is not None
    return tokens * 5.0 * own.inner * element


# Bytes a transformer layer keeps from its forward until its backward, tensor by tensor.
#
# Which tensors those are follows from what each operation's gradient needs (a matmul its input, a norm its
# input, flash attention its inputs and its result, an activation its input, a product both factors) and from
# what is fused:
#
# - plain: PyTorch's autograd. Queries and keys after the rotary embedding are new tensors while the projection
#   they came from stays alive, because the values are a view of it; a gated activation keeps gate, up, the
#   activated gate and the product. Checked against measured peaks of GPT and Llama models (``h200`` set).
# - compiled: torch.compile computes the activated gate again.
# - fused: Megatron-LM with Transformer Engine; values are copied, so that the projection can go.
#
# For a GPT without flash attention the sum is that of Korthikanti et al. (2022), section 4, dropouts where
# there are any.
#
# A recomputed module frees what ``generate.recompute`` makes anew and keeps its input: that is the output of a
# norm, queries, keys and values of a latent projection, the result of an activation, all within an MLP or
# experts, the stored square of an attention core. What it freed is back while its half of the layer runs
# backward.

M = RecomputeModule
MASK_BYTES = 1.0  # of one element that dropout drew


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Of one layer and one micro-batch on one rank.

    *transient* is what its backward (or its recomputed forward and backward) needs on top for a moment.
    """

    saved: float
    input: float  # what remains where the whole layer is recomputed
    transient: float
    # How much more it needs while recomputed modules are back, where it is not recomputed as a whole.
    again: float = 0.0

    def after(self, whole: bool) -> float:
        return self.input if whole else self.saved


def count_saved(
    model: Model, strategy: Strategy, block: LayerParts, framework: Framework = MEGATRON_CORE
) -> SavedActivations:
    """What a layer of kind *block* keeps."""
    layout = strategy.layout
    return _layer_kept(
        model,
        block,
        SavedShape(
            tokens=strategy.local_tokens,
            seq=strategy.seq,
            batch=strategy.micro_batch,
            tp=layout.tp,
            outer=strategy.outer_ways,
            cp=layout.cp,
            expert_tp=layout.expert_tp_size,
            element=strategy.stored.bytes,
            stream=strategy.stream.bytes,
            matmul=min(strategy.precision.bytes, strategy.stored.bytes),
            flash=fuses_attention(model, strategy, framework),
            mask=MASK_BYTES if framework.dropout else 0.0,
            activated=DType.FP8.bytes if framework.fp8_activations else strategy.stored.bytes,
            kernels=framework.kernels,
            alternate=framework.selective is SelectiveRule.ALTERNATE_MATMULS
            and strategy.recompute.kind is RecomputeKind.SELECTIVE,
            modules=_modules(strategy, framework),
            routed=strategy.busiest_share,
            written=framework.writes_out,
            masked=masks_window(block.window, strategy, framework),
            wide_softmax=framework.writes_out and widens_softmax(model) and not falls_back(model, strategy, framework),
            score=DType.FP32.bytes if falls_back(model, strategy, framework) else strategy.stored.bytes,
            eager_ssm=framework.ssm_kernels is SsmKernels.EAGER,
            copies=strategy.autocast and framework.writes_out and not model.joined,
            context=strategy.context,
        ),
    )


@dataclass(frozen=True, slots=True)
class _Half:
    """A mixer or a feed-forward with its norm: what it would keep, what recomputation frees of that, and
    what its backward needs for a moment.
    """

    kept: float = 0.0
    freed: float = 0.0
    transient: float = 0.0


def _modules(strategy: Strategy, framework: Framework) -> frozenset[RecomputeModule]:
    """What is recomputed; an activation inside the experts' product is not, having no kernel of its own."""
    selected = frozenset(strategy.recompute.selected)
    return selected - {M.EXPERT_ACTIVATION} if framework.fused_experts else selected


@lru_cache(maxsize=8192)
def _layer_kept(model: Model, block: LayerParts, shape: SavedShape) -> SavedActivations:
    outer = shape.tokens / shape.outer * model.hidden
    if shape.alternate:
        return _kept_by_torchtitan(model, block, shape, outer)
    halves = (_mixer_half(model, block, shape, outer), _feed_forward_half(model, block, shape, outer))
    transient = max(half.transient for half in halves)
    return SavedActivations(
        saved=sum(half.kept - half.freed for half in halves),
        input=outer * shape.stream,
        transient=transient,
        again=max(half.transient + half.freed for half in halves) - transient,
    )


def _mixer_half(model: Model, block: LayerParts, shape: SavedShape, outer: float) -> _Half:
    # A norm's input and its output, which the projection needs; the input of a norm at the end.
    norm_output = _norm_output(shape, outer) * (3 if shape.copies else 1)
    normed = _normed_bytes(model, shape)
    norms = outer * (normed * (model.pre_norms + model.post_norms) + shape.mask) + norm_output
    match block.mixer:
        case Mixer.ATTENTION:
            freed = _attention_freed(model, shape)
            # Elsewhere the norm is part of the linear layer after it, which recomputation leaves alone.
            if M.NORMS in shape.modules and model.latent is not None:
                freed += norm_output
            return _Half(norms + _attention(model, shape), freed, _attention_transient(model, shape))
        case Mixer.MAMBA:
            scanned = mamba_shape(model, shape.tokens, shape.batch, shape.tp, shape.cp)
            if shape.eager_ssm:
                kept = eager_mamba_kept(scanned, shape.element, shape.matmul)
                return _Half(norms + kept, 0.0, eager_mamba_transient(scanned))
            kept = mamba_kept(scanned, shape.element, shape.matmul)
            return _Half(norms + kept, 0.0, mamba_transient(scanned, shape.element))
        case Mixer.DELTA | Mixer.SELECTIVE:
            kept, transient = _recurrent(model, block, shape)
            return _Half(norms + kept, 0.0, transient)
    return _Half()


def _recurrent(model: Model, block: LayerParts, shape: SavedShape) -> tuple[float, float]:
    """What a delta net or a Mamba block of the first version keeps, and needs for a moment."""
    sizes = (shape.tokens, shape.batch, shape.tp, shape.cp)
    if block.mixer is Mixer.DELTA:
        kept = delta_kept(model, *sizes, shape.element, shape.matmul)
        return kept, delta_transient(model, *sizes, shape.element)
    kept = selective_kept(model, shape.tokens, shape.batch, shape.element)
    return kept, selective_transient(model, shape.tokens, shape.element)


def _feed_forward_half(model: Model, block: LayerParts, shape: SavedShape, outer: float) -> _Half:
    if block.feed_forward is FeedForward.NONE:
        return _Half()
    normed = _normed_bytes(model, shape)
    norms = outer * ((normed if model.post_norms else 0.0) + shape.mask)
    norm_output = 0.0
    if not (model.shared_norm and block.mixer is Mixer.ATTENTION):
        norm_output = _norm_output(shape, outer) * (2 if shape.copies and model.gated else 1)
        norms += outer * normed * model.pre_norms + norm_output
    if block.feed_forward is FeedForward.DENSE:
        inner = model.ffn / shape.tp
        kept = mlp_kept(model, shape, shape.tokens, inner)
        freed = kept if M.MLP in shape.modules else 0.0
        return _Half(norms + kept, freed, mlp_transient(model, shape, shape.tokens, inner))
    kept = experts_kept(model, shape)
    freed = norm_output if M.NORMS in shape.modules else 0.0
    if M.EXPERTS in shape.modules:
        freed += kept
    elif M.EXPERT_ACTIVATION in shape.modules:
        freed += experts_activated(model, shape)
    return _Half(norms + kept, freed, experts_transient(model, shape))


def _normed_bytes(model: Model, shape: SavedShape) -> float:
    """Of one element before a norm, what that keeps of it: the input; where it is written out, the input in
    fp32 and what its weight multiplies.
    """
    if shape.written and model.norm.kind is NormKind.RMS:
        return FP32_BYTES + (FP32_BYTES if model.wide_norms else shape.stream)
    return shape.stream


def _norm_output(shape: SavedShape, outer: float) -> float:
    return outer * (shape.matmul if shape.kernels is Kernels.FUSED else shape.element)


def _attention(model: Model, shape: SavedShape) -> float:
    """From the projection's output to the output projection's input."""
    tokens, tp, element = shape.tokens, shape.tp, shape.element
    query = tokens * model.heads * model.head_dim / tp
    key = tokens * max(model.kv_heads / tp, 1) * model.head_dim
    value = tokens * max(model.kv_heads / tp, 1) * model.value_dim
    output = tokens * model.heads * model.value_dim / tp
    rotary = model.position.kind is PositionKind.ROTARY
    kept = (query + key + value + output) * element
    # Values are a view of what was projected, unless they are a product of their own.
    views = shape.kernels is not Kernels.FUSED and (model.joined or not shape.written)
    if model.attention_gate:
        kept += 2 * output * element  # the gate, and the product, which the output projection needs
    if rotary and model.latent is None and views:
        kept += _projected(model, shape) - value * element
    if shape.written and model.qk_norm is not QkNorm.NONE:
        kept += (query + key) * (FP32_BYTES + element)
    if model.latent is not None:
        # Latents before and after their norms; values that are a view keep the keys they came with.
        latent = model.latent
        ranks = latent.kv_rank + latent.query_rank
        kept += tokens / shape.outer * (2 * ranks + latent.rope_dim) * element
        if shape.kernels is not Kernels.FUSED:
            kept += tokens * model.heads * latent.nope_dim / tp * element
    if shape.masked or not shape.flash:
        kept += _repeated(model, shape, key + value)
    if shape.masked:
        kept += shape.batch * shape.seq * shape.seq * element  # the mask as each layer adds it
    if shape.cp > 1:
        kept += _context_saved(model, shape)
    if shape.flash:
        return kept + tokens * model.heads / tp * FP32_BYTES  # log-sum-exp of each row
    return kept + _scores(model, shape) * _score_bytes(shape)


def _repeated(model: Model, shape: SavedShape, once: float) -> float:
    """Keys and values for each head, where transformers copies them."""
    if not shape.written or model.heads == model.kv_heads:
        return 0.0
    width = model.heads / shape.tp * (model.head_dim + model.value_dim)
    return (shape.tokens * width - once) * shape.element + once * shape.element


def _attention_freed(model: Model, shape: SavedShape) -> float:
    """Of the heads: the square of scores, and what the projections from a latent made."""
    freed = 0.0
    if M.CORE in shape.modules and not shape.flash:
        freed += _scores(model, shape) * _score_bytes(shape)
    if M.LATENT_UP in shape.modules and model.latent is not None:
        width = model.heads * model.head_dim / shape.tp
        width += max(model.kv_heads / shape.tp, 1) * (model.head_dim + model.value_dim)
        if shape.kernels is not Kernels.FUSED:
            width += model.heads * model.latent.nope_dim / shape.tp
        freed += shape.tokens * width * shape.element
    return freed


def _kept_by_torchtitan(model: Model, block: LayerParts, shape: SavedShape, outer: float) -> SavedActivations:
    """Its selective recomputation; Mamba blocks, which it does not know, keep everything."""
    kept = outer * shape.stream + _every_second_matmul(model, block, shape)
    transient = mlp_transient(model, shape, shape.tokens, model.ffn / shape.tp)
    if block.mixer is Mixer.MAMBA:
        scanned = mamba_shape(model, shape.tokens, shape.batch, shape.tp, shape.cp)
        kept += outer * shape.element + mamba_kept(scanned, shape.element, shape.element)
        transient = max(transient, mamba_transient(scanned, shape.element))
    elif block.mixer is Mixer.ATTENTION and shape.cp > 1:
        transient = max(transient, _attention_transient(model, shape))
    elif block.mixer in (Mixer.DELTA, Mixer.SELECTIVE):
        own, moment = _recurrent(model, block, shape)
        kept += outer * shape.element + own
        transient = max(transient, moment)
    return SavedActivations(kept, outer * shape.stream, transient)


def _every_second_matmul(model: Model, block: LayerParts, shape: SavedShape) -> float:
    """What torchtitan's selective recomputation keeps of a layer besides its input: the attention's result
    and the outputs of query, value, gate (or up) and down projections, that is of every second matmul.
    """
    width = 0.0
    lse = 0.0
    if block.mixer is Mixer.ATTENTION:
        width += model.heads * (model.head_dim + model.value_dim) / shape.tp
        width += max(model.kv_heads / shape.tp, 1) * model.value_dim
        lse = model.heads / shape.tp * FP32_BYTES
    if block.feed_forward is FeedForward.DENSE:
        width += model.ffn / shape.tp + model.hidden / shape.outer
    elif model.experts is not None and block.feed_forward is FeedForward.EXPERTS:
        rows = model.experts.top_k / shape.outer * shape.routed
        width += rows * (model.experts.ffn + model.hidden) + model.experts.shared_ffn / shape.tp
    return shape.tokens * (width * shape.element + lse)


def _scores(model: Model, shape: SavedShape) -> float:
    """Elements of the stored square of attention probabilities."""
    return shape.batch * (model.heads / shape.tp) * (shape.seq / shape.cp) * shape.seq


def _score_bytes(shape: SavedShape) -> float:
    """Of one probability; with dropout its mask and what that leaves of it, too (Korthikanti et al. 2022,
    section 4.1).
    """
    wide = FP32_BYTES if shape.wide_softmax else 0.0  # before it is cast
    return wide + shape.score + (shape.mask + shape.element if shape.mask else 0.0)


def _projected(model: Model, shape: SavedShape) -> float:
    """Queries, keys and values as they are projected; where tensor ranks share kv heads, those of all ranks
    (``generate.attention``).
    """
    ways = 1 if shape.tp > model.kv_heads else shape.tp
    query = model.heads * model.head_dim * (2 if model.attention_gate else 1)
    width = query + model.kv_heads * (model.head_dim + model.value_dim)
    return shape.tokens * width / ways * shape.element


def _attention_transient(model: Model, shape: SavedShape) -> float:
    """Gradients of queries, keys, values and their projection; unfused, those of two squares; with context
    parallelism what its exchange needs.
    """
    gradients = 2 * _projected(model, shape)
    if not shape.flash:
        gradients += 2 * _scores(model, shape) * shape.score
    return _context_transient(model, shape, gradients) if shape.cp > 1 else gradients


def _exchanged_bytes(model: Model, shape: SavedShape) -> tuple[float, float, float]:
    """Bytes of this rank's queries, of its keys and values, and of the attention's result.

    PyTorch's context parallelism knows no heads that share keys: they are repeated (``generate.context``).
    """
    element, heads = shape.tokens * shape.element, model.heads / shape.tp
    shared = shape.kernels is Kernels.FUSED or shape.context is not ContextKind.ALL_GATHER
    pairs = max(model.kv_heads / shape.tp, 1) if shared else heads
    return (
        element * heads * model.head_dim,
        element * pairs * (model.head_dim + model.value_dim),
        element * heads * model.value_dim,
    )


def _context_saved(model: Model, shape: SavedShape) -> float:
    """What context parallelism saves on top: the result before it is put together or exchanged, besides the
    one that the output projection saves (Transformer Engine, attention/dot_product_attention/
    context_parallel.py: out_per_step of the all-gather, out_part of the all-to-all), and repeated keys. The
    ring saves the block it received last in place of its own.
    """
    _, pairs, output = _exchanged_bytes(model, shape)
    once = shape.tokens * max(model.kv_heads / shape.tp, 1) * (model.head_dim + model.value_dim)
    saved = max(0.0, pairs - once * shape.element)
    if shape.kernels is Kernels.FUSED and shape.context is not ContextKind.RING:
        saved += output
    return saved


def _context_transient(model: Model, shape: SavedShape, gradients: float) -> float:
    """The most that the exchange of context-parallel ranks and the attention's *gradients* take at once.

    Fused is Transformer Engine's context_parallel.py:

    - ring: the forward holds the blocks of all ranks (p2p_comm_buffers), a result of each step and their sum
      in fp32; the backward two buffers of keys and values with their gradients.
    - all-gather: the backward holds gathered keys and values, as large sums of their gradients (dk, dv), and
      the gradients of two steps, whose ranges are 2 cp + 1 of 2 cp slices together.
    - all-to-all: gradients of queries, keys and values are copied to be received; the result's arrive first.

    Otherwise it is PyTorch's (torch/distributed/tensor/experimental/_attention.py): keys and values gathered
    or one block received, and gradients in two blocks.
    """
    query, pairs, output = _exchanged_bytes(model, shape)
    fused, cp = shape.kernels is Kernels.FUSED, shape.cp
    match shape.context:
        case ContextKind.RING:
            forward = cp * (pairs + output) + 2 * output if fused else 0.0
            return max(gradients + 4 * pairs, forward)
        case ContextKind.ALL_GATHER:
            return gradients + ((3 * cp + 0.5) if fused else (cp + 2)) * pairs
        case ContextKind.ALL_TO_ALL:
            return gradients + query + pairs + output
