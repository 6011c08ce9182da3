"""The app as a person uses it: sliders, a search, a dropped trace, two predictions side by side, a link."""

from typing import Any

import pytest

from tests.shared import ROOT

SLIDE = """([name, power]) => {
  const slider = document.querySelector(`[data-for="predict-${name}"]`);
  slider.value = String(power);
  slider.dispatchEvent(new Event("input", { bubbles: true }));
}"""
QUERY = "model=llama-3.1-8b&cluster=dgx-h100&framework=megatron-core&gpus=16&tp=2&global_batch=32&seq=2048"


@pytest.fixture
def there(app: str, opened: Any) -> Any:
    found = opened(f"{app}#predict?{QUERY}")
    found.page.wait_for_selector("#answer[data-answered]")
    yield found
    assert found.wrong == []
    assert all(each.startswith(app) for each in found.asked)


def test_a_slider_changes_the_answer_its_command_and_its_link(there: Any) -> None:
    page = there.page
    before = page.inner_text("h1")
    page.evaluate(SLIDE, ["tp", 2])
    page.wait_for_selector("#answer[data-answered*='tp=4']")
    assert page.inner_text("h1") != before
    assert "--tp 4" in page.inner_text("#line")
    assert "tp=4" in page.url
    assert page.input_value("#predict-tp") == "4"


def test_a_link_reproduces_its_view(there: Any, opened: Any) -> None:
    there.page.evaluate(SLIDE, ["pp", 1])
    there.page.wait_for_selector("#answer[data-answered*='pp=2']")
    again = opened(there.page.url)
    again.page.wait_for_selector("#answer[data-answered*='pp=2']")
    assert again.page.inner_text("h1") == there.page.inner_text("h1")
    assert again.page.inner_text("#line") == there.page.inner_text("#line")


def test_plan_and_compare_answer_live_and_by_their_links(app: str, opened: Any) -> None:
    plan = opened(f"{app}#plan?{QUERY}&tokens=100&price=2")
    plan.page.wait_for_selector("#answer[data-answered*='tokens=100']")
    assert "$" in plan.page.inner_text("#answer")
    plan.page.fill("#plan-tokens", "200")
    plan.page.wait_for_selector("#answer[data-answered*='tokens=200']")
    assert "--tokens 200B" in plan.page.inner_text("#line")
    compared = opened(f"{app}#alternatives?{QUERY}&cluster_2=dgx-b200", width=400)
    compared.page.wait_for_selector("#answer[data-answered*='cluster_2']")
    assert "dgx-b200" in compared.page.inner_text("#alternatives")
    assert compared.page.is_visible("#short")
    wide = compared.page.evaluate("document.documentElement.scrollWidth")
    assert wide <= 400
    assert plan.wrong == compared.wrong == []


def test_one_who_stays_gets_the_timeline_and_what_to_change(there: Any) -> None:
    there.page.wait_for_selector("canvas[data-ready]")
    assert "of these" in there.page.inner_text("#what-to-change")  # the best of them, or that none is


def test_what_is_wrong_is_told_and_goes_away(there: Any) -> None:
    there.page.fill("#predict-tp", "3")
    there.page.wait_for_selector("#problem:not([hidden])")
    assert "multiple" in there.page.inner_text("#problem")
    there.page.fill("#predict-tp", "4")
    there.page.wait_for_selector("#problem", state="hidden")
    there.page.wait_for_selector("#answer[data-answered*='tp=4']")
    there.wrong[:] = [each for each in there.wrong if "400" not in each]  # the browser's own word for it


def test_a_dropped_trace_is_analysed(there: Any) -> None:
    there.page.click("[data-view=analyze]")
    there.page.set_input_files("#files", str(ROOT / "examples" / "megatron-rank7.txt"))
    there.page.wait_for_selector("#answer[data-answered=analyze]")
    there.page.wait_for_selector("canvas[data-ready]")
    assert "Megatron run" in there.page.inner_text("#answer")


