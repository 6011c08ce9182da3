"""Kernels around experts that depend on the software: padding, biases in fp32, YaRN's rotation, copies of rows."""

import json
from dataclasses import replace

import pytest

from stepcast.generate.workload import generate
from stepcast.inputs.huggingface.reader import read_config
from stepcast.ir.framework import Dispatcher, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import DType
from stepcast.ir.work import Elementwise
from stepcast.models.catalog import load_model

STRATEGY = Strategy(Layout(ep=8, dp=8, expert_tp=1), 1, 8, 4096)


def moved(model: str, framework: Framework, strategy: Strategy = STRATEGY) -> dict[str, float]:
    """Return the bytes that each memory-bound operation of the first layers moves."""
    blocks = generate(load_model(model), strategy, framework).stages[0].body
    ops = [op for block in blocks for layer in block.layers for op in layer.all_ops]
    return {op.name: op.work.read_bytes + op.work.write_bytes for op in ops if isinstance(op.work, Elementwise)}


def test_rows_are_padded_for_scaled_formats_only() -> None:
    scaled = moved("qwen3-30b-a3b", Framework(), replace(STRATEGY, precision=DType.MXFP8))
    # 8 rows of each token on average, 2,048 elements of two bytes, read and written.
    assert scaled["pad rows"] == scaled["unpad gradient"] == 4096 * 8 * 2048 * 2 * 2
    assert "pad rows" not in moved("qwen3-30b-a3b", Framework())
    fused = moved("qwen3-30b-a3b", Framework(fused_experts=True), replace(STRATEGY, precision=DType.MXFP8))
    assert "pad rows" not in fused


def test_the_flex_dispatcher_weighs_biases_in_fp32() -> None:
    plain, flex = (
        moved("gpt-oss-20b", Framework(dispatcher=kind)) for kind in (Dispatcher.ALL_TO_ALL, Dispatcher.DEEPEP)
    )
    assert flex["weighted bias"] == 2.5 * plain["weighted bias"]
    assert "permute" in plain
    assert "permute" not in flex
    # A permutation by Transformer Engine instead of copies of chunks.
    assert flex["sort"] == 2.6 * plain["sort"]


def test_yarn_rotates_by_single_operators() -> None:
    """4,096 elements of queries and 512 of keys for each token, 29 passes of two bytes."""
    assert moved("gpt-oss-20b", Framework())["rotary"] == pytest.approx(4096 * (4096 + 512) * 2 * 29, rel=0.02)
    assert moved("qwen3-30b-a3b", Framework())["rotary"] == pytest.approx(4096 * (4096 + 512) * 2 * 2, rel=0.02)


def test_compiled_pytorch_adds_rows_by_atomics() -> None:
    compiled = moved("qwen3-30b-a3b", Framework(kernels=Kernels.COMPILED))
    assert compiled["unpermute"] == 4 * compiled["permute"]
    assert {"weigh", "weigh gradient"} <= set(compiled)


@pytest.mark.parametrize(("kind", "scaled"), [("yarn", True), ("linear", False), ("llama3", False)])
def test_configs_say_whether_cosines_are_scaled(kind: str, scaled: bool) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 256, "rope_scaling": {"rope_type": kind, "factor": 8.0},
    }  # fmt: skip
    assert read_config(json.dumps(config), "small").position.scaled is scaled
