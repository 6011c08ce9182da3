"""The end of a long pipeline follows from two shorter ones, bit for bit."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.simulation import kernels
from stepcast.simulation.engine import extend_makespan_s, simulate
from stepcast.simulation.messages import Messages, Send, SlotKind
from stepcast.simulation.pipeline import pipeline_program
from stepcast.simulation.program import Program
from stepcast.simulation.schedule import Schedule
from stepcast.simulation.schedules import interleaved, make_schedule
from stepcast.simulation.segments import Segment
from stepcast.simulation.steady import PERIODS, ShortSchedules, pair_programs, shorten_schedule
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


def extended_s(
    sizes: ShortSchedules, lengths_s: list[float], message_s: float, mode: Send = Send.EAGER
) -> float | None:
    """When a long pipeline ends, as two shorter ones prove it."""
    both = pair_programs(program_of(sizes.short, lengths_s, message_s, mode), sizes)
    if both is None:
        return None
    run = both.run(both.short.price_costs())
    return run.end_s if run else None


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(PERIODS)),
    st.integers(2, 4),
    st.lists(lengths, min_size=1, max_size=4),
    st.floats(0, 1e-3),
    st.sampled_from((Send.EAGER, Send.RENDEZVOUS)),
    st.integers(2, 12),
    st.integers(1, 2),
    st.integers(2, 20),
)
def test_an_extended_pipeline_ends_as_the_long_one_does(
    name: ScheduleKind,
    stages: int,
    lengths_s: list[float],
    message_s: float,
    mode: Send,
    groups: int,
    repeats: int,
    further: int,
) -> None:
    """However short the two are: where they have not settled nothing follows."""
    chunks = SCHEDULES[name].pieces(2)
    period, count = PERIODS[name](stages, stages * groups), 2 * stages * groups

    def make(size: int) -> Schedule:
        if name is ScheduleKind.INTERLEAVED:
            return interleaved(stages, size, chunks, period)
        return make_schedule(name, stages, size, chunks)

    short, longer, long = (make(count + more * repeats * period) for more in (0, 1, further))
    proved_s = extended_s(ShortSchedules(short, longer, further), lengths_s, message_s, mode)
    if proved_s is not None:
        assert proved_s == simulate(program_of(long, lengths_s, message_s, mode)).makespan_s


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
        batches = program.table.micro_batches
        assert batches is not None
        size = int(((batches[:, 0] >= 2 * stages) & (batches[:, 0] < 2 * stages + period)).sum())
        end_s = extend_makespan_s(program, program.price_costs(), size, 11 * stages // period)
        assert end_s == simulate(program_of(long, lengths_s, 1e-4, mode)).makespan_s


@pytest.mark.parametrize("name", sorted(PERIODS))
@pytest.mark.parametrize("mode", [Send.EAGER, Send.RENDEZVOUS])
def test_equal_stages_settle(name: ScheduleKind, mode: Send) -> None:
    chunks = SCHEDULES[name].pieces(2)
    sizes = [shorten_schedule(name, 8, 512, chunks, 128, repeats) for repeats in range(1, 9)]
    ends_s = [extended_s(size, [1e-3], 1e-4, mode) for size in sizes if size]
    long = make_schedule(name, 8, 512, chunks)
    assert simulate(program_of(long, [1e-3], 1e-4, mode)).makespan_s in ends_s


@pytest.mark.parametrize("name", ["1f1b", "interleaved"])
@pytest.mark.parametrize("lengths_s", [[1e-3] * 7 + [1.2e-3], [1.5e-3] + [1e-3] * 7], ids=["last", "first"])
def test_pipelines_with_a_slowest_stage_settle_soon(name: str, lengths_s: list[float]) -> None:
    chunks = SCHEDULES[ScheduleKind(name)].pieces(2)
    sizes = shorten_schedule(name, 8, 512, chunks)
    assert sizes is not None
    assert sizes.short.micro_batches + sizes.longer.micro_batches < 256
    long = make_schedule(name, 8, 512, chunks)
    assert extended_s(sizes, lengths_s, 1e-4) == simulate(program_of(long, lengths_s, 1e-4)).makespan_s


def test_a_pipeline_that_still_drifts_has_not_settled() -> None:
    """The last stage is slower by a hundredth, and the others may run far ahead of it."""

    def settle(least: int) -> set[float | None]:
        sizes = [shorten_schedule("zb-h2", 4, 8000, 1, least, repeats) for repeats in range(1, 5)]
        return {extended_s(size, [1e-3, 1e-3, 1e-3, 1.01e-3], 1e-4) for size in sizes if size} - {None}

    assert not settle(0)
    assert len(settle(1600)) == 1


def test_short_schedules_run_as_far_ahead_as_the_long_one() -> None:
    """ZB-H2 holds up to 2 x stages - 1 micro-batches: a schedule of fewer is another one."""
    sizes = shorten_schedule("zb-h2", 16, 512, 1)
    assert sizes is not None
    proved_s = extended_s(sizes, [1e-3] * 16, 1e-4)
    assert proved_s in (None, simulate(program_of(make_schedule("zb-h2", 16, 512, 1), [1e-3] * 16, 1e-4)).makespan_s)


def test_few_micro_batches_are_run_as_they_are() -> None:
    assert shorten_schedule("1f1b", 16, 32, 1) is None
    assert shorten_schedule("gpipe", 8, 100_000, 1) is None
    assert shorten_schedule("dualpipe", 8, 100_000, 2) is None
