"""Every documented example runs and prints what the page says.

A ``console`` block holds ``$ stepcast ...`` lines, each followed by its output; a line ``...`` stands for
any lines left out. Commands run in the root of the checkout and write to a folder that is thrown away.
"""

import contextlib
import re
import shlex
from pathlib import Path

import pytest

from stepcast.cli.main import main
from tests.shared import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```console\n(.*?)^```", re.DOTALL | re.MULTILINE)


def examples() -> list[tuple[str, str, str]]:
    """Page, command and expected output of every example."""
    found = []
    for page in PAGES:
        for block in BLOCK.findall(page.read_text()):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                found.append((page.relative_to(ROOT).as_posix(), command, output.strip("\n")))
    return found


EXAMPLES = examples()


def matches(expected: str, printed: str) -> bool:
    pieces = [re.escape(piece.strip("\n")) for piece in re.split(r"^\.\.\.$", expected, flags=re.MULTILINE)]
    return re.fullmatch(r"\s*.*?".join(pieces), printed.strip("\n"), re.DOTALL) is not None


@pytest.mark.parametrize(
    ("page", "command", "expected"), EXAMPLES, ids=[f"{page}: {command}" for page, command, _ in EXAMPLES]
)
def test_example(
    page: str,
    command: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = shlex.split(command)
    assert words[0] == "stepcast", f"{page}: documented commands are stepcast's own"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setenv("COLUMNS", "100")
    with contextlib.suppress(SystemExit):
        main(words[1:])
    captured = capsys.readouterr()
    printed = "\n".join(line.rstrip() for line in (captured.out + captured.err).splitlines())
    assert matches(expected, printed), f"{page}: {command} printed\n{printed}"


def programs() -> list[tuple[str, str]]:
    """Page and program: the ``python`` blocks of a page, one after the other."""
    found = []
    for page in PAGES:
        blocks = [block for block in PYTHON.findall(page.read_text()) if not block.startswith(">>>")]
        if blocks:  # sessions are run by the tests of what they tell
            found.append((page.relative_to(ROOT).as_posix(), "\n".join(blocks)))
    return found


@pytest.mark.parametrize(("page", "program"), programs(), ids=[page for page, _ in programs()])
def test_program(page: str, program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    exec(compile(program, page, "exec"), {"__name__": page})


def test_pages_have_examples() -> None:
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
