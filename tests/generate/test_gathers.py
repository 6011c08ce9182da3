"""What is gathered for products, in which format and beside what."""

from dataclasses import replace
from typing import Any

import pytest

from stepcast.generate.workload import generate
from stepcast.ir.framework import MEGATRON_CORE, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import ContextKind, Overlap, Sharding, Strategy, TrainingKind
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Collective, Elementwise, Matmul
from stepcast.ir.workload import FIRST, Layer, Op, Phase
from stepcast.models.catalog import load_model
from tests.software import software

LLAMA, GPT = load_model("llama3-8b"), load_model("gpt3-6.7b")
SEQ, TP = 4096, 4
WIDE = SEQ * LLAMA.hidden * 2  # bytes of a bf16 tensor as wide as the model


def layers_of(model: Any = LLAMA, layout: Layout | None = None, **changes: Any) -> list[Layer]:
    layout = layout or Layout(tp=TP)
    framework = software(changes)
    usual = Strategy(layout, 1, layout.dp, min(SEQ, model.max_seq), sequence_parallel=layout.tp > 1)
    return list(generate(model, replace(usual, **changes), framework).stages[0].body_layers())


def found(layers: list[Layer], role: str, phase: Phase, word: str) -> list[Op]:
    return [op for layer in layers if str(layer.role) == role for op in layer.ops(phase) if word in op.name]


def size(op: Op) -> int:
    assert isinstance(op.work, Collective)
    return op.work.size_bytes


