"""What two shorter pipelines tell of a long one is when that one ends, bit for bit."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.simulation.engine import makespans_together, simulate
from stepcast.simulation.messages import Messages, Send
from stepcast.simulation.pipeline import pipeline_program
from stepcast.simulation.program import Program
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import make_schedule
from stepcast.simulation.steady import PERIODS, ShortSchedules, pair_programs, periodic_schedule, shorten_schedule
from tests.simulation.test_steady import segments
from tests.simulation.uniform import LANES

lengths = st.floats(1e-3, 1e-2)


def program_of(schedule: Schedule, lengths_s: list[float], message_s: float) -> Program:
    messages = Messages(lambda kind, source, target: message_s, Send.EAGER, alike=True)
    return pipeline_program(schedule, LANES, segments(lengths_s), messages)


def told_s(sizes: ShortSchedules, lengths_s: list[float], message_s: float) -> float | None:
    """When a long pipeline ends, as two shorter ones tell it."""
    both = pair_programs(program_of(sizes.short, lengths_s, message_s), sizes)
    if both is None:
        return None
    prices = both.short.price_costs()
    run = [(both.short, prices), (both.longer, prices)]
    (short_s, longer_s), moves_s = makespans_together(run, {1: both.watched})
    return both.end_s(short_s, longer_s, moves_s.get(1))


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PERIODS)),
    st.integers(2, 4),
    st.lists(lengths, min_size=1, max_size=4),
    st.floats(0, 1e-3),
    st.integers(2, 12),
    st.integers(2, 20),
)
def test_what_is_told_is_so(
    name: ScheduleKind, stages: int, lengths_s: list[float], message_s: float, groups: int, further: int
) -> None:
    """However short the two are: where they have not settled nothing is told."""
    chunks = SCHEDULES[name].pieces(2)
    period = PERIODS[name](stages, stages * groups)
    short, longer, long = (
        periodic_schedule(name, stages, stages * groups + more * period, chunks, period) for more in (0, 1, further)
    )
    told = told_s(ShortSchedules(short, longer, further), lengths_s, message_s)
    if told is not None:
        assert told == simulate(program_of(long, lengths_s, message_s)).makespan_s


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
@pytest.mark.parametrize("lengths_s", [[1e-3] * 7 + [1.2e-3], [1.5e-3] + [1e-3] * 7], ids=["last", "first"])
def test_pipelines_with_a_slowest_stage_settle_soon(name: str, lengths_s: list[float]) -> None:
    chunks = SCHEDULES[ScheduleKind(name)].pieces(2)
    sizes = shorten_schedule(name, 8, 512, chunks)
    assert sizes is not None
    assert sizes.short.micro_batches + sizes.longer.micro_batches < 256
    long = make_schedule(name, 8, 512, chunks)
    assert told_s(sizes, lengths_s, 1e-4) == simulate(program_of(long, lengths_s, 1e-4)).makespan_s


def test_nothing_is_told_of_a_pipeline_that_drifts() -> None:
    """The last stage is slower by a hundredth, and the others may run far ahead of it."""
    sizes = shorten_schedule("zb-h2", 4, 1600, 1)
    assert sizes is not None
    assert told_s(sizes, [1e-3, 1e-3, 1e-3, 1.01e-3], 1e-4) is None


def test_few_micro_batches_are_run_as_they_are() -> None:
    assert shorten_schedule("1f1b", 16, 32, 1) is None
    assert shorten_schedule("1f1b", 1, 100_000, 1) is None
    assert shorten_schedule("gpipe", 8, 100_000, 1) is None
    assert shorten_schedule("dualpipe", 8, 100_000, 2) is None
