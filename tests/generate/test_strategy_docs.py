"""Every example of docs/strategies.md and docs/memory.md runs."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(("page", "name"), [("strategies.md", "workload"), ("memory.md", "stage")])
def test_examples_run(page: str, name: str) -> None:
    examples = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    assert examples
    names: dict[str, Any] = {}
    exec("\n".join(examples), names)
    assert name in names
