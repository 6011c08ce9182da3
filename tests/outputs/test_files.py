"""Files are on the disk when they are written: their bytes before their name, and the name itself."""

import gzip
import os
import stat
from pathlib import Path

import pytest

from stepcast.outputs import files


def test_bytes_then_name_then_folder_reach_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash between two of these leaves the old file or the new one."""
    target, events = tmp_path / "out", list[tuple[str, object]]()
    fsync, replace = os.fsync, os.replace

    def note_fsync(handle: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "bytes"
        events.append((kind, os.fstat(handle).st_ino if kind == "folder" else os.fstat(handle).st_size))
        fsync(handle)

    def note_replace(source: str, destination: str) -> None:
        events.append(("name", destination))
        replace(source, destination)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    files.write_file(str(target), b"new")
    assert events == [("bytes", 3), ("name", str(target)), ("folder", tmp_path.stat().st_ino)]


def test_a_held_file_is_held_by_one(tmp_path: Path) -> None:
    name = str(tmp_path / "lock")
    first = files.hold(name)
    assert first is not None
    assert files.hold(name) is None
    os.close(first)
    second = files.hold(name)
    assert second is not None
    os.close(second)


def test_why_a_file_cannot_be_written(tmp_path: Path) -> None:
    assert files.unwritable(str(tmp_path / "new")) == ""
    assert "is a folder" in files.unwritable(str(tmp_path))
    assert "there is no folder" in files.unwritable(str(tmp_path / "none" / "new"))
    assert files.unwritable("/dev/null") == ""


def test_an_identity_is_that_of_any_name(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_bytes(b"x")
    os.link(one, other)
    assert files.file_identity(str(one)) == files.file_identity(str(other)) is not None
    assert files.file_identity(str(tmp_path)) is None
    assert files.file_identity(str(tmp_path / "none")) is None


def test_large_files_are_written_completely(tmp_path: Path) -> None:
    data = os.urandom(3 * files.PIECE_BYTES + 7) if files.PIECE_BYTES < 2**24 else os.urandom(2**20)
    assert files.write_file(str(tmp_path / "large"), data) == len(data)
    assert (tmp_path / "large").read_bytes() == data


def test_packed_files_do_not_tell_the_time(tmp_path: Path) -> None:
    files.write_file(str(tmp_path / "a.gz"), b"text")
    assert (tmp_path / "a.gz").read_bytes() == gzip.compress(b"text", mtime=0)
