"""Files stay whole: a kill, a full disk or a limit costs the new file, never the old one."""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stepcast.outputs import files
from tests.cli.test_main import EXAMPLES, run
from tests.shared import ROOT

LLAMA, GPT = str(EXAMPLES / "simai-llama-405b.txt"), str(EXAMPLES / "simai-gpt-13b.txt")
MEGATRON = str(EXAMPLES / "megatron-rank7.txt")
PREDICT = ["predict", "--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8"]
PLAN = ["plan", "--gpus", "8", "--step-s", "1", "--steps", "100", "--checkpoint-size", "1GB", "--runs", "2"]
# Every way to write a file; the last word is its name.
SEARCH = ["search", "--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "1", "--global-batch", "1"]
WRITING = {
    "trace of simulate": ["simulate", GPT, "--cluster", "dgx-h100", "--trace"],
    "trace of predict": [*PREDICT, "--trace"],
    "workload of predict": [*PREDICT, "--to-workload"],
    "trace of analyze": ["analyze", MEGATRON, "--trace"],
    "trace of replay": ["replay", MEGATRON, "--trace"],
    "trace of compare": ["compare", MEGATRON, MEGATRON, "--trace"],
    "SimAI text": ["convert", "--to", "simai", GPT],
    "JSON": ["convert", "--to", "json", GPT],
    "Perfetto": ["convert", "--to", "perfetto", MEGATRON],
    "calibration": ["calibrate", "operators.csv", "--gpu", "h200", "-o"],
    "choices of plan": [*PLAN, "-o"],
    "found by search": [*SEARCH, "--top", "1", "-o"],
    "baseline of gate": ["gate", str(EXAMPLES / "gate" / "night-1.log"), "--save"],
    "rows": ["validate", "--set", "h200", "--data", "rows", "-o"],
}
OPERATORS = "op,dtype,rows,cols,ms\n" + "".join(f"add,bf16,{2**at},4096,{2**at / 1e5}\n" for at in range(9, 13))
BEFORE = b"what was there before\n"


def hidden_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".part")]


