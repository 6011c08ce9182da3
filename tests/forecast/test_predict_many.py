"""Many forecasts are as single ones, bit for bit, whatever was forecast before them."""

import gc
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from stepcast.cost.compute import make_cool_pricer, make_pricer
from stepcast.cost.fits import default_fit
from stepcast.cost.power import SUSTAINED
from stepcast.forecast import prediction as prediction_module
from stepcast.forecast.predict import predict, predict_many
from stepcast.forecast.prediction import Prediction
from stepcast.generate import overlap, workload
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.ir.framework import Execution, Framework
from stepcast.ir.layout import Layout
from stepcast.ir.legality import is_legal
from stepcast.ir.schedules import default_schedule
from stepcast.ir.strategy import Recompute, RecomputeKind, Sharding, Strategy, StrategyError
from stepcast.ir.work import Compute
from stepcast.models.catalog import load_model
from stepcast.simulation.step import Step, build_step

MODEL = load_model("llama-3.2-1b")
CLUSTER = load_cluster("dgx-h100")
# All that a forecast leaves behind for the next one to find.
REMEMBERED = (
    workload._MODEL_STAGES,
    workload._STAGES,
    workload._find_unit_maker,
    workload.block_layers,
    workload.end_layers,
    overlap.LAYERS,
)


def strategies() -> list[Strategy]:
    grid = product((1, 2), (1, 2, 4), (1, 2), (Sharding.ZERO_1, Sharding.FSDP), RecomputeKind)
    made = [
        Strategy(
            Layout(tp=tp, pp=pp, vpp=vpp, dp=16 // (tp * pp)),
            1,
            64,
            2048,
            sequence_parallel=tp > 1,
            schedule=default_schedule(vpp),
            sharding=sharding,
            recompute=Recompute(kind, layers=1 if kind is RecomputeKind.BLOCK else 0),
        )
        for tp, pp, vpp, sharding, kind in grid
    ]
    return [each for each in made if is_legal(MODEL, each)]


def facts(prediction: Prediction) -> tuple[float, bool, list[float]]:
    return prediction.step_s, prediction.fits, [stage.total for stage in prediction.memory]


def test_many_are_as_each_by_itself() -> None:
    chosen = strategies()
    assert len(chosen) > 40
    many = [facts(each) for each in predict_many(MODEL, CLUSTER, chosen)]
    backwards = [facts(each) for each in predict_many(MODEL, CLUSTER, chosen[::-1])]
    assert many == backwards[::-1]
    for each in REMEMBERED:
        each.cache_clear()
    for strategy, found in list(zip(chosen, many, strict=True))[::7]:
        assert facts(predict(MODEL, CLUSTER, strategy)) == found


def test_frameworks_do_not_share_what_differs() -> None:
    strategy = strategies()[0]
    eager = Framework(execution=Execution.EAGER)
    alone = [predict(MODEL, CLUSTER, strategy, each).step_s for each in (Framework(), eager)]
    assert alone[0] < alone[1]
    (again,) = predict_many(MODEL, CLUSTER, [strategy])
    assert again.step_s == alone[0]


def test_a_report_on_demand_is_of_the_same_step() -> None:
    for prediction in predict_many(MODEL, CLUSTER, strategies()[::9]):
        report = prediction.report
        assert report.step_s == prediction.step_s
        assert report.memory_bytes is not None
        assert report.memory_bytes["fits"] is prediction.fits
        assert prediction.times.makespan_s == prediction.step_s


def test_what_fails_is_told_in_its_turn() -> None:
    """After all that come before it, though many are simulated together."""
    good, bad = strategies()[:3], replace(strategies()[0], mtp_layers=2)
    assert not is_legal(MODEL, bad)
    found = predict_many(MODEL, CLUSTER, [*good, bad, *good])
    assert [next(found).step_s for _ in good] == [predict(MODEL, CLUSTER, each).step_s for each in good]
    with pytest.raises(StrategyError):
        next(found)


def test_many_leave_the_collection_of_garbage_as_it_was() -> None:
    for enabled in (False, True):
        (gc.enable if enabled else gc.disable)()
        for _ in predict_many(MODEL, CLUSTER, strategies()[:2]):
            assert gc.isenabled() is enabled
    assert gc.isenabled()


def test_a_step_is_simulated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[int] = []

    def counted(*args: Any, **options: Any) -> Step:
        built.append(1)
        return build_step(*args, **options)

    monkeypatch.setattr(prediction_module, "build_step", counted)
    prediction = predict(MODEL, CLUSTER, strategies()[0])
    assert prediction.report.step_s == prediction.step_s == prediction.times.makespan_s
    assert len(built) == 1


def test_seconds_under_another_load_are_not_taken() -> None:
    """Products that were priced under a sustained load have other seconds in a step that leaves the GPU cooler."""
    chosen = Strategy(Layout(dp=8), 1, 8, 512)
    expected_s = predict(MODEL, CLUSTER, chosen).step_s
    make_pricer.cache_clear()
    make_cool_pricer.cache_clear()
    sustained = make_pricer(CLUSTER.gpu, default_fit(), SUSTAINED)
    for stage in generate(MODEL, chosen).stages:
        for op in (op for block in stage.body for layer in block.layers for op in layer.all_ops):
            if isinstance(op.work, Compute):
                sustained(op.work)
    assert predict(MODEL, CLUSTER, chosen).step_s == expected_s
