"""``python -m benchmarks``: the names that it takes, and what it runs."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks import __main__ as benchmarks


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that would run."""
    asked: list[list[str]] = []

    def run(command: list[str], check: bool) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("subprocess.run", run)
    return asked


def test_every_benchmark_is_found() -> None:
    known = benchmarks.list_benchmarks()
    assert {*benchmarks.USUAL, *benchmarks.WITH_WORDS} <= {*known}
    assert not {"__main__", "streamed", "timing", "reader_simai"} & {*known}  # parts of others


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("whole_searches", [["benchmarks.whole_searches"]]),
        ("whole_searches gpt3 mixtral", [["benchmarks.whole_searches", "gpt3", "mixtral"]]),
        ("startup growth", [["benchmarks.startup"], ["benchmarks.growth"]]),
        ("", [[f"benchmarks.{name}"] for name in benchmarks.USUAL]),
    ],
)
def test_names_run_and_words_are_passed_on(words: str, expected: list[list[str]], commands: list[list[str]]) -> None:
    assert benchmarks.main(words.split()) == 0
    assert commands == [[sys.executable, "-m", *words] for words in expected]


@pytest.mark.parametrize("words", ["enigne", "startup enigne", "streamed", "enigne startup"])
def test_unknown_names_are_named(words: str, commands: list[list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmarks.main(words.split()) == 2
    assert "no benchmark is named" in capsys.readouterr().err
    assert commands == []
