"""Sentences, figures and tables that ``data/views.txt`` declares."""

import re

import pytest

from stepcast.ir.types import FactDict
from stepcast.views import view as ui
from stepcast.views.declared import FIGURE, HEAD, _read_sections, build_view
from stepcast.views.view import say
from tests.shared import ROOT

FACTS = {
    "step_s": 0.5,
    "parts": {"busy_s": 0.25},
    "ranks": [0, 1],
    "blank": "",
    "zero": 0,
    "none": None,
    "name": "{step_s}[x]",
    "size_bytes": 3 * 2**30,
    "run": {"cost": 5.0, "currency": "EUR"},
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{step_s} of {#ranks} rank{#ranks:plural}", "500.00 ms of 2 ranks"),
        ("{parts.busy_s/step_s} busy, {parts.busy_s/step_s:.2f}", "50.0 % busy, 0.50"),
        ("{size_bytes/GIB:g} GiB", "3 GiB"),
        ("{run.cost:money}", "5.00 EUR"),
        ("step[ of {none}][ in {blank}][{zero:!} at all]", "step"),
        ("{zero} {none?unknown}", "0 unknown"),
        ("{zero:!}{step_s}", None),
        ("{missing.key}", None),
        ("{name}", "{step_s}[x]"),
    ],
)
def test_a_sentence_has_the_values_of_its_facts(template: str, text: str | None) -> None:
    assert say(template, FACTS) == text


def test_every_section_can_be_read_and_is_used() -> None:
    folders = [ROOT / "src" / "stepcast" / name for name in ("views", "cli")]
    code = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    sections = _read_sections()
    listed = {row.split(" | ")[1].removeprefix("facts ") for rows in sections.values() for row in rows if " | " in row}
    for section, rows in sections.items():
        assert f'"{section}"' in code or section.startswith("show ") or section in listed, section
        for row in rows:
            assert row == "asked" or re.match(r"[@+]", row) or HEAD.fullmatch(row) or FIGURE.fullmatch(row), row


def test_remarks_and_bars_have_the_values_of_their_rows() -> None:
    call = {"kind": "all_reduce", "turn": 2, "group": "", "waiting": [0], "absent": []}
    rows = [call, {**call, "absent": [1], "evidence": ["the log ends"]}]
    unfinished = build_view("collective log", {"unfinished": rows}, timeline=None).parts[0]
    name = "all_reduce 2 of group "
    assert isinstance(unfinished, ui.Remarks)
    assert list(unfinished.remarks) == [
        ui.Remark(name, ": ranks [0] wait", ()),
        ui.Remark(name, ": ranks [0] wait for ranks [1], which never called it", ["the log ends"]),
    ]
    device = {"device": 3, "compute_s": 2.0, "exposed_s": 0.5, "copy_s": 0.0, "idle_s": 0.5}
    more: FactDict = {"bottleneck": [], "slow": [], "timeline": None}
    chart, listed, *_ = build_view("streams", {"devices": [device]}, **more).parts
    assert isinstance(chart, ui.Bars)
    assert isinstance(listed, ui.Table)
    assert (chart.most, chart.shown, listed.shown) == (3.0, ui.Shown.PAGE, ui.Shown.TEXT)
    (bar,) = chart.bars
    assert (bar.label, bar.value) == ("GPU 3", "2.000 s")
    assert [piece.kind for piece in bar.pieces] == ["compute", "exposed", "bubble"]
    assert chart.kinds["bubble"] == "GPU idle"
