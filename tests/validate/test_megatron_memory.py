"""Functional tests of Megatron-LM: what their arguments mean, and which are left out."""

import json
import shlex
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.inputs.configs.megatron import parse_layout
from stepcast.ir.model_parts import NormKind, PositionKind
from stepcast.ir.strategy import RecomputeModule, Sharding
from stepcast.ir.types import DType
from stepcast.validate.megatron_memory import COMMAND, measure_peak_memory, read_case
from tests.shared import DATA, needs_data
from tests.validate.csv_rows import write

GPT = {
    "id": "t1",
    "test": "gpt_tp2_pp2",
    "kind": "dense",
    "software": "dev",
    "gpu": "h100-sxm",
    "num_gpus": "8",
    "layers": "12",
    "hidden": "512",
    "heads": "8",
    "kv_heads": "8",
    "kv_channels": "64",
    "ffn": "2048",
    "swiglu": "0",
    "vocab_padded": "50432",
    "tied_embeddings": "1",
    "position": "learned_absolute",
    "normalization": "LayerNorm",
    "bias_linear": "1",
    "seq": "1024",
    "precision": "bf16",
    "fp8_params": "0",
    "tp": "2",
    "sp": "0",
    "pp": "2",
    "cp": "1",
    "ep": "1",
    "dp": "2",
    "optimizer": "adam",
    "distributed_optimizer": "1",
    "micro_batch": "4",
    "global_batch": "32",
    "recompute": "none",
    "transformer_impl": "transformer_engine",
    "attention_backend": "auto",
    "grad_accum_fusion": "1",
    "other_flags": "overlap-grad-reduce hidden-dropout=0.0 attention-dropout=0.0",
    "max_mem_bytes": "1400000000",
}


def test_arguments_become_a_model_a_strategy_and_a_framework() -> None:
    test = read_case(GPT).run
    assert test.model.position.kind is PositionKind.LEARNED
    assert test.model.norm.kind is NormKind.LAYER
    assert test.model.biases.mlp
    assert test.strategy.layout.gpus == 8
    assert test.strategy.sharding is Sharding.ZERO_1
    assert test.strategy.precision is DType.BF16
    assert test.strategy.overlap.gradients
    assert not test.framework.dropout
    assert test.framework.flash_attention
    assert read_case({**GPT, "other_flags": ""}).run.framework.dropout
    assert not read_case({**GPT, "attention_backend": "unfused"}).run.framework.flash_attention
    assert not read_case({**GPT, "transformer_impl": "local"}).run.framework.flash_attention


def test_mixtures_layouts_and_recomputed_modules_are_read() -> None:
    mixture = {"kind": "moe", "moe_experts": "8", "moe_topk": "2", "moe_ffn": "1024", "ep": "2", "etp": "1"}
    mixture |= {"moe_layer_freq": "([0]*1+[1]*11)", "recompute": "selective modules [layernorm moe_act]"}
    mixture |= {"other_flags": "mtp-num-layers=1"}
    test = read_case({**GPT, **mixture, "pp_layout": "Et*3|(tt|)*4mL"}).run
    assert (test.model.next_token_layers, test.strategy.mtp_layers) == (1, 1)
    assert test.model.experts is not None
    assert test.model.experts.first_dense == 1
    assert test.strategy.recompute.modules == (RecomputeModule.NORMS, RecomputeModule.EXPERT_ACTIVATION)
    assert test.strategy.stage_layers == (3, 2, 2, 2, 2, 0)
    assert test.strategy.layout.vpp == 3


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kind": "non-LLM: bert"}, "no training step"),
        ({"num_gpus": ""}, "num_gpus is not stated"),
        ({"vocab_padded": ""}, "vocab_padded is not stated"),
        ({"other_flags": "fine-grained-activation-offloading"}, "offloaded"),
        ({"global_batch": "33"}, "not a multiple"),
        ({"other_flags": "multi-latent-attention kv-lora-ra"}, "is not stated"),
    ],
)
def test_what_cannot_be_predicted_is_left_out_with_its_reason(changes: dict[str, str], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        read_case({**GPT, **changes})


def test_patterns() -> None:
    assert parse_layout("Et*3|(tt|)*6L", 2) == (3, 2, 2, 2, 2, 2, 2, 0)
    with pytest.raises(ValueError, match="stages"):
        parse_layout("Et|tt|L", 2)


def test_rows_are_bytes_and_their_commands_can_be_typed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = write(tmp_path / "megatron_memory.csv", GPT), tmp_path / "out.csv"
    assert main(["validate", "--set", "megatron-memory", "--data", str(path), "-o", str(out)]) == 0
    assert "GiB" in capsys.readouterr().out
    assert "measured_bytes,predicted_bytes" in out.read_text()
    row = measure_peak_memory(str(path)).columns.row(0)
    assert main([*shlex.split(row.tags[COMMAND])[1:-1], "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["memory_bytes"]["stages"]
    parts = ("parameters", "gradients", "optimizer", "activations", "temporary")
    assert sum(stages[-1][part] for part in parts) == pytest.approx(row.predicted_s)


@needs_data("megatron-memory")
def test_most_tests_are_compared() -> None:
    found = measure_peak_memory(str(DATA / "megatron-memory"))
    assert len(found.columns) >= 195
    assert len(found.columns) + sum(found.skipped.values()) == 244
