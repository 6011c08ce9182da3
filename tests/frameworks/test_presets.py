"""What recipes of mixtures of experts set beyond their tables of results."""

from dataclasses import replace

import pytest

from stepcast.frameworks.catalog import Settled, load_profile, settle
from stepcast.ir.framework import Dispatcher, Execution
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import RecomputeKind, RecomputeModule
from stepcast.ir.types import DType
from stepcast.models.catalog import load_model

M = RecomputeModule
EXPERTS = Layout(ep=8, dp=64, expert_tp=1)


def recipe(model: str, gpu: str, precision: str, release: str, layout: Layout = EXPERTS) -> Settled:
    profile = load_profile(f"megatron-bridge-{release}" if release else "megatron-bridge")
    return settle(profile, load_model(model), gpu, layout, {"precision": DType(precision)})


@pytest.mark.parametrize(
    ("model", "gpu", "precision", "release", "modules"),
    [
        ("deepseek-v3", "gb300", "mxfp8", "25.11", ()),
        ("deepseek-v3", "gb200", "mxfp8", "25.11", (M.LATENT_UP,)),
        ("deepseek-v3", "gb200", "mxfp8", "26.02", (M.MLP,)),
        ("deepseek-v3", "gb200", "mxfp8", "26.06", (M.LATENT_UP,)),
        ("deepseek-v3", "gb300", "mxfp8", "26.06", ()),
        ("deepseek-v3", "b200", "fp8", "25.11", (M.LATENT_UP,)),
        ("gpt-oss-120b", "gb200", "bf16", "26.02", (M.NORMS, M.EXPERT_ACTIVATION)),
        ("gpt-oss-120b", "gb300", "bf16", "26.02", ()),
        ("nemotron3-nano", "h100-sxm", "fp8", "26.02", (M.EXPERTS, M.NORMS, M.CORE)),
        ("nemotron3-super", "gb200", "mxfp8", "26.06", ()),
        ("nemotron3-super", "b200", "mxfp8", "26.04", (M.EXPERT_ACTIVATION, M.NORMS)),
        ("qwen3-30b-a3b", "b200", "mxfp8", "26.02", ()),
    ],
)
def test_presets_recompute(model: str, gpu: str, precision: str, release: str, modules: tuple[M, ...]) -> None:
    assert recipe(model, gpu, precision, release).choices["recompute"].modules == modules


def test_graphs_of_whole_steps_come_with_fused_experts() -> None:
    fused = recipe("qwen3-30b-a3b", "gb200", "mxfp8", "26.06")
    assert fused.framework.fused_experts
    assert fused.choices["overlap"].experts
    assert fused.framework.execution is Execution.GRAPHS
    before = recipe("qwen3-30b-a3b", "gb200", "mxfp8", "26.02")
    assert not before.framework.fused_experts
    assert not before.choices["overlap"].experts
    assert before.framework.execution is Execution.PARTIAL_GRAPHS
    eager = recipe("deepseek-v3", "b200", "mxfp8", "26.02").framework
    assert (eager.execution, eager.dispatcher) == (Execution.EAGER, Dispatcher.HYBRIDEP)


@pytest.mark.parametrize(
    ("model", "gpu", "release", "execution", "dispatcher", "overlaps"),
    [
        ("qwen3-30b-a3b", "b200", "25.09", Execution.GRAPHS, Dispatcher.ALL_TO_ALL, False),
        ("qwen3-30b-a3b", "b200", "26.02", Execution.EAGER, Dispatcher.ALL_TO_ALL, False),
        ("qwen3-30b-a3b", "b200", "26.04", Execution.PARTIAL_GRAPHS, Dispatcher.HYBRIDEP, False),
        ("qwen3-235b-a22b", "gb200", "25.09", Execution.GRAPHS, Dispatcher.ALL_TO_ALL, False),
        ("qwen3-235b-a22b", "gb200", "25.11", Execution.PARTIAL_GRAPHS, Dispatcher.HYBRIDEP, False),
        ("qwen3-235b-a22b", "h100-sxm", "25.11", Execution.EAGER, Dispatcher.ALL_TO_ALL, True),
    ],
)
def test_releases_differ_in_graphs_and_exchange(
    model: str, gpu: str, release: str, execution: Execution, dispatcher: Dispatcher, overlaps: bool
) -> None:
    settled = recipe(model, gpu, "fp8", release)
    assert (settled.framework.execution, settled.framework.dispatcher) == (execution, dispatcher)
    assert settled.choices["overlap"].experts is overlaps


def test_stages_of_one_chunk_cannot_exchange_beside_another_micro_batch() -> None:
    layout = Layout(pp=8, ep=8, dp=8, expert_tp=1)
    assert not recipe("deepseek-v3", "b300", "mxfp8", "26.06", layout).choices["overlap"].experts


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
    assert recipe("deepseek-v3", "b200", "mxfp8", "26.02", layout).choices["stage_layers"] == layers


def test_without_a_release_there_is_no_preset() -> None:
    plain = recipe("deepseek-v3", "gb200", "mxfp8", "")
    assert plain.framework.execution is Execution.GRAPHS
    assert plain.choices["recompute"].modules == ()
    assert plain.choices["mtp_layers"] == 0


def test_what_is_given_counts_more_than_presets() -> None:
    profile = load_profile("megatron-bridge-25.11")
    said = {"execution": Execution.GRAPHS, "mtp_layers": 0}
    settled = settle(profile, load_model("deepseek-v3"), "h100-sxm", EXPERTS, said)
    assert settled.framework.execution is Execution.GRAPHS
    assert settled.choices["mtp_layers"] == 0


def test_olmo_core_recomputes_the_largest_model_alone() -> None:
    """allenai/OLMo-core, official scripts: no checkpointing for OLMo 3 7B, full for OLMo 2 32B."""
    profile, model = load_profile("olmo-core"), load_model("llama-3.1-8b")
    kinds = [
        settle(profile, replace(model, name=name), "h100-sxm", Layout(dp=64)).choices["recompute"].kind
        for name in ("OLMo-3-1025-7B", "OLMo-2-0325-32B")
    ]
    assert kinds == [RecomputeKind.NONE, RecomputeKind.FULL]
