"""Memory of captured programs that are distributed: each phase is scaled by itself."""

from dataclasses import replace

import pytest

from stepcast.cost.memory.stages import WORKSPACE_BYTES
from stepcast.forecast.captured import CapturedSharding, Spread, predict_captured
from stepcast.hardware import load_cluster
from stepcast.ir.captured import Captured, CapturedMemory, LayerPart
from stepcast.ir.work import Matmul
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload

GIB = 2**30
LAYERS = 4


def checkpointed() -> Captured:
    """Four layers of 2 GiB that save 1 GiB each and need 3 to run backward, then a loss that needs 20 GiB.

    On one GPU the fullest moment is the end of the backward: all gradients, and hardly any activations.
    """
    matmul = Op("mm", Matmul(64, 64, 64))
    layer, loss = Layer("layer", (matmul,), (matmul,), (matmul,)), Layer("loss", (matmul,), (matmul,))
    part = LayerPart(
        GIB, 2 * GIB, 2 * GIB, kept_bytes=GIB, forward_peak_bytes=2 * GIB, backward_peak_bytes=3 * GIB, sent_bytes=1
    )
    last = LayerPart(kept_bytes=8 * GIB, forward_peak_bytes=12 * GIB, backward_peak_bytes=20 * GIB)
    stage = Stage((Block((layer,), LAYERS), Block((loss,))))
    peak = CapturedMemory(8 * GIB, 8 * GIB, 16 * GIB, 0, 3 * GIB, all_gradients=8 * GIB)
    workload = Workload((stage,), name="checkpointed", source="captured")
    return Captured(workload, (part,) * LAYERS + (last,), peak, LAYERS * GIB, 64, 1)


def allocated_gib(spread: Spread) -> list[float]:
    stages = predict_captured(checkpointed(), load_cluster("dgx-h100"), spread).memory
    return [(stage.allocated - WORKSPACE_BYTES) / GIB for stage in stages]


def test_one_gpu_holds_what_was_traced() -> None:
    assert allocated_gib(Spread()) == pytest.approx([8 + 8 + 16 + 3])


def test_replicas_hold_buckets_besides_their_gradients() -> None:
    assert allocated_gib(Spread(dp=8)) == pytest.approx([8 + 8 + 16 + 3 + 8])


def test_gradients_that_are_views_are_in_the_buckets() -> None:
    """Then the fullest moment is the loss: buckets, five saved layers and what it needs."""
    views = replace(checkpointed(), facts=(("ddp", "views"),))
    (stage,) = predict_captured(views, load_cluster("dgx-h100"), Spread(dp=8)).memory
    assert (stage.allocated - WORKSPACE_BYTES) / GIB == pytest.approx(8 + 16 + 8 + 4 + 20)


def test_sharding_leaves_the_loss_as_it_is() -> None:
    """Shares of weights and states, 4 saved layer inputs, the loss, and the weights of two layers."""
    ways = 8
    found = allocated_gib(Spread(dp=ways, sharding=CapturedSharding.FSDP))
    assert found == pytest.approx([(8 + 16) / ways + 4 + 20 + 2 * 2])


def test_accumulated_gradients_are_there_at_the_loss() -> None:
    ways = 8
    found = allocated_gib(Spread(dp=ways, micro_batches=2, sharding=CapturedSharding.FSDP))
    assert found == pytest.approx([(8 + 8 + 16) / ways + 4 + 20 + 2 * 2])


@pytest.mark.parametrize(("schedule", "first"), [(None, 2), ("gpipe", 4)])
def test_stages_hold_their_micro_batches(schedule: str | None, first: int) -> None:
    """1F1B holds two micro-batches on the first of two stages, GPipe all four, and one is at work."""
    found = allocated_gib(Spread(pp=2, micro_batches=4, schedule=schedule))
    inside = sum(1 for part in checkpointed().parts if part.parameters) - _last_stage_layers(schedule)
    weights, states = 2 * inside, 4 * inside
    working = (first - 1) * inside + (inside - 1) + 3 + 2  # backward of the last layer, its gradient added
    assert found[0] == pytest.approx(2 * weights + states + working)


def _last_stage_layers(schedule: str | None) -> int:
    spread = Spread(pp=2, micro_batches=4, schedule=schedule)
    stages = predict_captured(checkpointed(), load_cluster("dgx-h100"), spread).memory
    return round(stages[-1].parameters / (2 * GIB))
