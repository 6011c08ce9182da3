"""Steps of very many micro-batches: told from a few of them, as if all had been run."""

from itertools import product

import pytest

from stepcast.forecast.predict import predict
from stepcast.forecast.prediction import PreparedStep
from stepcast.frameworks.catalog import load_framework
from stepcast.hardware import load_cluster
from stepcast.ir.layout import Layout
from stepcast.ir.legality import is_legal
from stepcast.ir.strategy import Overlap, ScheduleKind, Sharding, Strategy
from stepcast.ir.types import replace
from stepcast.models.catalog import load_model
from stepcast.simulation import steady
from stepcast.simulation.steady import PERIODS

MODEL = load_model("llama-3.2-1b").with_layers(8)
CLUSTER = load_cluster("dgx-h100")


def strategy(
    schedule: ScheduleKind, micro_batches: int, sharding: Sharding = Sharding.ZERO_1, transfers: bool = True
) -> Strategy:
    chunks = 2 if schedule in (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V) else 1
    layout = Layout(tp=2, pp=4, vpp=chunks, dp=2)
    return Strategy(
        layout,
        1,
        2 * micro_batches,
        512,
        sequence_parallel=True,
        schedule=schedule,
        sharding=sharding,
        overlap=Overlap(transfers=transfers),
    )


@pytest.mark.parametrize(
    ("schedule", "sharding", "transfers"),
    [
        case
        for case in product(sorted(PERIODS), (Sharding.ZERO_1, Sharding.FSDP), (False, True))
        if is_legal(MODEL, strategy(case[0], 2048, *case[1:]))
    ],
)
def test_a_long_step_is_as_if_written_out(
    schedule: ScheduleKind, sharding: Sharding, transfers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = strategy(schedule, 2048, sharding, transfers)
    short = predict(MODEL, CLUSTER, chosen)
    step, run = short.source.reported
    with monkeypatch.context() as patch:
        patch.setattr(PreparedStep, "steady", None)
        patch.setattr(PreparedStep, "reported", property(lambda source: (source.step, source.run)))
        whole = predict(MODEL, CLUSTER, chosen)
        _ = whole.report
    assert step.schedule.micro_batches < 1024
    assert short.step_s == run.makespan_s == whole.step_s
    assert short.run.makespan_s == whole.step_s
    one, two = short.report, whole.report
    assert one.breakdown_s == pytest.approx(two.breakdown_s, rel=1e-9, abs=1e-9)
    assert sum(one.breakdown_s.values()) == pytest.approx(one.step_s, rel=1e-12)
    assert (one.low_s, one.high_s) == pytest.approx((two.low_s, two.high_s), rel=1e-9)
    assert [each.peak_in_flight for each in one.stages] == [each.peak_in_flight for each in two.stages]
    assert [each.bubble_s for each in one.stages] == pytest.approx([each.bubble_s for each in two.stages])


@pytest.mark.parametrize("seq", [512, 4096])
def test_a_long_step_whose_host_runs_ahead_is_as_if_written_out(seq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain PyTorch issues one step after the other: on short sequences the GPU waits for it, on long ones not."""
    chosen, framework = strategy(ScheduleKind.ONE_F_ONE_B, 1024, Sharding.NONE), load_framework("pytorch")
    chosen = replace(chosen, seq=seq)
    short = predict(MODEL, CLUSTER, chosen, framework)
    step, _ = short.source.reported
    assert step.has_lead
    monkeypatch.setattr(PreparedStep, "steady", None)
    monkeypatch.setattr(PreparedStep, "reported", property(lambda source: (source.step, source.run)))
    assert short.step_s == pytest.approx(predict(MODEL, CLUSTER, chosen, framework).step_s, rel=1e-9)


def test_a_million_micro_batches_are_as_many_times_what_each_adds() -> None:
    steps_s = [predict(MODEL, CLUSTER, strategy(ScheduleKind.ONE_F_ONE_B, 10**6 + n)).step_s for n in (0, 1, 2)]
    assert steps_s[2] - steps_s[1] == pytest.approx(steps_s[1] - steps_s[0], rel=1e-4)
    assert steps_s[0] == pytest.approx(10**6 * (steps_s[1] - steps_s[0]), rel=1e-3)


@pytest.mark.parametrize("micro_batches", [32_768, 524_288])
def test_many_micro_batches_of_a_deep_pipeline_have_an_answer(micro_batches: int) -> None:
    """A step of hours: sums of its ticks are rounded."""
    layout = Layout(tp=8, pp=16)
    chosen = Strategy(layout, 1, micro_batches, 8192, sequence_parallel=True)
    prediction = predict(load_model("llama-3.1-70b"), CLUSTER, chosen)
    assert prediction.step_s > 128
    one = predict(load_model("llama-3.1-70b"), CLUSTER, replace(chosen, global_batch=micro_batches + 1)).step_s
    slowest_s = max(stage.busy_s + stage.exposed_s for stage in prediction.report.stages)
    assert slowest_s < prediction.step_s < 1.02 * slowest_s
    assert one - prediction.step_s == pytest.approx(slowest_s / micro_batches, rel=0.01)
    assert sum(prediction.report.breakdown_s.values()) == pytest.approx(prediction.step_s, rel=1e-12)


def test_a_pipeline_that_has_not_settled_says_what_its_breakdown_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZB-V settles in longer schedules than the shortest."""
    chosen = strategy(ScheduleKind.ZB_V, 40_000)
    settled = predict(MODEL, CLUSTER, chosen)
    assert not any("drift apart" in note for note in settled.report.assumptions)
    monkeypatch.setattr(steady, "LONGER", (1,))
    early = predict(MODEL, CLUSTER, chosen)
    assert early.step_s == settled.step_s
    assert any("drift apart" in note for note in early.report.assumptions)


def test_what_turns_around_in_the_middle_says_how_many_are_too_many() -> None:
    with pytest.raises(ValueError, match=r"1,000,000 micro-batches of schedule gpipe .* use fewer"):
        predict(MODEL, CLUSTER, strategy(ScheduleKind.GPIPE, 10**6))
    long = predict(MODEL, CLUSTER, strategy(ScheduleKind.ONE_F_ONE_B, 10**6))
    assert long.report.step_s == long.step_s
    with pytest.raises(ValueError, match="micro-batches of schedule 1f1b"):
        _ = long.timeline
