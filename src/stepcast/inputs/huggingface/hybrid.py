"""Hugging Face configs of models with Mamba-2 blocks, one function per family.

What a config leaves out follows the default of its class in transformers; sizes are never guessed.
"""

from dataclasses import replace

from stepcast.inputs.huggingface.dense import ConfigTable, llama, shown
from stepcast.inputs.huggingface.experts import expert_groups, sparse_layers
from stepcast.inputs.source import FormatError
from stepcast.ir.architecture import MOST_LAYERS
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Experts, Hybrid, Position, PositionKind, QkNorm
from stepcast.ir.recurrent import Delta, Selective

# Where a layer is one thing, and where it is a mixer and a feed-forward: an MLP or experts.
BLOCK_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
BEFORE_MLP = {"mamba": "m", "attention": "a"}
BEFORE_EXPERTS = {"mamba": "x", "attention": "y"}


def nemotron_h(keys: ConfigTable, name: str) -> Model:
    """Mamba-2, attention and feed-forward blocks in the order a pattern gives; no positions."""
    model = llama(keys, name)
    pattern = keys.word("hybrid_override_pattern", default="").replace("|", "")
    if not pattern:
        pattern = "".join(BLOCK_LETTERS.get(str(kind), "?") for kind in keys.items("layers_block_type"))
    if not pattern:
        raise FormatError("the nemotron_h config lacks hybrid_override_pattern or layers_block_type")
    hybrid = Hybrid(
        pattern=pattern,
        mamba_heads=keys.count("mamba_num_heads"),
        mamba_head_dim=keys.count("mamba_head_dim"),
        state=keys.count("ssm_state_size"),
        groups=keys.count("n_groups", "mamba_n_groups"),
        conv=keys.count("conv_kernel", default=4),
        chunk=keys.count("chunk_size", "mamba_chunk_size", default=128),
    )
    experts = None
    if "E" in pattern:
        groups, top_groups = expert_groups(keys)
        experts = Experts(
            count=keys.count("n_routed_experts"),
            top_k=keys.count("num_experts_per_tok"),
            ffn=keys.count("moe_intermediate_size"),
            shared_ffn=keys.count("moe_shared_expert_intermediate_size", default=0, least=0),
            router_bias=True,
            latent=keys.count("moe_latent_size", default=0, least=0),
            groups=groups,
            top_groups=top_groups,
        )
    return replace(
        model,
        gated=False,
        activation=keys.activation("mlp_hidden_act", default="relu2"),
        position=Position(PositionKind.NONE),
        hybrid=hybrid,
        experts=experts,
        next_token_layers=keys.count("num_nextn_predict_layers", default=0, least=0),
    )


