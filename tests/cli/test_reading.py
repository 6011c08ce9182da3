"""What FILE may be: standard input, and folders with other things in them."""

import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stepcast.hardware.catalog import data_names
from tests.cli.test_main import EXAMPLES, run, run_json

pytestmark = pytest.mark.slow

LLAMA = EXAMPLES / "simai-llama-405b.txt"
MEGATRON = EXAMPLES / "megatron-rank7.txt"
KINETO = EXAMPLES / "kineto-llama-1b.json.gz"
ON_H100 = ("--cluster", "dgx-h100")


def pipe_in(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        (LLAMA, ("show",), ()),
        (KINETO, ("show",), ()),
        (LLAMA, ("simulate",), ON_H100),
        (LLAMA, ("simulate",), ("--engine", "simai")),
        (MEGATRON, ("analyze",), ()),
        (KINETO, ("analyze",), ()),
        (EXAMPLES / "operators-h200.csv", ("calibrate",), ("--gpu", "h200")),
    ],
)
def test_a_dash_reads_standard_input(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    file: Path,
    before: tuple[str, ...],
    after: tuple[str, ...],
) -> None:
    named = run_json(capsys, *before, str(file), *after)
    pipe_in(monkeypatch, file.read_bytes())
    piped = run_json(capsys, *before, "-", *after)
    for found in (named, piped):
        for name in ("file", "source", "workload", "command"):
            found.pop(name, None)
    assert piped == named


def test_convert_is_a_filter(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    pipe_in(monkeypatch, LLAMA.read_bytes())
    from stepcast.cli.main import main

    assert main(["convert", "-", "-", "--to", "simai"]) == 0
    sys.stdout.flush()
    assert capfdbinary.readouterr().out == LLAMA.read_bytes()


def test_compare_takes_a_prediction_from_a_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, printed, _ = run(capsys, "analyze", str(MEGATRON), "--json")
    (tmp_path / "one.json").write_text(printed)
    named = run_json(capsys, "compare", str(tmp_path / "one.json"), str(MEGATRON))
    pipe_in(monkeypatch, printed.encode())
    piped = run_json(capsys, "compare", "-", str(MEGATRON))
    assert piped["step_s"] == named["step_s"]


@pytest.mark.parametrize(("data", "expected"), [(b"", "is empty"), (b"hello\n", "no known format")])
def test_what_is_wrong_with_standard_input_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], data: bytes, expected: str
) -> None:
    pipe_in(monkeypatch, data)
    status, out, err = run(capsys, "show", "-")
    assert (status, out) == (2, "")
    assert err.startswith("stepcast: standard input: ")
    assert expected in err


def test_a_cluster_is_shown_from_a_file_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, f'base = "{data_names("clusters")[0]}"\n'.encode())
    status, _, err = run(capsys, "show", "-")
    assert status == 2
    assert "save it as NAME.toml" in err


def test_a_real_pipe_is_read() -> None:
    with LLAMA.open("rb") as file:
        command = [sys.executable, "-m", "stepcast", "show", "-", "--json"]
        found = subprocess.run(command, stdin=file, capture_output=True, check=True)
    assert json.loads(found.stdout)["lines"] == 557


# ---- folders -----------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run's folder as people keep them."""
    folder = tmp_path / "run"
    folder.mkdir()
    shutil.copy(MEGATRON, folder)
    (folder / "README.md").write_text("# our run\n")
    (folder / "stderr.log").write_bytes(b"")
    (folder / "core.7").write_bytes(b"\x7fELF\0\0\0" * 99)
    return folder


