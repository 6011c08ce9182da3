"""Measuring a GPU, without one: the cases, the loop, the corrections, the file."""

import itertools
import tomllib
from collections import Counter
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.calibrate.classes import fit_classes, fit_energies
from stepcast.cost.calibration import CalibrationError, Correction, calibration
from stepcast.cost.compute import compute_price, step_load
from stepcast.cost.fits import default_fit
from stepcast.cost.power import SUSTAINED
from stepcast.hardware import load_gpu
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, GroupedMatmul, Matmul
from stepcast.pytorch.profile import (
    LONGEST_S,
    Case,
    CollectiveRow,
    Document,
    MeasuredPoints,
    MeasuringProgress,
    Operator,
    TorchBackend,
    gpu_cases,
    held_bytes,
    measure,
    measure_sustained,
    read_document,
    sustained_cases,
    to_toml,
)

H200, T4, FIT = load_gpu("h200"), load_gpu("t4"), default_fit()
FORMATS = (DType.BF16, DType.TF32, DType.FP8, DType.FP16, DType.FP32)
CASES = gpu_cases(H200, FIT, FORMATS, quick=True)


class Times:
    """A GPU whose matmuls take *factor* times the predicted time, and whose grouped ones fail."""

    def __init__(self, factor: float = 1.5) -> None:
        self.factor, self.asked = factor, 0

    def seconds(self, work: Operator) -> float:
        self.asked += 1
        if isinstance(work, GroupedMatmul):
            raise RuntimeError("no kernel\nimage")
        return self.factor * compute_price(work, H200, FIT).seconds

    def sustained_s(self, work: Operator) -> float:
        """At the clock that its power leaves where work goes on."""
        return self.factor * compute_price(work, H200, FIT, SUSTAINED).seconds


def ticking(step_s: float) -> "itertools.count[float]":
    return itertools.count(0.0, step_s)


def test_cases_have_names_of_their_own_and_come_in_turns() -> None:
    for quick in (False, True):
        cases = gpu_cases(H200, FIT, FORMATS, quick)
        assert len({case.name for case in cases}) == len(cases)
        kinds = Counter(case.kind for case in cases)
        assert min(kinds.values()) >= 3
        assert {case.kind for case in cases[: len(kinds)]} == set(kinds)
    assert len(gpu_cases(H200, FIT, FORMATS)) > 2 * len(CASES)


def test_small_gpus_get_cases_they_can_run() -> None:
    cases = gpu_cases(T4, FIT, (DType.FP16, DType.FP32))
    assert len(cases) > 40
    for case in cases:
        assert held_bytes(case.work) < T4.memory_bytes / 2
        assert compute_price(case.work, T4, FIT).seconds <= LONGEST_S
    assert "attention.backward" in {case.kind for case in cases}


def test_failures_are_noted_and_known_points_kept() -> None:
    backend, clock, seen = Times(), ticking(0.001), list[MeasuringProgress]()
    points = measure(CASES, backend, MeasuredPoints(), 1e9, lambda: next(clock), seen.append)
    grouped = [case.name for case in CASES if isinstance(case.work, GroupedMatmul)]
    assert sorted(points.failed) == sorted(grouped)
    assert set(points.failed.values()) == {"no kernel image"}
    assert len(points.seconds) == len(CASES) - len(grouped)
    assert [progress.done for progress in seen] == list(range(1, len(CASES) + 1))
    assert dict(seen[-1].points.seconds) == dict(points.seconds)
    backend.asked = 0
    again = measure(CASES, backend, points, 1e9, lambda: next(clock))
    assert backend.asked == len(grouped)
    assert again == points


def test_time_runs_out_and_a_rerun_goes_on() -> None:
    backend, clock = Times(), ticking(1.0)
    first = measure(CASES, backend, MeasuredPoints(), 20.0, lambda: next(clock))
    assert first.left
    assert len(first.seconds) + len(first.failed) + len(first.left) == len(CASES)
    second = measure(CASES, backend, first, 1e9, lambda: next(clock))
    assert not second.left
    assert second.seconds.items() >= first.seconds.items()


