"""The bytes that PyTorch's allocator reserves for a traced step."""

import pytest

pytest.importorskip("torch")

from stepcast.pytorch.capture.reserved import reserve_bytes
from stepcast.pytorch.capture.tracer import Event, Moment, StepTrace, Storage, TracedTensor
from stepcast.units import MIB


def trace_of(*storages: Storage) -> StepTrace:
    """Return a step of one operator each: forward, backward, update."""
    events = [Event("add", (), (), (), moment, 0, recomputed=False) for moment in Moment]
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
