"""Types beyond plain language models: text parts of multimodal ones, GLM 4.5, and what is told of the others."""

from typing import Any

import pytest

from stepcast.inputs.huggingface.reader import read_config
from stepcast.inputs.source import FormatError
from stepcast.ir.model_parts import QkNorm
from tests.inputs.huggingface_configs import CONFIGS

QWEN2_VL_7B: dict[str, Any] = {
    "model_type": "qwen2_vl",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "use_sliding_window": False,
    "vision_config": {"depth": 32, "embed_dim": 1280, "hidden_size": 3584},
}
GLM_45_AIR: dict[str, Any] = {
    "model_type": "glm4_moe",
    "attention_bias": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "partial_rotary_factor": 0.5,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GLM_45 = GLM_45_AIR | {
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "first_k_dense_replace": 3,
    "num_hidden_layers": 92,
    "use_qk_norm": True,
}


def as_json(table: dict[str, Any]) -> bytes:
    import json

    return json.dumps(table).encode()


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        (QWEN2_VL_7B, 7.62),  # as Qwen2.5-7B: the vision tower is left out
        (GLM_45_AIR, 106.8),  # 106B as published
        (GLM_45, 352.8),  # 355B as published, which rounds up and counts what predicts further tokens
    ],
)
def test_parameters(config: dict[str, Any], billions: float) -> None:
    assert read_config(as_json(config), "model").parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("outer", "part", "inner"),
    [
        ("llava_next", "text_config", "llama-3.1-8b"),
        ("qwen2_5_vl", "text_config", "qwen2.5-7b"),
        ("internvl_chat", "llm_config", "qwen2.5-7b"),
        ("qwen3_vl_moe", "text_config", "qwen3-30b-a3b"),
    ],
)
def test_the_text_part_is_the_language_model(outer: str, part: str, inner: str) -> None:
    alone = read_config(as_json(CONFIGS[inner]), "model")
    kinds = {"qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl_moe": "qwen3_vl_moe_text"}
    text = CONFIGS[inner] | ({"model_type": kinds[outer]} if outer in kinds else {})
    whole = read_config(as_json({"model_type": outer, part: text, "vision_config": {"depth": 32}}), "model")
    assert whole == alone


def test_glm_norms_queries_where_it_says_so() -> None:
    assert read_config(as_json(GLM_45), "glm").qk_norm is QkNorm.HEAD
    assert read_config(as_json(GLM_45_AIR), "glm").qk_norm is not QkNorm.HEAD


@pytest.mark.parametrize(
    ("kind", "lacking"),
    [
        ("rwkv", "linear recurrences"),
        ("minimax", "lightning attention"),
        ("mllama", "cross-attention"),
        ("brandnew", ""),
    ],
)
def test_an_unknown_type_says_what_is_missing_and_offers_capture(kind: str, lacking: str) -> None:
    with pytest.raises(FormatError) as caught:
        read_config(as_json(CONFIGS["llama-3.1-8b"] | {"model_type": kind}), "model")
    assert f"unknown model_type '{kind}'" in str(caught.value)
    assert lacking in str(caught.value)
    assert "'stepcast capture'" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(
        FormatError, match=r"nearest are qwen3_moe, qwen2_moe, qwen3_vl_moe; docs/models.md lists the \d+"
    ):
        read_config(as_json(CONFIGS["llama-3.1-8b"] | {"model_type": "qwen3-moe"}), "model")
