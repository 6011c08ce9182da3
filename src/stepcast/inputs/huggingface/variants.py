"""Hugging Face configs of models with experts, latent attention or recurrent layers, one function per family.

Keys that a config leaves out have the default of its class in transformers; sizes are never guessed.
"""

from dataclasses import replace

from stepcast.inputs.huggingface.dense import ConfigTable, llama, mistral, qwen2, qwen3, shortest_period
from stepcast.inputs.source import FormatError
from stepcast.ir.architecture import MOST_LAYERS
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation, Biases, Experts, Hybrid, Latent, Position, PositionKind, QkNorm
from stepcast.ir.recurrent import Delta, Selective


def mixtral(keys: ConfigTable, name: str) -> Model:
    model = mistral(keys, name)
    experts = Experts(
        count=keys.count("num_local_experts", default=8),
        top_k=keys.count("num_experts_per_tok", default=2),
        ffn=model.ffn,
    )
    return replace(model, experts=experts)


def sparse_layers(keys: ConfigTable, layers: int) -> list[bool]:
    """Return which layers have experts: the last of every so many, but not those in mlp_only_layers."""
    every = keys.count("decoder_sparse_step", default=1)
    dense = keys.layer_numbers("mlp_only_layers", layers)
    return [(layer + 1) % every == 0 and layer not in dense for layer in range(layers)]


def _qwen_experts(keys: ConfigTable, model: Model, shared_ffn: int) -> Model:
    pattern = [True]
    if model.layers <= MOST_LAYERS:  # else the Model refuses so many layers
        pattern = sparse_layers(keys, model.layers)
    if not any(pattern):
        raise FormatError("decoder_sparse_step and mlp_only_layers leave no layer with experts")
    experts = Experts(
        count=keys.count("num_experts"),
        top_k=keys.count("num_experts_per_tok"),
        ffn=keys.count("moe_intermediate_size"),
        shared_ffn=shared_ffn,
        shared_gate=shared_ffn > 0,
        pattern=shortest_period(tuple(pattern)),
    )
    return replace(model, experts=experts)


def qwen2_moe(keys: ConfigTable, name: str) -> Model:
    shared_ffn = keys.count("shared_expert_intermediate_size", default=0, least=0)
    return _qwen_experts(keys, qwen2(keys, name), shared_ffn)


def qwen3_moe(keys: ConfigTable, name: str) -> Model:
    return _qwen_experts(keys, qwen3(keys, name), 0)


def deepseek(keys: ConfigTable, name: str) -> Model:
    """Latent attention; shared experts next to the routed ones; the first layers dense (V2, V3, Kimi K2)."""
    latent = Latent(
        kv_rank=keys.count("kv_lora_rank"),
        nope_dim=keys.count("qk_nope_head_dim"),
        rope_dim=keys.count("qk_rope_head_dim"),
        value_dim=keys.count("v_head_dim"),
        query_rank=keys.count("q_lora_rank", default=0, least=0),
    )
    if keys.kind == "deepseek_v32":  # the indexer of sparse attention
        latent = replace(
            latent,
            index_heads=keys.count("index_n_heads", default=64),
            index_dim=keys.count("index_head_dim", default=128),
            top_keys=keys.count("index_topk", default=2048),
        )
    wide = latent.nope_dim + latent.rope_dim
    model = llama(ConfigTable({**keys.table, "head_dim": wide}, keys.kind), name)
    return replace(
        model,
        kv_heads=model.heads,
        biases=Biases(model.biases.qkv, model.biases.attention_output),
        latent=latent,
        experts=_deepseek_experts(keys) if keys.has("n_routed_experts") else None,
        next_token_layers=keys.count("num_nextn_predict_layers", default=0, least=0),
    )


def glm4_moe(keys: ConfigTable, name: str) -> Model:
    """GLM 4.5: grouped attention with biases, DeepSeek's experts (transformers Glm4MoeForCausalLM)."""
    model = llama(keys, name)
    return replace(
        model,
        head_dim=keys.count("head_dim", default=128),
        biases=Biases(qkv=keys.flag("attention_bias", default=False)),
        qk_norm=QkNorm.HEAD if keys.flag("use_qk_norm", default=False) else model.qk_norm,
        experts=_deepseek_experts(keys),
        next_token_layers=keys.count("num_nextn_predict_layers", default=0, least=0),
    )


