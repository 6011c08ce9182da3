"""What computing loses to communication: as much as runs beside it, and never more."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.ir.layout import Group
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.ir.workload import Block, Op, Stage, Workload
from stepcast.simulation.breakdown import stage_times
from stepcast.simulation.costs import Prices
from stepcast.simulation.engine import simulate
from stepcast.simulation.schedules import make_schedule
from stepcast.simulation.step import HEALTHY, Conditions, build_step
from tests.simulation.test_step import SIZE_S, layer, seconds, workload

SHARE = 0.125


def gather(length_s: float, blocking: bool = False) -> Op:
    return Op("gather", Collective(CollectiveKind.ALL_GATHER, round(length_s / SIZE_S), Group.DP), blocking)


def ran(
    work: Workload, batches: int, schedule: str, conditions: Conditions = HEALTHY
) -> tuple[float, float, float, float]:
    """(step, its computing) without and with what computing loses."""
    order = make_schedule(schedule, work.layout.pp, batches, 1)
    found: list[float] = []
    for takes in (None, lambda kind, group: SHARE):
        step = build_step(work, order, Prices(seconds, takes=takes), 0.0, conditions=conditions)
        run = simulate(step.program, step.seconds)
        stages = stage_times(step, run)
        assert stages[0].total_s == pytest.approx(run.makespan_s)
        found += [run.makespan_s, sum(stage.compute_s for stage in stages)]
    step_s, compute_s, slowed_s, slower_s = found
    return step_s, compute_s, slowed_s, slower_s


def steps_s(
    *ops: Op, batches: int = 4, schedule: str = "1f1b", pp: int = 1, conditions: Conditions = HEALTHY
) -> tuple[float, float, float, float]:
    """*ops* stand between 1 s and 5 s of a forward."""
    first, rest = layer(1.0, 0.0, 0.0), layer(5.0, 3.0, 3.0)
    forward = (*first.forward, *ops, *rest.forward)
    work = workload(replace(rest, forward=forward), pp=pp, micro_batches=batches)
    return ran(work, batches, schedule, conditions)


def test_computing_loses_a_share_of_what_runs_beside_it() -> None:
    step_s, _, slowed_s, _ = steps_s(gather(2.0))
    assert step_s == pytest.approx(4 * 12.0)
    assert slowed_s == pytest.approx(4 * (12.0 + SHARE * 2.0))


def test_a_slow_group_takes_for_longer() -> None:
    slow = Conditions(slow_groups={Group.DP: 2.0})
    assert steps_s(gather(2.0), conditions=slow)[2] == pytest.approx(4 * (12.0 + SHARE * 4.0))


def test_communication_alone_takes_nothing() -> None:
    """Blocking, at the end of all computing, or waited for at once."""
    blocking = steps_s(gather(2.0, blocking=True))
    assert blocking[:2] == blocking[2:]
    rest = layer(5.0, 3.0, 3.0)
    for forward in (
        (*rest.forward, gather(2.0)),
        (gather(2.0), Op("needs it", rest.forward[0].work, after=("gather",))),
    ):
        found = ran(workload(replace(rest, forward=forward), pp=1, micro_batches=4), 4, "1f1b")
        assert found[:2] == found[2:]


def test_long_communication_slows_what_computes_after_it_and_nothing_else() -> None:
    """100 s of communication for the 5 s that its slot computes after it."""
    step_s, compute_s, slowed_s, slower_s = steps_s(gather(100.0), batches=1)
    assert slower_s == pytest.approx(compute_s + 5 * SHARE)
    assert slowed_s == pytest.approx(step_s)


def test_what_outlasts_a_layer_slows_the_next_one() -> None:
    """Reductions at the end of a layer that repeats run beside the layer after it; the last beside nothing."""
    plain = layer(1.0, 1.0, 1.0)
    reduce = Op("reduce", Collective(CollectiveKind.ALL_REDUCE, round(0.5 / SIZE_S), Group.DP), False)
    reducing = replace(plain, weight_gradient=(*plain.weight_gradient, reduce))
    work = Workload((Stage((Block((reducing,), repeat=8), Block((plain,)))),))
    _, compute_s, _, slower_s = ran(work, 1, "1f1b")
    assert slower_s == pytest.approx(compute_s + 7 * 0.5 * SHARE)


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