@pytest.mark.parametrize(
    ("precision", "inputs", "gradients"),
    [
        (DType.BF16, WIDE, WIDE),
        (DType.FP8, WIDE // 2, WIDE // 2),
        # Scales of blocks hold along rows or columns: the gradient is gathered in both ways.
        (DType.MXFP8, WIDE // 2, WIDE),
        (DType.NVFP4, WIDE // 4, WIDE // 2),
    ],
)
def test_operands_are_gathered_in_the_format_of_their_product(precision: DType, inputs: int, gradients: int) -> None:
    layers = layers_of(precision=precision)
    for role in ("attention qkv", "mlp up"):
        assert size(found(layers, role, Phase.FORWARD, "all-gather")[0]) == inputs
        assert size(found(layers, role, Phase.INPUT_GRADIENT, "all-gather again")[0]) == inputs
    for role in ("attention output", "mlp down"):
        assert size(found(layers, role, Phase.INPUT_GRADIENT, "all-gather")[0]) == gradients
        assert size(found(layers, role, Phase.FORWARD, "reduce-scatter")[0]) == WIDE


@pytest.mark.parametrize("others", [{"kernels": Kernels.COMPILED}, {"training": TrainingKind.LORA, "lora_rank": 16}])
def test_others_gather_before_they_quantise(others: dict[str, Any]) -> None:
    layers = layers_of(precision=DType.FP8, **others)
    assert size(found(layers, "mlp up", Phase.FORWARD, "all-gather")[0]) == WIDE
    gathers = found(layers, "mlp down", Phase.INPUT_GRADIENT, "all-gather")
    # Adapters gather what they take of the gradient by themselves.
    assert {size(gather) for gather in gathers} == ({WIDE // 2, WIDE} if "lora_rank" in others else {WIDE})
    work = found(layers, "mlp up", Phase.FORWARD, "quantise input")[0].work
    assert isinstance(work, Elementwise)
    assert work.rows == SEQ


@pytest.mark.parametrize(("exchanges", "kind", "sent"), [(False, "all-gather", WIDE), (True, "all-to-all", WIDE // TP)])
def test_row_parallel_adapters_turn_columns_into_rows(exchanges: bool, kind: str, sent: int) -> None:
    """NeMo's ParallelLinearAdapter: gather_output, or all2all_hp2sp."""
    layers = layers_of(training=TrainingKind.LORA, lora_rank=16, exchanges_adapters=exchanges)
    for phase in (Phase.FORWARD, Phase.INPUT_GRADIENT):
        assert size(found(layers, "attention output", phase, f"adapters tp {kind}")[0]) == sent
    product = found(layers, "attention output", Phase.FORWARD, "lora up forward")[0].work
    assert isinstance(product, Matmul)
    assert (product.m, product.n) == (SEQ, LLAMA.hidden // TP)


def test_a_rank_quantises_its_share_of_what_is_gathered_and_turns_all_of_it() -> None:
    layers = layers_of(precision=DType.FP8)
    shares = [
        found(layers, "mlp up", Phase.FORWARD, "quantise input"),
        found(layers, "mlp down", Phase.INPUT_GRADIENT, "quantise gradient"),
    ]
    turned = [
        found(layers, "mlp up", Phase.WEIGHT_GRADIENT, "turn gathered input"),
        found(layers, "mlp down", Phase.WEIGHT_GRADIENT, "turn gathered gradient"),
    ]
    assert [ops[0].work.rows for ops in shares] == [SEQ // TP] * 2  # type: ignore[union-attr]
    assert [ops[0].work.rows for ops in turned] == [SEQ] * 2  # type: ignore[union-attr]
    assert not found(layers_of(precision=DType.MXFP8), "mlp up", Phase.WEIGHT_GRADIENT, "turn gathered")


def test_overlapped_gradients_are_gathered_beside_their_product() -> None:
    plain, overlapped = (layers_of(overlap=Overlap(tensor=on)) for on in (False, True))
    for layers, blocking in ((plain, True), (overlapped, False)):
        gather = found(layers, "mlp down", Phase.INPUT_GRADIENT, "all-gather")[0]
        weight = found(layers, "mlp down", Phase.WEIGHT_GRADIENT, "weight gradient")[0]
        assert gather.blocking is blocking
        assert (gather.name in weight.after) is not blocking


def test_the_sum_of_the_last_part_has_no_product_beside_it() -> None:
    ops = found(layers_of(overlap=Overlap(tensor=True)), "mlp down", Phase.FORWARD, "reduce-scatter")[:2]
    assert [op.blocking for op in ops] == [False, True]
    assert [size(op) for op in ops] == [WIDE * 3 // 4, WIDE // 4]
    assert ops[0].name in ops[1].after


def test_ranks_that_gather_keys_attend_to_as_many_pairs_as_those_of_a_ring() -> None:
    def flops(context: ContextKind) -> float:
        layers = layers_of(layout=Layout(cp=4), context=context)
        ops = found(layers, "attention core", Phase.FORWARD, "core")
        return sum(op.work.flops for op in ops if isinstance(op.work, Attention))

    assert flops(ContextKind.ALL_GATHER) == flops(ContextKind.RING)


def test_pytorch_repeats_heads_that_share_keys_before_it_gathers_them() -> None:
    shared, repeated = (
        size(
            found(
                layers_of(layout=Layout(cp=4), context=ContextKind.ALL_GATHER, kernels=kernels),
                "attention core",
                Phase.FORWARD,
                "cp all-gather",
            )[0]
        )
        for kernels in (Kernels.FUSED, Kernels.COMPILED)
    )
    assert repeated == shared * LLAMA.heads // LLAMA.kv_heads


def test_listed_gathers_take_each_tensor_by_itself_and_copy_each_part() -> None:
    def gathers(listed: bool) -> list[Op]:
        layers = layers_of(GPT, Layout(dp=16), sharding=Sharding.ZERO_3, listed_gathers=listed)
        return [op for layer in layers for op in layer.ops(Phase.FORWARD) if "all-gather" in op.name]

    together, listed = gathers(False)[-1], gathers(True)[-1]
    assert isinstance(together.work, Collective)
    assert isinstance(listed.work, Collective)
    # Weights and biases of four products and two norms.
    assert (listed.work.times, listed.kernels) == (12, 12 * 16)
    assert listed.work.size_bytes == -(-together.work.size_bytes // 12)
    assert (together.blocking, listed.blocking, listed.host_reads) == (False, True, True)


@pytest.mark.parametrize("sharding", [Sharding.ZERO_1, Sharding.ZERO_3])
def test_blocks_without_a_first_norm_wait_for_their_weights(sharding: Sharding) -> None:
    """OLMo 2 has norms after its halves alone, so that the first product of a layer waits."""
    model = replace(LLAMA.with_layers(3), pre_norms=False, post_norms=True)
    framework = replace(MEGATRON_CORE, bucket_bytes=4)  # of one weight: each layer fills its own
    strategy = Strategy(Layout(dp=8), 1, 16, SEQ, sharding=sharding)
    layers = generate(model, strategy, framework).stages[0].body_layers(FIRST)
    products = [layer.forward for layer in layers if str(layer.role) == "attention qkv"]
    waits = [name for ops in products for op in ops if isinstance(op.work, Matmul) for name in op.after]
    assert len(products) == 3
    assert sum("all-gather" in name for name in waits) >= 3
