"""Pages as a reader meets them: nothing goes wrong, nothing leaves the page, and what moves moves."""

from pathlib import Path
from typing import Any

import pytest

from tests.pages.test_pages import VERBS

HELD = {"wide": 1200, "narrow": 400}


@pytest.mark.parametrize("width", HELD)
@pytest.mark.parametrize("name", VERBS)
def test_a_page_opens_without_an_error_a_request_or_a_sideways_scroll(
    name: str, width: str, pages: dict[str, Path], opened: Any
) -> None:
    there = opened(pages[name], width=HELD[width])
    if there.page.query_selector("canvas"):
        there.page.wait_for_selector("canvas[data-ready]")
    assert there.wrong == []
    assert there.asked == [pages[name].as_uri()]
    assert there.page.evaluate("document.documentElement.scrollWidth") <= HELD[width]
    assert there.page.inner_text("h1").strip()


VIEW = "document.getElementById('canvas').view()"
SPAN = f"({VIEW}.to - {VIEW}.from) / {VIEW}.ticks"


def view(page: Any) -> dict[str, Any]:
    found: dict[str, Any] = page.evaluate(VIEW)
    return found


@pytest.fixture
def timeline(pages: dict[str, Path], opened: Any) -> Any:
    there = opened(pages["predict"])
    there.page.wait_for_selector("canvas[data-ready]")
    there.page.locator("#canvas").scroll_into_view_if_needed()
    yield there.page
    assert there.wrong == []


def span(page: Any) -> float:
    return float(page.evaluate(SPAN))


def middle_of_first_row(page: Any) -> tuple[float, float]:
    box, found = page.locator("#canvas").bounding_box(), view(page)
    y, tall = found["lines"][0]
    return box["x"] + (found["label"] + found["width"]) / 2, box["y"] + y + tall * 0.3


def test_zoom_by_wheel_buttons_and_keys(timeline: Any) -> None:
    assert span(timeline) == 1
    timeline.mouse.move(*middle_of_first_row(timeline))
    timeline.keyboard.down("Control")
    timeline.mouse.wheel(0, -400)
    timeline.keyboard.up("Control")
    timeline.wait_for_function(f"{SPAN} < 0.6")
    wheeled = span(timeline)
    timeline.click("#zoom-in")
    assert span(timeline) == pytest.approx(wheeled / 2, rel=1e-3)
    timeline.click("#fit")
    assert span(timeline) == 1
    timeline.focus("#canvas")
    timeline.keyboard.press("+")
    assert span(timeline) == pytest.approx(0.6, rel=1e-3)
    timeline.keyboard.press("0")
    assert span(timeline) == 1


def test_a_wheel_over_the_timeline_scrolls_the_page_unless_it_was_chosen(timeline: Any) -> None:
    timeline.mouse.move(*middle_of_first_row(timeline))
    timeline.mouse.wheel(0, -300)
    timeline.wait_for_timeout(100)
    assert span(timeline) == 1


def test_dragging_pans(timeline: Any) -> None:
    timeline.click("#zoom-in")
    timeline.click("#zoom-in")
    before = view(timeline)["from"]
    x, y = middle_of_first_row(timeline)
    timeline.mouse.move(x, y)
    timeline.mouse.down()
    timeline.mouse.move(x - 150, y, steps=5)
    timeline.mouse.up()
    timeline.wait_for_function(f"{VIEW}.from > {before}")


def test_hovering_tells_what_runs_there(timeline: Any) -> None:
    timeline.mouse.move(*middle_of_first_row(timeline))
    timeline.wait_for_selector("#tip:not([hidden])")
    told = timeline.inner_text("#tip")
    assert "stage 0" in told
    assert "from" in told
    assert "micro-batch" in told


def test_searching_marks_and_goes_to_what_it_finds(timeline: Any) -> None:
    timeline.fill("#find", "attention")
    assert "found" in timeline.inner_text("#found")
    timeline.press("#find", "Enter")
    assert "attention" in timeline.inner_text("#picked")
    assert span(timeline) < 0.2
    first = view(timeline)["pick"]
    timeline.press("#find", "Enter")
    assert view(timeline)["pick"] != first
    timeline.fill("#find", "no such thing")
    assert timeline.inner_text("#found") == "none found"


def test_ranks_fold(timeline: Any) -> None:
    before = view(timeline)
    timeline.click("#fold")
    after = view(timeline)
    assert set(before["folded"]) != set(after["folded"]) or before["folded"] != after["folded"]
    assert len(before["lines"]) != len(after["lines"])


