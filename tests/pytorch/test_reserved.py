"""The bytes that PyTorch's allocator reserves for a traced step."""

import pytest

pytest.importorskip("torch")

import torch

from stepcast.pytorch.capture.build import reserve_bytes
from stepcast.pytorch.capture.tracer import Event, Moment, StepTrace, Storage, TracedTensor, workspace_bytes
from stepcast.units import MIB


def trace_of(*storages: Storage) -> StepTrace:
    """Return a step of one operator each: forward, backward, update."""
    events = [Event("add", (), (), (), moment, "", recomputed=False) for moment in Moment]
    return StepTrace(events=events, storages=list(storages))


def test_states_are_placed_where_activations_were() -> None:
    """The states of the first step split the block of the activation, so that the second needs another."""
    weight = Storage(12 * MIB, 0, role="parameters")
    states = [Storage(12 * MIB, 0, role="optimizer") for _ in range(2)]
    activation = Storage(24 * MIB, 0, freed=2)
    gradient = Storage(12 * MIB, 1, freed=4, role="gradients")
    assert reserve_bytes(trace_of(weight, activation, gradient)) == (12 + 24 + 12) * MIB
    assert reserve_bytes(trace_of(weight, *states, activation, gradient)) == (12 + 24 + 12 + 24) * MIB


def test_results_of_the_last_step_are_held_until_the_next_has_its_own() -> None:
    logits = Storage(40 * MIB, 0)
    trace = trace_of(logits)
    assert reserve_bytes(trace) == 40 * MIB  # no operator writes it: an input
    trace.events[0] = trace.events[0]._replace(writes=(TracedTensor((10 * MIB,), (1,), "fp32", 0),))
    assert reserve_bytes(trace) == 2 * 40 * MIB


def test_what_a_step_leaves_is_freed_by_the_next() -> None:
    """A generator's graph lives from one step into the next, whose backward frees it: one block serves both."""
    carried = Storage(40 * MIB, 0, freed=2, is_carried=True)
    left = Storage(40 * MIB, 2)
    trace = trace_of(carried, left)
    trace.events[2] = trace.events[2]._replace(writes=(TracedTensor((10 * MIB,), (1,), "fp32", 1),))
    assert reserve_bytes(trace) == 40 * MIB


def test_averages_of_weights_stay() -> None:
    """A tensor that every step updates in place was made before the first."""
    average = Storage(40 * MIB, 0, is_carried=True)
    trace = trace_of(average)
    weight = TracedTensor((10 * MIB,), (1,), "fp32", 0)
    trace.events[2] = trace.events[2]._replace(reads=(weight,), writes=(weight,))
    assert reserve_bytes(trace) == 40 * MIB


def test_workspaces_of_an_operator_follow_each_other() -> None:
    """One that an operator frees before it makes the next takes the same block, if that is large enough."""
    first, second = Storage(40 * MIB, 1, freed=1), Storage(40 * MIB, 1, freed=2)
    assert reserve_bytes(trace_of(first, second)) == 40 * MIB
    second.size_bytes = 42 * MIB
    assert reserve_bytes(trace_of(first, second)) == (40 + 42) * MIB


def test_convolutions_copy_operands_to_channels_last() -> None:
    """As an H200 allocated it in steps of small networks: MiB of 64 images of 112 x 112 in bf16, 128 in TF32."""

    def needed(images: int, channels: int, size: int, dtype: object) -> list[float]:
        def empty(*shape: int) -> object:
            return torch.empty(shape, dtype=dtype, device="meta")

        data, weight = empty(images, channels, size, size), empty(2 * channels, channels, 3, 3)
        out, options = empty(images, 2 * channels, size // 2, size // 2), (None, [2, 2], [1, 1], [1, 1], False, [0], 1)
        forward = workspace_bytes("convolution", (data, weight, *options), [out])
        masked = (out, data, weight, *options, [True, True, False])
        backward = workspace_bytes("convolution_backward", masked, [data, weight])
        return [size / MIB for size in (*forward, *backward)]

    assert needed(64, 32, 112, torch.bfloat16) == pytest.approx([73.54, 73.54, 75.25], abs=0.5)
    assert needed(128, 32, 56, torch.float32) == pytest.approx([49.07, 73.57, 77.40], abs=2)
    assert needed(128, 16, 112, torch.float32) == pytest.approx([147.02, 149.20], abs=0.5)


def test_long_sums_are_split_between_blocks() -> None:
    def needed(rows: int) -> tuple[int, ...]:
        summed = torch.empty(rows, 32000, device="meta")
        return workspace_bytes("sum", (summed,), [torch.empty(32000, device="meta")])

    assert not needed(512)
    assert needed(2048)
