"""The wheel holds every file of the package and of the examples; so does the sdist, of which it is built."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.shared import ROOT

LIST_FILES = """
import sys
import setuptools
from distutils.core import run_setup

setup = run_setup("setup.py", stop_after="config")
setup.parse_config_files()
setup.get_command_obj("egg_info").egg_base = sys.argv[1]  # that of an earlier build lists what was in it
build = setup.get_command_obj("build_py")
build.ensure_finalized()
print("\\n".join(build.get_outputs(include_bytecode=0)))
"""


@pytest.mark.subprocess
def test_every_file_of_the_package_is_in_the_wheel(tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="builds the wheel")
    command = [sys.executable, "-c", LIST_FILES, str(tmp_path)]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    packed = {os.path.relpath(line, os.path.join("build", "lib")) for line in listed.stdout.splitlines()}
    expected = {
        str(path.relative_to(ROOT / "src"))
        for path in (ROOT / "src" / "stepcast").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    expected |= {
        f"stepcast/examples/{path.relative_to(ROOT / 'examples')}"
        for path in (ROOT / "examples").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    assert "stepcast/pytorch/record/site/sitecustomize.py" in expected
    assert sorted(expected - packed) == []
