"""The command from outside: exit status, one-line errors, JSON alone on standard output."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from stepcast import __version__
from stepcast.cli.main import VERBS, main
from tests.shared import ROOT

EXAMPLES = ROOT / "examples"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        status = main(list(arguments))
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "--version") == (0, f"stepcast {__version__}\n", "")
    status, out, _ = run(capsys, "--help")
    assert status == 0
    assert all(verb.name in out and verb.summary.split()[0] in out for verb in VERBS)


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_every_verb_explains_itself(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    status, out, _ = run(capsys, verb, "--help")
    assert status == 0
    assert f"stepcast {verb}" in out


def test_the_command_alone_lists_the_verbs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys) == run(capsys, "--help")


@pytest.mark.parametrize("arguments", [["frobnicate"], ["show"], ["convert", "a", "b", "--to", "png"]])
def test_wrong_usage_is_status_2(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> None:
    status, out, err = run(capsys, *arguments)
    assert (status, out) == (2, "")
    assert "usage" in err


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("empty", b"", "is empty"),
        ("junk", b"\x00\x01\x02" * 999, "no known format"),
        ("cut.json", b'{"model_type": "llama", "hidden', "cut.json"),
        ("policy", b"HYBRID_TRANSFORMER pp: x\n1\n", "policy:1: pp is 'x'; expected a number"),
    ],
)
def test_bad_files_are_one_line_on_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, data: bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    status, out, err = run(capsys, "show", str(path))
    assert (status, out) == (2, "")
    assert err.startswith("stepcast: ")
    assert err.count("\n") == 1
    assert expected in err


def test_missing_file(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = run(capsys, "show", "nowhere.txt")
    assert status == 2
    assert err == "stepcast: nowhere.txt: cannot be read: no such file or directory\n"


def test_a_verb_outside_the_process_never_shows_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "bad"
    path.write_bytes(b"DATA\nmany\n")
    done = subprocess.run([sys.executable, "-m", "stepcast", "show", str(path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_output_cut_short_by_the_reader_is_no_error() -> None:
    words = [sys.executable, "-m", "stepcast", "show", str(EXAMPLES / "simai-llama-405b.txt")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout
        assert command.stderr
        command.stdout.close()
        assert (command.stderr.read(), command.wait()) == (b"", 0)


# Configurations of other tools and of CI, specifications of sweeps, background jobs, notebooks and several runs are not shown.
ASIDE = ("configs", "scripts", "sweeps", "network", "notebooks", "ci", "gate", "watch", "agents", "peers", "spans")
DOCUMENTS = [path for path in sorted(EXAMPLES.iterdir()) if path.name not in ASIDE]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_show_every_example(capsys: pytest.CaptureFixture[str], path: Path) -> None:
    found = run_json(capsys, "show", str(path))
    assert found["format"]
    status, out, _ = run(capsys, "show", str(path))
    assert status == 0
    assert path.name in out


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_text_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, path: Path, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    _, out, err = run(capsys, "show", path.relative_to(ROOT).as_posix() if Path.cwd() == ROOT else str(path))
    lines = [line for line in (out + err).splitlines() if str(path.parent) not in line]
    assert max(map(len, lines)) <= columns


def test_show_several_documents_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(EXAMPLES / name) for name in ("simai-gpt-13b.txt", "optable-gpt2-large.tsv")]
    found = run_json(capsys, "show", *paths)
    assert [document["format"] for document in found["documents"]] == ["simai", "optable"]


def test_edits_answer_their_warnings(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(EXAMPLES / "optable-gpt2-large.tsv")
    found = run_json(capsys, "show", path, "--repeat-layers", "2", "--backward-factor", "2")
    assert found["warnings"] == []
    assert found["compute_by_phase_s"]["input-gradient"] > 0


@pytest.mark.parametrize(
    "arguments", [["--repeat-layers", "0"], ["--backward-factor", "-1"], ["--backward-factor", "nan"]]
)
def test_impossible_edits_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    status, _, err = run(capsys, "show", str(EXAMPLES / "optable-gpt2-large.tsv"), *arguments)
    assert status == 2
    assert err.startswith("stepcast: ")


def test_list_formats(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run_json(capsys, "list", "formats")["formats"]
    assert {"simai", "optable", "megatron", "optimus", "chakra", "kineto", "nccl-tests", "huggingface", "perfetto"} <= {
        row["format"] for row in listed
    }


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_names_every_verb(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    status, out, _ = run(capsys, "completion", shell)
    assert status == 0
    assert all(verb.name in out for verb in VERBS)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_verbs_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    _, script, _ = run(capsys, "completion", "bash")
    probe = 'COMP_WORDS=(stepcast convert --t); COMP_CWORD=2; _stepcast; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script + probe], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "--to"


def test_demo_reads_every_example_and_writes_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run(capsys, "demo", "--examples", str(EXAMPLES), "-o", str(tmp_path))
    assert status == 0
    assert all(path.name in out for path in EXAMPLES.iterdir() if path.is_file())
    assert json.loads((tmp_path / "megatron-rank7.perfetto.json").read_bytes())["traceEvents"]


def test_demo_passes_over_examples_of_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "readme.txt").write_text("not ours")
    status, out, _ = run(capsys, "demo")
    assert status == 0
    assert "megatron-rank7.txt" in out


@pytest.mark.parametrize(("what", "name"), [("gpus", "h200"), ("clusters", "dgx-h100"), ("models", "llama")])
def test_list_catalogues(capsys: pytest.CaptureFixture[str], what: str, name: str) -> None:
    rows = run_json(capsys, "list", what)[what]
    assert any(name in str(next(iter(row.values()))).lower() for row in rows)


def test_show_a_cluster_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lab.toml"
    path.write_text('base = "dgx-h100"\nnodes = 64\n[node]\nnics = 4\n')
    found = run_json(capsys, "show", str(path))
    assert (found["format"], found["gpus"], found["nics_per_node"]) == ("cluster", 512, 4)
    path.write_text('base = "dgx-h100"\n[node]\nnicks = 4\n')
    status, _, err = run(capsys, "show", str(path))
    assert status == 2
    assert "lab.toml" in err
    assert "nics" in err
