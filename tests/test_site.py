"""The site: every page is in it, and it builds without a warning."""

import importlib.util
import re
from types import ModuleType

import pytest
import yaml

from tests.shared import ROOT


@pytest.fixture(scope="module")
def builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "tools" / "build_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_names_pages_that_are_there() -> None:
    nav = str(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    named = set(re.findall(r"[\w/.-]+\.md", nav)) - {"index.md"}
    assert {page for page in named if not (ROOT / "docs" / page).is_file()} == set()
    assert {"tutorial.md", "python.md", "accuracy.md", "configs.md"} <= named


@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="needs mkdocs-material; 'make docs' installs and runs it"
)
def test_the_site_builds_without_a_warning(builder: ModuleType) -> None:
    assert builder.main() == 0
