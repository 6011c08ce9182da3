"""Gradient buckets: how many parameters are reduced together."""

import pytest

from stepcast.generate.workload import generate
from stepcast.ir.dtype import DType
from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import NO_OVERLAP, Sharding, Strategy
from stepcast.ir.work import Collective
from stepcast.ir.workload import Stage
from stepcast.models.catalog import load_model
from tests.generate.test_generate import LLAMA, all_ops, run_of


def reductions(stage: Stage) -> list[int]:
    """Bytes of each reduction of the last of four micro-batches."""
    return [op.work.size_bytes for op in all_ops(stage, 3) if isinstance(op.work, Collective)]


def test_buckets_bound_the_reductions() -> None:
    limit = 100 * 2**20
    stage = run_of(dp=8, bucket_bytes=limit).stages[0]
    assert max(reductions(stage)) < 2 * limit
    assert len(reductions(run_of(dp=8, bucket_bytes=0).stages[0])) == 1


@pytest.mark.parametrize("gradients", [DType.FP32, DType.BF16])
@pytest.mark.parametrize(("dp", "cp", "buckets"), [(8, 1, 186), (256, 4, 7), (2048, 1, 4)])
def test_buckets_grow_with_the_ranks_that_reduce_them(
    gradients: DType, dp: int, cp: int, buckets: int
) -> None:
    """Megatron-Core: max(40 M, 1 M x dp x cp) parameters, whatever the format of their gradients."""
    stage = run_of(dp=dp, cp=cp, gradient_dtype=gradients).stages[0]
    collectives = [op.work for op in all_ops(stage, 3) if isinstance(op.work, Collective)]
    sizes = [work.size_bytes for work in collectives if work.group is Group.DP]
    assert len(sizes) == buckets
    assert sum(sizes) == LLAMA.parameters * gradients.bytes


def test_only_the_first_stage_has_buckets_unless_told() -> None:
    first, *others = run_of(dp=8, pp=4).stages
    assert len(reductions(first)) > 40
    assert [len(reductions(stage)) for stage in others] == [1, 1, 1]
    assert all(len(reductions(stage)) >= 40 for stage in run_of(dp=8, pp=4, bucket_bytes=160_000_000).stages)


def test_fsdp_reduces_each_layer_at_once() -> None:
    stage = run_of(dp=8, sharding=Sharding.FSDP).stages[0]
    scatters = [op for op in all_ops(stage, 3) if "reduce-scatter" in op.name]
    assert len(scatters) == 34


def test_experts_fill_buckets_of_their_own() -> None:
    model = load_model("qwen3-30b-a3b")
    stage = generate(model, Strategy(Layout(dp=64, ep=8), 1, 256, 4096)).stages[0]
    sizes: dict[Group, list[int]] = {Group.DP: [], Group.EXPERT_DP: []}
    for op in all_ops(stage, 3):
        if isinstance(op.work, Collective) and op.work.group in sizes:
            sizes[op.work.group].append(op.work.size_bytes // 4)
    assert sum(sum(each) for each in sizes.values()) == model.parameters - 7 * sum(sizes[Group.EXPERT_DP])
    assert all(min(each[:-1]) >= 64e6 for each in sizes.values())


def test_what_overlaps_nothing_is_one_reduction() -> None:
    layers = {layer.name: layer for layer in run_of(dp=8, overlap=NO_OVERLAP).stages[0].epilogue}
    assert len(layers["gradients"].forward) == 1
