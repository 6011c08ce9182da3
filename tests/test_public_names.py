"""What ``import stepcast`` promises, and that it stays cheap."""

import subprocess
import sys

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
