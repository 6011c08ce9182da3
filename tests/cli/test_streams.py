"""Standard streams that close early, fill up or were never open; Ctrl-C; wrong words: one line, no traceback."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_main import EXAMPLES, run

STEPCAST = [sys.executable, "-m", "stepcast"]
LLAMA = str(EXAMPLES / "simai-llama-405b.txt")
# As a terminal's user has it; some machines that run tests switch the buffer off.
BUFFERED = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
MORE_THAN_A_PIPE_HOLDS = 4 * 2**20
LONG = (["list", "models"], ["show", LLAMA, "--json"], ["predict", "--help"], ["convert", LLAMA, "-", "--to", "simai"])


@pytest.mark.parametrize("words", LONG, ids=" ".join)
def test_a_reader_that_leaves_early_is_no_error(words: list[str]) -> None:
    process = subprocess.Popen([*STEPCAST, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=BUFFERED)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    error = process.stderr.read()
    process.stderr.close()
    assert (process.wait(), error) == (0, b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", LONG, ids=" ".join)
def test_a_full_disk_is_one_line(words: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        found = subprocess.run([*STEPCAST, *words], stdout=full, stderr=subprocess.PIPE, text=True, env=BUFFERED)
    assert found.returncode == 2
    assert found.stderr == "stepcast: standard output: no space left on device\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("words", [["list", "gpus"], ["show", "-"], ["show", LLAMA, "--json"]], ids=" ".join)
def test_closed_streams_give_no_traceback(words: list[str], closed: str) -> None:
    command = " ".join([*STEPCAST, *words, closed])
    found = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert "Traceback" not in found.stderr
    assert found.returncode == (2 if "-" in words else 0)


def test_results_and_warnings_go_into_one_file(tmp_path: Path) -> None:
    printed = tmp_path / "printed"
    with printed.open("w") as file:
        done = subprocess.run([*STEPCAST, "show", LLAMA], stdout=file, stderr=subprocess.STDOUT)
    assert done.returncode == 0
    assert "micro-batches" in printed.read_text()


def test_an_interrupt_is_one_line() -> None:
    # Whoever runs the tests in the background has them ignore interrupts, and their children with them.
    heard = "import signal, sys; signal.signal(2, signal.default_int_handler); from stepcast.cli.start import main"
    command = [sys.executable, "-c", f"{heard}; sys.exit(main())", "show", "-"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write(bytes(MORE_THAN_A_PIPE_HOLDS))  # returns when most of it has been read
        process.stdin.flush()
        for _ in range(20):  # an interrupt between two reads is seen after the second, which never ends
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1)
                break
        assert process.returncode == 130
        assert process.stderr.read() == b"stepcast: interrupted\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["shw", "f"], "unrecognised value 'shw'; did you mean show"),
        (["list", "gpu"], "did you mean gpus"),
        (["collective", "all-redcue"], "did you mean all-reduce"),
        (["op", "layernorm"], "did you mean layer-norm"),
        (["show", "f", "--formt", "simai"], "unrecognised option '--formt'; did you mean --format"),
        (["show", "f", "--zzz"], "unrecognised option '--zzz'; usage: stepcast show --help"),
        (["convert", "f", "g", "--to", "png"], "choose from simai, optable, chakra, perfetto, cluster, json"),
        (["show", ""], "variable of your shell"),
        (["predict", "--model", "m", "--cluster", "c", "--gpus", "8", "--trace", "no/t.json"], "there is no folder no"),
        (["convert", LLAMA, "no/w.txt", "--to", "simai"], "there is no folder no; create it first"),
        (["convert", LLAMA, ".", "--to", "simai"], "is a folder"),
        (["convert", LLAMA, "x.json", "--to", "perfetto"], "--trace OUT"),
        (["convert", str(EXAMPLES / "operators-h200.csv"), "x", "--to", "simai"], "holds a table of operator times"),
        (["simulate", LLAMA, "--cluster", "dgx-h100", "--gpus", "1000"], "use --gpus 896 or 1,024"),
        (["simulate", LLAMA, "--cluster", "dgx-h100", "--gpus", "100"], "use --gpus 128,"),
        (["simulate", LLAMA, "--engine", "simai", "--nic-gb-per-s", "0"], "--nic-gb-per-s: expected a number above zero"),
        (["simulate", LLAMA, "--cluster", "dgx-h100", "--schedule", sys.executable], "expected a text file"),
        (["predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "\u0668"], "--gpus: expected a whole number"),
        (["predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "9", "--pp", "3", "--to-workload", "w"], ".et writes Chakra"),
        (["analyze", LLAMA], "'stepcast simulate' simulates it"),
        (["demo", "--examples", str(EXAMPLES), "-o", LLAMA], "is a file; name a folder"),
    ],
)  # fmt: skip
def test_a_wrong_word_is_answered_with_the_right_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith("stepcast: ")
    assert err.count("\n") == 1
    assert expected in err


@pytest.mark.parametrize(
    "words",
    [
        ["simulate", "w.txt", "--cluster", "dgx-h100", "--trace", "w.txt"],
        ["simulate", "w.txt", "--cluster", "dgx-h100", "--trace", "link.txt"],
        ["convert", "w.txt", "./w.txt", "--to", "simai"],
        ["predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", "--trace", "n", "--to-workload", "n"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_no_file_is_written_over_what_is_read_or_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    held = Path(LLAMA).read_bytes()
    Path("w.txt").write_bytes(held)
    Path("link.txt").symlink_to("w.txt")
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert "use another name" in err
    assert Path("w.txt").read_bytes() == held


def test_help_is_a_word_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "help") == run(capsys, "--help")
    told = run(capsys, "help", "show")
    assert told[0] == 0
    assert "docs" in told[1] or "stepcast show" in told[1]


def test_no_file_is_written_where_one_must_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0:
        pytest.skip("needs a user other than root, who may write everywhere")
    tmp_path.chmod(0o555)
    status, _, err = run(capsys, "convert", LLAMA, str(tmp_path / "w.txt"), "--to", "simai")
    assert status == 2
    assert "permission denied" in err


@pytest.mark.parametrize("what", ["formats", "gpus", "clusters", "models"])
def test_lists_fit_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, "list", what)
    assert max(map(len, out.splitlines())) <= 80