def mamba2(keys: ConfigTable, name: str) -> Model:
    """Mamba-2 blocks alone. The Model's attention heads are those of the scan; no layer has attention."""
    _without_projection_bias(keys, "use_bias")
    layers, heads = keys.count("num_hidden_layers"), keys.count("num_heads")
    head_dim = keys.count("head_dim")
    hybrid = Hybrid(
        pattern=_pattern(["mamba"] * min(layers, MOST_LAYERS + 1), BLOCK_LETTERS),
        mamba_heads=heads,
        mamba_head_dim=head_dim,
        state=keys.count("state_size"),
        groups=keys.count("n_groups", default=8),
        conv=keys.count("conv_kernel", default=4),
        chunk=keys.count("chunk_size", default=256),
    )
    return Model(
        name=name,
        layers=layers,
        hidden=keys.count("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        ffn=0,
        vocab=keys.count("vocab_size"),
        max_seq=keys.count("max_position_embeddings", default=2048),
        tied=keys.flag("tie_word_embeddings", default=False),
        position=Position(PositionKind.NONE),
        hybrid=hybrid,
    )


def bamba(keys: ConfigTable, name: str) -> Model:
    """Every layer a mixer and a gated MLP; attention in the layers that attn_layer_indices names."""
    model = llama(keys, name)
    attention = keys.items("attn_layer_indices")
    for layer in attention:
        if type(layer) is not int or not 0 <= layer < model.layers:
            raise FormatError(f"attn_layer_indices names {shown(layer)}; there are {model.layers} layers")
    kinds = ["attention" if layer in attention else "mamba" for layer in range(model.layers)]
    return replace(model, hybrid=_granite_hybrid(keys, model, _pattern(kinds, BEFORE_MLP)))


def granite_hybrid(keys: ConfigTable, name: str) -> Model:
    """As Bamba, by layer_types; the feed-forward is a shared MLP, with experts beside it if there are any."""
    model = llama(keys, name)
    shared = keys.count("shared_intermediate_size")
    count = keys.count("num_local_experts", default=0, least=0)
    kinds = [str(kind) for kind in keys.items("layer_types")]
    kinds = kinds or ["mamba"] * min(model.layers, MOST_LAYERS + 1)
    hybrid = _granite_hybrid(keys, model, _pattern(kinds, BEFORE_EXPERTS if count else BEFORE_MLP))
    rotary = keys.word("position_embedding_type", default="nope") == "rope"
    experts = None
    if count:
        top_k = keys.count("num_experts_per_tok")
        experts = Experts(count=count, top_k=top_k, ffn=model.ffn, shared_ffn=shared)
    return replace(
        model,
        ffn=0 if count else shared,
        tied=keys.flag("tie_word_embeddings", default=True),
        position=Position(PositionKind.ROTARY if rotary else PositionKind.NONE),
        hybrid=hybrid,
        experts=experts,
    )


def _granite_hybrid(keys: ConfigTable, model: Model, pattern: str) -> Hybrid:
    """The sizes as Bamba and Granite 4 name them; a head's width follows from the others unless given."""
    _without_projection_bias(keys, "mamba_proj_bias")
    heads = keys.count("mamba_n_heads", default=128)
    inner = keys.count("mamba_expand", default=2) * model.hidden
    if keys.table.get("mamba_d_head", "auto") == "auto":
        if inner % heads:
            raise FormatError(f"the inner width {inner} is not a multiple of {heads} Mamba heads")
        head_dim = inner // heads
    else:
        head_dim = keys.count("mamba_d_head")
    return Hybrid(
        pattern=pattern,
        mamba_heads=heads,
        mamba_head_dim=head_dim,
        state=keys.count("mamba_d_state", default=256),
        groups=keys.count("mamba_n_groups", default=1),
        conv=keys.count("mamba_d_conv", default=4),
        chunk=keys.count("mamba_chunk_size", default=256),
    )


def _pattern(kinds: list[str], letters: dict[str, str]) -> str:
    unknown = [kind for kind in kinds if kind not in letters]
    if unknown:
        raise FormatError(f"unknown layer type {shown(unknown[0])}; known: {', '.join(letters)}")
    return "".join(letters[kind] for kind in kinds)


def _without_projection_bias(keys: ConfigTable, key: str) -> None:
    if keys.flag(key, default=False):
        raise FormatError(f"{key}: Mamba blocks with biased projections are not known")


# Hugging Face configs of models with gated delta nets or Mamba blocks of the first version.
#
# What a config leaves out follows the default of its class in transformers; sizes are never guessed.

MIXERS = ("linear_attention", "full_attention")
# Letter of a layer by whether it mixes by attention and whether experts follow.
DELTA_LETTERS = {(False, False): "d", (False, True): "e", (True, False): "a", (True, True): "y"}
SELECTIVE_LETTERS = {(False, False): "s", (False, True): "t", (True, False): "a", (True, True): "y"}


def qwen3_next(keys: ConfigTable, name: str) -> Model:
    """Three gated delta nets for each layer of gated attention; experts with a shared one that is gated."""
    model = replace(llama(keys, name), head_dim=keys.count("head_dim", default=256))
    layers = min(model.layers, MOST_LAYERS + 1)
    attention = _attention_layers(keys, layers)
    routed = sparse_layers(keys, layers, keys.count("decoder_sparse_step", default=1))
    delta = Delta(
        key_heads=keys.count("linear_num_key_heads", default=16),
        value_heads=keys.count("linear_num_value_heads", default=32),
        key_dim=keys.count("linear_key_head_dim", default=128),
        value_dim=keys.count("linear_value_head_dim", default=128),
        conv=keys.count("linear_conv_kernel_dim", default=4),
    )
    experts = None
    if any(routed):
        shared = keys.count("shared_expert_intermediate_size", default=512, least=0)
        experts = Experts(
            count=keys.count("num_experts", default=512),
            top_k=keys.count("num_experts_per_tok", default=10),
            ffn=keys.count("moe_intermediate_size", default=512),
            shared_ffn=shared,
            shared_gate=shared > 0,
        )
    pattern = "".join(DELTA_LETTERS[kind] for kind in zip(attention, routed, strict=True))
    return replace(
        model,
        qk_norm=QkNorm.HEAD,
        attention_gate=True,
        hybrid=Hybrid(pattern),
        delta=delta if not all(attention) else None,
        experts=experts,
    )


def jamba(keys: ConfigTable, name: str) -> Model:
    """Mamba blocks with norms of time step, B and C, now and then attention without positions; an MLP or
    experts after each.
    """
    model = llama(keys, name)
    layers = range(min(model.layers, MOST_LAYERS + 1))
    every, first = (keys.count("attn_layer_period", default=8), keys.count("attn_layer_offset", default=4, least=0))
    routed_every, routed_first = (
        keys.count("expert_layer_period", default=2),
        keys.count("expert_layer_offset", default=1, least=0),
    )
    count = keys.count("num_experts", default=16)
    kinds = [(at % every == first, count > 1 and at % routed_every == routed_first) for at in layers]
    experts = None
    if any(routed for _, routed in kinds):
        top_k = keys.count("num_experts_per_tok", default=2)
        experts = Experts(count=count, top_k=top_k, ffn=model.ffn)
    return replace(
        model,
        position=Position(PositionKind.NONE),
        hybrid=Hybrid("".join(SELECTIVE_LETTERS[kind] for kind in kinds)),
        selective=_selective(keys, model.hidden, "mamba_", normed=True),
        experts=experts,
    )


def mamba(keys: ConfigTable, name: str) -> Model:
    """Mamba blocks alone; no layer has attention, so the Model's one head stands for nothing. Falcon's norms
    of time step, B and C have no weights.
    """
    hidden, layers = keys.count("hidden_size", "d_model"), keys.count("num_hidden_layers", "n_layer")
    return Model(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=1,
        kv_heads=1,
        head_dim=hidden,
        ffn=0,
        vocab=keys.count("vocab_size"),
        max_seq=keys.count("max_position_embeddings", default=2048),
        tied=keys.flag("tie_word_embeddings", default=keys.kind == "mamba"),
        position=Position(PositionKind.NONE),
        hybrid=Hybrid("S" * min(layers, MOST_LAYERS + 1)),
        selective=_selective(keys, hidden, "", normed=False),
    )


def _selective(keys: ConfigTable, hidden: int, prefix: str, normed: bool) -> Selective:
    """The sizes as Jamba names them, or, without *prefix*, Mamba."""
    bias = f"{prefix}proj_bias" if prefix else "use_bias"
    if keys.flag(bias, default=False):
        raise FormatError(f"{bias}: Mamba blocks with biased projections are not known")
    inner = keys.count(f"{prefix}expand", default=2) * hidden
    if not prefix:
        inner = keys.count("intermediate_size", "d_inner", default=inner)
    rank = "mamba_dt_rank" if prefix else "time_step_rank"
    auto = keys.table.get(rank, "auto") == "auto"
    return Selective(
        inner=inner,
        state=keys.count(f"{prefix}d_state" if prefix else "state_size", default=16),
        rank=-(-hidden // 16) if auto else keys.count(rank),
        conv=keys.count(f"{prefix}d_conv" if prefix else "conv_kernel", default=4),
        conv_bias=keys.flag(f"{prefix}conv_bias" if prefix else "use_conv_bias", default=True),
        normed=normed,
    )


def _attention_layers(keys: ConfigTable, layers: int) -> list[bool]:
    """Which layers mix by attention: layer_types, or the last of every so many."""
    types = keys.items("layer_types")
    if not types:
        every = keys.count("full_attention_interval", default=4)
        return [(at + 1) % every == 0 for at in range(layers)]
    unknown = [kind for kind in types if kind not in MIXERS]
    if unknown:
        raise FormatError(f"unknown layer type {shown(unknown[0])}; known: {', '.join(MIXERS)}")
    if len(types) != layers:
        raise FormatError(f"layer_types has {len(types)} entries for {layers} layers")
    return [kind == "full_attention" for kind in types]
