"""Text out of files and arguments never steers a terminal, and a terminal that lacks a character still gets an answer."""

import argparse
import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stepcast.cli.main import VERBS, build_parser, main
from stepcast.views.text import LONGEST_MESSAGE, UNSEEN, message, visible
from tests.cli.test_main import EXAMPLES, run
from tests.inputs.test_nccl_tests import new_row, table
from tests.shared import ROOT

# A title set, a colour, a cursor moved up, the eight-bit form of all that, text turned around, a rung bell.
HOSTILE = "x\x1b]0;owned\x07\x1b[31m\x1b[2A\x9b31m\u202egnp\x7f\x08"
UNSHOWN = re.compile(f"[{UNSEEN}]")
LLAMA, GPT = EXAMPLES / "simai-llama-405b.txt", EXAMPLES / "simai-gpt-13b.txt"


def lines_of(path: Path, count: int) -> str:
    return "".join(path.read_text().splitlines(keepends=True)[:count])


def toml(text: str) -> str:
    """A TOML string of *text*."""
    return json.dumps(text)


CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}
CONFIG |= {"num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 100}
EVENT = {
    "ph": "X",
    "cat": "kernel",
    "name": HOSTILE,
    "pid": 0,
    "tid": 7,
    "ts": 1.0,
    "dur": 5.0,
    "args": {HOSTILE: HOSTILE},
}
KINETO = {"schemaVersion": 1, HOSTILE: HOSTILE, "deviceProperties": [{"id": 0, "name": HOSTILE}]}
GPT_TEXT, TABLE = GPT.read_text(), lines_of(EXAMPLES / "optable-gpt2-large.tsv", 20)
RANK, OPTIMUS = lines_of(EXAMPLES / "megatron-rank7.txt", 40), (EXAMPLES / "optimus-llama-1b.txt").read_text()
OPERATORS = lines_of(EXAMPLES / "operators-h200.csv", 5)
CALIBRATION = 'gpu = "h200"\n[class."matmul.bf16"]\nfactor = 1.0\n'
NCCL = table(new_row(), program=HOSTILE)
# What a file may say that is shown, or named in the reason why it is refused.
FILES = {
    "layer of SimAI": GPT_TEXT.replace("attention", HOSTILE),
    "collective of SimAI": GPT_TEXT.replace("ALLREDUCE", HOSTILE, 1),
    "header of SimAI": GPT_TEXT.replace("pp_comm", HOSTILE, 1),
    "operator of a table": TABLE.replace("getitem", HOSTILE),
    "column of a table": TABLE.replace("process_time", HOSTILE),
    "operation of a rank": RANK.replace("get_batch", HOSTILE),
    "key of a rank": RANK.replace("mg_state", HOSTILE),
    "group of a rank": RANK.replace("group_kind=pp", f"group_kind={HOSTILE}"),
    "line of a log": OPTIMUS.replace("rank", HOSTILE, 3),
    "operator of a csv": OPERATORS.replace("linear", HOSTILE),
    "format of a csv": OPERATORS.replace("bf16", HOSTILE),
    "log of nccl-tests": NCCL,
    "host of nccl-tests": NCCL.replace("sum", HOSTILE),
    "events of a profiler": json.dumps({**KINETO, "traceEvents": [EVENT]}),
    "kind of a profiler": json.dumps({**KINETO, "traceEvents": [{**EVENT, "ph": HOSTILE}]}),
    "architecture of a model": json.dumps({**CONFIG, "architectures": [HOSTILE]}),
    "type of a model": json.dumps({**CONFIG, "model_type": HOSTILE}),
    "size of a model": json.dumps({**CONFIG, "hidden_size": HOSTILE}),
    "step that was printed": json.dumps({"step_s": 1.0, "breakdown_s": {HOSTILE: 1.0}, "run": {HOSTILE: HOSTILE}}),
    "description of a cluster": f'base = "dgx-h100"\ndescription = {toml(HOSTILE)}\n',
    "key of a cluster": f'base = "dgx-h100"\n{toml(HOSTILE)} = 1\n',
    "base of a cluster": f"base = {toml(HOSTILE)}\n[network]\n",
    "unit of a cluster": f'base = "dgx-h100"\n[node.nic]\nbandwidth = {toml("1 " + HOSTILE)}\n',
    "source of a cluster": f'base = "dgx-h100"\n[node]\nnics = 4\n[sources]\nnode = {toml(HOSTILE)}\n',
    "class of a calibration": CALIBRATION.replace('"matmul.bf16"', toml(HOSTILE)),
    "key of a calibration": CALIBRATION + f"{toml(HOSTILE)} = 1.0\n",
    "GPU of a calibration": CALIBRATION.replace('"h200"', toml(HOSTILE)),
    "constant of a calibration": f'gpu = "h200"\n[constants]\n{toml(HOSTILE)} = 1.0\n',
    "description of a framework": f'extends = "megatron-core"\ndescription = {toml(HOSTILE)}\n',
    "kernels of a framework": f'extends = "megatron-core"\n[software]\nkernels = {toml(HOSTILE)}\n',
    "no format": HOSTILE,
}  # fmt: skip
SIMULATED = ["--cluster", "dgx-h100"]
READING = (
    ["show", "FILE"],
    ["show", "FILE", "--json"],
    ["convert", "FILE", "OUT", "--to", "json"],
    ["simulate", "FILE", *SIMULATED, "--critical-path", "--gantt"],
    ["analyze", "FILE"],
    ["compare", "FILE", "FILE"],
    ["predict", "--model", "FILE", *SIMULATED, "--gpus", "8"],
    ["predict", "--model", "llama-3.1-8b", "--cluster", "FILE", "--gpus", "8"],
    ["collective", "barrier", "--ranks", "2", "--cluster", "FILE"],
    ["plan", "--gpus", "8", "--step-s", "1", "--steps", "9", "--checkpoint-size", "1GB", "--failures", "FILE"],
    ["op", "add", "--rows", "8", "--columns", "8", "--gpu", "h200", "--calibration", "FILE"],
)
TOML = ("a cluster", "a calibration", "a framework", "no format")


def check_shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What *words* print, which no terminal obeys."""
    status, out, err = run(capsys, *words)
    assert status in (0, 1, 2)
    assert not UNSHOWN.search(out), ascii(out)
    assert not UNSHOWN.search(err), ascii(err)
    assert status != 2 or "\nstepcast: " in "\n" + err or "--debug" in words
    return out + err


@pytest.mark.parametrize("name", FILES)
def test_no_file_steers_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Ten commands for each of thirty places; the file's own name is as bad."""
    file = tmp_path / (HOSTILE.replace("/", "") + "\n" + (".toml" if name.endswith(TOML) else ".json"))
    file.write_text(FILES[name])
    shown = [
        check_shown(capsys, *(str(file) if word == "FILE" else str(tmp_path / "out") if word == "OUT" else word for word in words))
        for words in READING
    ]  # fmt: skip
    assert any("\\x1b" in text for text in shown)


VALUED = [
    (verb.name, action.option_strings[-1])
    for verb in VERBS
    for parser in [build_parser([verb])]
    for sub in next(each for each in parser._actions if isinstance(each, argparse._SubParsersAction)).choices.values()
    for action in sub._actions
    if action.option_strings and action.nargs is None
]
# What a verb needs before it looks at an option.
NEEDED = {
    "show": [str(GPT)],
    "predict": ["--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8"],
    "search": ["--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "1", "--global-batch", "1"],
    "plan": ["--gpus", "8", "--step-s", "1", "--steps", "9", "--checkpoint-size", "1GB", "--runs", "2"],
    "simulate": [str(GPT), *SIMULATED],
    "analyze": [str(EXAMPLES / "megatron-rank7.txt")],
    "replay": [str(EXAMPLES / "megatron-rank7.txt")],
    "compare": [str(GPT), str(GPT)],
    "convert": [str(GPT), "out", "--to", "json"],
    "collective": ["all-reduce", "--ranks", "8", "--size", "1MB", "--cluster", "dgx-h100"],
    "op": ["add", "--rows", "8", "--columns", "8", "--gpu", "h200"],
    "calibrate": [str(GPT)],
    "validate": ["--set", "h200", "--data", "nowhere"],
}


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_no_argument_steers_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    monkeypatch.chdir(tmp_path)
    if verb not in ("demo", "profile", "validate"):
        check_shown(capsys, verb, HOSTILE)
    check_shown(capsys, verb, "--" + HOSTILE)
    check_shown(capsys, HOSTILE, verb)
    for option in [option for own, option in VALUED if own == verb]:
        check_shown(capsys, verb, *NEEDED.get(verb, []), option, HOSTILE)


def test_a_terminal_gets_our_own_sequences_alone(tmp_path: Path) -> None:
    path = tmp_path / (HOSTILE.replace("/", "") + "\ufdd0\n.txt")
    path.write_text(FILES["layer of SimAI"])
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "stepcast", "show", str(path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )
    os.close(theirs)
    shown = b""
    with contextlib.suppress(OSError):  # how the end of a terminal reads
        while piece := os.read(ours, 4096):
            shown += piece
    os.close(ours)
    assert process.wait() == 0
    assert shown.startswith(b"\x1b[1m")
    text = (
        shown.decode()
        .replace("\r\n", "\n")
        .replace("\r\x1b[K", "")
        .replace("\x1b[1m", "")
        .replace("\x1b[2m", "")
        .replace("\x1b[0m", "")
    )
    assert not UNSHOWN.search(text), ascii(text)


def test_a_traceback_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Traceback" in check_shown(capsys, "--debug", "show", HOSTILE)


def test_the_commands_are_many() -> None:
    assert len(FILES) * len(READING) + len(VALUED) >= 120


def test_json_means_the_same_to_its_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.txt"
    path.write_text(FILES["layer of SimAI"])
    found = json.loads(check_shown(capsys, "show", str(path), "--json"))
    assert any(HOSTILE in layer for block in found["body"] for layer in block["layers"])


def test_a_file_name_that_is_no_text_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a\udcff.txt")
    try:
        Path(path).write_text(GPT_TEXT)
    except OSError:
        pytest.skip("needs a file system that takes any bytes as file names")
    assert r"a\xff.txt" in check_shown(capsys, "show", path)
    assert json.loads(check_shown(capsys, "show", path, "--json"))["file"].endswith(r"a\xff.txt")


def test_long_words_are_cut_in_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.toml"
    path.write_text(f'base = "dgx-h100"\n{"k" * 1_000_000} = 1\n')
    for words in (
        ["collective", "barrier", "--ranks", "2", "--cluster", str(path)],
        ["show", "y" * 100_000],
        ["show", str(GPT), "--format", "z" * 100_000],
    ):
        err = check_shown(capsys, *words)
        assert err.count("\n") == 1
        assert len(err) < 2 * LONGEST_MESSAGE
        assert "more]" in err


@pytest.mark.parametrize("text", ["plain", "a b\tc", HOSTILE, "é漢", "\u2028\ud800", ""])
def test_what_is_shown_twice_is_shown_once(text: str) -> None:
    assert not UNSHOWN.search(visible(text))
    assert visible(visible(text)) == visible(text)
    assert message(text) == visible(text.strip())


# ---- terminals that lack characters ------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252", "utf-8"])
@pytest.mark.parametrize(
    "words",
    [
        ["list", "models"],
        ["list", "clusters", "--json"],
        ["show", "漢é.txt"],
        ["show", "漢é.txt", "--json"],
        ["show", "漢é.txt", "nothing-é"],
        ["simulate", "漢é.txt", *SIMULATED, "--critical-path", "--gantt"],
        ["convert", "漢é.txt", "neu-漢", "--to", "json"],
        ["predict", "--help"],
        ["漢"],
    ],
    ids=" ".join,
)
def test_a_terminal_without_a_character_gets_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    Path("漢é.txt").write_text(GPT_TEXT.replace("attention", "漢é"))
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2))
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    try:
        status = main(words)
    except SystemExit as ended:
        status = int(str(ended.code))
    out.flush()
    err.flush()
    shown, told = out.buffer.getvalue().decode(encoding), err.buffer.getvalue().decode(encoding)
    assert status == (2 if words[-1] in ("nothing-é", "漢") else 0), told
    if "--json" in words:
        assert json.loads(shown)
    if encoding == "ascii" and words[0] == "show" and "--json" not in words:
        assert r"\xe9" in shown + told


def test_no_message_of_ours_needs_more_than_ascii() -> None:
    """Beyond the mark of what was cut, which has a stand-in. Pages are of one encoding everywhere."""
    package = ROOT / "src" / "stepcast"
    of_pages = {package / "views" / f"{name}.py" for name in ("blocks", "html", "timeline")}
    for path in set(package.rglob("*.py")) - of_pages:
        found = set(re.findall(r"[^\x00-\x7f]", path.read_text()))
        assert found <= set("…µ–—×·’“”"), path
