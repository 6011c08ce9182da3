"""Gather the pages and build the site with mkdocs, where a warning is an error.

The README is its first page; pages that the navigation does not name yet are added under "More", so that a
new page is never left out.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
GATHERED = ROOT / "build" / "docs"
BESIDE = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")


def gather() -> list[str]:
    """Pages as the site has them; their names."""
    shutil.rmtree(GATHERED, ignore_errors=True)
    shutil.copytree(ROOT / "docs", GATHERED)
    for name in BESIDE:
        (GATHERED / name.lower()).write_text(_linked((ROOT / name).read_text()))
    (GATHERED / "index.md").write_text(_linked((ROOT / "README.md").read_text()))
    for page in (ROOT / "docs").rglob("*.md"):
        target = GATHERED / page.relative_to(ROOT / "docs")
        target.write_text(_beside(page.read_text()))
    return sorted(page.relative_to(GATHERED).as_posix() for page in GATHERED.rglob("*.md"))


def _linked(text: str) -> str:
    """Links of a page at the top of the checkout, from the top of the site."""
    text = text.replace("](docs/", "](")
    for name in BESIDE:
        text = text.replace(f"]({name}", f"]({name.lower()}")
    return text


def _beside(text: str) -> str:
    for name in BESIDE:
        text = text.replace(f"](../{name}", f"]({name.lower()}")
    return text.replace("](../README.md", "](index.md")


def configuration(pages: list[str]) -> Path:
    """mkdocs.yml with the pages that its navigation lacks."""
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    named = set(re.findall(r"[\w/.-]+\.md", str(config["nav"])))
    further = [page for page in pages if page not in named]
    config["nav"].append({"More": further})
    config["docs_dir"], config["site_dir"] = str(GATHERED), str(ROOT / "site")
    file = ROOT / "build" / "mkdocs.yml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


def main() -> int:
    file = configuration(gather())
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(file)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}  # of a major version that does not exist yet
    return subprocess.run(words, check=False, env=quiet).returncode


if __name__ == "__main__":
    sys.exit(main())
