"""Attention: norm, projections, rotary embedding, the core, the output projection.

Multi-head latent attention (DeepSeek-V2, 2024, section 2.1) projects down to low ranks, norms them and
projects up to the heads; its down-projections are on every tensor rank and run on the tokens outside tensor
regions. Sparse attention (DeepSeek-V3.2-Exp, 2025; inference/model.py, class Indexer) adds an indexer, which
is on every tensor rank too: its heads score all keys for each query, and the core sees the best of them. Its
own loss, which compares its scores with the attention's, is not counted.

The saved tensors follow from what each operation's gradient needs (a matmul its input, a norm its input,
flash attention its inputs and its result) and from what is fused:

- plain and compiled: queries and keys after the rotary embedding are new tensors while the projection they
  came from stays alive, because the values are a view of it (checked against measured peaks, ``h200`` set).
- fused: Megatron-LM with Transformer Engine; values are copied, so that the projection can go.

For a GPT without flash attention the sum is that of Korthikanti et al. (2022), section 4, dropouts where there are any.
"""

from dataclasses import replace
from itertools import chain

from stepcast.ir.architecture import Architecture
from stepcast.ir.layers import attention_core as core
from stepcast.ir.layers import operators as build
from stepcast.ir.layers.kernels import C, K, Ops, PhaseOps, collective, list_kernels, list_phases, make_layer, stream_op
from stepcast.ir.layers.lists import norm_readers
from stepcast.ir.layers.operators import Linear
from stepcast.ir.layers.sizes import SavedTensor, Sizes, present
from stepcast.ir.layout import Group
from stepcast.ir.model_parts import Latent, LayerParts, PositionKind, QkNorm
from stepcast.ir.strategy import RecomputeModule as M
from stepcast.ir.types import FP32_BYTES, DType
from stepcast.ir.work import Attention
from stepcast.ir.workload import Layer, Op, Role

INDEX_BYTES = 4.0  # of the place of one chosen key


def _attended(model: Architecture, block: LayerParts) -> LayerParts:
    """Return *block* with the keys that an indexer chooses as its window, which has as many pairs."""
    sparse = model.latent is not None and model.latent.top_keys
    return replace(block, window=model.latent.top_keys) if model.latent and sparse else block


def count_mixing_flops(model: Architecture, block: LayerParts, seq: int, batch: int, causal: bool) -> float:
    """Count scores and weighted sums of one forward; not *causal* takes attention as the full square."""
    all_keys: float = seq / 2 if causal else seq
    keys = min(all_keys, core.window_keys(seq, _attended(model, block)) or all_keys)
    flops = 2.0 * float(batch * seq) * keys * model.heads * (model.head_dim + model.value_dim)
    if model.latent and model.latent.top_keys:
        # Scores of all pairs, and their sum over heads by the weights of each query.
        flops += 2.0 * float(batch * seq) * all_keys * model.latent.index_heads * (model.latent.index_dim + 1)
    return flops


def list_saved(sizes: Sizes, block: LayerParts) -> list[SavedTensor]:
    """Return the tensors from the projection's output to the output projection's input."""
    model, tp, tokens, element = sizes.model, sizes.tp, sizes.tokens, sizes.stored.bytes
    kv_heads = max(model.kv_heads / tp, 1)
    latent, flash = model.latent, core.fuses_attention(model, sizes.strategy, sizes.framework)
    from_latent = (M.LATENT_UP,) if latent else ()
    query = SavedTensor("queries", tokens * model.heads * model.head_dim / tp * element, from_latent)
    key = SavedTensor("keys", tokens * kv_heads * model.head_dim * element, from_latent)
    value = SavedTensor("values", tokens * kv_heads * model.value_dim * element, from_latent)
    output = SavedTensor("attention output", tokens * model.heads * model.value_dim / tp * element)
    log_sum = SavedTensor("log-sum-exp of each row", tokens * model.heads / tp * FP32_BYTES)
    if sizes.alternates_matmuls:
        return [query, value, output, log_sum]
    tensors = [query, key, value, output]
    if model.attention_gate:
        tensors.append(SavedTensor("gate, and its product for the output projection", 2 * output.size_bytes))
    # Values are a view of what was projected, unless they are a product of their own.
    views = not sizes.fused_by_hand and (model.joined or not sizes.eager_modules)
    if model.position.kind is PositionKind.ROTARY and latent is None and views:
        tensors.append(SavedTensor("projection that values are a view of", _projected(sizes) - value.size_bytes))
    if sizes.eager_modules and model.qk_norm is not QkNorm.NONE:
        normed = (query.size_bytes + key.size_bytes) / element * (FP32_BYTES + element)
        tensors.append(SavedTensor("inputs of query and key norms", normed))
    if latent is not None:
        low = 2 * (latent.kv_rank + latent.query_rank) + latent.rope_dim
        tensors.append(SavedTensor("latents before and after their norms", sizes.outer_share * low * element))
        if not sizes.fused_by_hand:
            nope = tokens * model.heads * latent.nope_dim / tp * element
            tensors.append(SavedTensor("keys that values are a view of", nope, (M.LATENT_UP,)))
        if latent.top_keys:
            index = latent.index_heads * latent.index_dim + latent.index_dim + latent.index_heads
            tensors.append(SavedTensor("indexer", sizes.outer_share * index * element))
            chosen = min(latent.top_keys, sizes.strategy.seq) * INDEX_BYTES
            tensors.append(SavedTensor("places of the chosen keys", tokens * chosen))
    masked = core.masks_window(_attended(model, block).window, sizes.strategy, sizes.framework)
    if (masked or not flash) and sizes.eager_modules and model.heads != model.kv_heads:
        repeated = tokens * (model.heads / tp * (model.head_dim + model.value_dim)) * element
        tensors.append(SavedTensor("keys and values repeated for each head", repeated))
    if masked:
        square = sizes.strategy.micro_batch * sizes.strategy.seq * sizes.strategy.seq
        tensors.append(SavedTensor("mask as each layer adds it", square * element))
    if sizes.cp > 1:
        tensors.append(SavedTensor("context-parallel exchange", core.context_saved_bytes(sizes)))
    if flash:
        return [*tensors, log_sum]
    return [*tensors, SavedTensor("probabilities", _scores(sizes) * _score_bytes(sizes), (M.CORE,))]


