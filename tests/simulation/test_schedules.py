"""Schedules against what their papers say of them: bubble and activations held."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.schedules import SCHEDULES, Pairs, PiecePlacement, Pipeline, ScheduleKind
from stepcast.simulation.engine import simulate
from stepcast.simulation.schedule import ChunkPlace, Schedule, ScheduleError, Slot, SlotAction
from stepcast.simulation.schedule_file import check_schedule
from stepcast.simulation.schedules import interleaved, make_schedule
from tests.simulation.uniform import spans_s, uniform_program

pytestmark = pytest.mark.slow

EXACT = 1e-9
SIZES = ((1, 1), (1, 5), (2, 2), (2, 7), (4, 4), (4, 8), (4, 32), (8, 24), (16, 64))
DURATIONS = ((1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (2.5e-3, 3.1e-3, 2.9e-3), (0.4, 0.9, 0.2))


def bubble_s(name: str, stages: int, batches: int, chunks: int, seconds: tuple[float, float, float]) -> float:
    """The step less the time that one stage works."""
    program = uniform_program(make_schedule(name, stages, batches, chunks), *seconds)
    return simulate(program).makespan_s - float(program.lane_busy_s()[0, 0])


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("seconds", DURATIONS)
@pytest.mark.parametrize(("stages", "batches"), SIZES)
def test_bubble_of_gpipe_and_1f1b(name: str, stages: int, batches: int, seconds: tuple[float, float, float]) -> None:
    """(p - 1) / (m + p - 1) of the step: Huang et al. (2019), section 2.3; Narayanan et al. (2021), section
    2.2."""
    program = uniform_program(make_schedule(name, stages, batches, 1), *seconds)
    step_s = simulate(program).makespan_s
    idle = 1 - program.lane_busy_s()[0, 0] / step_s
    assert idle == pytest.approx((stages - 1) / (batches + stages - 1), abs=EXACT)
    assert step_s == pytest.approx((batches + stages - 1) * sum(seconds), rel=EXACT)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize("seconds", DURATIONS)
@pytest.mark.parametrize(("stages", "batches"), [(2, 2), (2, 8), (4, 4), (4, 12), (8, 8), (8, 64), (16, 32)])
def test_bubble_of_interleaved(stages: int, batches: int, chunks: int, seconds: tuple[float, float, float]) -> None:
    """(p - 1) / (v m) of the ideal time: Narayanan et al. (2021), section 2.2.2."""
    ideal_s = batches * chunks * sum(seconds)
    bubble = bubble_s("interleaved", stages, batches, chunks, seconds) / ideal_s
    assert bubble == pytest.approx((stages - 1) / (chunks * batches), abs=EXACT)


@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0), (1.0, 1.3, 0.7), (0.4, 0.9, 0.2), (3e-3, 3e-3, 2e-3)])
@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 40), (16, 40)])
def test_bubble_of_zb_h1_and_h2(stages: int, batches: int, seconds: tuple[float, float, float]) -> None:
    """(p - 1)(F + B - W) and (p - 1)(F + B - 2 W), B being the input gradient: Qi et al. (2023), table 2; W
    <= F, B.

    Of the first stage from its first op to its last: the stages do not wait for each other before the
    optimizer.
    """
    forward_s, input_s, weight_s = seconds
    for name, held in (("zb-h1", 1), ("zb-h2", 2)):
        program = uniform_program(make_schedule(name, stages, batches, 1), *seconds)
        bubble = spans_s(program) - program.lane_busy_s()[:, 0]
        expected = (stages - 1) * (forward_s + input_s - held * weight_s)
        assert bubble.max() == pytest.approx(expected, rel=EXACT, abs=EXACT * forward_s)


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
@pytest.mark.parametrize(("stages", "batches"), [(1, 3), (2, 4), (4, 8), (4, 16), (8, 15), (8, 40), (16, 40)])
def test_no_bubble_when_the_three_passes_are_equal(name: str, stages: int, batches: int) -> None:
    """Qi et al. (2023), figures 3 and 9: with F = B = W every stage works without a pause."""
    program = uniform_program(
        make_schedule(name, stages, batches, SCHEDULES[ScheduleKind(name)].pieces(1)), 0.3, 0.3, 0.3
    )
    assert spans_s(program) == pytest.approx(program.lane_busy_s()[:, 0], rel=EXACT)


@pytest.mark.parametrize("overlapped_s", [2.0, 1.7, 1.5])
@pytest.mark.parametrize("weight_s", [0.3, 0.5, 1.0])
@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 8), (4, 20), (8, 20), (16, 64)])
def test_bubble_of_dualpipe(stages: int, batches: int, weight_s: float, overlapped_s: float) -> None:
    """(p / 2 - 1)(F&B + B - 3 W): DeepSeek-V3 report (2024), table 2; B is the whole backward, B - W = F."""
    backward_s = 1.0 + weight_s
    both_s = overlapped_s / 2.0 * (1.0 + backward_s)  # never shorter than the backward alone
    schedule = make_schedule("dualpipe", stages, batches, 2)
    program = uniform_program(schedule, 1.0, 1.0, weight_s, both_s)
    # Stages overlap unequal numbers of pairs; the formula is that of the stage with the least to do.
    bubble = simulate(program).makespan_s - program.lane_busy_s()[:, 0].min()
    assert bubble == pytest.approx((stages / 2 - 1) * (both_s + backward_s - 3 * weight_s), abs=EXACT)


PEAKS: dict[str, Callable[[int, int, int, int], int]] = {
    "gpipe": lambda p, m, v, s: m * v,
    "1f1b": lambda p, m, v, s: min(p - s, m),
    "interleaved": lambda p, m, v, s: min(2 * (p - s - 1) + (v - 1) * p + 1, m * v),
    "zb-h1": lambda p, m, v, s: min(p, m),
    "zb-h2": lambda p, m, v, s: min(2 * p - 1, m),
    "zb-v": lambda p, m, v, s: min(2 * p, 2 * m),
    "v-half": lambda p, m, v, s: sum(SCHEDULES[ScheduleKind.V_HALF].held(Pipeline(p, 2, m), s)),
    "v-min": lambda p, m, v, s: sum(SCHEDULES[ScheduleKind.V_MIN].held(Pipeline(p, 2, m), s)),
    "dualpipe": lambda p, m, v, s: p + 1,
}
"""Chunk activations held at most by stage s. Sources: the papers named in the modules (1F1B p - s;
interleaved as Megatron-LM's warm-up counts; ZB table 2: p and 2 p - 1; ZB-V as 1F1B, two chunks each;
DualPipe p + 1)."""


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 8), (4, 16), (8, 16), (8, 32), (16, 64)])
def test_schedules_are_sound_and_hold_what_is_published(name: str, stages: int, batches: int) -> None:
    chunks = SCHEDULES[ScheduleKind(name)].pieces(3 if name == "interleaved" else 1)
    schedule = make_schedule(name, stages, batches, chunks)
    check_schedule(schedule)
    peaks = tuple(PEAKS[name](stages, batches, chunks, stage) for stage in range(stages))
    assert schedule.count_in_flight() == peaks


@pytest.mark.parametrize("kind", ScheduleKind)
@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 8), (4, 16), (8, 32)])
def test_orders_are_as_the_table_says(kind: ScheduleKind, stages: int, batches: int) -> None:
    facts = SCHEDULES[kind]
    chunks = max(facts.fewest_chunks, facts.most_chunks or 2)
    schedule = make_schedule(kind, stages, batches, facts.pieces(chunks))
    assert schedule.placement is facts.placement
    kinds = {slot.kind for order in schedule.orders for slot in order}
    assert (SlotAction.WEIGHT in kinds) == facts.splits_backward
    assert any(slot.with_next for order in schedule.orders for slot in order) == (facts.pairs is Pairs.OWN)
    along = [facts.pieces_of_stage(stage, stages, chunks) for stage in range(stages)]
    for stage in range(stages):
        for chunk, piece in enumerate(along[stage]):
            place = schedule.following(ChunkPlace(stage, chunk))
            assert place is None or along[place.stage][place.chunk] == piece + 1
    held = [facts.held(Pipeline(stages, chunks, batches), stage) for stage in range(stages)]
    assert schedule.count_in_flight() == tuple(sum(min(batches, one) for one in each) for each in held)
    if facts.before_input_gradient is not None:
        held = [facts.before_input_gradient(Pipeline(stages, chunks, batches), at) for at in range(stages)]
        assert schedule.count_in_flight(SlotAction.INPUT) == tuple(min(batches, one) for (one,) in held)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 7), st.integers(1, 20), st.integers(1, 4))
def test_every_schedule_that_can_be_made_runs(name: str, stages: int, batches: int, chunks: int) -> None:
    try:
        schedule = make_schedule(name, stages, batches, SCHEDULES[ScheduleKind(name)].pieces(chunks))
    except ScheduleError:
        return
    check_schedule(schedule)
    program = uniform_program(schedule, 1.0, 1.0, 0.5)
    busy_s = program.lane_busy_s()[:, 0]
    assert busy_s == pytest.approx(busy_s[0])
    assert simulate(program).makespan_s >= busy_s[0] * (1 - EXACT)


@pytest.mark.parametrize(
    ("stages", "batches", "group"), [(4, 6, None), (4, 9, None), (4, 14, 5), (8, 20, 12), (2, 5, 3)]
)
def test_interleaved_when_the_stages_do_not_divide_the_micro_batches(
    stages: int, batches: int, group: int | None
) -> None:
    schedule = interleaved(stages, batches, 2, group)
    check_schedule(schedule)
    program = uniform_program(schedule, 1.0, 1.0, 1.0)
    bubble = simulate(program).makespan_s - program.lane_busy_s()[0, 0]
    assert bubble >= (stages - 1) * 3.0 - EXACT


@pytest.mark.parametrize(
    ("name", "stages", "batches", "chunks", "words"),
    [
        ("2f2b", 2, 4, 1, "unknown schedule"),
        ("1f1b", 2, 4, 2, "runs 1 chunk"),
        ("1f1b", 0, 4, 1, "at least 1"),
        ("interleaved", 4, 8, 1, "at least 2 chunks"),
        ("interleaved", 4, 3, 2, "at least 1 x pp = 4, not 3: use 4"),
        ("zb-v", 4, 8, 1, "runs 2 chunk"),
        ("zb-h1", 4, 8, 2, "runs 1 chunk"),
        ("dualpipe", 3, 8, 2, "a multiple of 2 stages"),
        ("dualpipe", 4, 6, 2, "at least 2 x pp = 8, not 6: use 8"),
    ],
)
def test_what_cannot_be_scheduled_says_why(name: str, stages: int, batches: int, chunks: int, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        make_schedule(name, stages, batches, chunks)


@pytest.mark.parametrize(("group", "words"), [(3, "must be between"), (9, "must be between"), (7, "leave 1")])
def test_a_group_that_megatron_refuses_is_refused(group: int, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        interleaved(4, 8, 2, group)


def test_routes_forward_and_back_are_each_other() -> None:
    for placement, chunks in ((PiecePlacement.LOOP, 3), (PiecePlacement.V, 2), (PiecePlacement.TWO_WAY, 2)):
        schedule = Schedule.of("any", 4, 8, chunks, placement, ((),) * 4)
        places = [ChunkPlace(stage, chunk) for stage in range(4) for chunk in range(chunks)]
        for place in places:
            following, previous = schedule.following(place), schedule.previous(place)
            assert following is None or schedule.previous(following) == place
            assert previous is None or schedule.following(previous) == place
        starts = [place for place in places if schedule.previous(place) is None]
        assert len(starts) == (2 if placement is PiecePlacement.TWO_WAY else 1)


def _orders(*stages: str) -> Schedule:
    kinds = {kind.letter: kind for kind in SlotAction}
    orders = tuple(tuple(Slot(kinds[word[0]], int(word[1:])) for word in text.split()) for text in stages)
    return Schedule.of("by hand", len(orders), 2, 1, PiecePlacement.LOOP, orders)


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (_orders("F0 F1 B0"), "micro-batch 1 of chunk 0 has F"),
        (_orders("F0 F1 B0 B1 B1"), "B1 runs twice"),
        (_orders("F0 F1 B0 B2"), "no micro-batch and chunk"),
        (_orders("F0 B1 F1 B0"), "B1 comes before F1"),
        (_orders("F0 F1 W0 I0 B1"), "W0 comes before I0"),
        (_orders("F0 F1 I0 B0 B1"), "has FBI"),
        (_orders("F0 B0 F1 B1", "F1 F0 B0 B1"), "deadlock: stage 0 waits at B0 for B0 of stage 1"),
    ],
)
def test_the_checker_finds(schedule: Schedule, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        check_schedule(schedule)
