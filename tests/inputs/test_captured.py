"""Captured programs as files."""

import json
from pathlib import Path

import pytest

from stepcast import FormatError, read
from tests.shared import ROOT

EXAMPLE = ROOT / "examples" / "captured" / "llama-3.2-1b.json"


def test_a_memory_key_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    document = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    document["memory"]["activatons"] = document["memory"].pop("activations")
    path = tmp_path / "step.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(FormatError, match="activatons"):
        read(str(path))
