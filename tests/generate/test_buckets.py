"""Gradient buckets: how many parameters are reduced together."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.cost.pricing import Pricer
from stepcast.generate.data import fill_buckets
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.ir.architecture import NOTHING, Shard
from stepcast.ir.framework import Execution
from stepcast.ir.layout import Group, Layout
from stepcast.ir.strategy import NO_OVERLAP, Sharding, Strategy
from stepcast.ir.types import DType
from stepcast.ir.work import Collective, CollectiveKind, Elementwise
from stepcast.ir.workload import LAST, Stage
from stepcast.models.catalog import load_model
from tests.generate.test_generate import LLAMA, all_ops, run_of


def collectives(stage: Stage) -> list[Collective]:
    """Those of the last of four micro-batches, each bucket by itself."""
    works = [op.work for op in all_ops(stage, LAST) if isinstance(op.work, Collective)]
    return [replace(work, times=1) for work in works for _ in range(work.times)]


def reductions(stage: Stage) -> list[int]:
    """Bytes of each."""
    return [work.size_bytes for work in collectives(stage)]


def test_buckets_bound_the_reductions() -> None:
    limit = 200 * 2**20
    stage = run_of(dp=8, bucket_bytes=limit).stages[0]
    assert sorted(reductions(stage))[-3] < 2 * limit  # embeddings are one tensor each
    assert len(reductions(run_of(dp=8, bucket_bytes=0).stages[0])) == 1


@pytest.mark.parametrize("gradients", [DType.FP32, DType.BF16])
@pytest.mark.parametrize(("dp", "cp", "buckets"), [(8, 1, 162), (256, 4, 7), (2048, 1, 4)])
def test_buckets_grow_with_the_ranks_that_reduce_them(gradients: DType, dp: int, cp: int, buckets: int) -> None:
    """Megatron-Core: max(40 M, 1 M x dp x cp) parameters, whatever the format of their gradients."""
    stage = run_of(dp=dp, cp=cp, gradient_dtype=gradients).stages[0]
    sizes = [work.size_bytes for work in collectives(stage) if work.group is Group.DP]
    assert len(sizes) == buckets
    assert sum(sizes) == LLAMA.parameters * gradients.bytes


def test_only_the_first_stage_has_buckets_unless_told() -> None:
    first, *others = run_of(dp=8, pp=4).stages
    assert len(reductions(first)) > 40
    assert [len(reductions(stage)) for stage in others] == [1, 1, 1]
    assert all(len(reductions(stage)) >= 40 for stage in run_of(dp=8, pp=4, bucket_bytes=160_000_000).stages)


def test_fsdp_reduces_each_layer_at_once() -> None:
    stage = run_of(dp=8, sharding=Sharding.FSDP).stages[0]
    scatters = [op for op in all_ops(stage, LAST) if "reduce-scatter" in op.name]
    assert len(scatters) == 34


def test_experts_fill_buckets_of_their_own() -> None:
    model = load_model("qwen3-30b-a3b")
    stage = generate(model, Strategy(Layout(dp=64, ep=8), 1, 256, 4096)).stages[0]
    sizes: dict[Group, list[int]] = {Group.DP: [], Group.EXPERT_DP: []}
    for work in collectives(stage):
        if work.group in sizes:
            sizes[work.group].append(work.size_bytes // 4)
    assert sum(sum(each) for each in sizes.values()) == model.parameters - 7 * sum(sizes[Group.EXPERT_DP])
    assert all(min(each[:-1]) >= 64e6 for each in sizes.values())


def test_what_overlaps_nothing_is_one_reduction() -> None:
    layers = {layer.name: layer for layer in run_of(dp=8, overlap=NO_OVERLAP).stages[0].epilogue}
    assert len(layers["gradients"].forward) == 1


amounts = st.integers(0, 10**12)
shards = st.lists(
    st.builds(lambda dense, experts, share: Shard(dense, experts, dense // share), amounts, amounts, st.integers(1, 9)),
    min_size=1,
    max_size=6,
)


@given(shards, st.integers(1, 10**10))
def test_buckets_hold_what_they_were_filled_with(filled: list[Shard], limit: int) -> None:
    found = [bucket for _, bucket in fill_buckets(limit, tuple(filled))]
    held = [
        Shard(*(each * times for each in (shard.dense, shard.experts, shard.unquantised))) for shard, times in found
    ]
    assert sum(held, start=NOTHING) == sum(filled, start=NOTHING)
    largest = max([limit, *(max(shard.dense, shard.experts) for shard in filled)])
    assert all(0 < shard.total <= 2 * largest for shard, _ in found)


@given(shards, st.integers(1, 10**10))
def test_equal_buckets_are_counted_not_listed(filled: list[Shard], limit: int) -> None:
    """However small a bucket is, a shard has those of one more parameter, of one more unquantised, and the others."""
    assert len(fill_buckets(limit, tuple(filled))) <= 2 * 3 * len(filled)


@pytest.mark.parametrize("execution", [Execution.GRAPHS, Execution.EAGER])
def test_a_step_has_no_more_ops_for_smaller_buckets(execution: Execution) -> None:
    """An eager host issues them in groups of twice as many each; none holds less than a tensor of a layer."""
    stage = run_of(dp=8, bucket_bytes=1000, execution=execution).stages[0]
    ops = [op for op in all_ops(stage, LAST) if isinstance(op.work, Collective)]
    assert sum(op.work.total_bytes for op in ops if isinstance(op.work, Collective)) == 4 * LLAMA.parameters
    assert sum(op.kernels for op in ops) == 7 * LLAMA.layers + 2
    assert len(ops) <= 9 * (LLAMA.layers + 2)


@pytest.mark.parametrize("execution", [Execution.GRAPHS, Execution.EAGER])
def test_an_eager_host_reads_the_norm_of_each_bucket_before_it_is_reduced(execution: Execution) -> None:
    stage = run_of(dp=8, execution=execution, checks_gradients=True).stages[0]
    checks = [op for op in all_ops(stage, LAST) if op.name.endswith("check")]
    assert all(op.host_reads for op in checks)
    read = sum(op.work.read_bytes for op in checks if isinstance(op.work, Elementwise))
    assert read == (4 * LLAMA.parameters if execution is Execution.EAGER else 0)


@given(st.sampled_from(list(CollectiveKind)), st.integers(0, 10**9), st.integers(1, 1000))
def test_several_collectives_take_as_long_as_each(kind: CollectiveKind, size_bytes: int, times: int) -> None:
    pricer = Pricer(load_cluster("dgx-h100"), Layout(dp=16))
    one, all_of_them = (pricer.price(Collective(kind, size_bytes, Group.DP, count)) for count in (1, times))
    assert all_of_them.seconds == pytest.approx(times * one.seconds, rel=1e-12)
    assert all_of_them.high_s == pytest.approx(times * one.high_s, rel=1e-12)


def test_weights_in_fp8_leave_embeddings_and_norms_to_the_last_bucket() -> None:
    """Megatron-Core's partition_buckets: their buffers are reduced with the first layers' weights."""
    changes: dict[str, Any] = {"precision": DType.FP8, "fp8_parameters": True, "gradient_dtype": DType.BF16}
    last, *layers = reductions(run_of(dp=8, bucket_elements=2**27, **changes).stages[0])  # that of the first layer
    assert last + sum(layers) == 2 * LLAMA.parameters
    assert last > 2 * 2 * LLAMA.vocab * LLAMA.hidden > 4 * max(layers)


def test_an_update_clears_gradients_and_quantises_weights_that_are_gathered_in_bf16() -> None:
    def moved(**changes: Any) -> dict[str, float]:
        ops = run_of(dp=8, precision=DType.MXFP8, **changes).stages[0].epilogue[-1].forward
        return {op.name: op.work.read_bytes + op.work.write_bytes for op in ops if isinstance(op.work, Elementwise)}

    prepared = moved()
    assert prepared["clear gradients"] == 4 * LLAMA.parameters
    assert 0.8 < prepared["quantise weights"] / (4 * LLAMA.parameters) < 1
    assert not any("quantise" in name for name in moved(fp8_parameters=True))
    assert not any("clear" in name for name in moved(fused_accumulation=False))
