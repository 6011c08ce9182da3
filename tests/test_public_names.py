"""What ``import stepcast`` promises, and that it stays cheap."""

import subprocess
import sys

import stepcast


def test_every_public_name_loads() -> None:
    for name in stepcast.__all__:
        assert getattr(stepcast, name) is not None


def test_importing_the_package_loads_no_heavy_module() -> None:
    probe = "import sys, stepcast, stepcast.cli.main; print([m for m in ('numpy', 'msgspec', 'numba') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
