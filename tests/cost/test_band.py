"""The band of a predicted step: learnt of measured runs, wider for what nobody measured."""

from dataclasses import replace

import pytest

from stepcast.cost.band import BandKind, Bands, band_of, default_bands
from stepcast.frameworks.catalog import load_framework
from stepcast.hardware import load_cluster
from stepcast.ir.framework import Framework
from stepcast.ir.layout import Layout
from stepcast.ir.step import Band
from stepcast.ir.strategy import Strategy
from stepcast.models.catalog import load_model


def band(
    model: str = "llama-3.1-70b",
    cluster: str = "dgx-h100",
    gpus: int = 64,
    seq: int = 8192,
    framework: Framework | None = None,
) -> Band:
    strategy = Strategy(Layout(dp=gpus), 1, gpus, seq)
    return band_of(load_model(model), load_cluster(cluster), strategy, framework or load_framework("nemo"))


def width(found: Band) -> float:
    return found.high / found.low


def test_it_states_its_level_and_its_rows() -> None:
    found = band()
    assert found.level == 0.9
    assert found.of == "dense"
    assert found.rows >= 100
    assert found.widened == ()


def test_it_is_asymmetric_and_holds_the_prediction() -> None:
    """Real runs are slower than predicted more often, and by more, than they are faster."""
    found = band()
    assert found.low < 1 < found.high
    assert found.high * found.low > 1
    low_s, high_s = Band(1.1, 1.6, "of its kind", 20).around(2.0)
    assert (low_s, high_s) == (2.0, 3.2)


@pytest.mark.parametrize(("pp", "gpus", "late_s"), [(1, 64, 0), (2, 64, 0.3 * 2 * 9), (4, 64, 0.3 * 4 * 11), (4, 8, 0)])
def test_messages_that_cpus_wait_for_may_be_late(pp: int, gpus: int, late_s: float) -> None:
    """8 micro-batches; a stage between two others has twice the messages; inside a node none is late."""
    strategy = Strategy(Layout(pp=pp, dp=gpus // pp), 1, 8 * gpus // pp, 4096)
    args = load_model("llama-3.2-1b"), load_cluster("aws-p5"), strategy
    found = band_of(*args, load_framework("nanotron"))
    assert found.late_s == pytest.approx(late_s)
    assert found.around(10.0)[1] == pytest.approx(10.0 * found.high + late_s)
    assert band_of(*args, load_framework("megatron-core")).late_s == 0


def test_experts_are_less_sure() -> None:
    assert width(band("qwen3-30b-a3b", seq=4096)) > width(band(seq=4096))


@pytest.mark.parametrize(
    ("unmeasured", "reason"),
    [
        (band(framework=replace(load_framework("nemo"), name="mine")), "framework mine"),
        (band(gpus=65536), "more than 12,288 GPUs"),
        (band(seq=2**21), "sequences of more than"),
        (band(cluster="l40s-node", gpus=8), "GPUs of ada"),
    ],
)
def test_what_nobody_measured_widens_it(unmeasured: Band, reason: str) -> None:
    assert width(unmeasured) > width(band())
    assert any(reason in text for text in unmeasured.widened) or not reason


def test_a_generation_without_rows_has_the_band_of_all() -> None:
    found = band(cluster="mi355x-node", model="qwen3-30b-a3b", gpus=8, seq=4096)
    assert found.of == "experts"
    assert found.widened == ("GPUs of cdna4 with experts",)


def test_a_profile_that_others_build_on_was_measured_with_them() -> None:
    assert band(framework=load_framework("megatron-core")).widened == ()


def test_the_widest_of_several_reasons_counts() -> None:
    both = band(gpus=65536, framework=replace(load_framework("nemo"), name="mine"))
    assert len(both.widened) == 2
    bands = default_bands()
    factor = max(bands.widened["gpus"], bands.widened["framework"])
    kind = bands.kinds["dense"]
    assert both.high == pytest.approx(kind.middle * (kind.high / kind.middle) ** factor)


def test_widening_keeps_the_middle() -> None:
    kind = BandKind(low=0.9, middle=1.05, high=1.4, rows=100)
    low, high = kind.widen(2.0)
    assert low == pytest.approx(1.05 * (0.9 / 1.05) ** 2)
    assert high == pytest.approx(1.05 * (1.4 / 1.05) ** 2)
    assert kind.widen(1.0) == pytest.approx((0.9, 1.4))


def test_every_kind_that_ships_is_in_order() -> None:
    bands = default_bands()
    assert isinstance(bands, Bands)
    for name, kind in bands.kinds.items():
        assert kind.low < kind.middle < kind.high, name
        assert kind.rows >= 12, name
    assert all(factor >= 1 for factor in bands.widened.values())
