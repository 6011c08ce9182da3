"""Help: in groups, within a terminal, with two commands of each verb that run."""

import contextlib
import shlex
from pathlib import Path

import pytest

from stepcast.cli.main import VERBS, main
from tests.cli.test_main import run
from tests.shared import ROOT

PAGES = {verb.name: verb for verb in VERBS if verb.page}
# Those that need what a test has not: a GPU, recorded runs, results of others, or a long while.
ELSEWHERE = ("profile", "compare", "search", "validate", "capture", "record", "run", "watch", "mcp", "serve")


@pytest.mark.parametrize("verb", PAGES)
def test_help_ends_with_two_examples_and_fits(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    _, out, _ = run(capsys, verb, "--help")
    for example in PAGES[verb].examples:
        assert f"  stepcast {example}\n" in out
        assert len(f"  stepcast {example}") <= 80
    status, out, _ = run(capsys, "help", verb)
    assert status == 0
    assert f"stepcast {verb} --help" in out
    assert (ROOT / "docs" / f"{PAGES[verb].page}.md").is_file()


def test_most_verbs_have_a_page_and_two_examples() -> None:
    assert {verb.name for verb in VERBS} - set(PAGES) == {"completion"}
    assert all(verb.about and len(verb.examples) == 2 for verb in PAGES.values())


@pytest.mark.parametrize(
    "command", [example for verb, page in PAGES.items() if verb not in ELSEWHERE for example in page.examples]
)
def test_examples_of_help_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    status = 2
    with contextlib.suppress(SystemExit):
        status = main(shlex.split(command))
    assert status == 0, capsys.readouterr().err


def test_predict_has_groups_with_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "predict", "--help")
    for group in (
        "model, cluster and framework:",
        "parallelism (",
        "batch:",
        "execution:",
        "cost estimates:",
        "input and output:",
    ):
        assert f"\n{group}" in out
    assert "usage: stepcast predict [RUN] [options]" in out
    told = " ".join(out.split())
    for default in (
        "(default: megatron-core; peft",
        "ranks (default: 1)",
        "(default: 8 micro-batches",
        "(default: 100)",
    ):
        assert default in told