@pytest.fixture
def measured(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder holds measurements that ``WRITING`` names."""
    folder = tmp_path_factory.mktemp("measured")
    monkeypatch.chdir(folder)
    Path("operators.csv").write_text(OPERATORS)
    Path("rows").mkdir()
    head = (ROOT / "tests" / "data" / "h200" / "ops.csv").read_text().splitlines(keepends=True)[:30]
    Path("rows", "ops.csv").write_text("".join(head))


# ---- kill -9 -----------------------------------------------------------------------------------------------


def kill_while_writing(folder: Path, count: int, manner: str, words: list[str]) -> dict[str, int]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.faults.killer", str(count), manner, str(folder), *words]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert found.returncode == 0, found.stderr
    counts: dict[str, int] = json.loads(found.stdout)
    return counts


def test_twenty_kills_in_the_midst_of_writing_tear_nothing(tmp_path: Path) -> None:
    written = ("SimAI text", "trace of simulate", "workload of predict", "Perfetto")
    met = torn = 0
    for at, name in enumerate(written):
        folder = tmp_path / str(at)
        found = kill_while_writing(folder, 5, "whole", [*WRITING[name], str(folder / "out")])
        met, torn = met + found["met"], torn + found["torn"]
    assert met >= 15  # a slow machine may end a write before the kill comes
    assert torn == 0


def test_the_same_kills_tear_a_file_that_is_written_in_place(tmp_path: Path) -> None:
    """The killer can tell a torn file from a whole one."""
    found = kill_while_writing(tmp_path / "o", 4, "plain", [*WRITING["SimAI text"], str(tmp_path / "o" / "out")])
    assert found["torn"] >= 3


# ---- no room -----------------------------------------------------------------------------------------------


@contextmanager
def size_limit(size: int) -> Iterator[None]:
    """For what runs inside alone: whoever runs the tests may write their outcome to a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", WRITING)
def test_a_limit_on_sizes_leaves_the_old_file_and_names_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    target = tmp_path / "out.json"
    target.write_bytes(BEFORE)
    with size_limit(128):
        status, _, err = run(capsys, *WRITING[name], str(target))
    assert (status, err) == (2, f"stepcast: {target}: file too large; the file is left as it was\n")
    assert target.read_bytes() == BEFORE
    assert not hidden_files(tmp_path)


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("name", WRITING)
def test_with_room_the_new_file_takes_its_place(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    target = tmp_path / "out.json"
    target.write_bytes(BEFORE)
    assert run(capsys, *WRITING[name], str(target))[0] == 0
    assert len(target.read_bytes()) > 128
    assert os.listdir(tmp_path) == ["out.json"]


def test_a_set_of_files_is_written_wholly_or_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The communicators come last and are small: the ranks' files before them do not fit."""
    words = [*PREDICT, "--tp", "2", "--to-workload", str(tmp_path / "w.et")]
    old = tmp_path / "w.comm_group.json"
    old.write_bytes(BEFORE)
    with size_limit(4096):
        assert run(capsys, *words)[0] == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {old.name: BEFORE}


def test_the_demo_names_the_file_it_could_not_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with size_limit(128):
        status, _, err = run(capsys, "demo", "--examples", str(EXAMPLES), "-o", str(tmp_path))
    assert status == 2
    assert f"{tmp_path}/prediction.html: file too large" in err
    assert not list(tmp_path.iterdir())


def in_own_mounts(script: str, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run *script* where file systems can be mounted without touching the machine's."""
    if shutil.which("unshare") is None or subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("needs user namespaces (unshare -rm)")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = ["unshare", "-rm", "sh", "-ec", script, "sh", *words]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_full_disk_leaves_the_old_file_and_names_it(tmp_path: Path) -> None:
    script = """
        mount -t tmpfs -o size=64k none "$1"
        head -c 40000 /dev/zero > "$1/rest"; echo before > "$1/out.json"
        "$2" -m stepcast convert "$3" "$1/out.json" --to json || echo "status $?"
        cat "$1/out.json"; ls -A "$1"
    """
    found = in_own_mounts(script, str(tmp_path), sys.executable, LLAMA)
    assert found.stdout == "status 2\nbefore\nout.json\nrest\n"
    assert found.stderr == f"stepcast: {tmp_path}/out.json: no space left on device; the file is left as it was\n"


# ---- what is written over ----------------------------------------------------------------------------------


SIMULATE = ["simulate", "w.txt", "--trace", "link", "--cluster"]


@pytest.mark.parametrize("link", [os.link, os.symlink], ids=["hard link", "symbolic link"])
@pytest.mark.parametrize(
    ("read", "words"),
    [
        ("w.txt", [*SIMULATE, "dgx-h100"]),
        ("w.txt", ["convert", "w.txt", "link", "--to", "json"]),
        ("folder/w.txt", ["convert", "folder", "link", "--to", "json"]),
        ("c.toml", [*SIMULATE, "c.toml"]),
        ("base.toml", [*SIMULATE, "c.toml"]),
        ("base.toml", [*PREDICT[:3], "--cluster", "c.toml", "--gpus", "8", "--to-workload", "link"]),
        ("s.txt", [*SIMULATE, "dgx-h100", "--schedule", "s.txt"]),
        ("f.toml", [*PREDICT, "--framework", "f.toml", "--trace", "link"]),
        ("g.toml", [*PREDICT, "--framework", "f.toml", "--trace", "link"]),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each),
)
def test_what_is_read_is_not_written_over_by_any_name(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    link: Callable[[str, str], None],
    read: str,
    words: list[str],
) -> None:
    """Also where no argument names it: a file in a folder, or one that another builds on."""
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name in ("w.txt", "folder/w.txt"):
        Path(name).write_bytes(Path(GPT).read_bytes())
    Path("base.toml").write_text('base = "dgx-h100"\n')
    Path("c.toml").write_text('base = "base.toml"\n')
    Path("g.toml").write_text('extends = "megatron-core"\n')
    Path("f.toml").write_text('extends = "g.toml"\n')
    Path("s.txt").write_text("no schedule\n")
    held = Path(read).read_bytes()
    link(read, "link")
    status, out, err = run(capsys, *words)
    assert (status, out, err.count("use another name")) == (2, "", 1)
    assert Path(read).read_bytes() == held


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("convert - w.txt --to json < w.txt", "w.txt: is the file to read"),
        ("show w.txt >> w.txt", "goes to a file that is read"),
        ("convert w.txt out --to json > out", "out: is the file into which this prints"),
    ],
)
def test_streams_are_files_too(tmp_path: Path, command: str, told: str) -> None:
    shutil.copy(GPT, tmp_path / "w.txt")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    line = f"{sys.executable} -m stepcast {command}"
    found = subprocess.run(line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert found.returncode == 2
    assert told in found.stderr
    assert (tmp_path / "w.txt").read_bytes() == Path(GPT).read_bytes()


def test_a_file_mounted_twice_is_one_file(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    shutil.copy(GPT, tmp_path / "a" / "w.txt")
    script = 'mount --bind "$1/a" "$1/b"; "$2" -m stepcast convert "$1/a/w.txt" "$1/b/w.txt" --to json'
    found = in_own_mounts(script, str(tmp_path), sys.executable)
    assert found.returncode == 2
    assert "use another name" in found.stderr
    assert (tmp_path / "a" / "w.txt").read_bytes() == Path(GPT).read_bytes()


# ---- what a file keeps ---------------------------------------------------------------------------------------


def test_links_permissions_and_devices_stay_what_they_are(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_bytes(BEFORE)
    real.chmod(0o640)
    link.symlink_to(real)
    assert files.write_file(str(link), b"new") == 3
    assert link.is_symlink()
    assert (real.read_bytes(), real.stat().st_mode & 0o777) == (b"new", 0o640)
    assert files.write_file("/dev/null", b"new") == 3
    assert not Path("/dev/null").is_file()
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write_file(str(pipe), b"through")
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    assert pipe.is_fifo()


def test_the_longest_name_can_be_written(tmp_path: Path) -> None:
    name = "é" * 127
    assert files.write_file(str(tmp_path / name), b"x") == 1
    assert os.listdir(tmp_path) == [name]


def test_what_a_killed_process_left_does_not_stand_in_the_way(tmp_path: Path) -> None:
    left = tmp_path / f".out.{os.getpid()}-0.part"
    left.write_bytes(b"half")
    assert files.write_file(str(tmp_path / "out"), b"new") == 3
    assert (tmp_path / "out").read_bytes() == b"new"
    assert left.read_bytes() == b"half"
