"""The shipped notebooks run, and print what they show."""

import contextlib
import io
import json
from pathlib import Path

import pytest

from tests.shared import ROOT

NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    names: dict[str, object] = {}
    for cell in cells:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("".join(cell["source"]), path.name, "exec"), names)
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert printed.getvalue() == shown