def test_a_time_of_zero_is_a_failure() -> None:
    backend = MagicMock()
    backend.seconds.return_value = 0.0
    points = measure(CASES[:1], backend, MeasuredPoints(), 1e9, lambda: 0.0)
    assert list(points.failed) == [CASES[0].name]


def test_corrections_find_a_slower_gpu() -> None:
    clock = ticking(0.001)
    points = measure(CASES, Times(1.5), MeasuredPoints(), 1e9, lambda: next(clock))
    fitted = fit_classes(CASES, points.seconds, H200, FIT)
    assert {entry.kind for entry in fitted} == {case.kind for case in CASES if case.name in points.seconds}
    for entry in fitted:
        assert entry.correction.factor == pytest.approx(1.5, rel=0.01), entry
        assert entry.before == pytest.approx(1 / 3, rel=0.01)
        assert entry.after < 0.01


def test_the_range_is_that_of_points_left_out() -> None:
    rng = np.random.default_rng(3)
    cases = [case for case in gpu_cases(H200, FIT, (DType.BF16,)) if case.kind == "matmul.bf16"]
    seconds = {
        case.name: compute_price(case.work, H200, FIT).seconds * float(np.exp(0.1 * rng.standard_normal()))
        for case in cases
    }
    (entry,) = fit_classes(cases, seconds, H200, FIT)
    assert entry.left_out is not None
    assert entry.left_out >= entry.after
    assert 0.1 < entry.correction.spread < 0.35
    assert not fit_classes(cases[:2], seconds, H200, FIT)


words = st.text(st.characters(codec="ascii", exclude_characters="\r\n"), min_size=1, max_size=30)


@given(
    seconds=st.dictionaries(words, st.floats(1e-7, 1.0), max_size=5),
    failed=st.dictionaries(words, words, max_size=3),
    factor=st.floats(0.5, 2),
)
def test_what_is_written_is_read_again(seconds: dict[str, float], failed: dict[str, str], factor: float) -> None:
    row: CollectiveRow = {"kind": "all-reduce", "ranks": 2, "size_bytes": 1024, "seconds": 1e-5}
    corrections = {"matmul.bf16": Correction(factor, -0.1, 1e-6, 0.2)}
    written = Document(
        "h200", "NVIDIA H200", "torch", MeasuredPoints(seconds, failed), corrections, {"kernel_s": 2e-6}, (row,)
    )
    found = read_document(to_toml(written), "mine.toml")
    assert (found.gpu, found.device, found.software) == ("h200", "NVIDIA H200", "torch")
    assert dict(found.points.seconds) == pytest.approx(seconds, rel=1e-5)
    assert found.points.failed == failed
    assert found.corrections["matmul.bf16"].factor == pytest.approx(factor, rel=1e-5)
    assert dict(found.collectives[0]) == pytest.approx(row)


def test_a_calibration_takes_the_file() -> None:
    import tomllib

    document = Document("h200", "NVIDIA H200", "torch", MeasuredPoints({"a": 1.0}), {"stream.add": Correction(2.0)})
    assert calibration(tomllib.loads(to_toml(document))).corrections["stream.add"].factor == 2.0


@pytest.mark.parametrize("text", ["gpu = 3 =", 'gpu = "h200"', 'gpu = "h200"\ndevice = ""\nsoftware = ""\npoints = 3'])
def test_other_files_are_not_overwritten(text: str) -> None:
    with pytest.raises(CalibrationError, match=r"mine\.toml: .*expected a file that 'stepcast profile' wrote"):
        read_document(text, "mine.toml")


@pytest.fixture
def torch() -> MagicMock:
    """PyTorch as far as the backend knows it; every event pair is a millisecond apart."""
    fake = MagicMock()
    fake.cuda.get_device_properties.return_value.L2_cache_size = 50 * 2**20
    fake.cuda.get_device_capability.return_value = (9, 0)
    fake.cuda.Event.return_value.elapsed_time.return_value = 1.0
    return fake


