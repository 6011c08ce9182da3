"""A headless Chromium for pages and the app; without one these tests are skipped and say so."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepcast.ir.timeline import SpanKind, TimelineBuilder
from stepcast.views.document import About, Page, render
from stepcast.views.timeline import timeline_section
from tests.pages.test_pages import VERBS
from tests.shared import ROOT

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
# Of a machine that others use too.
PATIENCE_MS = 180_000
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium_path() -> str | None:
    given = os.environ.get("STEPCAST_CHROMIUM")
    return given or next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Debian's chromium, or what STEPCAST_CHROMIUM names, through Playwright's package."""
    sync_api = pytest.importorskip(
        "playwright.sync_api", reason="needs the extra browser: pip install 'stepcast[browser]'"
    )
    path = chromium_path()
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium, or name one in STEPCAST_CHROMIUM")
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield found
        found.close()


@dataclass
class Watched:
    """A page in the browser, with all that went wrong in it and all that it asked for."""

    page: Any
    wrong: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on(
            "console", lambda each: self.wrong.append(each.text) if each.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.asked.append(request.url))


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens a file or an address: ``opened(where, width=..., scheme=...)``."""
    contexts = []

    def open_at(where: str | Path, width: int = 1200, scheme: str = "light", **more: Any) -> Watched:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, **more)
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        watched = Watched(context.new_page())
        watched.page.goto(where.as_uri() if isinstance(where, Path) else where)
        return watched

    yield open_at
    for context in contexts:
        context.close()


def command(*words: str, cwd: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-m", "stepcast", *words], cwd=cwd, env=environment, capture_output=True, text=True
    )
    assert done.returncode in (0, 1), done.stderr


@pytest.fixture(scope="session")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of every verb."""
    folder = tmp_path_factory.mktemp("pages")
    (folder / "rows").mkdir()
    head = (ROOT / "tests" / "data" / "h200" / "ops.csv").read_text().splitlines(keepends=True)[:30]
    (folder / "rows" / "ops.csv").write_text("".join(head))
    made = {name: folder / f"{re.sub('[^a-z]', '-', name)}.html" for name in VERBS}
    for name, path in made.items():
        command(*VERBS[name], "--html", str(path), cwd=folder)
    return made


def many_slices(count: int) -> bytes:
    """A page whose timeline has *count* slices on 16 ranks of 3 lanes."""
    chance = np.random.default_rng(1)
    builder = TimelineBuilder()
    lanes = [builder.lane(rank, name) for rank in range(16) for name in ("compute", "tp", "dp")]
    each = count // len(lanes) + 1
    for lane in lanes:
        lengths = chance.exponential(1e-3, each)
        starts = np.cumsum(lengths) - lengths
        builder.add_columns(
            [f"operation {at}" for at in range(40)],
            chance.integers(0, 40, each).astype(np.int32),
            np.full(each, lane, np.int32),
            np.full(each, SpanKind.COMPUTE if lane % 3 == 0 else SpanKind.COMMUNICATION, np.int32),
            starts,
            lengths * 0.9,
        )
    timeline = builder.build(measured=False, stage_of_rank={rank: rank for rank in range(16)})
    return render(Page("many", "", [timeline_section(timeline)], About("test")))


@pytest.fixture(scope="session")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("large") / "page.html"
    path.write_bytes(many_slices(100_000))
    return path


@pytest.fixture(scope="session")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running app."""
    pytest.importorskip("uvicorn", reason="needs the extra web: pip install 'stepcast[web]'")
    pytest.importorskip("starlette", reason="needs the extra web: pip install 'stepcast[web]'")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "stepcast", "serve", "--port", "0"]
    folder = tmp_path_factory.mktemp("served")
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        assert server.stdout
        yield server.stdout.readline().removeprefix("open ").strip()
        server.terminate()
