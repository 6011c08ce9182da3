"""Pages: how long they take to make, to open and to move, in a headless Chromium where there is one."""

import tempfile
from pathlib import Path
from time import process_time

import stepcast
from stepcast.forecast.prediction import roofline
from stepcast.views.document import About, render
from stepcast.views.html import page_of
from stepcast.views.step import step_view
from tests.browser.conftest import FLAGS, chromium_path, many_slices
from tests.browser.test_pages_in_browser import PAN

SLICES = 100_000


def run() -> None:
    strategy = stepcast.Strategy(stepcast.Layout(tp=8, dp=2, pp=4), micro_batch=1, global_batch=64, seq=4096)
    prediction = stepcast.predict(stepcast.load_model("llama-3.1-70b"), stepcast.load_cluster("dgx-h100"), strategy)
    _ = prediction.report, prediction.timeline
    began = process_time()
    page = render(
        page_of(step_view(prediction.report.facts(), prediction.timeline, roofline(prediction)), About("predict"))
    )
    took = process_time() - began
    size = f"{len(prediction.timeline):,} spans: {took * 1e3:.0f} ms, {len(page) / 1e3:.0f} kB"
    print(f"page of a 70B step, {size}")
    large = many_slices(SLICES)
    print(f"page of {SLICES:,} slices that are all different: {len(large) / 1e3:.0f} kB")
    path = chromium_path()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        path = None
    if path is None:
        print("no Chromium or no Playwright here: opening and moving are not measured")
        return
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "page.html")
        file.write_bytes(large)
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        shown = browser.new_page(viewport={"width": 1200, "height": 900})
        ready, draw, frames = [], [], []
        for _ in range(3):
            shown.goto(file.as_uri())
            shown.wait_for_selector("canvas[data-ready]")
            ready.append(shown.evaluate("performance.now()"))
            found = shown.evaluate(PAN)
            draw.append(found["draw_ms"])
            frames.append(found["frames_per_s"])
        browser.close()
    moves = f"a frame takes {min(draw):.1f} ms, {max(frames):.0f} frames a second"
    print(f"  ready after {min(ready):.0f} ms; {moves}")


if __name__ == "__main__":
    run()
