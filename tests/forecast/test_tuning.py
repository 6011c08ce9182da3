"""Fine-tuning: published sizes of adapters and of 4-bit weights, and what each choice must change."""

from typing import Any

import pytest

import stepcast
from stepcast import Prediction
from stepcast.ir.strategy import BaseWeights, StrategyError


def predict(**choices: Any) -> Prediction:
    usual = {"cluster": "h200", "gpus": 1, "framework": "peft", "seq": 1024, "micro_batch": 2, "accumulation": 2}
    return stepcast.predict("llama-3.1-8b", **{**usual, **choices})


def test_adapters_of_all_linear_layers_have_the_size_that_peft_prints() -> None:
    """Llama 3.1 8B, rank 16, all seven projections: 41,943,040 trainable parameters."""
    (lora,), (full,) = predict(lora=16).memory, predict(framework="trainer").memory
    assert lora.parameters - full.parameters == pytest.approx(41_943_040 * 4)


@pytest.mark.parametrize(
    ("model", "trained"),
    [
        # 64 layers of in_proj 2560 -> 2 x 5120 + 2 x 128 + 80 and out_proj 5120 -> 2560.
        ("mamba2-2.7b", 64 * 16 * (2560 + 10576 + 5120 + 2560)),
        # Also x_proj 5120 -> 160 + 2 x 16 and dt_proj 160 -> 5120.
        ("mamba-2.8b", 64 * 16 * (2560 + 10240 + 5120 + 2560 + 5120 + 192 + 160 + 5120)),
    ],
)
def test_adapters_are_on_the_projections_of_recurrent_layers_too(model: str, trained: int) -> None:
    lora = stepcast.predict(model, gpu="h200", lora=16)
    assert lora.memory[0].gradients == 4 * trained
    with pytest.raises(ValueError, match=rf"{model} has no query, value layer to adapt"):
        stepcast.predict(model, gpu="h200", lora=16, lora_targets="q_proj,v_proj")
    if model == "mamba2-2.7b":
        assert stepcast.predict(model, gpu="h200", lora=16, base_weights="nf4").step_s > lora.step_s


def test_all_projections_of_latent_attention_have_adapters() -> None:
    ways = ("attention", "q_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj")
    steps = [stepcast.predict("deepseek-v2-lite", gpu="h200", lora=16, lora_targets=way).step_s for way in ways]
    assert steps[0] == steps[1]


def test_adapters_of_the_gates_of_experts_take_time() -> None:
    names = ("q_proj", "q_proj,gate_proj")
    alone, gated = (stepcast.predict("mixtral-8x7b", gpu="h200", lora=16, lora_targets=name) for name in names)
    assert gated.step_s > 1.05 * alone.step_s


def test_four_bits_take_what_qlora_states() -> None:
    """Dettmers et al. 2023: 0.5 bits per weight for scales, 0.127 with double quantisation."""
    assert BaseWeights.NF4_SINGLE.bytes * 8 == pytest.approx(4.5)
    assert BaseWeights.NF4.bytes * 8 == pytest.approx(4.127, abs=1e-3)
    plain, four = predict(lora=16), predict(lora=16, base_weights="nf4")
    assert four.memory[0].parameters < 0.4 * plain.memory[0].parameters


def test_fewer_targets_take_less_time_and_memory() -> None:
    few, many = predict(lora="16,32,q_proj+v_proj"), predict(lora="16,32,all-linear")
    assert few.step_s < many.step_s
    assert few.memory[0].allocated < many.memory[0].allocated
    dropping = predict(lora="16,32,all-linear,0.1")
    assert many.step_s < dropping.step_s
    assert many.memory[0].activations < dropping.memory[0].activations


def test_dpo_adds_the_forward_of_a_reference_and_its_weights() -> None:
    sft, dpo = predict(framework="trainer"), predict(framework="trainer", task="dpo", micro_batch=1)
    assert 1.2 * sft.step_s < dpo.step_s < 1.5 * sft.step_s
    assert dpo.memory[0].parameters == pytest.approx(2 * sft.memory[0].parameters)
    lora = predict(lora=16, task="dpo", micro_batch=1)
    assert lora.memory[0].parameters == predict(lora=16).memory[0].parameters
    reward = predict(framework="trainer", task="reward", micro_batch=1)
    assert reward.step_s < sft.step_s
    assert reward.memory[0].temporary < sft.memory[0].temporary


