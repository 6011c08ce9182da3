"""V-Half and V-Min: what a stage holds, and the bubble that the paper gives for equal passes."""

import pytest

from stepcast.ir.schedules import SCHEDULES, VEE_PERIOD, Pipeline, ScheduleKind, vee_times
from stepcast.simulation.schedule import SlotAction
from stepcast.simulation.schedules import make_schedule

F, _, I, W = SlotAction  # noqa: E741


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("stages", range(1, 17))
def test_units_of_a_stage_never_coincide(stages: int, step: int) -> None:
    for stage in range(stages):
        times = vee_times(stages, stage, step)
        assert len({unit % VEE_PERIOD for units in times for unit in units}) == VEE_PERIOD
        assert all(start < input_ < end for start, input_, end in zip(*times, strict=True))


@pytest.mark.parametrize(("name", "share"), [("v-min", 1 / 3), ("v-half", 1 / 2)])
def test_stages_hold_a_third_or_half_of_what_1f1b_holds(name: str, share: float) -> None:
    stages = 12
    held = SCHEDULES[ScheduleKind(name)].held
    for stage in range(stages):
        chunks = held(Pipeline(stages, 2, 100), stage)
        assert sum(chunks) / 2 <= share * stages + 2  # a chunk is half of a stage


@pytest.mark.parametrize("name", ["v-min", "v-half"])
def test_every_pass_runs_once_and_holds_what_is_stated(name: str) -> None:
    stages, batches = 4, 12
    schedule = make_schedule(name, stages, batches, 2)
    for stage, order in enumerate(schedule.orders):
        assert len(order) == len(set(order)) == 6 * batches
        live = peak = 0
        for slot in order:
            live += (slot.kind is F) - (slot.kind is W)
            peak = max(peak, live)
        assert peak == sum(SCHEDULES[ScheduleKind(name)].held(Pipeline(stages, 2, batches), stage))
