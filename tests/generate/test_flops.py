"""FLOPs of a model and of the workload generated from it, against published formulas."""

from typing import Any

import pytest

from stepcast.forecast.predict import predict
from stepcast.generate.flops import model_flops
from stepcast.generate.workload import generate
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.framework import Framework
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model, StagePiece, trained_shard
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import ContextKind, Recompute, RecomputeKind, Strategy, TrainingKind
from stepcast.models.catalog import load_model
from tests.executed import hardware_flops

FULL = Recompute(RecomputeKind.FULL)
BATCH = 16
UNFUSED = Framework(flash_attention=False)


def formula(model: Model, batch: int, seq: int, times: int) -> float:
    """Narayanan et al. 2021, appendix: 24 B s l h^2 (1 + s / 6h) for a forward, *times* of them, and the logits
    three times: 96 B s l h^2 (1 + s / 6h + V / 16lh) with full recomputation.
    """
    layers, hidden = model.layers, model.hidden
    blocks = times * 24 * batch * seq * layers * hidden**2 * (1 + seq / (6 * hidden))
    return blocks + 6 * batch * seq * hidden * model.vocab


def strategy(layout: Layout, **changes: Any) -> Strategy:
    return Strategy(layout, 1, BATCH, 2048, **changes)


LAYOUTS = [Layout(), Layout(tp=8), Layout(tp=2, pp=4, dp=2), Layout(dp=8), Layout(pp=8)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_hardware_flops_are_megatrons(layout: Layout) -> None:
    model = load_model("megatron-22b")
    split = strategy(layout, sequence_parallel=layout.tp > 1, recompute=FULL)
    assert hardware_flops(generate(model, split, UNFUSED)) == pytest.approx(formula(model, BATCH, 2048, 4), rel=1e-9)
    plain = strategy(layout)
    assert hardware_flops(generate(model, plain, UNFUSED)) == pytest.approx(formula(model, BATCH, 2048, 3), rel=1e-9)


@pytest.mark.parametrize("name", ["gpt3-1.3b", "gpt3-175b", "megatron-530b"])
def test_model_flops_are_megatrons(name: str) -> None:
    model = load_model(name)
    assert model_flops(model, 2048, BATCH) == pytest.approx(formula(model, BATCH, 2048, 3), rel=1e-9)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-405b", "qwen2.5-7b", "gpt3-175b"])
def test_six_n_d_within_its_known_terms(name: str) -> None:
    """6 N D leaves out attention scores and counts the embedding, which multiplies nothing."""
    model, seq = load_model(name), 4096
    tokens = BATCH * seq
    scores = 12 * tokens * seq * model.heads * model.head_dim * model.layers
    looked_up = 0 if model.tied else model.vocab * model.hidden
    positions = model.position.count * model.hidden
    estimate = 6 * (model.parameters - looked_up - positions) * tokens + scores
    assert model_flops(model, seq, BATCH) == pytest.approx(estimate, rel=1e-4)


def test_experts_count_the_chosen_ones() -> None:
    model, seq = load_model("mixtral-8x7b"), 4096
    tokens = BATCH * seq
    scores = 12 * tokens * seq * model.heads * model.head_dim * model.layers
    estimate = 6 * (model.active_parameters - model.vocab * model.hidden) * tokens + scores
    assert model_flops(model, seq, BATCH) == pytest.approx(estimate, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral-8x7b", Layout(ep=8, dp=8)),
        ("deepseek-v2", Layout(ep=8, dp=8)),
        ("deepseek-v3", Layout(ep=8, dp=8)),
        ("qwen3-30b-a3b", Layout(ep=8, dp=8)),
    ],
)
def test_generated_experts_and_latents_execute_what_the_model_asks_for(name: str, layout: Layout) -> None:
    model = load_model(name)
    run = generate(model, Strategy(layout, 1, BATCH, 2048), UNFUSED)
    assert hardware_flops(run) == pytest.approx(model_flops(model, 2048, BATCH), rel=1e-6)


