"""Each kind of layer declares weights, operators, saved tensors and FLOPs, and these agree with one another."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from stepcast.generate.workload import block_layers
from stepcast.ir.architecture import WeightPart
from stepcast.ir.framework import MEGATRON_CORE
from stepcast.ir.layers.kinds import KINDS, adapter_shard, block_weights, count_saved, mixing_flops, saved_halves
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.recurrent import DeltaRule, Scan, SelectiveScan
from stepcast.ir.strategy import Strategy, TrainingKind, layer_view
from stepcast.ir.work import Attention, GroupedMatmul, Matmul
from stepcast.ir.workload import Layer, Op, OpPart
from stepcast.models.catalog import load_model, model_names

SEQ = 4096
STRATEGY = Strategy(Layout(), 1, 1, SEQ)
RANK = 16
# A gate of one number per token, whose product has no operator.
WITHOUT_OPERATOR = ("shared_experts.gate_value.weight",)


def halves() -> Iterator[tuple[Model, LayerParts]]:
    """Yield a model for each mixer and feed-forward of the catalogue, with every feature of attention."""
    known = set()
    for name in model_names():
        model = load_model(name)
        for block in dict.fromkeys(model.blocks):
            experts = model.experts and (bool(model.experts.latent), bool(model.experts.shared_ffn))
            latent = model.latent and (bool(model.latent.query_rank), bool(model.latent.top_keys))
            window = (bool(block.window), block.chunked)
            mixer = (block.mixer, latent, model.attention_gate, model.qk_norm, model.attention_sinks, window)
            for key, half in (
                (mixer, replace(block, feed_forward=FeedForward.NONE)),
                ((block.feed_forward, experts, model.gated), LayerParts(Mixer.NONE, block.feed_forward)),
            ):
                if key not in known and half != LayerParts(Mixer.NONE, FeedForward.NONE):
                    known.add(key)
                    yield model, half


HALVES = list(halves())
each_half = pytest.mark.parametrize(
    ("model", "half"), HALVES, ids=[f"{model.name}-{half.mixer}-{half.feed_forward}" for model, half in HALVES]
)


def forward_ops(layers: tuple[Layer, ...]) -> Iterator[Op]:
    return (op for layer in layers for op in layer.forward)


def products(layers: tuple[Layer, ...]) -> list[Matmul | GroupedMatmul]:
    """Return the matmuls with the layers' own weights."""
    works = [op.work for op in forward_ops(layers) if op.part is OpPart.PRODUCT]
    return [work for work in works if isinstance(work, Matmul | GroupedMatmul)]


def test_every_kind_is_declared() -> None:
    assert set(KINDS) == {*Mixer, *FeedForward} - {Mixer.NONE, FeedForward.NONE}
    assert {half.mixer for _, half in HALVES} == set(Mixer)
    assert {half.feed_forward for _, half in HALVES} == set(FeedForward)


@each_half
def test_operators_multiply_by_all_weights(model: Model, half: LayerParts) -> None:
    layers = block_layers(model, layer_view(STRATEGY), MEGATRON_CORE, half, False)
    executed = sum(2.0 * work.m * work.n * work.k for work in products(layers))
    wanted = 0.0
    for weight in block_weights(model, half.mixer, half.feed_forward):
        if weight.is_multiplied and weight.name not in WITHOUT_OPERATOR:
            routed = weight.part is WeightPart.EXPERTS and model.experts
            share = model.experts.top_k / model.experts.count if routed and model.experts else 1.0
            wanted += 2.0 * SEQ * weight.elements * share
    assert executed == pytest.approx(wanted, rel=1e-12)


@each_half
def test_operators_mix_tokens_as_the_flops_say(model: Model, half: LayerParts) -> None:
    layers = block_layers(model, layer_view(STRATEGY), MEGATRON_CORE, half, False)
    works = [op.work for op in forward_ops(layers)]
    mixing = sum(work.flops for work in works if isinstance(work, Attention | Scan | DeltaRule | SelectiveScan))
    assert mixing == pytest.approx(mixing_flops(model, half, SEQ, 1, causal=True), rel=1e-3)
    assert (mixing > 0) == (half.mixer is not Mixer.NONE)


@each_half
def test_the_input_of_every_product_is_saved(model: Model, half: LayerParts) -> None:
    sizes = Sizes(model, STRATEGY)
    layers = block_layers(model, layer_view(STRATEGY), MEGATRON_CORE, half, False)
    inputs = {(work.m, work.k) for work in products(layers)}
    ((tensors, transient),) = saved_halves(sizes, half)
    saved = count_saved(model, STRATEGY, half).saved
    assert saved >= sum(rows * columns for rows, columns in inputs) * sizes.element
    assert saved == pytest.approx(sum(tensor.size_bytes for tensor in tensors))
    assert all(tensor.size_bytes > 0 for tensor in tensors)
    assert transient > 0


@each_half
def test_adapters_are_those_of_the_operators(model: Model, half: LayerParts) -> None:
    lora = replace(STRATEGY, training=TrainingKind.LORA, lora_rank=RANK)
    layers = block_layers(model, layer_view(lora), MEGATRON_CORE, half, False)
    parameters = 0
    for op in forward_ops(layers):
        work = op.work
        if " lora " in op.name and isinstance(work, Matmul | GroupedMatmul):
            parameters += work.n * work.k * (work.groups if isinstance(work, GroupedMatmul) else 1)
    assert parameters == adapter_shard(model, half.mixer, half.feed_forward, RANK).total
