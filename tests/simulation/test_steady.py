"""A long pipeline follows from a short one whose last period is repeated, bit for bit."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.simulation import kernels
from stepcast.simulation.engine import Repetition, Run, simulate, simulate_repeated
from stepcast.simulation.messages import Messages, Send, SlotKind
from stepcast.simulation.pipeline import pipeline_program
from stepcast.simulation.program import Program
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import interleaved, make_schedule
from stepcast.simulation.segments import Segment
from stepcast.simulation.steady import PERIODS, ShortSchedule, shorten_schedule
from tests.simulation.uniform import LANES, uniform_segments

pytestmark = pytest.mark.slow

lengths = st.floats(1e-3, 1e-2)


def segments(lengths_s: list[float]) -> Callable[[int, tuple[SlotKind, ...]], Segment]:
    """Stages of different lengths."""

    def segment_of(stage: int, phases: tuple[SlotKind, ...]) -> Segment:
        length_s = lengths_s[stage % len(lengths_s)]
        return uniform_segments(length_s, length_s, length_s / 2)(stage, phases)

    return segment_of


def program_of(schedule: Schedule, lengths_s: list[float], message_s: float, mode: Send = Send.EAGER) -> Program:
    messages = Messages(message_s, mode)
    return pipeline_program(schedule, LANES, segments(lengths_s), messages)


def repeat_period(
    short: ShortSchedule, lengths_s: list[float], message_s: float, mode: Send = Send.EAGER
) -> Run | None:
    """The long pipeline, by a short one whose last period is repeated."""
    program = program_of(short.schedule, lengths_s, message_s, mode)
    return simulate_repeated(
        program, program.price_costs(), Repetition(count_calls(program, short.period), short.repeats)
    )


def count_calls(program: Program, period: range) -> int:
    batches = program.table.micro_batches
    assert batches is not None
    return int(((batches[:, 0] >= period.start) & (batches[:, 0] < period.stop)).sum())


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PERIODS)),
    st.integers(2, 4),
    st.lists(lengths, min_size=1, max_size=4),
    st.floats(0, 1e-3),
    st.sampled_from((Send.EAGER, Send.RENDEZVOUS)),
    st.integers(2, 12),
    st.integers(2, 20),
)
def test_a_pipeline_that_is_repeated_ends_as_the_long_one_does(
    name: ScheduleKind, stages: int, lengths_s: list[float], message_s: float, mode: Send, groups: int, further: int
) -> None:
    """However short it is; where it has settled, each lane is also busy as long."""
    chunks = SCHEDULES[name].pieces(2)
    period, count = PERIODS[name](stages, stages * groups), 2 * stages * groups

    def make(size: int) -> Schedule:
        if name is ScheduleKind.INTERLEAVED:
            return interleaved(stages, size, chunks, period)
        return make_schedule(name, stages, size, chunks)

    short, long = make(count), program_of(make(count + further * period), lengths_s, message_s, mode)
    middle = count // 2
    run = repeat_period(ShortSchedule(short, range(middle, middle + period), further), lengths_s, message_s, mode)
    if run is None:
        return
    assert run.makespan_s == simulate(long).makespan_s
    assert run.runs is not None
    assert run.program.lane_busy_s(runs=run.runs) == pytest.approx(long.lane_busy_s(), rel=1e-12)


@pytest.mark.parametrize("worth_compiling", [0, 2**62], ids=["compiled", "numpy"])
@pytest.mark.parametrize("mode", [Send.EAGER, Send.RENDEZVOUS])
@pytest.mark.parametrize("name", sorted(PERIODS))
def test_a_pipeline_whose_periods_are_repeated_ends_as_the_long_one_does(
    name: ScheduleKind, mode: Send, worth_compiling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where stages drift apart, or waves pass through them again and again."""
    for name_of_limit in ("WORTH_OPENING", "WORTH_LOADING", "WORTH_COMPILING"):
        monkeypatch.setattr(kernels, name_of_limit, worth_compiling)
    for known in ("_loaded", "_looked"):
        monkeypatch.setattr(kernels, known, {})
    stages, chunks = 6, SCHEDULES[name].pieces(2)
    period = PERIODS[name](stages, 8 * stages)
    short, long = (make_schedule(name, stages, groups * stages, chunks) for groups in (5, 16))
    for lengths_s in (
        [1e-3],
        [1.5e-3, *[1e-3] * 5],
        [*[1e-3] * 5, 1.01e-3],
        [2e-3, 1.3e-3, 1.3e-3, 1e-3, 1e-3, 1.7e-3],
    ):
        program = program_of(short, lengths_s, 1e-4, mode)
        size = count_calls(program, range(2 * stages, 2 * stages + period))
        run = simulate_repeated(program, program.price_costs(), Repetition(size, 11 * stages // period))
        assert run is not None
        assert run.makespan_s == simulate(program_of(long, lengths_s, 1e-4, mode)).makespan_s


@pytest.mark.parametrize("name", sorted(PERIODS))
@pytest.mark.parametrize("mode", [Send.EAGER, Send.RENDEZVOUS])
def test_equal_stages_settle(name: ScheduleKind, mode: Send) -> None:
    short = shorten_schedule(name, 8, 2048, SCHEDULES[name].pieces(2), 4)
    assert short is not None
    run = repeat_period(short, [1e-3], 1e-4, mode)
    assert run is not None
    assert run.is_settled


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
@pytest.mark.parametrize("lengths_s", [[1e-3] * 7 + [1.2e-3], [1.5e-3] + [1e-3] * 7], ids=["last", "first"])
def test_pipelines_with_a_slowest_stage_settle_soon(name: str, lengths_s: list[float]) -> None:
    short = shorten_schedule(name, 8, 1024, SCHEDULES[ScheduleKind(name)].pieces(2), 4)
    assert short is not None
    assert short.schedule.micro_batches < 256
    run = repeat_period(short, lengths_s, 1e-4)
    assert run is not None
    assert run.is_settled


def test_a_pipeline_that_still_drifts_has_not_settled() -> None:
    """The last stage is slower by a hundredth, and the others may run far ahead of it."""
    ends_s = set()
    for longer, settles in ((1, False), (128, True)):
        short = shorten_schedule("zb-h2", 4, 8000, 1, longer)
        assert short is not None
        run = repeat_period(short, [1e-3, 1e-3, 1e-3, 1.01e-3], 1e-4)
        assert run is not None
        assert run.is_settled is settles
        ends_s.add(run.makespan_s)
    assert len(ends_s) == 1


def test_short_schedules_run_as_far_ahead_as_the_long_one() -> None:
    """ZB-H2 holds up to 2 x stages - 1 micro-batches: a schedule of fewer is another one."""
    short = shorten_schedule("zb-h2", 16, 512, 1)
    assert short is not None
    assert short.schedule.count_in_flight() == make_schedule("zb-h2", 16, 512, 1).count_in_flight()


def test_few_micro_batches_are_run_as_they_are() -> None:
    assert shorten_schedule("1f1b", 16, 32, 1) is None
    assert shorten_schedule("gpipe", 8, 100_000, 1) is None
    assert shorten_schedule("dualpipe", 8, 100_000, 2) is None
