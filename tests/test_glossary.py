"""The user glossary: data, page and length."""

import html
import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from stepcast.cli.main import main
from stepcast.views.markup import explain
from tests.shared import ROOT

spec = importlib.util.spec_from_file_location("make_glossary", ROOT / "tools" / "make_glossary.py")
assert spec is not None
assert spec.loader is not None
make_glossary = importlib.util.module_from_spec(spec)
spec.loader.exec_module(make_glossary)
TERMS: list[dict[str, Any]] = tomllib.loads(make_glossary.SOURCE.read_text(encoding="utf-8"))["term"]


def test_the_page_is_made_from_the_data() -> None:
    assert make_glossary.PAGE.read_text(encoding="utf-8") == make_glossary.render_page()


def test_the_glossary_covers_the_terms_of_the_field() -> None:
    names = {name.lower() for term in TERMS for name in (term["name"], *term.get("synonyms", ()))}
    assert len(TERMS) >= 60
    assert len(names) == sum(1 + len(set(term.get("synonyms", ()))) for term in TERMS) - _repeats()
    expected = (
        "MFU", "HFU", "bubble", "exposed communication", "bus bandwidth", "straggler", "critical path", "roofline", "Pareto frontier",
        "goodput", "MTBF", "HBM", "NVLink", "NIC", "rail", "ECMP", "ZeRO-1", "ZeRO-3", "FSDP", "1F1B", "interleaved", "zero-bubble",
        "DualPipe", "selective recompute", "sequence packing", "LoRA", "QLoRA", "prefill", "decode", "rollout", "MTP", "DDP",
    )  # fmt: skip
    assert not [name for name in expected if name.lower() not in names]


def _repeats() -> int:
    """Return how many synonyms differ from another of their term only in letter case."""
    return sum(
        1
        + len(set(term.get("synonyms", ())))
        - len({name.lower() for name in (term["name"], *term.get("synonyms", ()))})
        for term in TERMS
    )


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term["name"])
def test_a_term_has_two_sentences_and_a_page(term: dict[str, Any]) -> None:
    assert term["text"].count(". ") == 1
    assert term["text"].endswith(".")
    assert (ROOT / "docs" / term["page"]).is_file()


def test_pages_explain_terms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "step.html"
    words = "predict llama-3.2-1b --cluster dgx-h100 --gpus 16 --pp 2 --tp 2 --html"
    assert main([*words.split(), str(page)]) == 0
    titles = dict(re.findall(r'<abbr title="([^"]*)">([^<]*)</abbr>', page.read_text(encoding="utf-8")))
    assert {"pipeline bubble", "tensor parallel"} <= {label.lower() for label in titles.values()}
    definitions = {term["text"] for term in TERMS}
    assert {html.unescape(title) for title in titles} <= definitions


def test_acronyms_match_in_capitals_only() -> None:
    assert "<abbr" in explain("PP messages")
    assert "<abbr" not in explain("apply nice dppp")
    assert explain("<b>") == "&lt;b&gt;"
