"""Small inputs that ask for much: an answer or one clear line, within 20 s and 3 GB."""

import json
import os
import threading
from pathlib import Path

import pytest

from stepcast.ir.limits import LIMITS
from tests.fuzz.bombs import EXAMPLES, Bomb, all_bombs, uses, write
from tests.fuzz.greedy import greedy
from tests.fuzz.worker import run_command
from tests.shared import ROOT

# Every ninth one, to keep the suite short; `make fuzz` runs all of them.
EVERY = int(os.environ.get("STEPCAST_EVERY_BOMB", "9"))
BOMBS = dict(
    [*all_bombs("schedules", "chains", "simais", "tables", "models", "options", "traces", "protobufs")][::EVERY]
)
GREEDY, SEED = 8, 1


@pytest.fixture(autouse=True)
def _inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("bomb", BOMBS.values(), ids=BOMBS)
def test_a_small_input_takes_little(bomb: Bomb, tmp_path: Path) -> None:
    files, words = bomb
    write(files, tmp_path)
    outcome = run_command(words)
    assert not outcome.fault, outcome.err[:500]


def test_a_million_micro_batches_of_a_second_are_told_from_their_steady_state(tmp_path: Path) -> None:
    """Days of a step, whose times are rounded."""
    step_s = {}
    for micro_batches in (100_000, 1_000_000):
        header, rest = (EXAMPLES / "simai-gpt-13b.txt").read_text().split("\n", 1)
        words = header.split()
        words[words.index("ga:") + 1] = str(micro_batches)
        (tmp_path / "w.txt").write_text(f"{' '.join(words)}\n{rest}")
        outcome = run_command(("simulate", "w.txt", "--cluster", "dgx-h100", "--json"))
        assert outcome.status == 0, outcome.err
        step_s[micro_batches] = json.loads(outcome.out)["step_s"]
    assert step_s[1_000_000] > 86_400
    assert step_s[1_000_000] == pytest.approx(10 * step_s[100_000], rel=1e-3)


@pytest.mark.parametrize("number", range(GREEDY))
def test_what_fits_together_and_asks_for_much_takes_little(number: int, tmp_path: Path) -> None:
    files, words = greedy(SEED, number)
    write(files, tmp_path)
    assert run_command(words).fault == "", words


@pytest.mark.parametrize("kind", ["endless", "directory", "packed zeros"])
def test_every_file_option_survives_what_is_no_file(kind: str, tmp_path: Path) -> None:
    import gzip

    path = tmp_path / "x.toml"
    match kind:
        case "endless":
            path.symlink_to("/dev/zero")
        case "directory":
            path.mkdir()
        case _:
            path.write_bytes(10 * gzip.compress(bytes(26 * 2**20), 9))  # members of one file
    for name, words in uses(str(path)):
        outcome = run_command(words)
        assert outcome.status == 2, name
        assert not outcome.fault, (name, outcome.fault)


def test_a_pipe_that_nobody_writes_into_is_waited_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepcast.inputs.source.WRITER_S", 0.2)
    os.mkfifo(tmp_path / "pipe")
    outcome = run_command(("show", str(tmp_path / "pipe")))
    assert outcome.status == 2
    assert "no program writes into" in outcome.err


def test_a_pipe_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    data = (EXAMPLES / "simai-gpt-13b.txt").read_bytes()
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(data,))
    writer.start()
    outcome = run_command(("show", str(tmp_path / "pipe")))
    writer.join()
    assert outcome.status == 0, outcome.err


def test_standard_input_without_end_is_refused() -> None:
    outcome = run_command(("show", "-"), stdin="/dev/zero")
    assert outcome.status == 2
    assert "standard input: more than 512 MiB" in outcome.err


def test_every_limit_is_in_the_docs() -> None:
    page = (ROOT / "docs" / "limits.md").read_text()
    for limit in LIMITS:
        assert f"| {limit.what} | {limit.amount} | {limit.why} |" in page
