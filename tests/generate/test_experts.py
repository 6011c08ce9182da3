"""What Megatron-Core's experts run beside their products, and what is recomputed of them."""

from dataclasses import replace
from typing import Any

import pytest

from stepcast.generate.workload import block_layers, generate
from stepcast.ir.framework import MEGATRON_CORE, Execution, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.model_parts import FeedForward
from stepcast.ir.strategy import Recompute, RecomputeKind, RecomputeModule, Strategy, layer_view
from stepcast.ir.types import DType
from stepcast.ir.work import Elementwise, GroupedMatmul, Matmul
from stepcast.ir.workload import Layer, Op, Phase
from stepcast.models.catalog import load_model
from tests.executed import hardware_flops, layer_flops
from tests.software import software

M = RecomputeModule
GPT_OSS, QWEN, DEEPSEEK = (load_model(name) for name in ("gpt-oss-120b", "qwen3-30b-a3b", "deepseek-v3"))
EIGHT = Strategy(Layout(ep=8, dp=8, expert_tp=1), 1, 16, 4096)


def layers_of(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> dict[str, Layer]:
    """The layers of the model's last block with experts, by name."""
    return {layer.name: layer for layer in generate(model, strategy, framework).stages[-1].body_layers()}


def ops_of(layer: Layer) -> tuple[Op, ...]:
    return tuple(op for phase in Phase for op in layer.ops(phase))


def moved_bytes(ops: tuple[Op, ...], *starts: str) -> float:
    return sum(
        op.work.read_bytes + op.work.write_bytes
        for op in ops
        if isinstance(op.work, Elementwise) and op.name.startswith(starts)
    )


def test_a_router_multiplies_what_is_stored_and_differentiates_in_tf32() -> None:
    router = layers_of(QWEN, EIGHT)["experts router"]
    forward = [op.work.dtype for op in router.forward if isinstance(op.work, Matmul)]
    backward = [op.work.dtype for op in ops_of(router) if isinstance(op.work, Matmul)][len(forward) :]
    assert forward == [DType.BF16]
    assert backward == [DType.TF32, DType.TF32]
    # Its input widened for one gradient, the other gradient narrowed: 2 and 4 bytes each.
    assert moved_bytes(ops_of(router), "router widen", "router narrow") == 2 * 6 * 4096 * QWEN.hidden
    plain = layers_of(QWEN, EIGHT, Framework(kernels=Kernels.PLAIN))["experts router"]
    assert {op.work.dtype for op in ops_of(plain) if isinstance(op.work, Matmul)} == {DType.FP32}


def test_biased_experts_clamp_and_add_in_kernels_of_their_own() -> None:
    layers = layers_of(GPT_OSS, EIGHT)
    assert GPT_OSS.experts is not None
    rows, groups = 4096 * GPT_OSS.experts.top_k, GPT_OSS.experts.count // 8
    up, down = layers["experts up"], layers["experts down"]
    inner_bytes, width_bytes = 2.0 * rows * GPT_OSS.experts.ffn, 2.0 * rows * GPT_OSS.hidden
    # Passes as measured on an H200 (data/kernels.txt).
    assert moved_bytes(up.forward, "clamp") == 16 * inner_bytes
    assert moved_bytes(up.input_gradient, "clamp") == 33 * inner_bytes
    assert moved_bytes(down.forward, "weighted bias") == 10 * width_bytes
    assert moved_bytes(down.input_gradient, "weighted bias") == 20 * width_bytes
    assert [op.kernels for op in ops_of(down) if op.name.startswith("weighted")] == [groups, 2 * groups]


def test_experts_without_bias_have_no_such_kernels() -> None:
    layers = layers_of(QWEN, EIGHT)
    names = {op.name for name in ("experts up", "experts down") for op in ops_of(layers[name])}
    assert not any(name.startswith(("clamp", "weighted bias")) for name in names)


def test_fused_experts_are_their_products_and_one_quantisation_each_way() -> None:
    strategy, framework = replace(EIGHT, precision=DType.MXFP8), Framework(fused_experts=True)
    for model in (GPT_OSS, QWEN):
        layers = layers_of(model, strategy, framework)
        ops = (*ops_of(layers["experts up"]), *ops_of(layers["experts down"]))
        others = [op.name for op in ops if not isinstance(op.work, GroupedMatmul) and "accumulate" not in op.name]
        assert others == ["up quantise input", "down quantise gradient"]
        assert sum(isinstance(op.work, GroupedMatmul) for op in ops) == 6


def test_a_host_reads_the_tokens_of_experts_unless_their_number_is_fixed() -> None:
    def reads(**changes: Any) -> bool:
        framework = software(changes)
        layer = layers_of(QWEN, replace(EIGHT, **changes), framework)["experts router"]
        return any(op.host_reads for op in layer.forward)

    assert reads()
    assert not reads(expert_capacity=1.25)
    assert not reads(fused_experts=True)


def test_graphs_that_cannot_hold_routed_experts_hold_the_rest() -> None:
    layers = layers_of(DEEPSEEK, EIGHT, Framework(execution=Execution.PARTIAL_GRAPHS))
    outside = {name for name, layer in layers.items() if not layer.captured}
    routed = {"experts dispatch", "experts up", "experts down", "experts combine"}
    assert outside == routed | {"embedding", "final norm", "head", "loss"}
    assert not any(layer.captured for layer in layers_of(DEEPSEEK, EIGHT).values())


def selective(*modules: RecomputeModule) -> Strategy:
    return replace(EIGHT, recompute=Recompute(RecomputeKind.SELECTIVE, modules=modules))


def recomputed_names(model: Model, *modules: RecomputeModule) -> list[str]:
    layers = layers_of(model, selective(*modules))
    return [op.name for layer in layers.values() for op in ops_of(layer) if op.name.startswith("recompute ")]


def test_recomputed_experts_run_their_forward_again() -> None:
    plain, again = (hardware_flops(generate(DEEPSEEK, strategy)) for strategy in (EIGHT, selective(M.EXPERTS)))
    layers = layers_of(DEEPSEEK, EIGHT)
    names = ("experts router", "experts up", "experts down", "shared experts up", "shared experts down")
    forward = sum(layer_flops(Layer(name, layers[name].forward)) for name in names)
    times = DEEPSEEK.expert_layers * EIGHT.micro_batches * EIGHT.layout.dp
    assert again - plain == pytest.approx(forward * times)
    assert "recompute ep all-to-all dispatch" in recomputed_names(DEEPSEEK, M.EXPERTS)
    assert "recompute residual" not in recomputed_names(DEEPSEEK, M.EXPERTS)


def test_single_modules_are_recomputed() -> None:
    assert recomputed_names(GPT_OSS, M.EXPERT_ACTIVATION) == ["recompute clamp", "recompute activation"]
    up = recomputed_names(DEEPSEEK, M.LATENT_UP)
    assert {"recompute query up", "recompute kv up", "recompute rotary"} <= set(up)
    # Norms that are kernels of their own: before a router, and before latent projections.
    assert recomputed_names(GPT_OSS, M.NORMS) == ["recompute norm"]
    assert recomputed_names(DEEPSEEK, M.NORMS) == ["recompute norm"] * 2
    assert recomputed_names(DEEPSEEK, M.EXPERTS, M.EXPERT_ACTIVATION) == recomputed_names(DEEPSEEK, M.EXPERTS)


def test_no_module_named_means_the_attention_core() -> None:
    assert recomputed_names(QWEN) == ["recompute core"]
    assert Recompute().selected == ()
    with pytest.raises(ValueError, match="recomputed modules go with recompute 'selective'"):
        Recompute(RecomputeKind.FULL, modules=(M.CORE,))


@pytest.mark.parametrize("name", ["mixtral-8x7b", "jamba-v0.1", "qwen3-next-80b-a3b"])
def test_what_mixes_tokens_is_one_object_however_experts_are_spread(name: str) -> None:
    model = load_model(name)
    kind = next(each for each in model.blocks if each.feed_forward is FeedForward.EXPERTS)
    few, many = (
        block_layers(model, layer_view(Strategy(Layout(dp=8, ep=ep), 1, 8, 4096)), MEGATRON_CORE, kind, False)
        for ep in (1, 8)
    )
    shared = [one is other for one, other in zip(few, many, strict=False)]
    assert shared[0]
    assert not all(shared)  # their exchanges differ
