"""What recipes of mixtures of experts set beyond their tables of results."""

import pytest

from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Execution, RecomputeModule
from stepcast.validate.published.recipes import Recipe, recipe_of
from stepcast.validate.published.run import run_of

M = RecomputeModule
ROW = {
    "id": "x1",
    "framework": "Megatron-Bridge (NeMo container)",
    "num_gpus": "64.0",
    "tp": "1.0",
    "pp": "1.0",
    "dp": "64.0",
    "global_batch": "1280.0",
}
EXPERTS = Layout(ep=8, dp=64, expert_tp=1)


def recipe(
    model: str,
    gpu: str,
    precision: str,
    release: tuple[int, int] | None,
    layout: Layout = EXPERTS,
    layers: int = 61,
) -> Recipe:
    run = run_of({**ROW, "model": model, "gpu": gpu})
    return recipe_of(run, layout, precision, layers, release)


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "release", "modules"),
    [
        ("deepseek-v3", "GB300", "mxfp8", (25, 11), (M.LATENT_UP,)),
        ("deepseek-v3", "GB300", "bf16", (25, 11), (M.MLP, M.EXPERT_ACTIVATION)),
        ("deepseek-v3", "GB200", "mxfp8", (25, 11), (M.LATENT_UP, M.MLP)),
        ("deepseek-v3", "GB200", "mxfp8", (26, 4), (M.MLP,)),
        ("deepseek-v3", "GB200", "mxfp8", (26, 6), (M.LATENT_UP,)),
        ("deepseek-v3", "GB300", "mxfp8", (26, 6), ()),
        ("deepseek-v3", "B200", "fp8", (25, 9), (M.LATENT_UP,)),
        ("gpt-oss-120b", "GB200", "bf16", (26, 4), (M.NORMS, M.EXPERT_ACTIVATION)),
        ("gpt-oss-120b", "GB300", "bf16", (26, 4), ()),
        ("nemotron3-nano", "H100", "fp8", (26, 4), (M.EXPERTS, M.NORMS, M.CORE)),
        ("nemotron3-super", "GB200", "mxfp8", (26, 6), (M.NORMS, M.CORE, M.EXPERTS)),
        ("qwen3-30b-a3b", "B200", "mxfp8", (26, 2), ()),
    ],
)
def test_presets_recompute(
    model: str, gpu: str, precision: str, release: tuple[int, int], modules: tuple[M, ...]
) -> None:
    assert recipe(model, gpu, precision, release).recompute == modules


def test_graphs_of_whole_steps_come_with_fused_experts() -> None:
    fused = recipe("qwen3-30b-a3b", "GB200", "mxfp8", (26, 6))
    assert fused.fused_experts
    assert fused.overlapped_experts
    assert fused.execution is Execution.GRAPHS
    before = recipe("qwen3-30b-a3b", "GB200", "mxfp8", (26, 4))
    assert not before.fused_experts
    assert not before.overlapped_experts
    assert before.execution is Execution.PARTIAL_GRAPHS
    assert recipe("deepseek-v3", "B200", "mxfp8", (26, 2)).execution is Execution.EAGER


def test_stages_of_one_chunk_cannot_exchange_beside_another_micro_batch() -> None:
    layout = Layout(pp=8, ep=8, dp=8, expert_tp=1)
    assert not recipe("deepseek-v3", "B300", "mxfp8", (26, 6), layout).overlapped_experts


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (Layout(pp=16, ep=8, dp=8, expert_tp=1), (4,) * 15 + (1,)),
        (Layout(pp=8, ep=8, dp=8, expert_tp=1), (8,) * 7 + (5,)),
        (Layout(pp=8, vpp=4, ep=8, dp=8, expert_tp=1), (1,) + (2,) * 30 + (0,)),
        (EXPERTS, ()),
    ],
)
def test_deepseek_fills_its_stages_from_the_first(layout: Layout, layers: tuple[int, ...]) -> None:
    """The layouts of deepseek_v3.py; that of 32 pieces is Et|(tt|)*30mL."""
    assert recipe("deepseek-v3", "B200", "mxfp8", (26, 2), layout).stage_layers == layers


def test_rows_of_other_frameworks_or_releases_have_no_recipe() -> None:
    assert recipe("deepseek-v3", "GB200", "mxfp8", None) == Recipe()
    other = run_of({**ROW, "model": "deepseek-v3", "gpu": "GB200", "framework": "Megatron-LM"})
    assert recipe_of(other, EXPERTS, "mxfp8", 61, (26, 6)) == Recipe()
