"""What a strategy says about transfers between stages, in the forecast of its step."""

from dataclasses import replace

import pytest

from stepcast.forecast.predict import predict
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.layout import Layout
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import Overlap, ScheduleKind, Strategy
from stepcast.models.catalog import load_model

STAGES = Strategy(Layout(tp=2, pp=8), 1, 32, 4096, sequence_parallel=True)


def forecast(**changes: object) -> tuple[StepReport, StepReport]:
    """The step with transfers beside computation, and without."""
    model, cluster = load_model("llama-3.1-8b"), load_cluster("dgx-h100")
    beside, apart = (
        predict(model, cluster, replace(STAGES, overlap=Overlap(transfers=overlapped), **changes)).report  # type: ignore[arg-type]
        for overlapped in (True, False)
    )
    return beside, apart


@pytest.mark.parametrize("schedule", [ScheduleKind.ONE_F_ONE_B, ScheduleKind.GPIPE, ScheduleKind.ZB_H1])
def test_stages_that_stop_for_messages_are_slower(schedule: ScheduleKind) -> None:
    beside, apart = forecast(schedule=schedule)
    assert apart.step_s > beside.step_s
    assert apart.breakdown_s["pp"] > beside.breakdown_s["pp"]
    assert not apart.warnings


def test_stages_that_run_ahead_cannot_stop() -> None:
    layout = Layout(tp=2, pp=8, vpp=2)
    beside, apart = forecast(layout=layout, schedule=ScheduleKind.INTERLEAVED)
    assert apart.step_s == beside.step_s
    assert any("transfers overlap all the same" in warning for warning in apart.warnings)
