"""Weights that stages of a captured program share: Llama 3.2 1B ties its head to its embedding."""

from dataclasses import replace
from pathlib import Path

import pytest

from stepcast.forecast.captured import CapturedSharding, Spread, predict_captured
from stepcast.forecast.splitting import copy_tied_parameters, split_captured, sum_tied_gradients
from stepcast.hardware import Cluster, load_cluster
from stepcast.inputs import captured as reader
from stepcast.inputs.source import Source
from stepcast.ir.captured import Captured, Tie
from stepcast.ir.layout import Group
from stepcast.ir.work import Collective, Elementwise, ElementwiseKind
from stepcast.ir.workload import Layer, Op
from stepcast.outputs.plain import write_captured

EXAMPLE = Path(__file__).parents[2] / "examples" / "captured" / "llama-3.2-1b.json"
EMBEDDING_BYTES = 128256 * 2048 * 2


@pytest.fixture(scope="module")
def llama() -> Captured:
    return reader.read(Source(str(EXAMPLE)))


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return load_cluster("hgx-h200")


def exchanged(captured: Captured, cluster: Cluster, spread: Spread) -> list[list[Collective]]:
    """What each stage sums over other stages."""
    workload = predict_captured(captured, cluster, spread).workload
    return [
        [
            op.work
            for layer in stage.epilogue
            for op in layer.all_ops
            if isinstance(op.work, Collective) and op.work.group in (Group.EMBEDDING, Group.PP)
        ]
        for stage in workload.stages
    ]


def test_the_embedding_is_tied_to_the_head(llama: Captured) -> None:
    (tie,) = llama.ties
    assert tie.size_bytes == EMBEDDING_BYTES
    assert tie.parts[0] == 0
    assert reader.read(Source("again", data=write_captured(llama))).ties == llama.ties


def test_first_and_last_stage_sum_its_gradients(llama: Captured, cluster: Cluster) -> None:
    found = exchanged(llama, cluster, Spread(pp=4, micro_batches=8))
    ((first,), *middle, (last,)) = found
    assert first == last
    assert (first.size_bytes, first.group) == (EMBEDDING_BYTES, Group.EMBEDDING)
    assert not any(middle)


def test_shards_sum_their_own_share(llama: Captured, cluster: Cluster) -> None:
    spread = Spread(dp=2, pp=2, micro_batches=2, sharding=CapturedSharding.FSDP)
    ((first,), _) = exchanged(llama, cluster, spread)
    assert first.size_bytes == EMBEDDING_BYTES // 2


def test_one_stage_sums_nothing(llama: Captured, cluster: Cluster) -> None:
    assert exchanged(llama, cluster, Spread()) == [[]]


def test_the_last_stage_keeps_and_updates_a_copy(llama: Captured, cluster: Cluster) -> None:
    spread = Spread(pp=2, micro_batches=2)
    tied = predict_captured(llama, cluster, spread).memory[-1]
    untied = predict_captured(replace(llama, ties=()), cluster, spread).memory[-1]
    assert tied.parameters - untied.parameters == pytest.approx(EMBEDDING_BYTES, rel=0.01)
    assert tied.optimizer - untied.optimizer == pytest.approx(2 * EMBEDDING_BYTES, rel=0.01)


def test_weights_of_a_middle_stage_are_summed_over_all() -> None:
    """As a block that every stage repeats."""
    llama = reader.read(Source(str(EXAMPLE)))
    parts = len(llama.parts)
    begins = [parts // 3, 2 * parts // 3]
    shared = replace(llama, ties=(Tie((1, parts // 2, parts - 1), 1000),))
    found = [layer.forward[0].work for (layer,) in sum_tied_gradients(shared, begins, 1)]
    assert found == [found[0]] * 3
    assert isinstance(found[0], Collective)
    assert (found[0].group, found[0].size_bytes) == (Group.PP, 1000)
    more = [
        after.parameter_bytes - before.parameter_bytes
        for before, after in zip(llama.parts, copy_tied_parameters(shared, begins), strict=True)
    ]
    assert {at: size for at, size in enumerate(more) if size} == {parts // 2: 1000, parts - 1: 1000}


def test_split_ways_a_tie_is_smaller() -> None:
    llama = reader.read(Source(str(EXAMPLE)))
    half = replace(llama, ties=(Tie((0, 5), 1000, 600),))
    assert split_captured(half, 2).ties == (Tie((0, 5), 700),)


def test_weights_without_gradients_take_longer(llama: Captured, cluster: Cluster) -> None:
    idle = predict_captured(llama, cluster, Spread(zero_gradients=0.5))
    (optimizer,) = idle.workload.stages[0].epilogue
    kinds = [op.work.kind for op in optimizer.forward if isinstance(op.work, Elementwise)]
    # The fused update follows a list of counters, one for each weight.
    assert kinds == [ElementwiseKind.LISTED_OPTIMIZER, ElementwiseKind.OPTIMIZER, ElementwiseKind.IDLE_OPTIMIZER]
    assert idle.step_s > predict_captured(llama, cluster).step_s


def test_a_host_that_never_looks_runs_ahead(llama: Captured, cluster: Cluster) -> None:
    """Transformers reads in each forward whether sequences are packed, and begins a step with an idle GPU."""
    assert [op.name for layer, _ in llama.stage.counted_layers(1) for op in layer.forward if op.host_reads]
    stage = llama.stage
    body = tuple(
        replace(block, layers=tuple(replace(layer, forward=_blind(layer)) for layer in block.layers))
        for block in stage.body
    )
    blind = replace(llama, workload=replace(llama.workload, stages=(replace(stage, body=body),)))
    waits, never = (predict_captured(each, cluster) for each in (llama, blind))
    kernels_s = sum(
        count * never.pricer.seconds(op.work)
        for layer, count in never.workload.stages[0].counted_layers(1)
        for op in layer.all_ops
    )
    assert never.step_s == pytest.approx(kernels_s, rel=1e-6)
    assert 0.0001 < waits.step_s - never.step_s < 0.01


def _blind(layer: Layer) -> tuple[Op, ...]:
    return tuple(replace(op, host_reads=False) for op in layer.forward)
