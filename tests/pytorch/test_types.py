"""Types whose layers are unlike others', against transformers' own classes: parameters exactly, products too."""

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch: pip install 'stepcast[torch]'")
transformers = pytest.importorskip("transformers", reason="needs the extra torch: pip install 'stepcast[torch]'")

from stepcast.frameworks.catalog import load_profile, settle  # noqa: E402
from stepcast.generate.workload import generate  # noqa: E402
from stepcast.inputs.huggingface.reader import read_config  # noqa: E402
from stepcast.ir.layout import Layout  # noqa: E402
from stepcast.ir.model import Model  # noqa: E402
from stepcast.ir.model_parts import Mixer  # noqa: E402
from stepcast.ir.work import GroupedMatmul, Matmul  # noqa: E402
from stepcast.models.catalog import load_model  # noqa: E402
from stepcast.pytorch.capture.program import CaptureOptions, capture  # noqa: E402
from tests.inputs.huggingface_configs import CONFIGS  # noqa: E402
from tests.inputs.test_huggingface_types import GLM_45, GLM_45_AIR, QWEN2_VL_7B  # noqa: E402

WHOLE: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("qwen3-next-80b-a3b", "jamba-v0.1", "jamba-1.5-large")},
    **{name: CONFIGS[name] for name in ("mamba-2.8b", "falcon-mamba-7b", "olmo2-7b")},
    "glm-4.5": GLM_45,
    "glm-4.5-air": GLM_45_AIR,
}
BATCH, SEQ = 2, 128
FRAME: dict[str, Any] = {
    "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 512, "vocab_size": 512, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SMALL: dict[str, dict[str, Any]] = {
    "qwen3_next": FRAME | {
        "head_dim": 64, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    },
    "jamba": FRAME | {
        "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 8,
        "mamba_dt_rank": 16, "pad_token_id": None,
    },
}  # fmt: skip


def built(table: dict[str, Any]) -> Any:
    """transformers' own model, without memory for it."""
    kind = transformers.CONFIG_MAPPING[table["model_type"]]
    config = kind(**{key: value for key, value in table.items() if key != "model_type"})
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("name", WHOLE)
def test_published_models_have_exactly_these_parameters(name: str) -> None:
    """The correction that is added to a router's scores is a buffer there, and stored with the weights."""
    model = built(WHOLE[name])
    corrections = sum(
        buffer.numel() for key, buffer in model.named_buffers() if key.endswith("e_score_correction_bias")
    )
    expected = sum(weight.numel() for weight in model.parameters()) + corrections
    assert read_config(json.dumps(WHOLE[name]), name).parameters == expected


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl"])
def test_the_text_part_of_a_model_that_sees_is_counted_alone(kind: str) -> None:
    table = QWEN2_VL_7B | {"model_type": kind}
    text = {key: value for key, value in table.items() if key not in ("model_type", "vision_config")}
    config = transformers.CONFIG_MAPPING[kind](text_config=text)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    seen = sum(weight.numel() for weight in model.model.language_model.parameters())
    head = model.lm_head.weight.numel()
    assert read_config(json.dumps(table), "whole").parameters == seen + head


def along_the_sequence(model: Model) -> float:
    """Products of transformers' code for PyTorch alone, forward and twice that backward: of the delta rule
    keys by keys, queries by keys and that by values, the state read twice and written; of a selective scan
    its states by C. The system within a chunk is solved there, not multiplied.
    """
    total, tokens = 0.0, BATCH * SEQ
    for block in model.blocks:
        if block.mixer is Mixer.DELTA and (own := model.delta) is not None:
            key, value = own.key_dim, own.value_dim
            total += tokens * own.value_heads * (6 * key * value + own.chunk * (4 * key + 2 * value))
        elif block.mixer is Mixer.SELECTIVE and (scan := model.selective) is not None:
            total += tokens * 2 * scan.inner * scan.state
    return 3 * total


@pytest.mark.parametrize("kind", SMALL)
def test_products_are_those_that_transformers_runs(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL[kind] | {"model_type": kind}))
    found, model = capture(str(path), CaptureOptions(batch=BATCH, seq=SEQ)), load_model(str(path))
    assert found.parameters == model.parameters
    settled = settle(load_profile("transformers"), model, "h200", Layout(), {})
    workload = generate(model, settled.strategy(Layout(), BATCH, BATCH, SEQ), settled.framework)
    expected = along_the_sequence(model) + sum(
        count * op.work.flops
        for layer, count in workload.stages[0].counted_layers(1)
        for op in layer.all_ops
        if isinstance(op.work, Matmul | GroupedMatmul)
    )
    assert found.flops(attention=False) == pytest.approx(expected, rel=0.005)
