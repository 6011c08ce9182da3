"""The weight tensors of what mixes tokens in a layer: attention, latent attention, Mamba, delta nets."""

from stepcast.ir.architecture import Architecture
from stepcast.ir.model_parts import QkNorm
from stepcast.ir.weight import Split, Weight, WeightPart, linear, norm_weight


def attention_weights(model: Architecture) -> list[Weight]:
    part, bias = WeightPart.ATTENTION, model.biases.qkv
    weights = linear("attention.query", part, model.hidden, model.query_width, bias, Split.TENSOR)
    if model.attention_gate:
        weights += linear("attention.gate", part, model.hidden, model.query_width, bias, Split.TENSOR)
    for name in ("attention.key", "attention.value"):
        weights += linear(name, part, model.hidden, model.kv_width, bias, Split.TENSOR)
    output = model.biases.attention_output
    weights += linear("attention.output", part, model.query_width, model.hidden, output, Split.TENSOR, by_rows=True)
    if model.qk_norm in (QkNorm.HEAD, QkNorm.WHOLE):
        whole = model.qk_norm is QkNorm.WHOLE
        widths = {"query": model.query_width, "key": model.kv_width}
        weights += [
            norm_weight(model, f"attention.{side}_norm", width if whole else model.head_dim)
            for side, width in widths.items()
        ]
    if model.attention_sinks:
        weights.append(Weight("attention.sinks", part, (model.heads,), Split.TENSOR))
    return weights


def latent_weights(model: Architecture) -> list[Weight]:
    """Down-projections and their norms are on every rank; heads are split on the way up."""
    latent, part, bias = model.latent, WeightPart.ATTENTION, model.biases.qkv
    assert latent is not None
    if latent.query_rank:
        weights = linear("attention.query_down", part, model.hidden, latent.query_rank, bias)
        weights.append(norm_weight(model, "attention.query_norm", latent.query_rank))
        weights += linear("attention.query_up", part, latent.query_rank, model.query_width, False, Split.TENSOR)
    else:
        weights = linear("attention.query", part, model.hidden, model.query_width, False, Split.TENSOR)
    weights += linear("attention.kv_down", part, model.hidden, latent.kv_rank + latent.rope_dim, bias)
    weights.append(norm_weight(model, "attention.kv_norm", latent.kv_rank))
    up = model.heads * (latent.nope_dim + latent.value_dim)
    weights += linear("attention.kv_up", part, latent.kv_rank, up, False, Split.TENSOR)
    values, output = model.heads * latent.value_dim, model.biases.attention_output
    weights += linear("attention.output", part, values, model.hidden, output, Split.TENSOR, by_rows=True)
    return weights


def mamba_weights(model: Architecture) -> list[Weight]:
    """A Mamba-2 mixer (Dao and Gu 2024, section 6): gate, input, B, C and dt from one projection.

    Groups bound the split of B and C; A, D and the dt bias are one number per head.
    """
    hybrid, part = model.hybrid, WeightPart.MAMBA
    assert hybrid is not None
    inner, states = hybrid.inner, 2 * hybrid.groups * hybrid.state
    split, ways = Split.TENSOR, hybrid.groups
    return [
        Weight("mamba.in.gate_input", part, (2 * inner, model.hidden), split, inputs_split=False),
        Weight("mamba.in.states", part, (states, model.hidden), split, ways, False),
        Weight("mamba.in.dt", part, (hybrid.mamba_heads, model.hidden), split, inputs_split=False),
        Weight("mamba.conv.input", part, (inner, hybrid.conv + 1), split),  # kernel and bias
        Weight("mamba.conv.states", part, (states, hybrid.conv + 1), split, ways),
        Weight("mamba.heads", part, (3, hybrid.mamba_heads), split),
        Weight("mamba.norm", WeightPart.NORM, (inner,), split),
        Weight("mamba.out", part, (model.hidden, inner), split, inputs_split=True),
    ]


def selective_weights(model: Architecture) -> list[Weight]:
    """A Mamba mixer of the first version (Gu and Dao 2023); A and D are numbers of channels."""
    own, part = model.selective, WeightPart.MAMBA
    assert own is not None
    weights = [
        Weight("selective.in", part, (2 * own.inner, model.hidden), inputs_split=False),
        Weight("selective.conv", part, (own.inner, own.conv + own.conv_bias)),
        Weight("selective.steps", part, (own.steps, own.inner), inputs_split=False),
        Weight("selective.dt", part, (own.inner, own.rank), inputs_split=False),
        Weight("selective.channels", part, ((own.state + 2) * own.inner,)),  # A, D and the bias of dt
        Weight("selective.out", part, (model.hidden, own.inner), inputs_split=True),
    ]
    return [*weights, Weight("selective.norms", WeightPart.NORM, (own.steps,))] if own.normed else weights


def delta_weights(model: Architecture) -> list[Weight]:
    """A gated delta net (Yang et al. 2024); decay and its bias are one number per head of values."""
    own, part, split = model.delta, WeightPart.DELTA, Split.TENSOR
    assert own is not None
    return [
        Weight("delta.in", part, (own.projected, model.hidden), split, inputs_split=False),
        Weight("delta.conv", part, (own.channels, own.conv), split),
        Weight("delta.heads", part, (2, own.value_heads), split),
        Weight("delta.norm", WeightPart.NORM, (own.value_dim,)),
        Weight("delta.out", part, (model.hidden, own.values), split, inputs_split=True),
    ]
