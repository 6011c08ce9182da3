"""Hugging Face configs of models with experts or latent attention, one function per family."""

from dataclasses import replace

from stepcast.inputs.huggingface.dense import ConfigTable, llama, mistral, qwen2, qwen3, shortest_period, shown
from stepcast.inputs.source import FormatError
from stepcast.ir.architecture import MOST_LAYERS
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation, Biases, Experts, Latent, QkNorm


def mixtral(keys: ConfigTable, name: str) -> Model:
    model = mistral(keys, name)
    experts = Experts(
        count=keys.count("num_local_experts", default=8),
        top_k=keys.count("num_experts_per_tok", default=2),
        ffn=model.ffn,
    )
    return replace(model, experts=experts)


def sparse_pattern(keys: ConfigTable, layers: int, every: int) -> tuple[bool, ...]:
    """Which layers have experts, as short as it can be said."""
    if layers > MOST_LAYERS:
        return (True,)  # the Model refuses so many layers
    pattern = tuple(sparse_layers(keys, layers, every))
    if not any(pattern):
        raise FormatError("decoder_sparse_step and mlp_only_layers leave no layer with experts")
    return shortest_period(pattern)


def sparse_layers(keys: ConfigTable, layers: int, every: int) -> list[bool]:
    """Every *every*-th layer has experts (the last of each group), but not those in mlp_only_layers."""
    dense = set()
    for layer in keys.items("mlp_only_layers"):
        if type(layer) is not int or not 0 <= layer < layers:
            raise FormatError(f"mlp_only_layers names {shown(layer)}; there are {layers} layers")
        dense.add(layer)
    return [(layer + 1) % every == 0 and layer not in dense for layer in range(layers)]


def qwen2_moe(keys: ConfigTable, name: str) -> Model:
    model = qwen2(keys, name)
    shared = keys.count("shared_expert_intermediate_size", default=0, least=0)
    experts = Experts(
        count=keys.count("num_experts"),
        top_k=keys.count("num_experts_per_tok"),
        ffn=keys.count("moe_intermediate_size"),
        shared_ffn=shared,
        shared_gate=shared > 0,
        pattern=sparse_pattern(keys, model.layers, keys.count("decoder_sparse_step", default=1)),
    )
    return replace(model, experts=experts)


def qwen3_moe(keys: ConfigTable, name: str) -> Model:
    model = qwen3(keys, name)
    experts = Experts(
        count=keys.count("num_experts"),
        top_k=keys.count("num_experts_per_tok"),
        ffn=keys.count("moe_intermediate_size"),
        pattern=sparse_pattern(keys, model.layers, keys.count("decoder_sparse_step", default=1)),
    )
    return replace(model, experts=experts)


def deepseek(keys: ConfigTable, name: str) -> Model:
    """Latent attention; shared experts beside the routed ones; the first layers dense (V2, V3, Kimi K2)."""
    latent = Latent(
        kv_rank=keys.count("kv_lora_rank"),
        nope_dim=keys.count("qk_nope_head_dim"),
        rope_dim=keys.count("qk_rope_head_dim"),
        value_dim=keys.count("v_head_dim"),
        query_rank=keys.count("q_lora_rank", default=0, least=0),
        **_indexer(keys),
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


def _indexer(keys: ConfigTable) -> dict[str, int]:
    """Return the sizes of the indexer of sparse attention (V3.2); left out, its config's own defaults."""
    if keys.kind != "deepseek_v32":
        return {}
    return {
        "index_heads": keys.count("index_n_heads", default=64),
        "index_dim": keys.count("index_head_dim", default=128),
        "top_keys": keys.count("index_topk", default=2048),
    }


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