def transient_bytes(sizes: Sizes, block: LayerParts) -> float:
    """Return the gradients of queries, keys, values and their projection; unfused, those of two squares; with
    context parallelism what its exchange needs.
    """
    if sizes.alternates_matmuls and sizes.cp == 1:
        return 0.0
    gradients = 2 * _projected(sizes)
    if not core.fuses_attention(sizes.model, sizes.strategy, sizes.framework):
        gradients += 2 * _scores(sizes) * _probability_bytes(sizes)
    return core.context_transient(sizes, gradients) if sizes.cp > 1 else gradients


def _projected(sizes: Sizes) -> float:
    """Return the bytes of queries, keys and values as they are projected; where tensor ranks share kv heads,
    those of all ranks.
    """
    ways = 1 if sizes.shares_kv_heads else sizes.tp
    return sizes.tokens * sizes.qkv_width / ways * sizes.stored.bytes


def _scores(sizes: Sizes) -> float:
    """Return the elements of the stored square of attention probabilities."""
    strategy, heads = sizes.strategy, sizes.model.heads / sizes.tp
    return strategy.micro_batch * heads * (strategy.seq / sizes.cp) * strategy.seq


def _probability_bytes(sizes: Sizes) -> float:
    return FP32_BYTES if core.falls_back(sizes.model, sizes.strategy, sizes.framework) else sizes.stored.bytes


def _score_bytes(sizes: Sizes) -> float:
    """Return the bytes saved of one probability; with dropout its mask and what that leaves of it, too
    (Korthikanti et al. 2022, section 4.1).
    """
    fallback = core.falls_back(sizes.model, sizes.strategy, sizes.framework)
    before_cast = FP32_BYTES if sizes.eager_modules and core.widens_softmax(sizes.model) and not fallback else 0.0
    dropped = sizes.mask_bytes + sizes.stored.bytes if sizes.mask_bytes else 0.0
    return before_cast + _probability_bytes(sizes) + dropped


def list_operators(sizes: Sizes, block: LayerParts) -> tuple[Layer, ...]:
    model = sizes.model
    bias = model.biases.attention_output
    output = Linear("output", sizes.tokens, sizes.output_width, model.hidden, sizes.dtype, bias=bias)
    waits = build.column_waits(sizes, Role.LATENT_DOWN if model.latent else Role.QKV)
    layers = [*(_latent_layers(sizes) if model.latent else (_qkv_layer(sizes),))]
    layers.append(core.core_layer(sizes, _attended(model, block)))
    if model.attention_gate:
        # The result of attention times the sigmoid of its gate.
        layers.append(make_layer(Role.ATTENTION_GATE, *build.gate_ops(sizes, sizes.tokens, sizes.output_width)))
    layers.append(build.row_layer(sizes, Role.ATTENTION_OUTPUT, output))
    roles = (Role.ATTENTION_NORM, Role.ATTENTION_POST_NORM)
    products = len(norm_readers(model, "attention"))
    return build.surround_with_norms(sizes, *roles, *layers, waits=waits, products=products)


