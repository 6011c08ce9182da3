"""Workloads through the pipeline: closed forms, breakdowns that sum, and what each condition does."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.layout import Group, Layout
from stepcast.ir.schedules import SCHEDULES, ScheduleKind
from stepcast.ir.work import Collective, CollectiveKind, Recorded, Work
from stepcast.ir.workload import LAST, Block, Layer, Op, Stage, Workload, vary_blocks
from stepcast.simulation.breakdown import stage_times
from stepcast.simulation.chunks import Body
from stepcast.simulation.costs import Prices
from stepcast.simulation.engine import simulate, task_times
from stepcast.simulation.messages import Send
from stepcast.simulation.schedules import make_schedule
from stepcast.simulation.step import HEALTHY, Conditions, Step, build_step
from stepcast.simulation.timeline import timeline_of

SIZE_S = 1e-9  # seconds per byte of every collective here


def seconds(work: Work) -> float:
    if isinstance(work, Recorded):
        return work.duration_s
    assert isinstance(work, Collective)
    return work.size_bytes * SIZE_S


def layer(forward_s: float, gradient_s: float, weight_s: float, *ops: Op) -> Layer:
    return Layer(
        "layer", (Op("", Recorded(forward_s)), *ops), (Op("", Recorded(gradient_s)),), (Op("", Recorded(weight_s)),)
    )


def workload(*layers: Layer, pp: int, micro_batches: int, vpp: int = 1) -> Workload:
    return Workload((Stage((Block(layers, repeat=vpp),)),), Layout(pp=pp, vpp=vpp), micro_batches)


def run(
    work: Workload, name: str, message_s: float = 0.0, conditions: Conditions = HEALTHY, send: Send = Send.EAGER
) -> Step:
    chunks = SCHEDULES[ScheduleKind(name)].pieces(work.layout.vpp)
    schedule = make_schedule(name, work.layout.pp, work.micro_batches, chunks)
    return build_step(work, schedule, Prices(seconds), message_s, conditions=conditions, send=send)


def simulated_s(step: Step) -> float:
    return simulate(step.program, step.seconds).makespan_s


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 4), (4, 4), (8, 32)])
def test_bubble_share_of_gpipe_and_1f1b(name: str, stages: int, micro_batches: int) -> None:
    """(p - 1) / (m + p - 1) of the step: Narayanan et al. 2021, section 2.2."""
    step = run(workload(layer(1.0, 1.0, 1.0), pp=stages, micro_batches=micro_batches), name)
    result = simulate(step.program, step.seconds)
    for stage in stage_times(step, result):
        assert stage.bubble_s / result.makespan_s == pytest.approx(
            (stages - 1) / (micro_batches + stages - 1), abs=1e-9
        )


@pytest.mark.parametrize(("stages", "micro_batches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 16, 4)])
def test_bubble_of_interleaving_relative_to_ideal(stages: int, micro_batches: int, chunks: int) -> None:
    """(p - 1) / (v m) of the ideal time: Narayanan et al. 2021, section 2.2."""
    step = run(workload(layer(1.0, 1.0, 1.0), pp=stages, micro_batches=micro_batches, vpp=chunks), "interleaved")
    result = simulate(step.program, step.seconds)
    ideal_s = 3.0 * micro_batches * chunks
    assert (result.makespan_s - ideal_s) / ideal_s == pytest.approx((stages - 1) / (chunks * micro_batches), abs=1e-9)


def test_blocking_collectives_are_exposed_in_full_and_others_hidden() -> None:
    reduce = Collective(CollectiveKind.ALL_REDUCE, 500_000_000, Group.TP)
    for blocking, exposed_s in ((True, 2.0), (False, 0.0)):
        step = run(workload(layer(1.0, 1.0, 1.0, Op("reduce", reduce, blocking)), pp=1, micro_batches=4), "1f1b")
        (stage,) = stage_times(step, simulate(step.program, step.seconds))
        assert stage.communication_s[Group.TP] == pytest.approx(2.0)
        assert stage.exposed_s[Group.TP] == pytest.approx(exposed_s)


def test_communication_after_the_last_computation_is_exposed() -> None:
    reduce = Op("reduce", Collective(CollectiveKind.ALL_REDUCE, 500_000_000, Group.DP), blocking=False)
    last = Layer("layer", (Op("", Recorded(1.0)),), (Op("", Recorded(1.0)),), (Op("", Recorded(1.0)), reduce))
    step = run(workload(last, pp=1, micro_batches=1), "1f1b")
    result = simulate(step.program, step.seconds)
    (stage,) = stage_times(step, result)
    assert result.makespan_s == pytest.approx(3.5)
    assert stage.exposed_s[Group.DP] == pytest.approx(0.5)
    assert stage.bubble_s == 0.0


def test_a_named_wait_holds_an_op_until_the_communication_it_needs() -> None:
    gather = Op("gather", Collective(CollectiveKind.ALL_GATHER, 3_000_000_000, Group.DP), blocking=False)
    layers = (
        Layer("prefetch", (Op("", Recorded(1.0)), gather)),
        Layer("beside", (Op("", Recorded(1.0)),)),
        Layer("needs it", (Op("", Recorded(1.0), after=("gather",)),)),
    )
    step = run(workload(*layers, pp=1, micro_batches=1), "1f1b")
    assert simulate(step.program, step.seconds).makespan_s == pytest.approx(1.0 + 3.0 + 1.0)


def test_the_first_micro_batch_may_differ() -> None:
    stage = Stage((Block((layer(1.0, 1.0, 1.0),)),), varied=((0, (Block((layer(5.0, 1.0, 1.0),)),)),))
    step = run(Workload((stage,), Layout(), 4), "1f1b")
    assert simulate(step.program, step.seconds).makespan_s == pytest.approx(4 * 3.0 + 4.0)


def test_stages_meet_for_the_embedding() -> None:
    meet = Layer(
        "embedding", (Op("all-reduce", Collective(CollectiveKind.ALL_REDUCE, 1_000_000_000, Group.EMBEDDING)),)
    )
    stage = Stage((Block((layer(1.0, 1.0, 1.0),)),), epilogue=(meet,))
    step = run(Workload((stage,), Layout(pp=4), 4), "1f1b")
    result = simulate(step.program, step.seconds)
    # The first stage ends its backward last, at 3 (m + p - 1); the last stage waits for it.
    assert result.makespan_s == pytest.approx(3 * 7 + 1.0)
    middle = stage_times(step, result)[1]
    assert middle.exposed_s[Group.EMBEDDING] == 0.0


def test_slow_stages_and_groups() -> None:
    plain = workload(layer(1.0, 1.0, 1.0), pp=4, micro_batches=8)
    healthy = simulated_s(run(plain, "1f1b"))
    slow = simulated_s(run(plain, "1f1b", conditions=Conditions({2: 2.0})))
    assert slow > healthy
    assert slow >= 2.0 * 3.0 * 8
    with pytest.raises(ValueError, match="slow-down"):
        Conditions({0: 0.0})


@pytest.mark.parametrize("send", [Send.EAGER, Send.RENDEZVOUS, Send.BLOCKING])
def test_messages_cost_time(send: Send) -> None:
    plain = workload(layer(1.0, 1.0, 1.0), pp=4, micro_batches=8)
    step = run(plain, "1f1b", message_s=0.25, send=send)
    result = simulate(step.program, step.seconds)
    assert result.makespan_s > simulated_s(run(plain, "1f1b"))
    times = stage_times(step, result)
    for stage in times:
        assert stage.total_s == pytest.approx(result.makespan_s, rel=1e-12)


def test_whole_model_bodies_are_split_over_the_stages() -> None:
    work = Workload((Stage((Block((layer(1.0, 1.0, 1.0),), repeat=8),)),), Layout(pp=4), 4)
    schedule = make_schedule("1f1b", 4, 4, 1)
    step = build_step(work, schedule, Prices(seconds), 0.0, body=Body.MODEL)
    assert simulate(step.program, step.seconds).makespan_s == pytest.approx(2 * 3.0 * (4 + 3))
    with pytest.raises(ValueError, match="cannot be split"):
        build_step(work, make_schedule("1f1b", 16, 4, 1), Prices(seconds), 0.0, body=Body.MODEL)


SECONDS = st.floats(0.001, 10.0)
OPS = st.builds(
    lambda kind, size, group, blocking: Op(f"{group}", Collective(kind, size, group), blocking),
    st.sampled_from(list(CollectiveKind)),
    st.integers(0, 5_000_000_000),
    st.sampled_from([Group.TP, Group.DP, Group.EP]),
    st.booleans(),
)
LAYERS = st.lists(
    st.builds(lambda f, i, w, ops: layer(f, i, w, *ops), SECONDS, SECONDS, SECONDS, st.lists(OPS, max_size=3)),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=60)
@given(
    LAYERS, st.sampled_from([1, 2, 4]), st.integers(4, 8), st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.floats(0, 1)
)
def test_every_stage_accounts_for_the_whole_step(
    layers: list[Layer], stages: int, micro_batches: int, name: str, message_s: float
) -> None:
    work = workload(*layers, pp=stages, micro_batches=micro_batches)
    step = run(work, name, message_s=message_s)
    result = simulate(step.program, step.seconds)
    busy_s = micro_batches * sum(
        op.work.duration_s
        for each in layers
        for op in (*each.forward, *each.input_gradient, *each.weight_gradient)
        if isinstance(op.work, Recorded)
    )
    for stage in stage_times(step, result):
        assert stage.total_s == pytest.approx(result.makespan_s, rel=1e-9)
        assert stage.busy_s == pytest.approx(busy_s, rel=1e-9)
        assert stage.bubble_s >= -1e-9 * result.makespan_s
        for group, exposed_s in stage.exposed_s.items():
            if group is not Group.PP:
                assert -1e-12 <= exposed_s <= stage.communication_s[group] * (1 + 1e-9) + 1e-12
    assert result.makespan_s >= busy_s * (1 - 1e-12)


@settings(deadline=None, max_examples=30)
@given(LAYERS, st.sampled_from([1, 2, 4]))
def test_timelines_hold_every_task_without_overlap_in_a_lane(layers: list[Layer], stages: int) -> None:
    step = run(workload(*layers, pp=stages, micro_batches=4), "1f1b", message_s=0.1)
    result = simulate(step.program, step.seconds)
    timeline = timeline_of(step, task_times(result), Layout(pp=stages))
    assert math.isclose(timeline.end_s.max(), result.makespan_s, rel_tol=1e-9)
    for lane in range(len(timeline.lanes)):
        rows = timeline.lane_of == lane
        start, end = timeline.start_s[rows], timeline.end_s[rows]
        order = start.argsort()
        assert (start[order][1:] >= end[order][:-1] - 1e-9).all()


def test_an_eager_host_holds_up_short_work_and_hides_behind_long_work() -> None:
    def issue_s(work: Work, backward: bool) -> float:
        return 2.0 if backward else 1.0

    for op_s, step_s, host_s in ((5.0, 1.0 + 4 * 3 * 5.0, 1.0), (0.1, 4 * (1 + 2 + 2) + 0.1, 4 * 5 - 4 * 0.3 + 0.1)):
        work = workload(layer(op_s, op_s, op_s), pp=1, micro_batches=4)
        step = build_step(work, make_schedule("1f1b", 1, 4, 1), Prices(seconds, issue_s), 0.0)
        result = simulate(step.program, step.seconds)
        (stage,) = stage_times(step, result)
        assert result.makespan_s == pytest.approx(step_s)
        assert stage.host_s == pytest.approx(host_s)
        assert stage.total_s == pytest.approx(result.makespan_s)


def chains_of(step: Step, name: str) -> set[int]:
    """The chains of pieces that calls of the *name* run."""
    program = step.program
    called = zip(program.segment.tolist(), program.table.segment.tolist(), strict=True)
    return {segment for segment, number in called if program.names[number] == name}


def test_a_micro_batch_that_differs_backward_runs_the_usual_forward() -> None:
    usual = layer(1.0, 2.0, 3.0)
    last = replace(usual, weight_gradient=(Op("", Recorded(5.0)),))
    body = (Block((usual,), 8),)
    stage = Stage(body, varied=((LAST, vary_blocks(body, {2: last})),))
    step = run(Workload((stage,), Layout(pp=2), 4), "1f1b", message_s=1.0)
    # The first stage sends what the last receives; backward each has one more, of its last micro-batch.
    assert (len(chains_of(step, "F.0")), len(chains_of(step, "B.0"))) == (2, 4)


def test_chunks_that_run_the_same_share_what_they_run_but_not_their_names() -> None:
    work = workload(layer(1.0, 2.0, 3.0), pp=3, micro_batches=6, vpp=4)
    step = run(work, "interleaved", message_s=1.0)
    named = [f"F.{chunk}" for chunk in range(4)]
    # Those in the middle send on, the last of the model does not.
    assert len(set().union(*(chains_of(step, name) for name in named))) == 2
    timeline = timeline_of(step, task_times(simulate(step.program, step.seconds)), work.layout)
    assert {detail["slot"] for detail in timeline.details} >= set(named)
