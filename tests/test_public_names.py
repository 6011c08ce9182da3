"""What ``import stepcast`` promises, and that it stays cheap."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import stepcast
from tests.shared import ROOT


def test_every_public_name_loads() -> None:
    for name in stepcast.__all__:
        assert getattr(stepcast, name) is not None


def test_importing_the_package_loads_no_heavy_module() -> None:
    probe = (
        "import sys, stepcast, stepcast.cli.main; print([m for m in ('numpy', 'msgspec', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_library_forecasts_and_simulates() -> None:
    cluster = stepcast.load_cluster("dgx-h100")
    strategy = stepcast.Strategy(stepcast.Layout(tp=2, dp=4), micro_batch=1, global_batch=16, seq=4096)
    predicted = stepcast.predict(stepcast.load_model("llama-3.1-8b"), cluster, strategy).report
    assert 0 < predicted.step_s < 60
    workload = stepcast.read(ROOT / "examples" / "simai-llama-405b.txt")
    simulated = stepcast.simulate(workload, cluster).report
    found = stepcast.compare(simulated.facts(), simulated.facts()).facts()
    assert found["error"] == 0


def test_every_type_of_a_public_signature_is_exported() -> None:
    plain = {
        "Any",
        "Mapping",
        "Sequence",
        "Iterable",
        "Iterator",
        "Path",
        "PathLike",
        "Unpack",
        "None",
        "str",
        "int",
        "float",
        "bool",
    }
    plain |= {"dict", "list", "tuple", "object", "Timeline"}
    for name in stepcast.__all__:
        value = getattr(stepcast, name)
        if not inspect.isfunction(value) or value.__module__ != "stepcast.library":
            continue
        text = " ".join(str(annotation) for annotation in value.__annotations__.values())
        words = set(re.findall(r"\b[A-Za-z]\w*\b", re.sub(r"(?:\w+\.)+", "", text))) - {"class"}
        assert words <= plain | set(stepcast.__all__), (name, sorted(words - plain - set(stepcast.__all__)))


def test_predictions_have_plain_attributes(tmp_path: Path) -> None:
    prediction = stepcast.predict("llama-3.2-1b", "h100", gpus=8)
    low_s, high_s = prediction.interval_s
    assert low_s <= prediction.step_s <= high_s
    assert sum(prediction.breakdown_s.values()) == pytest.approx(prediction.step_s)
    facts = prediction.to_dict()
    assert (facts["step_s"], facts["mfu"]) == (prediction.step_s, prediction.mfu)
    assert facts["memory_bytes"]["fits"] == prediction.fits
    prediction.save_html(tmp_path / "page.html")
    assert "llama-3.2-1b" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_many_predictions_are_a_sequence() -> None:
    strategies = [stepcast.Strategy(stepcast.Layout(dp=8), batch, 16, 4096) for batch in (1, 2)]
    many = stepcast.predict_many("llama-3.2-1b", "h100", strategies)
    assert len(many) == 2
    assert many[1].step_s == stepcast.predict("llama-3.2-1b", "h100", strategies[1]).step_s
