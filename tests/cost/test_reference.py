"""Profiles of the GPU and host that prices were learnt on change nothing; others by how much they differ."""

from collections.abc import Mapping

import pytest

from stepcast.cost.calibration import Calibration, CalibrationError, Correction, calibration, reference
from stepcast.forecast.predict import predict
from stepcast.frameworks.catalog import load_profile, settle
from stepcast.hardware import load_cluster
from stepcast.hardware.catalog import load_fit
from stepcast.ir.layout import Layout
from stepcast.models.catalog import load_model

H200, MODEL = load_cluster("hgx-h200"), load_model("llama-3.2-1b")


def profiled(factor: float = 1.0, **launch: float) -> Calibration:
    """As a profile of the GPU of the fit would be, all its times *factor* as long."""
    profile, power = load_fit("profile"), load_fit("power")["hopper"]
    cool = power["cool"]["h200"]
    classes: dict[str, Mapping[str, float]] = {
        name: {"factor": factor * pair[0] * (cool if name.startswith("matmul") else 1.0), "slope": pair[1]}
        for name, pair in profile["class"].items()
    }
    energies = {
        name: seen * (power["attention"] if name == "attention" else power["joule_per_flop"][name])
        for name, seen in profile["power"].items()
    }
    usual = {**profile["launch"], **launch}
    return calibration({"gpu": "h200", "class": classes, "power": energies, "launch": usual})


def step_s(found: Calibration | None, batch: int = 4, seq: int = 4096) -> float:
    profile = load_profile("transformers")
    settled = settle(profile, MODEL, "h200", Layout(), {})
    strategy = settled.strategy(Layout(), batch, batch, seq)
    return predict(MODEL, H200, strategy, settled.framework, calibration=found).step_s


def test_the_profile_of_the_fit_changes_next_to_nothing() -> None:
    assert step_s(profiled()) == pytest.approx(step_s(None), rel=0.01)


def test_a_gpu_by_a_tenth_slower_has_slower_steps() -> None:
    assert 1.05 <= step_s(profiled(1.1)) / step_s(profiled()) <= 1.1


def test_the_pace_of_a_host_counts_where_steps_wait_for_it() -> None:
    usual = load_fit("profile")["launch"]
    twice = {name: 2 * value for name, value in usual.items()}
    slow = profiled(looks=20, **twice)
    assert slow.pace == pytest.approx(2 ** (20 / 23))
    assert step_s(slow, 1, 256) > 1.5 * step_s(profiled(), 1, 256)
    assert step_s(slow, 8, 4096) == pytest.approx(step_s(profiled(), 8, 4096), rel=0.05)


def test_one_look_at_a_host_says_little() -> None:
    usual = load_fit("profile")["launch"]
    assert profiled(**{name: 2 * value for name, value in usual.items()}).pace == pytest.approx(2**0.25)


@pytest.mark.parametrize("launch", [{"looks": 0}, {"looks": "3"}, {"light_host_s": 1.0}, {"heavy_host_s": "x"}])
def test_hosts_that_cannot_be_are_refused(launch: dict[str, object]) -> None:
    with pytest.raises(CalibrationError, match="launch"):
        calibration({"gpu": "h200", "class": {}, "launch": launch})


def test_operators_by_themselves_are_priced_as_measured() -> None:
    """Of one by itself there is no step to compare with: the factor holds as it is."""
    assert reference()["matmul.bf16"][0] == pytest.approx(0.99, abs=0.02)
    found = Calibration("h200", {"matmul.bf16": Correction(0.5)}, alone=True)
    assert found.corrections["matmul.bf16"].factor == 0.5
