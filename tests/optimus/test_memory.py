"""Memory of OptimusPrime runs: what must hold whatever was measured."""

from dataclasses import replace

import pytest

from stepcast.hardware.catalog import load_gpu
from stepcast.ir.layout import Layout
from stepcast.models.catalog import load_model
from stepcast.optimus.memory import optimus_memory
from stepcast.optimus.step import OptimusPlan, plan
from stepcast.units import MIB

MODEL, GPU = load_model("llama-3.2-1b"), load_gpu("a40")
LAYER = 4 * (2 * 2048 * 2048 + 2 * 2048 * 512 + 3 * 2048 * 8192)
WORDS = 4 * 128256 * 2048


def run(tp: int, pp: int, micro_batch: int = 4, seq: float = 112) -> OptimusPlan:
    return plan(MODEL, Layout(tp=tp, pp=pp), micro_batch, 32 // micro_batch, seq)


def test_weights_are_split_and_words_are_not() -> None:
    stages = optimus_memory(run(2, 4), GPU)
    norms = 4 * 2048
    assert [stage.parameters for stage in stages] == [
        WORDS + 4 * (LAYER / 2 + 2 * norms),
        5 * (LAYER / 2 + 2 * norms),
        5 * (LAYER / 2 + 2 * norms),
        WORDS + 2 * (LAYER / 2 + 2 * norms) + norms,
    ]
    assert all(stage.gradients == stage.parameters and not stage.optimizer for stage in stages)


def test_without_tensor_parallelism_there_are_moments_and_cuts_inside_a_layer() -> None:
    stages = optimus_memory(run(1, 8, 1), GPU)
    down = 4 * 2048 * 8192
    assert stages[0].parameters == WORDS + 2 * LAYER - down + 4 * 4 * 2048
    assert stages[3].parameters == 2 * LAYER + 4 * 4 * 2048
    assert all(stage.optimizer == 2 * stage.parameters for stage in stages)


def test_parts_add_up_and_none_is_negative() -> None:
    for stage in optimus_memory(run(4, 2, 8), GPU, (88, 109, 124, 95, 120)):
        assert sum(stage.parts.values()) == pytest.approx(stage.total)
        assert min(stage.parts.values()) >= 0
        assert stage.fits


def test_messages_of_a_whole_step_stay() -> None:
    """Twice the micro-batches: a middle stage keeps as many more tuples and gradients, though no more are
    in flight: its own input and that of stage 1, and two gradients, two tensors each.
    """
    few = run(2, 4, 1, 120)
    more = optimus_memory(replace(few, micro_batches=64), GPU)[2].activations
    less = optimus_memory(few, GPU)[2].activations
    assert more - less == pytest.approx(32 * 8 * 120 * 2048 * 4, rel=0.15)


def test_longer_sequences_need_more() -> None:
    short = optimus_memory(run(2, 4, 8, 64), GPU)
    long = optimus_memory(run(2, 4, 8, 512), GPU)
    assert all(one.total + 500 * MIB < other.total for one, other in zip(short, long, strict=True))


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="not a Llama"):
        optimus_memory(replace(run(1, 2), model=load_model("gpt2-large")), GPU)
