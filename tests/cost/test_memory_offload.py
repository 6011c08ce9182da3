"""What leaves the GPU, and what the host holds instead: by the arithmetic of Megatron-Core's, DeepSpeed's and
FSDP's documentation."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.cost.memory import StageMemory, memory
from stepcast.frameworks.catalog import load_framework
from stepcast.hardware import load_gpu
from stepcast.ir.framework import MEGATRON_CORE, Framework
from stepcast.ir.layers.kinds import count_saved
from stepcast.ir.layout import Layout
from stepcast.ir.strategy import Offload, Recompute, RecomputeKind, Sharding, Strategy
from stepcast.models.catalog import load_model

MODEL, GPU = load_model("llama-3.1-8b"), load_gpu("h100-sxm")
PLAIN = Strategy(Layout(dp=8), 1, 32, 4096, sharding=Sharding.ZERO_1)
OWN = MODEL.parameters / 8


def stage(strategy: Strategy, framework: Framework = MEGATRON_CORE) -> StageMemory:
    return memory(MODEL, strategy, GPU, framework)[0]


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_megatron_moves_twelve_bytes_and_copies_the_gradients(share: float) -> None:
    """fp32 weights and two moments leave; the host holds an fp32 gradient, too."""
    kept, moved = stage(PLAIN), stage(replace(PLAIN, offload=Offload(optimizer=share)))
    assert kept.optimizer - moved.optimizer == pytest.approx(share * 12 * OWN)
    assert moved.host == pytest.approx(share * 16 * OWN)
    assert (kept.parameters, kept.gradients) == (moved.parameters, moved.gradients)


def test_deepspeed_moves_split_gradients_too() -> None:
    """Ren et al., ZeRO-Offload, 2021: all but the 16-bit weights."""
    framework = load_framework("deepspeed-zero")
    whole = stage(replace(PLAIN, sharding=Sharding.ZERO_2, offload=Offload(optimizer=1)), framework)
    assert whole.gradients == whole.optimizer == 0
    assert whole.parameters == pytest.approx(2 * MODEL.parameters)
    assert whole.host == pytest.approx(16 * OWN)


def test_fsdp_moves_everything_that_ranks_split() -> None:
    moved = stage(replace(PLAIN, sharding=Sharding.FSDP, offload=Offload(optimizer=1)), load_framework("torchtitan"))
    assert moved.parameters == moved.gradients == moved.optimizer == 0
    assert moved.host == pytest.approx(16 * OWN)


@pytest.mark.parametrize("recompute", [RecomputeKind.NONE, RecomputeKind.FULL])
def test_of_offloaded_layers_two_are_on_the_gpu(recompute: RecomputeKind) -> None:
    """One at work, one on its way; recomputed ones keep their input alone, wherever that is."""
    strategy = replace(PLAIN, recompute=Recompute(recompute))
    one = count_saved(MODEL, strategy, MODEL.blocks[0]).after(recompute is RecomputeKind.FULL)
    kept, moved = stage(strategy), stage(replace(strategy, offload=Offload(activations=0.5)))
    assert kept.activations - moved.activations == pytest.approx((16 - 2) * one)
    assert moved.host == pytest.approx(16 * one)


def test_all_micro_batches_in_flight_are_on_the_host() -> None:
    strategy = replace(PLAIN, layout=Layout(pp=4, dp=2), offload=Offload(activations=1))
    stages = memory(MODEL, strategy, GPU)
    one = count_saved(MODEL, strategy, MODEL.blocks[0]).saved
    assert [each.host for each in stages] == pytest.approx([8 * one * held for held in (4, 3, 2, 1)])


@settings(deadline=None, max_examples=40)
@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.sampled_from([Layout(dp=8), Layout(pp=2, dp=4), Layout(tp=2, pp=2, vpp=2, dp=2)]),
)
def test_more_on_the_host_is_never_more_on_the_gpu(optimizer: float, activations: float, layout: Layout) -> None:
    strategy = replace(PLAIN, layout=layout, sequence_parallel=layout.tp > 1)
    shares = [Offload(), Offload(optimizer), Offload(optimizer, activations), Offload(1, 1)]
    found = [memory(MODEL, replace(strategy, offload=each), GPU)[0] for each in shares]
    # Two layers on their way may be more than the one that would stay.
    room = 2 * count_saved(MODEL, strategy, MODEL.blocks[0]).saved
    for less, more in pairwise(found):
        assert more.reserved <= less.reserved + 1.07 * room
        assert more.host >= less.host
        assert more.total == pytest.approx(sum(more.parts.values()))