def test_the_backend_has_a_way_to_run_every_case(torch: MagicMock) -> None:
    backend = TorchBackend(torch)
    assert set(backend.formats) == set(FORMATS)
    for case in gpu_cases(H200, FIT, backend.formats):
        assert backend.seconds(case.work) == pytest.approx(1e-3)
        torch.reset_mock()


@pytest.mark.parametrize(
    ("work", "function"),
    [
        (Matmul(128, 256, 512), "mm"),
        (Matmul(128, 256, 512, 4), "bmm"),
        (Matmul(128, 256, 512, 1, DType.FP8), "_scaled_mm"),
        (GroupedMatmul(128, 256, 512, 4), "_grouped_mm"),
        (Attention(1, 128, 128, 8, 2, 64, 64), "nn.functional.scaled_dot_product_attention"),
        (Attention(1, 128, 128, 8, 2, 64, 64, True, True), "autograd.grad"),
    ],
)
def test_operators_run_what_they_are(work: Operator, function: str, torch: MagicMock) -> None:
    TorchBackend(torch).seconds(work)
    place = torch
    for part in function.split("."):
        place = getattr(place, part)
    assert place.call_count >= 10


def test_tf32_is_on_for_tf32_alone(torch: MagicMock) -> None:
    backend, seen = TorchBackend(torch), []
    torch.mm.side_effect = lambda *_, **__: seen.append(torch.backends.cuda.matmul.allow_tf32)
    backend.seconds(Matmul(8, 8, 8, 1, DType.TF32))
    assert set(seen) == {True}
    seen.clear()
    backend.seconds(Matmul(8, 8, 8, 1, DType.FP32))
    assert set(seen) == {False}


def test_names_of_cases_say_their_size() -> None:
    assert Case(Matmul(128, 256, 512)).name == "matmul.bf16 128x256x512"
    assert Case(Attention(2, 128, 128, 8, 2, 64, 64)).name == "attention.forward 2x128 heads 8/2x64"


def test_the_energy_of_operations_is_seen_in_sustained_work() -> None:
    cases = sustained_cases(H200, FIT, (DType.BF16,))
    points = measure_sustained(cases, Times(1.0), MeasuredPoints())
    assert set(points.sustained) == set(points.seconds) == {case.name for case in cases}
    known = FIT.power.of("hopper")
    found = fit_energies(cases, points, H200, FIT)
    assert found["bf16"] == pytest.approx(known.energy("hopper", "bf16"), rel=0.15)
    assert found["attention"] == pytest.approx(known.attention, rel=0.15)
    again = measure_sustained(cases, MagicMock(), points)
    assert again == points


def test_a_profile_of_the_same_gpu_leaves_steps_where_they_were() -> None:
    works: list[Operator] = [Matmul(16384, 4096, 4096), Attention(2, 4096, 4096, 32, 8, 128, 128)]
    load = step_load(works, H200, FIT)
    table = tomllib.loads(Path("examples/calibrations/h200.toml").read_text())
    own = calibration(table)
    assert own.alone
    assert own.power
    for work in works:
        usual = compute_price(work, H200, FIT, load).seconds
        assert own.price(work, H200, FIT, load).seconds == pytest.approx(usual, rel=0.04)


def test_power_and_sustained_points_are_written_and_read() -> None:
    points = MeasuredPoints({"a": 1.0}, sustained={"a": 1.2})
    document = Document("h200", "NVIDIA H200", "torch", points, power={"bf16": 1e-12, "attention": 1.3})
    read = read_document(to_toml(document), "mine.toml")
    assert read.points == points
    assert read.power == document.power
    with pytest.raises(CalibrationError, match="joule"):
        calibration({"gpu": "h200", "power": {"bf16": -1.0}})
