"""Files as they come: compressed, marked, cut off, huge, or not text at all."""

import gzip
import random
from dataclasses import replace
from pathlib import Path

import pytest

from stepcast.inputs import source
from stepcast.inputs.source import FormatError, Source, csv_records
from stepcast.inputs.table import FORMATS, read, read_as_one
from stepcast.ir.limits import LINE, UNPACKED
from tests.shared import ROOT

GOOD = (ROOT / "examples" / "simai-gpt-13b.txt").read_bytes()


def message_of(path: Path) -> str:
    with pytest.raises(FormatError) as caught:
        read(path)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_gzip_is_read_as_the_file_inside(tmp_path: Path) -> None:
    path = tmp_path / "w.gz"
    path.write_bytes(gzip.compress(GOOD))
    assert read(path).layout == read_as_one([Source("w", GOOD)])[1].layout


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", "is empty"),
        (bytes(range(256)) * 64, "of no known format"),
        (b"\x00" * 5000, "binary data of no known format"),
        (b"hello world\n", "text of no known format"),
        (GOOD.split(b"\n")[0], "file ends after its header"),
        (GOOD[:5000], "expected 12"),
        (gzip.compress(GOOD)[:400], "the gzip file is cut off"),
        (GOOD.replace(b"mlp_row", b"mlp\xff\xfe", 1), "is not UTF-8 text"),
    ],
    ids=["empty", "junk", "zeros", "prose", "header only", "cut line", "cut gzip", "bad byte"],
)
def test_bad_files_are_one_clear_line(tmp_path: Path, data: bytes, expected: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(data)
    assert expected in message_of(path)
    assert str(path) in message_of(path)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16-le", "utf-16-be"])
def test_an_encoding_without_a_mark_is_recognised(encoding: str) -> None:
    assert Source("x", "some text of letters\n".encode(encoding)).encoding == (encoding, 0)
    assert Source("x", "{} \n".encode(encoding)).encoding == (encoding, 0)
    assert Source("x", "{}\n".encode(encoding)).encoding == ("utf-8", 0), "too short to tell"


def test_a_plain_file_is_neither_packed_nor_given(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a", tmp_path / "b"
    plain.write_bytes(b"text")
    packed.write_bytes(gzip.compress(b"text"))
    kinds = (Source(plain), Source(packed), Source(plain, b"text"), Source(tmp_path))
    assert [source.is_plain_file for source in kinds] == [True, False, False, False]


def test_missing_file_and_directories(tmp_path: Path) -> None:
    assert "no such file" in message_of(tmp_path / "none")
    assert "directory without files" in message_of(tmp_path)
    (tmp_path / "a.txt").write_bytes(GOOD)
    (tmp_path / "b.txt").write_bytes(GOOD)
    assert "read one at a time" in message_of(tmp_path)


@pytest.mark.parametrize("start", [b"", b"HYBRID_TRANSFORMER pp: 1 "], ids=["unknown", "simai header"])
def test_an_endless_line_is_refused_without_reading_it_all(tmp_path: Path, start: bytes) -> None:
    path = tmp_path / "line"
    with path.open("wb") as file:
        file.write(start)
        for _ in range(1 + LINE.most // 2**20):
            file.write(b"x" * 2**20)
        file.truncate(2 * 2**30)  # sparse: the rest of the 2 GB costs no disk
    message = message_of(path)
    assert "known format" in message or "longer than" in message


def test_every_format_has_a_loadable_reader() -> None:
    for entry in FORMATS:
        assert entry.marks or entry.columns or callable(entry.function("looks_like"))
        assert callable(entry.function("read_run" if entry.joins else "read"))


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_progress_rises_to_the_size_of_the_file(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / "w"
    path.write_bytes(gzip.compress(GOOD) if packed else GOOD)
    seen: list[int] = []
    assert read_as_one([Source(path, progress=seen.append)])[1] is not None
    assert seen[-1] == path.stat().st_size


def test_what_a_compressed_file_may_unpack_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "UNPACKED", replace(UNPACKED, most=5000))
    monkeypatch.setattr(source, "UNPACKED_TIMES", 2)
    for size, fits in ((5000, True), (5001, False), (50_000, False)):
        packed = Source("x.gz", gzip.compress(b"a" * size))
        if fits:
            assert b"".join(packed.chunks()) == b"a" * size
        else:
            with pytest.raises(FormatError, match="compressed file, unpacked"):
                list(packed.chunks())
    noise = random.Random(1).randbytes(9000)  # as large packed as unpacked
    assert b"".join(Source("x.gz", gzip.compress(noise)).chunks()) == noise


@pytest.mark.parametrize("kept", [20, 400, 3000, 8990])
def test_what_is_left_of_a_cut_file_is_read(kept: int) -> None:
    noise = random.Random(1).randbytes(9000)
    damage: list[str] = []
    found = b"".join(Source("x.gz", gzip.compress(noise)[:kept]).salvage_chunks(damage, 64))
    assert damage == ["the gzip file is cut off"]
    assert noise.startswith(found)
    assert len(found) >= kept - 600


def test_members_of_a_compressed_file_follow_each_other() -> None:
    packed = gzip.compress(b"one ") + gzip.compress(b"two ") + b"\0" * 100 + gzip.compress(b"three") + b"\0" * 9
    for chunk_bytes in (7, 64, 4096):
        damage: list[str] = []
        assert b"".join(Source("x.gz", packed).salvage_chunks(damage, chunk_bytes)) == b"one two three"
        assert not damage


def test_cells_that_are_missing_from_a_csv_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b,c\n1,2,3\n4\n")
    names, records = csv_records(Source(path))
    assert names == ["a", "b", "c"]
    assert list(records) == [{"a": "1", "b": "2", "c": "3"}, {"a": "4", "b": "", "c": ""}]
