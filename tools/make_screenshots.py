"""The README's two pictures; needs Chromium and the extras web and browser.

Writes the page of a prediction to docs/images/page.png, and the app with the same to docs/images/app.png.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
ASKED = {
    "model": "llama-3.1-70b",
    "cluster": "dgx-h100",
    "gpus": "64",
    "tp": "8",
    "pp": "4",
    "global_batch": "128",
    "seq": "4096",
}
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
STEPCAST = [sys.executable, "-m", "stepcast"]


def main() -> None:
    path = os.environ.get("STEPCAST_CHROMIUM") or shutil.which("chromium")
    if path is None:
        sys.exit("no chromium: apt-get install chromium, or name one in STEPCAST_CHROMIUM")
    IMAGES.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page(viewport={"width": 1200, "height": 1130})
        file = Path(folder, "page.html")
        words = [each for name, value in ASKED.items() for each in (f"--{name.replace('_', '-')}", value)]
        subprocess.run(
            [*STEPCAST, "predict", *words, "--html", file.name],
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=folder,  # whose name would stand in the picture
        )
        page.goto(file.as_uri())
        _shoot(page, "page.png")
        app = browser.new_page(viewport={"width": 1280, "height": 820}, color_scheme="dark")
        _app(app)
        browser.close()


def _app(page: Any) -> None:
    with subprocess.Popen([*STEPCAST, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        address = server.stdout.readline().removeprefix("open ").strip()
        page.goto(
            f"{address}#predict?framework=megatron-core&" + "&".join(f"{name}={value}" for name, value in ASKED.items())
        )
        page.wait_for_selector("#answer[data-whole]", timeout=60_000)
        page.fill("#predict-micro_batch", "2")  # a live answer, once all is loaded
        page.wait_for_selector("#answer[data-whole*='micro_batch=2']", timeout=60_000)
        _shoot(page, "app.png")
        server.terminate()


def _shoot(page: Any, name: str) -> None:
    page.wait_for_selector("canvas[data-ready]", timeout=60_000)
    page.screenshot(path=IMAGES / name)
    print(f"wrote {IMAGES / name}: {(IMAGES / name).stat().st_size / 1e3:.0f} kB")


main()
