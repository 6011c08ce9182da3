"""A part of an answer has one name: in text, on the page, in JSON and in Python."""

import html
import json
import re
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.forecast.prediction import Prediction
from stepcast.goodput.plan import Plan
from stepcast.ir.step import StepReport
from stepcast.searching.result import SearchResult
from stepcast.views import view as ui
from stepcast.views.document import About, Page
from stepcast.views.html import page_of
from stepcast.views.terminal import names_part, render_part, render_text
from tests.pages.test_pages import VERBS
from tests.shared import ROOT

pytestmark = pytest.mark.slow

# Title of a part -> the key of its values in JSON, or several where verbs differ.
JSON_NAMES = {
    "Time breakdown": "breakdown_s",
    "Time breakdown (mean run)": "split_s",
    "Time breakdown by rank": "breakdown_s",
    "Communication": "communication_s communication collectives",
    "Stages": "stages",
    "Stages of the run": "phases",
    "Memory": "memory_bytes",
    "Critical path": "critical_path",
    "Jitter": "jitter",
    "Strategies": "rows",
    "Alternatives": "rows",
    "Running sequences over time": "curve",
    "Phases": "phases_s",
    "Setting": "rollout_layout",
    "If lengths vary more or less": "sensitivity_s",
    "Best uses of the GPUs": "rows",
    "Requests": "curve",
    "Memory of a GPU": "memory_bytes",
    "Trend": "trend",
    "Measures": "measures",
    "Step time": "step_s",
    "Break-even prices": "break_even",
    "Why rank 1 wins": "binds",
    "Pareto frontier": "front",
    "Reproduce a row": "command",
    "Other intervals and spares (closed form)": "choices",
    "Operations": "operations operations_s",
    "Advice": "advice",
    "Kernels": "kernels",
    "Streams": "streams",
    "Collectives": "collectives",
    "Classes of kernels": "operations_s",
    "Layers": "layers",
    "Slow ranks": "stragglers",
    "Parts of the step": "parts",
    "Figures": "figures",
    "Tiers": "tiers",
    "Tiers over time": "busiest_over_time",
    "Who uses the busiest links": "hottest",
    "Busiest links": "links",
    "Slowed down by shared links": "operations",
    "Sizes": "rows",
    "What falls short": "findings",
    "GPUs": "gpus",
    "Classes": "classes",
    "Key figures": "documents",
    "h200": "h200",
}
# JSON key -> the attribute of the Python result.
PYTHON_NAMES = {
    StepReport: ("step_s", "breakdown_s", "communication_s", "stages", "memory_bytes", "assumptions", "warnings"),
    Prediction: ("step_s",),
    SearchResult: ("counts", "front"),
    Plan: ("goodput", "phases"),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rows").mkdir()
    head = (ROOT / "tests" / "data" / "h200" / "ops.csv").read_text().splitlines(keepends=True)[:30]
    Path("rows", "ops.csv").write_text("".join(head))


def views_of(words: list[str], monkeypatch: pytest.MonkeyPatch) -> list[ui.View]:
    """Run a command and return the views that it wrote as pages."""
    views: list[ui.View] = []

    def record(view: ui.View, about: About) -> Page:
        views.append(view)
        return page_of(view, about)

    monkeypatch.setattr("stepcast.views.html.page_of", record)
    assert main([*words, "--html", "page.html", "--json"]) in (0, 1)
    return views


def all_keys(value: object) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for item in value.values() for key in all_keys(item)}
    return {key for item in value for key in all_keys(item)} if isinstance(value, list) else set()


def names_in(page: str, pattern: str) -> set[str]:
    """Return what a pattern finds in a page, as text."""
    return {html.unescape(re.sub(r"<[^>]+>", "", name)) for name in re.findall(pattern, page, re.DOTALL)}


def shown_in_both(part: ui.Figure | ui.Part) -> bool:
    return part.shown in (ui.Shown.ALWAYS, ui.Shown.DETAIL)


@pytest.mark.parametrize("name", VERBS)
@pytest.mark.usefixtures("folder")
def test_text_page_and_json_name_a_part_alike(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (view,) = views_of(VERBS[name], monkeypatch)
    facts = json.loads(capsys.readouterr().out)
    page, text = Path("page.html").read_text(), render_text(view, 200)
    cards, titles = (
        names_in(page, r'<span class="name">(.*?)</span>(?=<strong>)'),
        names_in(page, r"<h2[^>]*>(.*?)</h2>"),
    )
    for figure in filter(shown_in_both, view.figures):
        assert re.search(rf"^{re.escape(figure.name)}\s", text, re.MULTILINE), figure.name
        assert figure.name[:1].upper() + figure.name[1:] in cards
    for part in view.parts:
        if part is None or not shown_in_both(part) or not (lines := render_part(part, 200)):
            continue
        assert names_part(part.title, lines.partition("\n")[0]), part.title
        assert part.title in titles
        short = (part.title, re.sub(r" (\(|of ).*|: .*", "", part.title), part.title.rpartition(": ")[2])
        names = next(JSON_NAMES[title] for title in short if title in JSON_NAMES)
        assert set(names.split()) & all_keys(facts), part.title


@pytest.mark.parametrize("result", PYTHON_NAMES, ids=lambda result: result.__name__)
def test_python_names_values_as_json_does(result: type) -> None:
    names = {*dir(result), *getattr(result, "__annotations__", {}), *getattr(result, "__slots__", ())}
    assert set(PYTHON_NAMES[result]) <= names
