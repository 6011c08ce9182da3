"""Outputs of the verbs that came later: a limit, a kill or another name costs the old file nothing."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.test_main import EXAMPLES, run
from tests.faults.test_writing import BEFORE, PREDICT, hidden_files, kill_while_writing, size_limit

SPEC = """[fixed]
model = "llama-3.2-1b"
cluster = "dgx-h100"
gpus = 8
[[axis]]
tp = [1, 2]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the answers of a sweep in it."""
    from stepcast.cli.main import main

    folder = tmp_path_factory.mktemp("swept")
    (folder / "spec.toml").write_text(SPEC)
    assert main(["sweep", str(folder / "spec.toml"), "-o", str(folder / "answers"), "--workers", "1"]) == 0
    return folder


@pytest.fixture
def here(swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(swept, tmp_path / "made")
    monkeypatch.chdir(tmp_path / "made")
    Path("k.json").write_bytes(b"{}")
    return tmp_path / "made"


# The last word is the name of the file.
LATER = {
    "saved run": [*PREDICT, "--save"],
    "page of predict": [*PREDICT, "--html"],
    "page of a trace": ["analyze", str(EXAMPLES / "megatron-rank7.txt"), "--html"],
    "page of a sweep": ["sweep", "show", "answers", "--html"],
    "exported csv": ["sweep", "export", "answers", "--to", "csv", "--to-file"],
    "exported json": ["sweep", "export", "answers", "--to", "json", "--to-file"],
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", LATER)
def test_a_full_disk_leaves_the_old_file_and_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.toml"
    target.write_bytes(BEFORE)

    def half(handle: int, data: bytes) -> None:
        os.write(handle, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("stepcast.outputs.files._write_all", half)
        status, _, err = run(capsys, *LATER[name], str(target))
    told = f"stepcast: {target}: no space left on device; the file is left as it was"
    assert (status, err.splitlines()[-1:]) == (2, [told])
    assert target.read_bytes() == BEFORE
    assert not hidden_files(tmp_path)
    assert run(capsys, *LATER[name], str(target))[0] == 0
    assert len(target.read_bytes()) > 64


@pytest.mark.parametrize("name", ["saved run", "page of predict", "page of a trace"])
def test_a_limit_on_sizes_leaves_the_old_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.toml"
    target.write_bytes(BEFORE)
    with size_limit(64):
        status, _, err = run(capsys, *LATER[name], str(target))
    assert (status, f"{target}: file too large" in err) == (2, True)
    assert target.read_bytes() == BEFORE
    assert not hidden_files(tmp_path)


def test_kills_in_the_midst_of_writing_tear_no_page(tmp_path: Path) -> None:
    found = kill_while_writing(tmp_path / "o", 4, "whole", [*PREDICT, "--html", str(tmp_path / "o" / "out")])
    assert found["torn"] == 0


@pytest.mark.parametrize("link", [os.link, os.symlink], ids=["hard link", "symbolic link"])
@pytest.mark.parametrize(
    ("read", "words"),
    [
        ("saved.toml", ["predict", "saved.toml", "--save", "link.toml"]),
        ("saved.toml", ["predict", "saved.toml", "--html", "link.toml"]),
        ("answers/results.sqlite", ["sweep", "export", "answers", "--to", "csv", "--to-file", "link.toml"]),
        ("answers/results.sqlite", ["sweep", "show", "answers", "--html", "link.toml"]),
        ("run.sh", ["predict", "--config", "run.sh", "--cluster", "dgx-h100", "--gpus", "8", "--save", "link.toml"]),
        ("captured.json", ["predict", "--captured", "captured.json", "--gpu", "h100", "--html", "link.toml"]),
    ],
    ids=lambda each: each if isinstance(each, str) else " ".join(each[:2]),
)  # fmt: skip
def test_what_is_read_is_not_written_over_by_any_name(
    here: Path, capsys: pytest.CaptureFixture[str], link: Callable[[str, str], None], read: str, words: list[str]
) -> None:
    shutil.copy(EXAMPLES / "configs" / "megatron-llama3-8b.sh", "run.sh")
    shutil.copy(EXAMPLES / "captured" / "llama-3.2-1b.json", "captured.json")
    Path("saved.toml").write_text('[predict]\nmodel = "llama-3.1-8b"\ncluster = "dgx-h100"\ngpus = 8\n')
    held = Path(read).read_bytes()
    link(str(here / read), "link.toml")
    status, _, err = run(capsys, *words)
    assert (status, err.count("use another name")) == (2, 1), err
    assert Path(read).read_bytes() == held
