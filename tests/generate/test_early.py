"""What Megatron-LM of 2021 ran that later releases fuse, overlap or leave out."""

from dataclasses import replace
from typing import Any

import pytest

from stepcast.generate.workload import generate
from stepcast.ir.framework import Framework, Kernels
from stepcast.ir.layout import Group, Layout
from stepcast.ir.strategy import NO_OVERLAP, Overlap, Sharding, Strategy
from stepcast.ir.types import DType
from stepcast.ir.work import Collective, CollectiveKind, Elementwise, ElementwiseKind
from stepcast.ir.workload import FIRST, Op, Phase, Workload
from stepcast.models.catalog import load_model
from tests.software import software

GPT = load_model("gpt3-6.7b")
TOKENS, HIDDEN, HEADS, SEQ = 2048, 4096, 32, 2048


def run_of(**changes: Any) -> Workload:
    layout = changes.pop("layout", Layout())
    changes.setdefault("flash_attention", False)
    framework = software(changes)
    usual = Strategy(layout, 1, 4 * layout.dp, SEQ, precision=DType.FP16)
    return generate(GPT, replace(usual, **changes), framework)


def ops(workload: Workload, name: str, stage: int = 0) -> list[Op]:
    layers = workload.stages[stage].body_layers()
    return [op for layer in layers for phase in Phase for op in layer.ops(phase) if op.name == name]


def moved(op: Op) -> float:
    assert isinstance(op.work, Elementwise)
    return op.work.read_bytes + op.work.write_bytes


def test_dropout_writes_a_mask_and_its_gradient_reads_it() -> None:
    with_dropout, without = run_of(dropout=True), run_of()
    square = HEADS * SEQ * SEQ
    assert not ops(without, "dropout")
    assert not ops(without, "dropout gradient")
    assert moved(ops(with_dropout, "dropout")[0]) == square * (2 + 2 + 1)
    # Of the probabilities, and before both residuals.
    assert sorted({moved(op) for op in ops(with_dropout, "dropout gradient")}) == [
        TOKENS * HIDDEN * (2 + 1 + 2),
        square * (2 + 1 + 2),
    ]
    residuals = [ops(run, "residual")[0] for run in (with_dropout, without)]
    assert moved(residuals[0]) - moved(residuals[1]) == TOKENS * HIDDEN
    assert residuals[0].work.kind is ElementwiseKind.DROPOUT  # type: ignore[union-attr]


def test_the_fused_softmax_reads_what_the_mask_leaves() -> None:
    work = ops(run_of(), "softmax")[0].work
    assert isinstance(work, Elementwise)
    assert work.read_bytes == work.write_bytes / 2


def test_sums_of_gradients_in_kernels_of_their_own() -> None:
    weights = HIDDEN * HIDDEN
    (alike, *_) = ops(run_of(fused_accumulation=False, gradient_dtype=DType.FP16), "output accumulate")
    assert moved(alike) == weights * (2 + 2 + 2)
    wide = run_of(fused_accumulation=False, gradient_dtype=DType.FP32)
    assert moved(ops(wide, "output widen")[0]) == weights * (2 + 4)
    assert moved(ops(wide, "output accumulate")[0]) == weights * (4 + 4 + 4)
    assert moved(ops(run_of(), "output accumulate")[0]) < moved(alike)


def test_gradients_of_biases_and_of_joined_projections_are_kernels_of_their_own() -> None:
    plain, fused = run_of(kernels=Kernels.PLAIN), run_of()
    assert not ops(fused, "up bias gradient")
    for run in (plain, run_of(fused_accumulation=False)):
        assert moved(ops(run, "up bias gradient")[0]) == TOKENS * 4 * HIDDEN * 2
        assert moved(ops(run, "join gradients")[0]) == 2 * TOKENS * 3 * HIDDEN * 2
    llama = generate(load_model("llama-3.1-8b"), Strategy(Layout(), 1, 4, SEQ), Framework(kernels=Kernels.PLAIN))
    assert not ops(llama, "up bias gradient")


def test_fsdp_by_parameter_copies_out_and_in() -> None:
    layout, gradients = Layout(dp=8), DType.FP32
    changes = {"layout": layout, "sharding": Sharding.FSDP, "gradient_dtype": gradients}
    compiled = run_of(kernels=Kernels.COMPILED, **changes)
    out, inside = ops(compiled, "parameters copy out"), ops(compiled, "gradients copy in")
    # Forward and backward of 32 layers, the embedding and the head.
    assert len(out) == 2 * (32 + 2)
    layer = 12 * HIDDEN * HIDDEN
    assert layer < moved(out[2]) / 4 < 1.01 * layer
    assert sum(map(moved, inside)) / (2 + 4) == sum(map(moved, out)) / 2 / (2 + 2)
    assert not ops(run_of(kernels=Kernels.PLAIN, **changes), "parameters copy out")


def test_sums_over_tensor_ranks_wait_for_both_gradients() -> None:
    beside = run_of(layout=Layout(tp=2), overlap=Overlap())
    after = run_of(layout=Layout(tp=2), overlap=replace(NO_OVERLAP, tensor_gradients=False))
    name = "mlp up tp all-reduce"
    assert not ops(beside, name)[0].blocking
    assert ops(after, name)[0].blocking
    assert not any(op.after for stage in after.stages for layer in stage.body_layers() for op in layer.forward)


def test_tensor_ranks_send_parts_and_gather_them() -> None:
    layout = Layout(tp=4, pp=2)
    whole, parts = run_of(layout=layout), run_of(layout=layout, boundary_scattered=True)
    assert whole.boundary_bytes == TOKENS * HIDDEN * 2
    assert parts.boundary_bytes == TOKENS * HIDDEN * 2 / 4
    assert not ops(parts, "arriving tp all-gather", 0)
    assert len(ops(parts, "arriving tp all-gather", 1)) == 1
    assert len(ops(parts, "arriving gradient tp all-gather", 0)) == 1
    assert not ops(whole, "arriving tp all-gather", 1)
    shared = run_of(layout=layout, boundary_scattered=True, sequence_parallel=True)
    assert shared.boundary_bytes == parts.boundary_bytes
    assert not ops(shared, "arriving tp all-gather", 1)


def test_owners_send_their_tensors_one_after_the_other() -> None:
    run = run_of(layout=Layout(dp=4), sharding=Sharding.ZERO_1, owners_broadcast=True)
    (gather,) = [layer for layer in run.stages[0].epilogue if layer.name == "parameters"]
    works = [op.work for op in gather.forward if isinstance(op.work, Collective)]
    assert [(work.kind, work.group, work.times) for work in works] == [(CollectiveKind.BROADCAST, Group.DP, 4)]
    assert all(op.blocking for op in gather.forward)
    assert sum(work.total_bytes for work in works) == pytest.approx(2 * GPT.parameters, rel=0.02)
    # Nothing is gathered beside the first forward any more.
    assert all("parameters" not in op.name for op in ops_of_first(run))
    within = run_of(layout=Layout(dp=8, shard=2), sharding=Sharding.ZERO_1, owners_broadcast=True)
    (gather,) = [layer for layer in within.stages[0].epilogue if layer.name == "parameters"]
    works = [op.work for op in gather.forward if isinstance(op.work, Collective)]
    assert [(work.group, work.times) for work in works] == [(Group.SHARD, 2)]


def ops_of_first(workload: Workload) -> list[Op]:
    return [op for layer in workload.stages[0].body_layers(FIRST) for op in layer.forward]
