"""Whatever the strategy, the parts of a step are none of them negative and add up to it."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stepcast.forecast.predict import predict
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.framework import Execution, Framework, Kernels
from stepcast.ir.layout import Layout
from stepcast.ir.legality import is_legal
from stepcast.ir.strategy import Overlap, ScheduleKind, Sharding, Strategy, StrategyError
from stepcast.models.catalog import load_model

pytestmark = pytest.mark.slow

MODEL, CLUSTER = load_model("llama-3.2-1b"), load_cluster("dgx-a100")
STAGES = {ScheduleKind.INTERLEAVED: 2, ScheduleKind.ZB_V: 2}


@st.composite
def strategies(draw: st.DrawFn) -> tuple[Strategy, Framework]:
    schedule = draw(st.sampled_from(ScheduleKind))
    pick = st.sampled_from
    layout = Layout(
        tp=draw(pick((1, 2, 8))),
        cp=draw(pick((1, 2))),
        pp=draw(pick((1, 2, 4))),
        vpp=STAGES.get(schedule, 1),
        dp=draw(pick((1, 8))),
    )
    overlap = Overlap(*(draw(st.booleans()) for _ in Overlap.__dataclass_fields__))
    try:
        strategy = Strategy(
            layout,
            1,
            layout.dp * draw(pick((4, 8, 16))),
            draw(pick((1024, 32768))),
            sequence_parallel=layout.tp > 1,
            schedule=schedule,
            sharding=draw(pick(Sharding)),
            overlap=overlap,
        )
        return strategy, Framework(execution=draw(pick(Execution)))
    except StrategyError:
        assume(False)
        raise


@settings(max_examples=60, deadline=None)
@given(chosen=strategies())
def test_parts_are_not_negative_and_sum_to_the_step(chosen: tuple[Strategy, Framework]) -> None:
    strategy, framework = chosen
    assume(is_legal(MODEL, strategy))
    report = predict(MODEL, CLUSTER, strategy, framework).report
    assert min(report.breakdown_s.values()) >= 0
    assert sum(report.breakdown_s.values()) == pytest.approx(report.step_s, rel=1e-9)


def test_own_communication_while_a_message_is_under_way_is_counted_once() -> None:
    """In DualPipe a stage's collectives run while it waits for a neighbour's message."""
    strategy = Strategy(
        Layout(tp=8, dp=8, pp=2),
        2,
        128,
        4096,
        sequence_parallel=True,
        schedule=ScheduleKind.DUALPIPE,
        sharding=Sharding.ZERO_1,
    )
    report = predict(load_model("gemma-2-9b"), CLUSTER, strategy).report
    assert min(report.breakdown_s.values()) >= 0


def test_what_a_host_issued_early_is_not_waited_for_twice() -> None:
    """Gathered parameters that were issued long before they are needed, tensor-parallel sums between them."""
    strategy = Strategy(
        Layout(tp=8, dp=8),
        2,
        128,
        1024,
        sharding=Sharding.FSDP,
        overlap=Overlap(gradients=False, parameters=False, tensor=True),
    )
    framework = Framework(kernels=Kernels.PLAIN, execution=Execution.PARTIAL_GRAPHS)
    report = predict(load_model("llama-3.1-8b"), load_cluster("dgx-h100"), strategy, framework).report
    assert min(report.breakdown_s.values()) >= 0
