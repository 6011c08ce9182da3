"""What a short pipeline proves of a long one is what the long one does, bit for bit."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.simulation.engine import Run, simulate
from stepcast.simulation.messages import Messages, Send, SlotKind
from stepcast.simulation.pipeline import pipeline_program
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import make_schedule
from stepcast.simulation.segments import Segment
from stepcast.simulation.steady import PERIODS, added_s, count_repeats
from tests.simulation.uniform import LANES, uniform_segments


def segments(lengths_s: list[float]) -> Callable[[int, tuple[SlotKind, ...]], Segment]:
    """Stages of different lengths."""

    def segment_of(stage: int, phases: tuple[SlotKind, ...]) -> Segment:
        length_s = lengths_s[stage % len(lengths_s)]
        return uniform_segments(length_s, length_s, length_s / 2)(stage, phases)

    return segment_of


def run_of(schedule: Schedule, lengths_s: list[float], message_s: float, mode: Send) -> Run:
    messages = Messages(lambda kind, source, target: message_s, mode)
    return simulate(pipeline_program(schedule, LANES, segments(lengths_s), messages))


lengths = st.floats(1e-3, 1e-2)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PERIODS)),
    st.integers(2, 4),
    st.lists(lengths, min_size=1, max_size=4),
    st.floats(0, 1e-3),
    st.sampled_from((Send.EAGER, Send.RENDEZVOUS)),
    st.integers(1, 40),
)
def test_a_settled_pipeline_goes_on_as_it_did(
    name: ScheduleKind, stages: int, lengths_s: list[float], message_s: float, mode: Send, further: int
) -> None:
    chunks = SCHEDULES[name].pieces(2)
    count = 16 * stages

    def run(micro_batches: int) -> Run:
        return run_of(make_schedule(name, stages, micro_batches, chunks), lengths_s, message_s, mode)

    found = settling(run, name, stages, count)
    if found is not None:
        period, added = found
        long = run(count + further * period)
        assert long.makespan_s == run(count).makespan_s + further * added


def settling(run: Callable[[int], Run], name: ScheduleKind, stages: int, count: int) -> tuple[int, float] | None:
    """The period of a pipeline, and what each adds."""
    group = PERIODS[name](stages, count)
    short = run(count)
    period = group * count_repeats(short, run(count + group), count, group, stages)
    added = added_s(short, run(count + period), count, period) if period else None
    return (period, added) if added is not None else None


@pytest.mark.parametrize("name", sorted(PERIODS))
@pytest.mark.parametrize("mode", [Send.EAGER, Send.RENDEZVOUS])
def test_equal_stages_settle(name: ScheduleKind, mode: Send) -> None:
    stages, chunks = 4, SCHEDULES[name].pieces(2)

    def run(micro_batches: int) -> Run:
        return run_of(make_schedule(name, stages, micro_batches, chunks), [1e-3], 1e-4, mode)

    found = settling(run, name, stages, 96)
    assert found is not None
    period, added = found
    # F, I and W take 1, 1 and half a millisecond; what else a period takes is waiting for messages.
    assert 2.5e-3 * period * chunks - 1e-12 <= added < 2.9e-3 * period * chunks


def test_a_pipeline_that_still_drifts_has_not_settled() -> None:
    """The last stage is slower by a hundredth: it takes many micro-batches until the others have run ahead of
    it as far as they may.
    """

    def run(micro_batches: int) -> Run:
        schedule = make_schedule("zb-h2", 4, micro_batches, 1)
        return run_of(schedule, [1e-3, 1e-3, 1e-3, 1.01e-3], 1e-4, Send.EAGER)

    soon, late = (settling(run, ScheduleKind.ZB_H2, 4, count) for count in (16, 1600))
    assert soon is None
    assert late is not None