def _qkv_layer(sizes: Sizes) -> Layer:
    """Return one product for queries, keys and values, or one for each, whose input gradients are added up."""
    forward, backward = _head_ops(sizes)
    hidden, bias = sizes.model.hidden, sizes.model.biases.qkv
    if sizes.separate_projections:
        query = sizes.query_width * (2 if sizes.model.attention_gate else 1)
        widths = {"query": query, "key": sizes.key_width, "value": sizes.value_width}
        linears = tuple(
            Linear(name, sizes.tokens, hidden, width, sizes.dtype, bias=bias) for name, width in widths.items()
        )
        layer = build.column_layer(sizes, Role.QKV, linears, forward, backward)
        return build.sum_input_gradients(sizes, layer, len(linears))
    qkv = Linear("qkv", sizes.tokens, hidden, sizes.qkv_width // sizes.tp, sizes.dtype, bias=bias)
    # Autograd joins the gradients of queries, keys and values, which are slices of one result.
    width, model = sizes.query_width + sizes.key_width + sizes.value_width, sizes.model
    if sizes.eager_modules:
        shape, sliced = (sizes.tokens, width, sizes.stored), model.gated or core.selects_heads(model)
        tailed = model.position.tailed
        backward += list_kernels("joined gradients", sizes, *shape, "join gradients", sliced=sliced, tailed=tailed)
    elif sizes.plain_gradients:
        backward += (stream_op("join gradients", K.COPY, sizes.tokens, width, 1, 1, sizes.stored),)
    if sizes.shares_kv_heads:
        gathered, scattered = _share_heads(sizes)
        forward, backward = (*gathered, *forward), (*backward, *scattered)
    return build.column_layer(sizes, Role.QKV, (qkv,), forward, backward)


def _share_heads(sizes: Sizes) -> tuple[Ops, Ops]:
    """Handle fewer kv heads than tensor ranks: each rank multiplies its slice of the projection, all gather
    it and take their queries and the head these look at; gradients are summed and split again.

    Source: Megatron-Core, transformer/attention.py (num_query_groups < world_size) and
    tensor_parallel/mappings.py, which joins and splits columns by a copy.
    """
    rows, width, dtype = sizes.tokens, sizes.qkv_width, sizes.stored
    size = build.tensor_bytes(sizes, width)
    return (
        (
            collective("qkv heads tp all-gather", C.ALL_GATHER, size, Group.TP),
            stream_op("join heads", K.COPY, rows, width, 1, 1, dtype),
        ),
        (
            # What the rank took no part of has no gradient.
            stream_op("heads gradient fill", K.FILL, rows, width, 0, 1, dtype),
            stream_op("split heads gradient", K.COPY, rows, width, 1, 1, dtype),
            collective("qkv heads tp reduce-scatter", C.REDUCE_SCATTER, size, Group.TP),
        ),
    )


def _head_ops(sizes: Sizes) -> tuple[Ops, Ops]:
    """Norm queries and keys and rotate them, which plain PyTorch does one after the other."""
    model, tokens = sizes.model, sizes.tokens
    width = sizes.query_width + sizes.key_width
    separate = {"query ": sizes.query_width, "key ": sizes.key_width}
    rotated = {"": width} if sizes.fused or sizes.framework.runs_liger else separate
    # Modules written in Python norm queries and keys one after the other.
    normed = separate if sizes.eager_modules else {"query key ": width}
    normings: list[tuple[Ops, Ops]] = []
    for name, width in normed.items() if model.qk_norm is not QkNorm.NONE else ():
        row = width if model.qk_norm is QkNorm.WHOLE else model.head_dim
        normings.append(build.norm_ops(sizes, f"{name}norm", tokens * width // row, row, heads=True))
    turns = rotated.items() if model.position.kind is PositionKind.ROTARY else ()
    rotations = [_rotate(sizes, width, name) for name, width in turns]
    forward = [ops for ops, _ in (*normings, *rotations)]
    backward = [ops for _, ops in (*reversed(rotations), *normings)]
    return tuple(chain(*forward)), tuple(chain(*backward))


def _rotate(sizes: Sizes, width: int, name: str = "") -> tuple[Ops, Ops]:
    """Return the rotary embedding of *width* elements of every token, and its gradient: one kernel, or an op for each
    operation. Megatron-Core falls back to PyTorch operators where YaRN scales cosines. Autocast leaves the angles of
    transformers, and so the result, in fp32.
    """
    stored, liger, eager = sizes.stored, sizes.framework.runs_liger, sizes.eager_modules
    position, code = sizes.model.position, ""
    if sizes.fused or liger:
        code = "scaled " if position.scaled and not liger else "fused "
    widened = eager and sizes.casts_activations and not code
    turned = max(1, round(width * position.share)) if eager else width
    forward, backward = (
        list_kernels(
            f"{code}{word}",
            sizes,
            sizes.tokens,
            width,
            DType.FP32 if widened else stored,
            f"{name}{word}",
            wide=widened and stored is not DType.FP32,
            turned=turned,
            half=max(1, turned // 2),
            rest=max(1, width - turned),
            sinks=eager and sizes.model.attention_sinks,
            tailed=eager and position.tailed,
            joined=eager and sizes.model.joined,
            swapped=K.STRIDED if eager else K.ROTARY,
            spread=K.BROADCAST if eager else K.ROTARY,
            cat=K.JOIN if eager else K.ROTARY,
        )
        for word in ("rotary", "rotary gradient")
    )
    return forward, backward


def _latent_layers(sizes: Sizes) -> tuple[Layer, ...]:
    model, latent = sizes.model, present(sizes.model.latent)
    outer, hidden, dtype = sizes.outer_tokens, model.hidden, sizes.dtype
    down = [Linear("kv down", outer, hidden, latent.kv_rank + latent.rope_dim, dtype)]
    up = [Linear("kv up", sizes.tokens, latent.kv_rank, sizes.heads * (latent.nope_dim + latent.value_dim), dtype)]
    normed = latent.kv_rank
    if latent.query_rank:
        down.insert(0, Linear("query down", outer, hidden, latent.query_rank, dtype))
        up.insert(0, Linear("query up", sizes.tokens, latent.query_rank, sizes.query_width, dtype))
        normed += latent.query_rank
    else:
        up.insert(0, Linear("query", sizes.tokens, hidden, sizes.query_width, dtype))
    rotated, waits = (sizes.heads + 1) * latent.rope_dim, build.column_waits(sizes, Role.LATENT_UP)
    forward, backward = _rotate(sizes, rotated)
    if sizes.eager_modules:
        shape = (sizes.tokens, sizes.query_width, sizes.stored)
        heads, heads_gradient = list_phases("latent heads", sizes, *shape, up=up[-1].outputs)
        forward, backward = forward + heads, heads_gradient + backward
    down_forward, down_gradient, down_weights = build.join_phases(sizes, down)
    norm, norm_gradient = build.norm_ops(sizes, "latent norm", outer, normed)
    width = normed + latent.rope_dim + (0 if latent.query_rank else hidden)
    index = _index_ops(sizes, latent) if latent.top_keys else PhaseOps()
    return (
        make_layer(
            Role.LATENT_DOWN,
            (*down_forward, *norm, *index.forward),
            (*build.wait_for(index.input_gradient + norm_gradient, waits), *down_gradient),
            down_weights + index.weight_gradient,
        ),
        build.column_layer(sizes, Role.LATENT_UP, tuple(up), forward, backward, width=width),
    )


def _index_ops(sizes: Sizes, latent: Latent) -> PhaseOps:
    """Score all keys for each query of this rank and choose the best; ranks that share tokens gather keys."""
    outer, strategy, hidden = sizes.outer_tokens, sizes.strategy, sizes.model.hidden
    projections = (
        ("index query", latent.query_rank or hidden, latent.index_heads * latent.index_dim),
        ("index key", hidden, latent.index_dim),
        ("index weights", hidden, latent.index_heads),
    )
    linears = (
        Linear(name, outer, inputs, outputs, sizes.dtype, adapted=False) for name, inputs, outputs in projections
    )
    forward, gradient, weights = build.join_phases(sizes, linears)
    norm = ("index norm", K.LAYER_NORM, outer, latent.index_dim)
    gathers: Ops = ()
    for group, ways in ((Group.TP, strategy.outer_ways), (Group.CP, sizes.cp)):
        if ways > 1:
            size = outer * ways * latent.index_dim * sizes.element
            gathers += (collective(f"index keys {group} all-gather", C.ALL_GATHER, size, group),)
    keys = max(1, strategy.seq // 2)  # of all queries on average

    def score(backward: bool) -> Attention:
        shape = (strategy.micro_batch, max(1, outer // strategy.micro_batch), keys, latent.index_heads, 1)
        return Attention(*shape, latent.index_dim, 1, False, backward, sizes.unquantised)

    return PhaseOps(
        (
            *forward,
            stream_op(*norm, 1, 1, sizes.stored),
            *gathers,
            Op("index scores", score(False)),
            stream_op("index choice", K.SOFTMAX, outer, keys, 1, 1, DType.FP32),
        ),
        (Op("index scores gradient", score(True)), stream_op(*norm, 2, 1, sizes.stored, True), *gradient),
        weights,
    )