@pytest.mark.parametrize("verb", ["show", "analyze"])
def test_unknown_files_of_a_folder_are_left_out_and_named(
    run_folder: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    status, out, err = run(capsys, verb, str(run_folder), "--json")
    assert status == 0
    assert json.loads(out)["format"] == "megatron"
    note = next(line for line in err.splitlines() if line.startswith("note: "))
    assert "left out 3 of 4 files" in note
    for reason in ("README.md (text of no known format)", "stderr.log (is empty)", "core.7 (binary data"):
        assert reason in note


def test_a_folder_without_known_files_is_an_error(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_folder / MEGATRON.name).unlink()
    status, out, err = run(capsys, "show", str(run_folder))
    assert (status, out) == (2, "")
    assert err.startswith(f"stepcast: {run_folder}: holds no file of a known format: README.md")
    assert err.count("\n") == 1


def test_an_unknown_file_named_by_itself_is_an_error(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = run(capsys, "show", str(MEGATRON), str(run_folder / "README.md"))
    assert (status, out) == (2, "")
    assert "README.md: text of no known format" in err


def test_convert_takes_its_output_as_an_option_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / name) for name in ("first.txt", "second.txt")]
    assert run(capsys, "convert", str(LLAMA), files[0], "--to", "simai")[0] == 0
    assert run(capsys, "convert", "--to", "simai", "-o", files[1], str(LLAMA))[0] == 0
    assert Path(files[0]).read_bytes() == Path(files[1]).read_bytes()
    for words, error in (([], "no file to write given"), ([files[0], "-o", files[1]], "two files to write")):
        status, _, err = run(capsys, "convert", str(LLAMA), *words, "--to", "simai")
        assert status == 2
        assert error in err
        assert err.count("\n") == 1


ASKED = {
    "predict": "predict llama-3.2-1b --cluster dgx-h100 --gpus 8 --pp 2 --global-batch 8",
    "clusters": "predict llama-3.2-1b --cluster dgx-h100,dgx-a100 --gpus 8 --global-batch 8",
    "simulate": f"simulate {LLAMA} --cluster dgx-h100",
    "plan": "plan llama-3.2-1b --cluster dgx-h100 --gpus 8 --global-batch 512 --tokens 10B",
    "search": "search llama-3.2-1b --cluster dgx-h100 --gpus 8 --global-batch 64",
    "generate": "generate llama-3.2-1b --gpu h200",
    "network": "network llama-3.2-1b --cluster dgx-h100 --gpus 8 --global-batch 8",
    "analyze": f"analyze {MEGATRON} --verbose",
    "kineto": f"analyze {KINETO} --verbose",
    "kineto replay": f"replay {KINETO} --what-if host=graphs",
    "replay": f"replay {MEGATRON} --what-if compute=0.9x",
    "compare": f"compare {MEGATRON} {MEGATRON}",
    "gate": f"gate {EXAMPLES / 'gate' / 'night-2.log'} --baseline {EXAMPLES / 'gate' / 'night-1.log'}",
}


@pytest.mark.parametrize("words", ASKED.values(), ids=ASKED)
def test_a_saved_answer_is_shown_as_it_was_printed(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, printed, _ = run(capsys, *words.split())
    _, answer, _ = run(capsys, *words.split(), *(() if "--json" in words else ("--json",)))
    saved, page = tmp_path / "answer.json", tmp_path / "answer.html"
    saved.write_text(answer)
    status, shown, _ = run(capsys, "show", str(saved), "--html", str(page))
    assert (status, page.is_file()) == (0, True)
    # The command, which may take several lines, has --json as well.
    lines = [line for line in printed.splitlines() if not line.startswith(("stepcast ", " " * 16))]
    assert set(lines) <= set(shown.splitlines())


def test_a_file_that_is_no_complete_answer_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "answer.json"
    saved.write_text('{"command": "stepcast predict llama"}')
    assert run(capsys, "show", str(saved))[0::2] == (
        2,
        f"stepcast: {saved}: is no complete answer of a verb: 'memory_bytes'\n",
    )


def test_a_saved_run_is_named_with_its_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "run.toml"
    assert run(capsys, *ASKED["predict"].split(), "--save", str(saved))[0] == 0
    status, _, err = run(capsys, "show", str(saved))
    assert (status, "'stepcast predict' predicts it" in err) == (2, True)