def test_packed_samples_attend_to_themselves_alone() -> None:
    packed = predict(lora=16, seq=8192, micro_batch=1, lengths="512:1", batching="packed")
    alone = predict(lora=16, seq=8192, micro_batch=1)
    assert packed.step_s < alone.step_s


def test_frozen_weights_have_adapters() -> None:
    default, given = (predict(framework="trainer", base_weights="nf4", lora=rank) for rank in (None, 8))
    assert (default.step_s, default.memory) == (given.step_s, given.memory)


def test_flash_attention_takes_a_window_without_a_mask() -> None:
    """A window as long as the sequence cuts nothing off: its step takes as long as one without."""
    windowed, plain = (
        stepcast.predict(f"llama-3.1-8b{sizes}", gpu="h200", framework="peft", lora=16, seq=4096, micro_batch=1,
                         accumulation=1, attention_kernel="flash-2")
        for sizes in (":window=4096", "")
    )  # fmt: skip
    assert windowed.step_s == pytest.approx(plain.step_s, rel=1e-6)
    assert windowed.memory[0].allocated == plain.memory[0].allocated


def test_frozen_layers_have_no_gradients_and_no_backward() -> None:
    """Llama 3.1 8B: a layer has 218,112,000 weights; the forward alone is a third of the work of a layer."""
    few, full = predict(framework="trainer", train_layers=4), predict(framework="trainer")
    assert few.memory[0].gradients == pytest.approx(4 * 218_112_000 * 2)
    assert few.memory[0].optimizer == pytest.approx(2 * few.memory[0].gradients)
    assert few.memory[0].parameters == full.memory[0].parameters
    assert 0.35 * full.step_s < few.step_s < 0.6 * full.step_s
    with pytest.raises(StrategyError, match="together"):
        predict(lora=16, train_layers=4)


def test_dora_and_eight_bits_change_time_and_memory() -> None:
    plain, dora = predict(lora=16), predict(lora=16, dora=True)
    assert dora.step_s > 1.2 * plain.step_s
    assert dora.memory[0].allocated > plain.memory[0].allocated
    eight = predict(lora=16, base_weights="int8")
    linear = 32 * (218_112_000 - 2 * 4096)  # weights of all layers but their norms lose a byte
    assert plain.memory[0].parameters - eight.memory[0].parameters == pytest.approx(linear)


def test_adapters_on_frozen_weights_of_all_formats_take_what_was_measured() -> None:
    """Four steps of one shape on an H200 (data/transformers/tuning.csv). QLoRA is faster than LoRA with adapters in fp32,
    for whose input peft's layers of 16-bit weights make two casts, and slower than LoRA with adapters in bf16.
    """
    shape: dict[str, Any] = {"seq": 2048, "micro_batch": 2, "accumulation": 1, "gpu": "h200", "lora": 16}
    ways: list[tuple[dict[str, Any], float]] = [
        ({"framework": "trainer"}, 0.3569),
        ({"framework": "peft", "base_weights": "nf4"}, 0.3846),
        ({"framework": "peft"}, 0.4019),
        ({"framework": "peft", "base_weights": "int8"}, 0.5589),
    ]
    for way, measured_s in ways:
        step_s = stepcast.predict("llama-3.1-8b", **shape, **way).step_s
        assert step_s == pytest.approx(measured_s, rel=0.1 if way.get("base_weights") == "int8" else 0.03)


def test_liger_needs_no_logits() -> None:
    plain, liger = predict(lora=16), predict(lora=16, liger=True)
    logits = 2 * 1024 * 128_256 * 4
    assert plain.memory[0].temporary - liger.memory[0].temporary > 2 * logits
    assert liger.step_s < plain.step_s
