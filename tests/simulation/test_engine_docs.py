"""The examples of the engine's pages run and print what the pages say."""

import doctest
from pathlib import Path

import pytest

from stepcast.simulation.schedule_file import parse_schedule

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("page", ["engine.md", "schedules.md"])
def test_examples_run(page: str) -> None:
    result = doctest.testfile(str(DOCS / page), module_relative=False)
    assert result.attempted > 3
    assert result.failed == 0


def test_the_schedule_on_the_page_is_one() -> None:
    text = (DOCS / "schedules.md").read_text()
    block = text[text.index("    # four lines of head") : text.index("A slot is its letter")]
    assert parse_schedule(block).stages == 2