def _deepseek_experts(keys: ConfigTable) -> Experts:
    ffn = keys.count("moe_intermediate_size")
    every = min(keys.count("moe_layer_freq", default=1), MOST_LAYERS)
    method = keys.word("topk_method", default="greedy" if keys.kind == "deepseek_v2" else "noaux_tc")
    # Left out, these are transformers' own defaults (DeepseekV3Config).
    usual = (8, 4) if keys.kind in ("deepseek_v3", "deepseek_v32") else (1, 1)
    groups, top_groups = expert_groups(keys, *usual) if method != "greedy" else (1, 1)
    return Experts(
        count=keys.count("n_routed_experts"),
        top_k=keys.count("num_experts_per_tok"),
        ffn=ffn,
        shared_ffn=ffn * keys.count("n_shared_experts", default=0, least=0),
        router_bias=method == "noaux_tc",  # the correction added to the scores when choosing
        first_dense=keys.count("first_k_dense_replace", default=0, least=0),
        pattern=(True,) + (False,) * (every - 1),
        groups=groups,
        top_groups=top_groups,
    )


def expert_groups(keys: ConfigTable, groups: int = 1, top_groups: int = 1) -> tuple[int, int]:
    """Return the groups that experts are divided into, and how many of them a token may choose from."""
    return keys.count("n_group", default=groups), keys.count("topk_group", default=top_groups)


def grok(keys: ConfigTable, name: str) -> Model:
    """Norms before and after each half, capped scores (github.com/xai-org/grok-1)."""
    model = llama(keys, name)
    experts = Experts(
        count=keys.count("num_experts", "num_local_experts"), top_k=keys.count("num_experts_per_tok"), ffn=model.ffn
    )
    return replace(
        model,
        tied=keys.flag("tie_word_embeddings", default=True),
        activation=Activation.GELU,
        post_norms=True,
        attention_softcap=keys.number("max_attn_value", 30.0),
        experts=experts,
    )


def gpt_oss(keys: ConfigTable, name: str) -> Model:
    """Biases everywhere but in the head, one learned sink per head, every second layer windowed."""
    model = llama(keys, name)
    bias = keys.flag("attention_bias", default=True)
    experts = Experts(
        count=keys.count("num_local_experts"),
        top_k=keys.count("num_experts_per_tok", "experts_per_token"),
        ffn=model.ffn,
        router_bias=True,
    )
    return replace(
        model,
        biases=Biases(bias, bias, mlp=True),
        attention_sinks=True,
        window=keys.window(model.layers, (True, False)),
        experts=experts,
    )


def llama4(keys: ConfigTable, name: str) -> Model:
    """Experts of intermediate_size with one shared, dense layers of intermediate_size_mlp between them."""
    model = llama(keys, name)
    step = min(keys.count("interleave_moe_layer_step", default=1), MOST_LAYERS)
    experts = Experts(
        count=keys.count("num_local_experts"),
        top_k=keys.count("num_experts_per_tok", default=1),
        ffn=model.ffn,
        shared_ffn=model.ffn,
        pattern=(False,) * (step - 1) + (True,),
    )
    normed = keys.flag("use_qk_norm", default=True)
    return replace(
        model,
        ffn=keys.count("intermediate_size_mlp"),
        qk_norm=QkNorm.PLAIN if normed else QkNorm.NONE,
        window=keys.window(model.layers, (True, True, True, False), size_key="attention_chunk_size"),
        experts=experts,
    )


