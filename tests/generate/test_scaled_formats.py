"""What scaled formats and accumulated gradients add to a matmul."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from stepcast.generate.workload import generate
from stepcast.ir.framework import MEGATRON_CORE, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.strategy import Sharding, Strategy, TrainingKind
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Elementwise, Matmul
from stepcast.ir.workload import Op, Phase, Workload
from stepcast.models.catalog import load_model

MODEL = load_model("llama-3.1-8b").with_layers(1)
TOKENS, HIDDEN, FFN = 4096, 4096, 14336
STRATEGY = Strategy(Layout(), 1, 2, TOKENS)
NARROW = replace(MEGATRON_CORE, fp8_attention=True)


def _ops(workload: Workload) -> Iterator[Op]:
    """Of a micro-batch."""
    for layer in workload.stages[0].body_layers():
        for phase in Phase:
            yield from layer.ops(phase)


def moved_bytes(workload: Workload, words: str) -> float:
    """Bytes that all ops of a micro-batch move whose names contain *words*."""
    return sum(
        op.work.read_bytes + op.work.write_bytes
        for op in _ops(workload)
        if words in op.name and isinstance(op.work, Elementwise)
    )


def test_bf16_is_not_quantised() -> None:
    assert moved_bytes(generate(MODEL, STRATEGY), "quantise") == 0


@pytest.mark.parametrize(("dtype", "per_element"), [("fp8", 6), ("mxfp8", 4), ("nvfp4", 14)])
def test_every_operand_of_a_block_is_quantised_once(dtype: str, per_element: int) -> None:
    inputs = HIDDEN + HIDDEN + HIDDEN + FFN  # of qkv, output, up, down
    gradients = (HIDDEN + 2 * 1024) + HIDDEN + 2 * FFN + HIDDEN
    found = moved_bytes(generate(MODEL, replace(STRATEGY, precision=DType(dtype))), "quantise")
    assert found == per_element * TOKENS * (inputs + gradients)


@pytest.mark.parametrize(("dtype", "per_element"), [("fp8", 5), ("mxfp8", 3), ("nvfp4", 9)])
def test_frozen_weights_need_no_columns(dtype: str, per_element: float) -> None:
    """Columns are for weight gradients, of which LoRA has none; its adapters stay in bf16."""
    lora = replace(STRATEGY, precision=DType(dtype), training=TrainingKind.LORA, lora_rank=16)
    workload = generate(MODEL, lora)
    inputs = HIDDEN + HIDDEN + HIDDEN + FFN
    gradients = (HIDDEN + 2 * 1024) + HIDDEN + 2 * FFN + HIDDEN
    assert moved_bytes(workload, "quantise") == per_element * TOKENS * (inputs + gradients)
    adapters = [op.work for op in _ops(workload) if " lora " in op.name]
    assert {work.dtype for work in adapters if isinstance(work, Matmul)} == {DType.BF16}


@pytest.mark.parametrize(("precision", "multiplied"), [("fp8", "fp8"), ("mxfp8", "fp8"), ("nvfp4", "fp8")])
def test_attention_in_fp8_where_linear_layers_are(precision: str, multiplied: str) -> None:
    strategy = replace(STRATEGY, precision=DType(precision))
    for framework, expected in ((MEGATRON_CORE, "bf16"), (NARROW, multiplied)):
        found = [op.work for op in _ops(generate(MODEL, strategy, framework))]
        assert {str(work.dtype) for work in found if isinstance(work, Attention)} == {expected}


def test_gathered_inputs_are_quantised_before_the_gather() -> None:
    split = replace(STRATEGY, precision=DType.MXFP8, layout=Layout(tp=8), sequence_parallel=True)
    found = moved_bytes(generate(MODEL, split), "quantise input")
    shares = (HIDDEN + HIDDEN + HIDDEN + FFN) // 8  # outputs of split layers are split in width
    assert found == 4 * TOKENS * shares


def accumulated_bytes(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> float:
    return moved_bytes(generate(model, strategy, framework), "accumulate")


def test_fp32_gradients_cost_more_to_add_up_than_bf16_ones() -> None:
    in_fp32 = accumulated_bytes(MODEL, STRATEGY)
    in_bf16 = accumulated_bytes(MODEL, STRATEGY, Framework(gradient_dtype=DType.BF16))
    # Half of 4 bytes read and 2 more written, against half of 2 bytes read.
    assert in_fp32 == pytest.approx(3 * in_bf16)
    assert in_bf16 > 0


def test_a_single_micro_batch_adds_to_a_cleared_buffer() -> None:
    single = replace(STRATEGY, global_batch=1)
    assert accumulated_bytes(MODEL, single) > 0
    assert accumulated_bytes(MODEL, single, Framework(fused_accumulation=False)) == 0
    assert accumulated_bytes(MODEL, STRATEGY, Framework(kernels=Kernels.COMPILED)) == 0


WEIGHTS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * 1024 + 3 * HIDDEN * FFN  # q and output, k and v, MLP
VOCAB = 128256


@pytest.mark.parametrize("sharding", [Sharding.ZERO_2, Sharding.ZERO_3, Sharding.HYBRID_FSDP])
@pytest.mark.parametrize("batches", [1, 3])
def test_megatron_fsdp_overwrites_the_gradients_that_it_splits(sharding: Sharding, batches: int) -> None:
    """Megatron-LM, core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py: overwrite_main_grad; Transformer Engine's
    matmul then writes 4 bytes in place of 2, of which half is hidden, and reads no sum.
    """
    layout = Layout(dp=8, shard=4 if sharding is Sharding.HYBRID_FSDP else 0)
    workload = generate(MODEL, Strategy(layout, 1, 8 * batches, TOKENS, sharding=sharding))
    assert moved_bytes(workload, "accumulate") == (WEIGHTS + HIDDEN * VOCAB) * 2 / 2
    split = replace(STRATEGY, layout=layout, global_batch=8, sharding=sharding)
    assert accumulated_bytes(MODEL, split, Framework(gradient_dtype=DType.BF16)) == 0


@pytest.mark.parametrize("sharding", [Sharding.ZERO_2, Sharding.FSDP])
@pytest.mark.parametrize("batches", [1, 3])
def test_plain_software_copies_the_gradients_that_it_splits(sharding: Sharding, batches: int) -> None:
    """PyTorch's FSDP and DeepSpeed's contiguous_gradients: fresh gradients go into a buffer, and shards are added up."""
    plain = Framework(kernels=Kernels.PLAIN, gradient_dtype=DType.BF16)
    workload = generate(MODEL, Strategy(Layout(dp=8), 1, 8 * batches, TOKENS, sharding=sharding), plain)
    assert moved_bytes(workload, "logits accumulate") == moved_bytes(workload, "up accumulate") == 0
    assert moved_bytes(workload, "gradients copy in") == 2 * 2 * MODEL.parameters


def test_gradients_that_are_reduced_once_are_added_up_complete() -> None:
    """A pipeline that keeps gathered weights reduces after its last micro-batch (torch.distributed.pipelining)."""
    kept = Strategy(Layout(dp=4, pp=2), 1, 16, TOKENS, sharding=Sharding.FSDP)
    model = MODEL.with_layers(2)
    whole = replace(kept, sharding=Sharding.ZERO_1)
    assert accumulated_bytes(model, kept) == accumulated_bytes(model, whole)
    assert accumulated_bytes(model, replace(kept, reshard=True)) < accumulated_bytes(model, whole)


def test_the_last_layers_may_stay_wide() -> None:
    """Megatron-Core's num_layers_at_end_in_bf16, over stages and where a stage holds both kinds."""
    model = load_model("llama-3.1-8b").with_layers(8)
    strategy = Strategy(Layout(pp=2), 1, 4, TOKENS, precision=DType.MXFP8)
    framework = replace(MEGATRON_CORE, wide_layers=3)
    stages = generate(model, strategy, framework).stages

    def formats(stage: int) -> list[str]:
        works = [op.work for layer in stages[stage].body_layers() for op in layer.ops(Phase.FORWARD)]
        return [str(work.dtype) for work in works if isinstance(work, Matmul)]

    products = 4  # qkv, output, up, down
    assert formats(0) == ["mxfp8"] * 4 * products
    assert formats(1) == ["mxfp8"] * products + ["bf16"] * (3 * products + 1)  # and the logits
    plain = replace(strategy, precision=DType.BF16)
    assert generate(model, plain, framework).stages == generate(model, plain).stages