def test_the_theme_is_the_systems_until_it_is_chosen(pages: dict[str, Path], opened: Any) -> None:
    def back(page: Any) -> str:
        return str(page.evaluate("getComputedStyle(document.body).backgroundColor"))

    light, dark = opened(pages["plan"]).page, opened(pages["plan"], scheme="dark").page
    assert back(light) != back(dark)
    dark.click("#theme")
    assert back(dark) == back(light)
    dark.click("#theme")
    assert back(dark) != back(light)


def test_a_table_sorts_and_lights_up_its_dots(pages: dict[str, Path], opened: Any) -> None:
    page = opened(pages["search"]).page
    cells = "table.sortable tbody tr td:nth-child(7)"
    page.click("table.sortable th:nth-child(7) button")
    once = page.eval_on_selector_all(cells, "all => all.map(each => Number(each.dataset.key))")
    assert once == sorted(once)
    page.click("table.sortable th:nth-child(7) button")
    assert page.eval_on_selector_all(cells, "all => all.map(each => Number(each.dataset.key))") == sorted(
        once, reverse=True
    )
    page.hover("tr[data-row='2']")
    assert page.locator("circle[data-row='2'].on").count() == 1
    page.focus("circle[data-row='1']")
    assert page.locator("tr[data-row='1'].on").count() == 1
    assert page.locator("#tip").is_visible()


def test_a_page_can_be_used_by_keyboard_alone(pages: dict[str, Path], opened: Any) -> None:
    page = opened(pages["predict"]).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the answer"
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert {"theme", "find", "zoom-in", "canvas"} <= reached


def test_a_page_prints_whole(pages: dict[str, Path], opened: Any) -> None:
    page = opened(pages["predict"]).page
    page.wait_for_selector("canvas[data-ready]")
    assert len(page.pdf(format="A4")) > 20_000
    page.emulate_media(media="print")
    assert not page.locator(".bar").first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", VERBS)
def test_no_serious_barrier(name: str, scheme: str, pages: dict[str, Path], opened: Any) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python: pip install 'stepcast[browser]'"
    )
    # Axe adds a script of its own, which the page's policy would refuse.
    page = opened(pages[name], scheme=scheme, bypass_csp=True).page
    if page.query_selector("canvas"):
        page.wait_for_selector("canvas[data-ready]")
    found = axe.Axe().run(page).response["violations"]
    serious = [
        (each["id"], each["nodes"][0]["html"][:200]) for each in found if each["impact"] in ("serious", "critical")
    ]
    assert serious == []


# ---- many slices ---------------------------------------------------------------------------------------------

PAN = """async () => {
  const canvas = document.getElementById("canvas");
  for (let at = 0; at < 20; at++) {
    canvas.showRange(at / 200, 0.5 + at / 200);
    await new Promise((done) => requestAnimationFrame(done));
  }
}"""


def test_a_hundred_thousand_slices_load_and_pan(large_page: Path, opened: Any) -> None:
    """How fast depends on who else uses the machine: the benchmark `pages` counts frames a second."""
    there = opened(large_page)
    there.page.wait_for_selector("canvas[data-ready='100032']")
    there.page.evaluate(PAN)
    assert span(there.page) == pytest.approx(0.5, rel=1e-3)
    assert there.wrong == []


# ---- text of others ------------------------------------------------------------------------------------------


def test_hostile_names_stay_text_in_the_browser(tmp_path: Path, opened: Any) -> None:
    import json

    from tests.browser.conftest import command
    from tests.pages.test_pages import NAMES

    events = [
        {"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": 7, "ts": 10.0 * at, "dur": 8.0, "args": {}}
        for at, name in enumerate(NAMES.values())
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    command("analyze", "trace.json", "--html", "page.html", cwd=tmp_path)
    there = opened(tmp_path / "page.html", width=400)
    there.page.wait_for_selector("canvas[data-ready]")
    box, found = there.page.locator("#canvas").bounding_box(), view(there.page)
    for at in range(len(events)):
        x = box["x"] + found["label"] + (at + 0.3) / len(events) * (found["width"] - found["label"])
        there.page.mouse.move(x, box["y"] + found["lines"][0][0] + 5)
        there.page.wait_for_timeout(30)
    assert there.wrong == []
    assert there.page.locator("img").count() == 0
    assert there.page.evaluate("document.documentElement.scrollWidth") <= 400