def test_a_search_tells_how_far_it_is_and_what_it_found(there: Any) -> None:
    page = there.page
    page.click("[data-view=search]")
    page.fill("#search-model", "llama-3.2-1b")
    for name, value in (("gpus", "8"), ("global_batch", "16"), ("seq", "2048"), ("top", "3")):
        page.fill(f"#search-{name}", value)
    page.click("#search-go")
    page.get_by_text("done", exact=True).wait_for()
    assert page.locator("table.sortable tr[data-row]").count() == 3
    assert page.inner_text("#line").startswith("stepcast search")


@pytest.mark.parametrize("view", ["search", "analyze", "saved"])
def test_another_view_does_not_show_the_last_prediction(view: str, there: Any) -> None:
    page = there.page
    before, line = page.inner_text("h1"), page.inner_text("#line")
    page.click(f"[data-view={view}]")
    assert page.locator("#answer h1").count() == 0
    assert page.locator("#origin").is_hidden()
    assert page.get_attribute("#answer", "aria-busy") == "false"
    page.click("[data-view=predict]")
    page.wait_for_selector("#answer[data-answered]")
    assert (page.inner_text("h1"), page.inner_text("#line")) == (before, line)


def test_a_search_shows_that_it_works_and_leaves_other_views_alone(there: Any) -> None:
    page = there.page
    page.click("[data-view=search]")
    page.fill("#search-model", "llama-3.1-8b")
    for name, value in (("gpus", "64"), ("global_batch", "256"), ("seq", "2048"), ("top", "3")):
        page.fill(f"#search-{name}", value)
    page.click("#search-go")
    page.wait_for_selector("#answer[aria-busy=true]")
    assert page.inner_text("#answer").startswith("Searching: ")
    page.click("[data-view=predict]")
    page.wait_for_selector("#answer[data-answered*='tp=2']")
    prediction = page.inner_text("h1")
    page.wait_for_selector("#search-bar[hidden]", state="attached")
    assert page.inner_text("h1") == prediction
    page.click("[data-view=search]")
    assert page.locator("table.sortable tr[data-row]").count() == 3


def test_a_run_that_does_not_fit_shows_what_would_fit(app: str, opened: Any) -> None:
    query = "model=llama-3.1-8b&cluster=dgx-h100&framework=transformers&gpus=8&micro_batch=4&seq=4096"
    page = opened(f"{app}#predict?{query}").page
    page.wait_for_selector("#answer[data-whole]")
    assert "Does not fit" in page.inner_text("#answer")
    section = page.locator("#how-to-make-it-fit")
    assert section.locator("tbody tr").count() == 2
    assert "--" in section.locator("tbody tr").first.inner_text()


def test_two_that_were_kept_are_laid_side_by_side(there: Any) -> None:
    page = there.page
    page.click("#keep")
    page.evaluate(SLIDE, ["tp", 3])
    page.wait_for_selector("#answer[data-answered*='tp=8']")
    page.click("#keep")
    page.click("[data-view=saved]")
    for box in page.query_selector_all("#saved-list input"):
        box.check()
    page.click("#compare")
    page.wait_for_selector("#answer[data-answered=compare]")
    assert "Parts of the step" in page.inner_text("#answer")
    assert page.inner_text("#line").count("\nstepcast predict --model") == 1


def test_the_app_is_readable_at_400_pixels(app: str, opened: Any) -> None:
    found = opened(app, width=400)
    found.page.wait_for_selector("#answer[data-whole] canvas[data-ready]")
    assert found.page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["predict", "search", "plan", "alternatives", "analyze", "saved"])
def test_no_serious_barrier_in_the_app(app: str, view: str, scheme: str, opened: Any) -> None:
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="needs axe-playwright-python: pip install 'stepcast[browser]'"
    )
    query = {"predict": QUERY, "plan": f"{QUERY}&tokens=100", "alternatives": f"{QUERY}&cluster_2=dgx-b200"}.get(view)
    page = opened(f"{app}#{view}?{query}" if query else f"{app}#{view}", scheme=scheme, bypass_csp=True).page
    # A prediction is replaced by its whole page a moment later: not while axe reads it.
    answered = "data-whole" if view == "predict" else "data-answered"
    page.wait_for_selector(f"#answer[{answered}]" if query else f"#panel-{view}:not([hidden])")
    found = axe.Axe().run(page).response["violations"]
    assert [
        (each["id"], each["nodes"][0]["html"][:200]) for each in found if each["impact"] in ("serious", "critical")
    ] == []
