"""Messages between stages, work once per step, and overlap: small programs with their times worked out by
hand."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.simulation.engine import simulate, task_times
from stepcast.simulation.messages import Messages, Send, SlotKind
from stepcast.simulation.pipeline import Round, SlotTable, pipeline_program
from stepcast.simulation.program import Program, ProgramBuilder
from stepcast.simulation.schedule import SlotAction
from stepcast.simulation.schedules import make_schedule
from stepcast.simulation.segments import ProgramError, Segment, TimedOp
from stepcast.simulation.timeline import critical_path
from stepcast.simulation.unfolded import simulate_unfolded
from tests.simulation.uniform import LANES, uniform_program, uniform_segments

pytestmark = pytest.mark.slow


def messages(mode: Send, seconds: float) -> Messages:
    return Messages(seconds, mode)


def spans(program: Program) -> dict[tuple[int, str, int], tuple[float, float]]:
    """(rank, op, how many of that name came before it) -> start and end; the ops that take time."""
    times = task_times(simulate(program))
    found: dict[tuple[int, str, int], tuple[float, float]] = {}
    for call in range(program.calls):
        for op, name in enumerate(program.segments[program.segment[call]].names):
            task = program.task_start[call] + op
            start, end = float(times.start_s[task]), float(times.end_s[task])
            if end > start:
                rank = int(program.rank[call])
                count = sum(key[:2] == (rank, name) for key in found)
                found[rank, name, count] = start, end
    return found


def test_eager_messages_take_the_senders_lane() -> None:
    """Two stages, two micro-batches, F = 1, B = 2, half a second per message."""
    found = spans(uniform_program(make_schedule("1f1b", 2, 2, 1), 1, 1, 1, messages=messages(Send.EAGER, 0.5)))
    assert found[0, "F", 1] == (1, 2)
    assert found[0, "send", 0] == (1, 1.5)
    assert found[1, "F", 0] == (1.5, 2.5)
    assert found[1, "B", 0] == (2.5, 4.5)
    assert found[1, "send", 0] == (4.5, 5)
    assert found[0, "B", 0] == (5, 7)
    assert found[1, "F", 1] == (4.5, 5.5)
    assert found[1, "B", 1] == (5.5, 7.5)
    assert found[0, "B", 1] == (8, 10)


def test_eager_messages_queue_in_their_lane() -> None:
    found = spans(uniform_program(make_schedule("gpipe", 2, 3, 1), 1, 1, 1, messages=messages(Send.EAGER, 1.5)))
    assert [found[0, "send", number] for number in range(3)] == [(1, 2.5), (2.5, 4), (4, 5.5)]


def test_rendezvous_waits_for_a_receiver_that_is_busy_but_the_sender_goes_on() -> None:
    """GPipe, a second stage three times as slow: its receive is posted when the forward before it begins."""

    def segment_of(stage: int, phases: tuple[SlotKind, ...]) -> Segment:
        return uniform_segments(3.0 if stage else 1.0, 1.0, 1.0)(stage, phases)

    program = pipeline_program(make_schedule("gpipe", 2, 3, 1), LANES, segment_of, messages(Send.RENDEZVOUS, 0.5))
    assert program.table.rank_names == ("stage 0", "stage 1", "activations 0 to 1", "gradients 1 to 0")
    found = spans(program)
    assert [found[0, "F", number] for number in range(3)] == [(0, 1), (1, 2), (2, 3)]
    assert found[2, "message", 0] == (1, 1.5)
    assert found[1, "F", 0] == (1.5, 4.5)
    # Posted at 1.5, when the first forward began; the sender was ready at 2.
    assert found[2, "message", 1] == (2, 2.5)
    # Posted at 4.5, when the second forward began; the sender has been ready since 3.
    assert found[2, "message", 2] == (4.5, 5)
    assert found[1, "F", 2] == (7.5, 10.5)


def test_blocking_messages_stop_both_sides() -> None:
    """The same stages: the sender cannot start its next forward while its message waits."""

    def segment_of(stage: int, phases: tuple[SlotKind, ...]) -> Segment:
        return uniform_segments(3.0 if stage else 1.0, 1.0, 1.0)(stage, phases)

    found = spans(pipeline_program(make_schedule("gpipe", 2, 3, 1), LANES, segment_of, messages(Send.BLOCKING, 0.5)))
    assert found[0, "send", 0] == found[1, "receive", 0] == (1, 1.5)
    assert found[0, "F", 1] == (1.5, 2.5)
    assert found[1, "F", 0] == (1.5, 4.5)
    assert found[0, "send", 1] == found[1, "receive", 1] == (4.5, 5)
    assert found[0, "F", 2] == (5, 6)


NO_BUFFERS = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "v-half": 2, "v-min": 2}
"""The schedules that run with blocking messages, and their chunks."""


@pytest.mark.parametrize("mode", Send)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_with_its_messages(name: str, mode: Send) -> None:
    chunks = NO_BUFFERS.get(name) if mode is Send.BLOCKING else SCHEDULES[ScheduleKind(name)].pieces(2)
    if chunks is None:
        with pytest.raises(ProgramError, match="deadlock"):
            simulate(
                uniform_program(
                    make_schedule(name, 4, 12, SCHEDULES[ScheduleKind(name)].pieces(2)),
                    1,
                    1,
                    1,
                    messages=messages(mode, 1),
                )
            )
        return
    schedule = make_schedule(name, 4, 12, chunks)
    free = simulate(uniform_program(schedule, 1, 1, 1)).makespan_s
    for seconds in (0.0, 0.01, 0.4):
        program = uniform_program(schedule, 1, 1, 1, messages=messages(mode, seconds))
        run = simulate(program)
        times = simulate_unfolded(program, compiled=False)
        assert run.makespan_s == pytest.approx(times.makespan_s, rel=1e-12)
        assert run.makespan_s >= free - 1e-9
        assert critical_path(program, times).duration_s.sum() == pytest.approx(run.makespan_s, rel=1e-12)


@pytest.mark.parametrize("name", [name for name, chunks in NO_BUFFERS.items() if chunks == 1])
def test_both_sides_of_a_blocking_message_see_it_at_the_same_time(name: str) -> None:
    found = spans(uniform_program(make_schedule(name, 4, 9, 1), 1, 1.5, 0.5, messages=messages(Send.BLOCKING, 0.3)))
    sends, receives = (sorted(span for key, span in found.items() if key[1] == word) for word in ("send", "receive"))
    assert len(sends) == 2 * 3 * 9
    np.testing.assert_allclose(sends, receives, atol=1e-9)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(["gpipe", "1f1b", "zb-h1", "zb-h2", "interleaved"]), st.floats(0, 2), st.floats(0, 2))
def test_waiting_more_never_helps(name: str, seconds: float, more: float) -> None:
    """Eager is never slower than rendezvous, nor rendezvous than blocking, nor a shorter message than a
    longer."""
    schedule = make_schedule(name, 4, 8, 2 if name == "interleaved" else 1)
    modes = [Send.EAGER, Send.RENDEZVOUS] + [Send.BLOCKING] * (name in NO_BUFFERS)

    def step_s(mode: Send, duration_s: float) -> float:
        return simulate(uniform_program(schedule, 1, 1.5, 0.5, messages=messages(mode, duration_s))).makespan_s

    order = [step_s(mode, seconds) for mode in modes]
    assert all(later >= earlier - 1e-9 for earlier, later in pairwise(order))
    assert all(step_s(mode, seconds + more) >= step_s(mode, seconds) - 1e-9 for mode in modes)


def test_the_turn_of_a_v_costs_no_message() -> None:
    schedule = make_schedule("zb-v", 2, 4, 2)
    table = SlotTable(schedule, Send.EAGER, ())
    sending = {
        (slot.kind, stage, slot.chunk)
        for stage, code, frame in zip(table.stage.tolist(), table.near[0].tolist(), table.frame.tolist(), strict=True)
        for slot in table.codes[code]
        if table.frames[frame].context.own[0].sends
    }
    assert sending == {
        (SlotAction.FORWARD, 0, 0),
        (SlotAction.FORWARD, 1, 1),
        (SlotAction.INPUT, 0, 1),
        (SlotAction.INPUT, 1, 0),
    }


@pytest.mark.parametrize("mode", Send)
def test_calls_carry_their_micro_batches(mode: Send) -> None:
    """In the order of the schedule, pairs with both; messages carry that of their sender."""
    schedule = make_schedule("1f1b" if mode is Send.BLOCKING else "dualpipe", 4, 8, 1 if mode is Send.BLOCKING else 2)
    program = uniform_program(schedule, 1, 1, 1, messages=messages(mode, 0.1))
    assert program.table.micro_batches is not None
    for stage, order in enumerate(schedule.orders):
        calls = program.table.micro_batches[slice(*program.table.rank_start[stage : stage + 2])]
        assert calls[calls >= 0].tolist() == [slot.micro_batch for slot in order]
    for batches in np.split(program.table.micro_batches, program.table.rank_start[1:-1])[schedule.stages :]:
        assert len(np.unique(batches[:, 0])) == len(batches)
        assert (batches[:, 1] == -1).all()


def test_tasks_know_their_calls_and_lanes() -> None:
    program = uniform_program(make_schedule("1f1b", 2, 3, 1), 1, 1, 1, messages=messages(Send.EAGER, 0.1))
    calls, lanes = program.task_calls(), program.task_lanes()
    for task, (call, lane) in enumerate(zip(calls, lanes, strict=True)):
        shape = program.segments[program.segment[call]].shape
        assert shape.lane[task - program.task_start[call]] == lane


def test_messages_need_lanes_of_their_own_when_both_sides_wait() -> None:
    with pytest.raises(ProgramError, match="five different lanes"):
        Messages(0.0, Send.BLOCKING, receive_lanes=(1, 2))


def test_first_and_last_phases_are_told_apart() -> None:
    asked: list[tuple[int, tuple[SlotKind, ...]]] = []
    uniform = uniform_segments(1, 1, 1)

    def segment_of(stage: int, phases: tuple[SlotKind, ...]) -> Segment:
        asked.append((stage, phases))
        return uniform(stage, phases)

    pipeline_program(make_schedule("1f1b", 1, 3, 1), LANES, segment_of)
    assert sorted(asked) == sorted(
        (0, (SlotKind(kind, 0, first, last),))
        for kind in (SlotAction.FORWARD, SlotAction.BACKWARD)
        for first, last in ((True, False), (False, False), (False, True))
    )


def test_gradient_reduction_overlaps_the_backward_and_the_optimizer_waits_for_it() -> None:
    """The last backward starts two buckets, of 1.5 s each, after 1 s and 2 s; the optimizer awaits the
    lane."""
    lanes = ("compute", "dp")

    def segment_of(stage: int, phases: tuple[SlotKind, ...]) -> Segment:
        (phase,) = phases
        if phase.kind is SlotAction.FORWARD:
            return Segment.of("forward", (TimedOp("F", 1.0, inputs=(0,)),), lanes=2, inputs=1, outputs=(0,))
        ops = [TimedOp("B", 1.0, inputs=(0,)), TimedOp("B", 1.0)]
        if phase.last:
            ops[1:] = [TimedOp("reduce", 1.5, 1, after=(0,)), TimedOp("B", 1.0), TimedOp("reduce", 1.5, 1, after=(2,))]
        return Segment.of("backward", ops, lanes=2, inputs=1, outputs=(len(ops) - 1 - phase.last,))

    optimizer = Segment.of("optimizer", (TimedOp("step", 0.25, lanes=(1,)),), lanes=2)
    program = pipeline_program(make_schedule("1f1b", 1, 2, 1), lanes, segment_of, after=(Round.of({0: optimizer}),))
    found = spans(program)
    assert found[0, "reduce", 0] == (5, 6.5)
    assert found[0, "reduce", 1] == (6.5, 8)
    assert found[0, "B", 3] == (5, 6)
    assert found[0, "step", 0] == (8, 8.25)
    path = critical_path(program, task_times(simulate(program)))
    names = [program.segments[program.segment[call]].names[op] for call, op in zip(path.call, path.op, strict=True)]
    assert names == ["F", "B", "B", "F", "B", "reduce", "reduce", "step"]


def test_stages_meet_once_per_step() -> None:
    """The first and the last stage reduce the embedding together: both start when the later of them is
    there."""
    post = Segment.of("post", (TimedOp("post", 0.0, 1, lanes=(0,)),), lanes=5, outputs=(0,))
    reduce = Segment.of("embedding", (TimedOp("reduce", 0.5, 1, inputs=(0,)),), lanes=5, inputs=1)
    rounds = (Round.of({0: post, 3: post}), Round.of({0: reduce, 3: reduce}, {0: (3,), 3: (0,)}))
    schedule = make_schedule("1f1b", 4, 8, 1)
    program = pipeline_program(schedule, LANES, uniform_segments(1, 1, 1), after=rounds)
    found = spans(program)
    last = max(end for key, (_, end) in found.items() if key[1] == "B")
    assert found[0, "reduce", 0] == found[3, "reduce", 0] == (last, last + 0.5)
    with pytest.raises(ProgramError, match="takes no part"):
        pipeline_program(schedule, LANES, uniform_segments(1, 1, 1), after=(rounds[1],))


def test_joining_segments_changes_nothing() -> None:
    """One call of two segments joined is the same as two calls."""
    one = Segment.of("one", (TimedOp("a", 1.0), TimedOp("b", 2.0, 1, after=(0,))), lanes=2, outputs=(1,))
    two = Segment.of("two", (TimedOp("c", 0.5, inputs=(0,)), TimedOp("d", 1.0, 1, lanes=(0,))), lanes=2, inputs=1)
    apart, joined = ProgramBuilder(("x", "y"), 1), ProgramBuilder(("x", "y"), 1)
    both = one.then(two, {0: 0})
    for _ in range(3):
        call = apart.call(0, one)
        apart.call(0, two, ((call, 0),))
        joined.call(0, both)
    ends = [task_times(simulate(builder.program())).end_s for builder in (apart, joined)]
    assert ends[0].tolist() == ends[1].tolist()


def test_calls_that_wait_for_each_other_are_an_error() -> None:
    builder = ProgramBuilder(("x",), 2)
    segment = Segment.of("meet", (TimedOp("a", 1.0, inputs=(0,)),), lanes=1, inputs=1, outputs=(0,))
    one, two = builder.call(0, segment), builder.call(1, segment)
    builder.bind(one, 0, (two, 0))
    builder.bind(two, 0, (one, 0))
    for run in (simulate, lambda program: simulate_unfolded(program, compiled=False)):
        with pytest.raises(ProgramError, match=r"deadlock: call 0 of rank 0 \(meet\) waits for call 0 of rank 1"):
            run(builder.program())


@pytest.mark.parametrize(
    ("op", "words"),
    [
        (TimedOp("a", 1.0, 2), "a lane that is not there"),
        (TimedOp("a", 1.0, lanes=(7,)), "a lane that is not there"),
        (TimedOp("a", 1.0, after=(0,)), "not before it"),
        (TimedOp("a", 1.0, inputs=(1,)), "an input that is not there"),
        (TimedOp("a", 1.0, -1), "waits for nothing"),
        (TimedOp("a", 1.0, -1, inputs=(0,)), "nothing waits for it"),
        (TimedOp("a", -1.0), "negative or not finite"),
        (TimedOp("a", float("nan")), "negative or not finite"),
    ],
)
def test_segments_check_themselves(op: TimedOp, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        Segment.of("s", (op,), lanes=2, inputs=1)


def test_a_program_of_nothing_takes_no_time() -> None:
    program = ProgramBuilder(("x",), 2).program()
    assert simulate(program).makespan_s == 0.0
    assert simulate_unfolded(program, compiled=False).makespan_s == 0.0
    assert len(critical_path(program, simulate_unfolded(program, compiled=False))) == 0