@pytest.mark.parametrize("context", list(ContextKind))
def test_context_parallel_ranks_share_the_attention(context: ContextKind) -> None:
    model = load_model("llama-3.1-8b")
    alone = generate(model, Strategy(Layout(), 1, 4, 8192))
    shared = generate(model, Strategy(Layout(cp=4), 1, 4, 8192, context=context))
    assert hardware_flops(shared) == pytest.approx(hardware_flops(alone), rel=1e-9)


def test_a_window_bounds_the_attention() -> None:
    model = load_model("gemma-2-9b")
    assert model.window is not None
    longer = model_flops(model, 8192, 1, causal=True) / 8192 - model_flops(model, 4096, 1, causal=True) / 4096
    full = 6 * (8192 - 4096) / 2 * model.heads * model.head_dim * 2
    windowed = sum(block.window is not None for block in model.blocks)
    # With a window of 4096 a query sees 3072 keys of 8192 tokens on average, 2048 of 4096.
    assert longer == pytest.approx(full * (model.layers - windowed) + full * windowed / 2, rel=1e-3)


def test_causal_halves_the_square() -> None:
    model = load_model("gpt3-1.3b")
    whole, half = model_flops(model, 2048, 1), model_flops(model, 2048, 1, causal=True)
    assert whole - half == pytest.approx(6 * 2048 * 2048 * model.hidden * model.layers)


def test_adapters_need_two_thirds_of_what_frozen_weights_do() -> None:
    """Forward and input gradient of frozen weights, all three of attention and adapters."""
    model, seq = load_model("llama-2-70b"), 2048
    tokens = BATCH * seq
    scores = 12 * tokens * seq * model.heads * model.head_dim * model.layers
    needed = model_flops(model, seq, BATCH, lora_rank=16)
    adapters = needed - 2 / 3 * (model_flops(model, seq, BATCH) - scores) - scores
    strategy = Strategy(Layout(), 1, BATCH, seq, training=TrainingKind.LORA, lora_rank=16)
    trained = trained_shard(model, strategy, StagePiece(range(model.layers), True, True)).total
    assert adapters == pytest.approx(6 * tokens * trained, rel=1e-6)
    run = generate(model, strategy, UNFUSED)
    assert hardware_flops(run) == pytest.approx(needed, rel=1e-6)


def test_published_lora_runs_count_four_operations_for_each_weight() -> None:
    """Megatron-Bridge, Llama 3 70B: 1731 TFLOP/s at 6206 tokens/s of each GPU, on short documents, so that
    hardly any attention is in them."""
    needed = model_flops(load_model("llama-3-70b"), 1, 1, lora_rank=16)
    assert needed == pytest.approx(1731e12 / 6206, rel=0.01)


@pytest.mark.parametrize("capacity", [0.1, 0.5, 1.0, 2.0])
def test_tokens_that_experts_drop_are_not_needed(capacity: float) -> None:
    model, seq = load_model("mixtral-8x7b"), 2048
    strategy = Strategy(Layout(ep=8, dp=8), 1, BATCH, seq, expert_capacity=capacity)
    needed = model_flops(model, seq, BATCH, processed_share=strategy.processed_share)
    assert hardware_flops(generate(model, strategy, UNFUSED)) == pytest.approx(needed, rel=1e-3)
    assert needed <= model_flops(model, seq, BATCH)


@pytest.mark.parametrize("context", [None, *ContextKind])
def test_chunks_of_llama_4_are_sequences_of_their_own(context: ContextKind | None) -> None:
    """Local layers see nothing beyond their chunk of 8,192 tokens: 4 of them cost what 4 sequences do."""
    model, cluster = load_model("llama-4-scout").with_layers(3), load_cluster("dgx-h100")
    cp = 1 if context is None else 2

    def step(seq: int, batch: int) -> StepReport:
        layout = Layout(cp=cp)
        return predict(model, cluster, Strategy(layout, batch, batch, seq, context=context or ContextKind.RING)).report

    long, short = step(32768, 1), step(8192, 4)
    assert long.throughput is not None
    assert short.throughput is not None
    flops = [each.throughput.tflops_per_gpu * each.step_s for each in (long, short)]  # type: ignore[union-attr]
    assert flops[0] == pytest.approx(flops[1], rel=1e-3)
    assert long.step_s == pytest.approx(short.step_s, rel=0.02)
