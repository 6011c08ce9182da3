"""Colour and bars where a person looks at a terminal who did not ask to be spared, and nowhere else."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepcast.cli.output import BAR_WIDTH, ProgressBar, bar_text, moving_text
from stepcast.cli.streams import RULES, paint
from stepcast.ir.progress import report_progress, watch_progress
from tests.cli.test_main import EXAMPLES
from tests.faults.test_hostile_text import HOSTILE
from tests.shared import ROOT

SEQUENCE = re.compile(r"\x1b\[[0-9;]*m")
PREDICT = ["predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--tp", "2"]


def on_terminal(*words: str, **environment: str) -> str:
    """What a terminal gets to see of both streams."""
    ours, theirs = pty.openpty()
    given = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm", "COLUMNS": "100", **environment}
    if "NO_COLOR" not in environment:
        given.pop("NO_COLOR", None)
    running = subprocess.Popen(
        [sys.executable, "-m", "stepcast", *words], stdin=theirs, stdout=theirs, stderr=theirs, env=given
    )
    os.close(theirs)
    found = b""
    while True:
        try:
            piece = os.read(ours, 65_536)
        except OSError:
            break
        if not piece:
            break
        found += piece
    running.wait()
    os.close(ours)
    return found.decode().replace("\r\n", "\n")


def test_a_terminal_gets_colours_and_blocks() -> None:
    text = on_terminal(*PREDICT)
    assert SEQUENCE.search(text)
    assert "█" in text
    assert "\x1b[32mfits\x1b[0m" in text


@pytest.mark.parametrize(("words", "environment"), [(["--plain"], {}), ([], {"NO_COLOR": "1"}), ([], {"TERM": "dumb"})])
def test_who_wants_none_gets_none(words: list[str], environment: dict[str, str]) -> None:
    text = on_terminal(*PREDICT, *words, **environment)
    assert "\x1b" not in text
    assert "█" not in text
    assert "####" in text


def test_colours_change_no_word() -> None:
    coloured = SEQUENCE.sub("", on_terminal(*PREDICT)).replace("█", "#")
    assert coloured == on_terminal(*PREDICT, "--plain").replace(" --plain", "")


def test_json_on_a_terminal_is_json() -> None:
    assert "\x1b" not in on_terminal(*PREDICT, "--json")


def test_a_document_on_a_terminal_is_shown_as_it_is(tmp_path: Path) -> None:
    text = on_terminal("convert", str(EXAMPLES / "simai-gpt-13b.txt"), "-", "--to", "simai")
    assert "\x1b" not in text


def test_hostile_text_gets_no_sequence_through(tmp_path: Path) -> None:
    path = tmp_path / "given.txt"
    path.write_text((EXAMPLES / "simai-gpt-13b.txt").read_text().replace("attention", HOSTILE))
    text = on_terminal("show", str(path))
    assert set(SEQUENCE.findall(text)) <= {
        "\x1b[0m",
        "\x1b[1m",
        "\x1b[2m",
        *(f"\x1b[{at}m" for at in (31, 32, 33, 34, 36)),
    }
    assert "\x1b" not in SEQUENCE.sub("", text).replace("\x1b[K", "")
    assert "\x9b" not in text
    assert "\u202e" not in text


def test_rules_do_not_overlap() -> None:
    text = "warning: memory DOES NOT FIT\nstep   1 s\n----  ---\nx  ###\n"
    assert SEQUENCE.sub("", paint(text, False)) == text
    assert len(RULES) == 9


def test_bars_say_how_far_and_how_long() -> None:
    assert bar_text("rows", 1, 4, "1 of 4", 30.0) == "rows [#######.......................] 1 of 4, 30 s left"


def test_work_without_a_known_end_moves() -> None:
    shown = [moving_text("search", at, "best 1 s") for at in range(100)]
    assert shown[0] == "search [###...........................] best 1 s"
    assert shown[1] != shown[0]
    assert all(each.count("#") == 3 and len(each) == len(shown[0]) for each in shown)
    assert BAR_WIDTH == 30


def test_a_bar_shows_nothing_in_the_first_second(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    now = [100.0]
    monkeypatch.setattr("stepcast.cli.output.show_status", shown.append)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    bar = ProgressBar("rows")
    for done in range(10):
        bar(done, 10)
        now[0] += 0.3
    assert len(shown) == 6
    assert shown[0].startswith("rows [############")
    bar(10, 10)
    assert shown[-1] == ""


def test_loops_tell_those_who_watch() -> None:
    told: list[tuple[int, int]] = []
    assert list(report_progress("ab")) == ["a", "b"]
    with watch_progress(lambda done, total: told.append((done, total))):
        assert list(report_progress(iter("ab"))) == ["a", "b"]
    assert told == [(0, 2), (1, 2), (2, 2)]
    list(report_progress("ab"))
    assert len(told) == 3
