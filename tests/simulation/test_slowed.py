"""What computing loses to communication: as much as runs beside it, and never more."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.group import Group
from stepcast.ir.work import Collective, CollectiveKind, Work
from stepcast.ir.workload import Op
from stepcast.simulation.breakdown import stage_times
from stepcast.simulation.engine import simulate
from stepcast.simulation.schedules.table import make_schedule
from stepcast.simulation.slowed import slowed
from stepcast.simulation.step import HEALTHY, Conditions, Step, build_step
from tests.simulation.test_step import SIZE_S, layer, seconds, workload

SHARE = 0.125


def gather(length_s: float, blocking: bool = False) -> Op:
    return Op("gather", Collective(CollectiveKind.ALL_GATHER, round(length_s / SIZE_S), Group.DP), blocking)


def steps_s(
    *ops: Op, batches: int = 4, schedule: str = "1f1b", pp: int = 1, conditions: Conditions = HEALTHY
) -> tuple[float, float, float, float]:
    """(step, its computing) without and with what computing loses; *ops* stand before 5 s of a forward."""

    def takes(work: Work) -> float:
        return SHARE

    first, rest = layer(1.0, 0.0, 0.0), layer(5.0, 3.0, 3.0)
    forward = (*first.forward, *ops, *rest.forward)
    work = workload(replace(rest, forward=forward), pp=pp, micro_batches=batches)
    order = make_schedule(schedule, pp, batches, 1)
    step = build_step(work, order, seconds, lambda one, two: 0.0, conditions=conditions, takes=takes)
    run = simulate(step.program)
    after = Step(slowed(run), order, step.lanes, step.message_s, step.rounds_before, step.rounds_after)
    second = simulate(after.program)
    parts = [
        sum(stage.compute_s for stage in stage_times(one, result))
        for one, result in ((step, run), (after, second))
    ]
    assert stage_times(after, second)[0].total_s == pytest.approx(second.makespan_s)
    return run.makespan_s, parts[0], second.makespan_s, parts[1]


def test_computing_loses_a_share_of_what_runs_beside_it() -> None:
    step_s, _, slowed_s, _ = steps_s(gather(2.0))
    assert step_s == pytest.approx(4 * 12.0)
    assert slowed_s == pytest.approx(4 * (12.0 + SHARE * 2.0))


def test_a_slow_group_takes_for_longer() -> None:
    slow = Conditions(slow_groups={Group.DP: 2.0})
    assert steps_s(gather(2.0), conditions=slow)[2] == pytest.approx(4 * (12.0 + SHARE * 4.0))


def test_communication_alone_takes_nothing() -> None:
    """Blocking, or beside nothing because a single short computation leaves it alone."""
    blocking = steps_s(gather(2.0, blocking=True))
    assert blocking[:2] == blocking[2:]
    # 100 s of communication for 11 s of computing: all of that is slowed down, and nothing but that.
    step_s, compute_s, slowed_s, slower_s = steps_s(gather(100.0), batches=1)
    assert slower_s == pytest.approx(compute_s + 11 * SHARE)
    assert slowed_s == pytest.approx(step_s)


def test_what_outlasts_its_call_slows_the_next_ones_too() -> None:
    """Two gathers of 9 s from the first second on: beside two forwards and the backward after them."""
    step_s, compute_s, _, slower_s = steps_s(gather(9.0), batches=2, schedule="gpipe")
    assert (step_s, compute_s) == (24.0, 24.0)
    assert slower_s == pytest.approx(24.0 + SHARE * 18.0)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.floats(0.01, 30.0), min_size=1, max_size=3),
    batches=st.integers(1, 6),
    pp=st.integers(1, 3),
    schedule=st.sampled_from(("gpipe", "1f1b", "zb-h1")),
)
def test_the_loss_has_a_limit(lengths: list[float], batches: int, pp: int, schedule: str) -> None:
    ops = [gather(length_s) for length_s in lengths]
    step_s, compute_s, slowed_s, slower_s = steps_s(*ops, batches=batches, schedule=schedule, pp=pp)
    assert step_s <= slowed_s * (1 + 1e-12)
    assert slowed_s <= step_s * (1 + SHARE) * (1 + 1e-12)
    assert compute_s <= slower_s * (1 + 1e-12)
    assert slower_s <= compute_s * (1 + SHARE) * (1 + 1e-12)