# Letters of layers that are one block, and of those with a mixer and a feed-forward: an MLP or experts.
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
    _check_no_bias(keys, "use_bias")
    layers, heads = keys.count("num_hidden_layers"), keys.count("num_heads")
    head_dim = keys.count("head_dim")
    hybrid = Hybrid(
        pattern="M" * min(layers, MOST_LAYERS + 1),
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
    attention = keys.layer_numbers("attn_layer_indices", model.layers)
    kinds = ["attention" if layer in attention else "mamba" for layer in range(model.layers)]
    return replace(model, hybrid=_granite_sizes(keys, model, "".join(BEFORE_MLP[kind] for kind in kinds)))


def granite_hybrid(keys: ConfigTable, name: str) -> Model:
    """Like Bamba, by layer_types; the feed-forward is a shared MLP, with experts next to it if there are any."""
    model = llama(keys, name)
    shared = keys.count("shared_intermediate_size")
    count = keys.count("num_local_experts", default=0, least=0)
    letters = BEFORE_EXPERTS if count else BEFORE_MLP
    kinds = keys.layer_types(letters) or ["mamba"] * min(model.layers, MOST_LAYERS + 1)
    hybrid = _granite_sizes(keys, model, "".join(letters[kind] for kind in kinds))
    is_rotary = keys.word("position_embedding_type", default="nope") == "rope"
    experts = None
    if count:
        top_k = keys.count("num_experts_per_tok")
        experts = Experts(count=count, top_k=top_k, ffn=model.ffn, shared_ffn=shared)
    return replace(
        model,
        ffn=0 if count else shared,
        tied=keys.flag("tie_word_embeddings", default=True),
        position=Position(PositionKind.ROTARY if is_rotary else PositionKind.NONE),
        hybrid=hybrid,
        experts=experts,
    )


def _granite_sizes(keys: ConfigTable, model: Model, pattern: str) -> Hybrid:
    """Return the sizes as Bamba and Granite 4 name them; a head's width follows from the others unless given."""
    _check_no_bias(keys, "mamba_proj_bias")
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


def _check_no_bias(keys: ConfigTable, key: str) -> None:
    if keys.flag(key, default=False):
        raise FormatError(f"{key}: Mamba blocks with biased projections are not known")


# Models with gated delta nets or Mamba blocks of the first version.

MIXERS = ("linear_attention", "full_attention")
# Letter of a layer by whether it mixes by attention and whether experts follow.
DELTA_LETTERS = {(False, False): "d", (False, True): "e", (True, False): "a", (True, True): "y"}
SELECTIVE_LETTERS = {(False, False): "s", (False, True): "t", (True, False): "a", (True, True): "y"}


def qwen3_next(keys: ConfigTable, name: str) -> Model:
    """Three gated delta nets for each layer of gated attention; experts with a shared one that is gated."""
    model = replace(llama(keys, name), head_dim=keys.count("head_dim", default=256))
    layers = min(model.layers, MOST_LAYERS + 1)
    attention = _attention_layers(keys, layers)
    routed = sparse_layers(keys, layers)
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
    """Mamba blocks with norms of time step, B and C, some attention without positions; an MLP or experts after each."""
    model = llama(keys, name)
    layers = range(min(model.layers, MOST_LAYERS + 1))
    every, first = keys.count("attn_layer_period", default=8), keys.count("attn_layer_offset", default=4, least=0)
    routed_every = keys.count("expert_layer_period", default=2)
    routed_first = keys.count("expert_layer_offset", default=1, least=0)
    count = keys.count("num_experts", default=16)
    kinds = [(layer % every == first, count > 1 and layer % routed_every == routed_first) for layer in layers]
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
    """Mamba blocks alone; no layer uses the Model's one head. Falcon's norms of time step, B and C have no weights."""
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
    """Return the sizes as Jamba names them, or, without *prefix*, Mamba."""
    _check_no_bias(keys, f"{prefix}proj_bias" if prefix else "use_bias")
    inner = keys.count(f"{prefix}expand", default=2) * hidden
    if not prefix:
        inner = keys.count("intermediate_size", "d_inner", default=inner)
    rank = "mamba_dt_rank" if prefix else "time_step_rank"
    is_auto = keys.table.get(rank, "auto") == "auto"
    return Selective(
        inner=inner,
        state=keys.count(f"{prefix}d_state" if prefix else "state_size", default=16),
        rank=-(-hidden // 16) if is_auto else keys.count(rank),
        conv=keys.count(f"{prefix}d_conv" if prefix else "conv_kernel", default=4),
        conv_bias=keys.flag(f"{prefix}conv_bias" if prefix else "use_conv_bias", default=True),
        normed=normed,
    )


def _attention_layers(keys: ConfigTable, layers: int) -> list[bool]:
    """Return which layers mix by attention: by layer_types, or the last of every so many."""
    if types := keys.layer_types(MIXERS, layers):
        return [kind == "full_attention" for kind in types]
    every = keys.count("full_attention_interval", default=4)
    return [(layer + 1) % every == 0 for layer in range(layers)]
