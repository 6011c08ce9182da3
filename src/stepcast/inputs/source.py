"""A file as readers see it: decompressed, decoded, with lines of bounded length; and TOML, read completely."""

import codecs
import contextlib
import csv
import io
import math
import os
import re
import stat
import threading
import tomllib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import BinaryIO, TypeVar

from stepcast.ir.limits import COLUMNS, DESCRIPTION, KEY_PARTS, LINE, PIPE, UNPACKED, UNPACKED_TIMES, Limit
from stepcast.ir.types import FactDict


class FormatError(ValueError):
    """A file that is not what its format promises; its text names the file and the line."""

    def __init__(self, message: str, path: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.path = path
        self.line = line

    def __str__(self) -> str:
        place = ":".join(str(part) for part in (self.path, self.line) if part)
        return f"{place}: {self.message}" if place else self.message

    def in_file(self, path: str) -> "FormatError":
        """Return the same error with the file named, unless it already names one."""
        return FormatError(self.message, self.path or path, self.line)


def expect(condition: object, message: str, path: str | None = None, line: int | None = None) -> None:
    """Raise a FormatError with *message* unless *condition* holds."""
    if not condition:
        raise FormatError(message, path, line)


@contextlib.contextmanager
def prefix_errors(
    words: str, path: str | None = None, kinds: tuple[type[Exception], ...] = (ValueError,)
) -> Iterator[None]:
    """Raise errors of these *kinds* as errors that begin with *words*: a FormatError where they are of a file.

    *path*: that of the file, "" for one that the caller names.
    """
    try:
        yield
    except kinds as error:
        text = f"{words}: {error}"
        raise (ValueError(text) if path is None else FormatError(text, path)) from None


DATA = Path(__file__).parents[1] / "data"
"""Files of the package."""
HEAD_BYTES = 64 * 1024
CHUNK_BYTES = 2**20
# A named pipe that nobody opens to write into would be waited for without end.
WRITER_S = 10.0

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARKS = ((b"\xef\xbb\xbf", "utf-8"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be"))

Piece = TypeVar("Piece", bytes, str)
Progress = Callable[[int], None]  # called with the bytes of the file that have been read


class Source:
    """One input file, or bytes given in its place."""

    def __init__(
        self, path: str | os.PathLike[str], data: bytes | None = None, progress: Progress | None = None
    ) -> None:
        self.path = os.fspath(path)
        self._data = data
        self._progress = progress

    @property
    def is_plain_file(self) -> bool:
        """Return True if the bytes are those of a file on disk, neither given, nor from a pipe, nor packed."""
        if self._data is not None or not os.path.isfile(self.path):
            return False
        with open(self.path, "rb") as file:
            return file.read(2) != GZIP_MAGIC

    @contextlib.contextmanager
    def _open_raw(self) -> Iterator[BinaryIO]:
        """Open the file, or the bytes given, and turn errors of the operating system into FormatError."""
        try:
            if self._data is None and not stat.S_ISREG(mode := os.stat(self.path).st_mode):
                with self._open_stream(mode) as pipe:  # gives its bytes once, and readers look at the beginning first
                    self._data = read_most(pipe, PIPE, self.path)
            if self._data is not None:
                yield io.BytesIO(self._data)
                return
            with open(self.path, "rb") as file:
                yield file
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise FormatError(f"cannot be read: {reason}", self.path) from None

    def _open_stream(self, mode: int) -> BinaryIO:
        expect(not stat.S_ISDIR(mode), "is a directory; expected a file", self.path)
        if stat.S_ISFIFO(mode):
            opened: list[BinaryIO] = []

            def wait() -> None:
                with contextlib.suppress(OSError):
                    opened.append(open(self.path, "rb"))  # noqa: SIM115  # the caller closes it

            waiting = threading.Thread(target=wait, daemon=True)
            waiting.start()
            waiting.join(WRITER_S)
            expect(opened, f"is a pipe that no program writes into (waited {WRITER_S:.0f} s)", self.path)
            return opened[0]
        if stat.S_ISCHR(mode):
            file = open(self.path, "rb")  # noqa: SIM115  # the caller closes it
            if file.isatty():
                return file
            file.close()
        raise FormatError("is a device or socket; expected a file or a pipe", self.path)

    @cached_property
    def head_bytes(self) -> bytes:
        """Return the first bytes, for recognising the format; as many as a damaged gzip gives."""
        damage: list[str] = []
        head = next(self.salvage_chunks(damage, HEAD_BYTES), b"")
        expect(head or not damage, "".join(damage), self.path)
        return head

    @cached_property
    def encoding(self) -> tuple[str, int]:
        """Return the text encoding and the length of its byte-order mark."""
        head = self.head_bytes
        for mark, name in BYTE_ORDER_MARKS:
            if head.startswith(mark):
                return name, len(mark)
        # UTF-16 without a mark: ASCII text has a zero in every second byte.
        half = len(head) // 2
        for name, full, empty in (("utf-16-le", 0, 1), ("utf-16-be", 1, 0)):
            if half >= 4 and head[empty::2].count(0) > 0.9 * half and head[full::2].count(0) < 0.1 * half:
                return name, 0
        return "utf-8", 0

    @cached_property
    def head(self) -> str:
        """Return the first characters; damaged ones are replaced."""
        name, skip = self.encoding
        return self.head_bytes[skip:].decode(name, errors="replace")

    def chunks(self) -> Iterator[bytes]:
        """Yield the decompressed bytes, piece by piece."""
        damage: list[str] = []
        yield from self.salvage_chunks(damage)
        expect(not damage, "".join(damage), self.path)

    def salvage_chunks(self, damage: list[str], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Yield chunks; where a gzip file is cut off or damaged, what comes before, and note the *damage*."""
        with self._open_raw() as raw:

            def read() -> bytes:
                data = raw.read(chunk_bytes)
                if self._progress is not None and self._data is None:
                    self._progress(raw.tell())
                return data

            packed = read()
            if not packed.startswith(GZIP_MAGIC):
                while packed:
                    yield packed
                    packed = read()
                return
            member = zlib.decompressobj(wbits=31)
            packed_bytes = len(self._data) if self._data is not None else os.stat(self.path).st_size
            left = max(UNPACKED.most, UNPACKED_TIMES * packed_bytes)
            while packed or not member.eof:
                try:
                    piece = member.decompress(packed, chunk_bytes)
                except zlib.error as error:
                    damage.append(f"the gzip file is damaged: {error}")
                    return
                if piece:
                    if (left := left - len(piece)) < 0:
                        raise FormatError(UNPACKED.message, self.path)
                    yield piece
                packed = member.unconsumed_tail or member.unused_data
                if member.eof:
                    while not (packed := packed.lstrip(b"\0")):  # zeros may fill the space after a member
                        packed = read()
                        if not packed:
                            return
                    member = zlib.decompressobj(wbits=31)
                elif not packed:
                    packed = read()
                    if not packed and not piece:
                        damage.append("the gzip file is cut off")
                        return

    def data(self, limit: Limit) -> bytes:
        """Return all decompressed bytes up to *limit*, without a byte-order mark, as UTF-8 where it was UTF-16."""
        name, skip = self.encoding
        return self.text(limit).encode() if name != "utf-8" else self.raw(limit)[skip:]

    def raw(self, limit: Limit) -> bytes:
        """Return all decompressed bytes up to *limit*, as they are."""
        return b"".join(self._enforce_limit(self.chunks(), limit))

    def _enforce_limit(self, pieces: Iterator[Piece], limit: Limit) -> Iterator[Piece]:
        """Refuse a file that is too large, before it is read where that shows in its size."""
        if self._data is None and os.path.isfile(self.path) and os.path.getsize(self.path) > limit.most:
            raise FormatError(limit.message, self.path)
        read = 0
        for piece in pieces:
            read += len(piece)
            expect(read <= limit.most, limit.message, self.path)
            yield piece

    def slabs(self, errors: str = "strict", limit: Limit = LINE) -> Iterator[str]:
        """Yield the text in pieces of complete lines with plain line feeds; refuse lines longer than any format's."""
        name, skip = self.encoding
        decoder = codecs.getincrementaldecoder(name)(errors)
        rest: list[str] = []  # pieces of the line that has not ended; joined once
        length, line = 0, 1
        for chunk in chain(self.chunks(), [b""]):
            try:
                piece = decoder.decode(chunk[skip:] if skip else chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += error.object.count(b"\n", 0, error.start)
                byte, encoding = f"byte {error.object[error.start]:#04x}", error.encoding.upper()
                raise FormatError(f"{byte} is not {encoding} text; expected a text file", self.path, line) from None
            skip = 0
            last = piece.rfind("\n") + 1
            if last:
                slab = "".join((*rest, piece[:last]))
                rest, length = [], 0
                line += slab.count("\n")
                yield slab.replace("\r\n", "\n") if "\r" in slab else slab
            rest.append(piece[last:])
            length += len(piece) - last
            if length > limit.most:
                if limit is not LINE:
                    raise FormatError(limit.message, self.path)
                raise FormatError(f"line is longer than {limit.amount}; expected lines of text", self.path, line)
        if end := "".join(rest):
            yield end.replace("\r\n", "\n").replace("\r", "\n")

    def text(self, limit: Limit, errors: str = "strict") -> str:
        """Return all text up to *limit*, with plain line feeds."""
        return "".join(self._enforce_limit(self.slabs(errors, limit), limit))

    def each_line(self, errors: str = "strict") -> Iterator[str]:
        """Yield the lines without their ends; a final line end adds no empty line."""
        for slab in self.slabs(errors):
            yield from slab.removesuffix("\n").split("\n")


def read_most(stream: BinaryIO, limit: Limit, path: str) -> bytes:
    """Return all of a *stream* that may have no end, up to *limit*."""
    data = bytearray()
    while chunk := stream.read(CHUNK_BYTES):
        data += chunk
        expect(len(data) <= limit.most, limit.message, path)
    return bytes(data)


_PART = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
# The parser's time grows with the square of the parts of a key.
_DEEP_KEY = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*+\.[ \t]*+{_PART}){{{KEY_PARTS.most}}}")


def read_toml(path: str | os.PathLike[str]) -> FactDict:
    """Return the tables of the file at *path*."""
    return parse_toml(Source(path).text(DESCRIPTION), os.fspath(path))


@cache
def read_words(topic: str) -> Mapping[str, Mapping[str, str]]:
    """Return the tables of ``data/words``: words of other tools about a topic, and what they mean here."""
    return read_toml(DATA / "words" / f"{topic}.toml")


def parse_toml(text: str, path: str | None = None) -> FactDict:
    """Return the tables of *text*; raise a FormatError where it is not TOML."""
    expect(not _DEEP_KEY.search(text), KEY_PARTS.message, path)
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FormatError("not valid TOML: nested too deeply", path) from None
    except ValueError as error:  # a TOMLDecodeError, or a number of thousands of digits
        raise FormatError(f"not valid TOML: {error}", path) from None


# ---- text tables, separated by commas or tabs: their header, their rows, and numbers in their cells -------


def parse_count(token: str, name: str, line: int | None, at_least: int = 0) -> int:
    """Return a whole number; ``16777216.0`` counts as one. *name* is the field in the error."""
    number = parse_amount(token, name, line)
    if not number.is_integer():
        raise FormatError(f"{name} is {token!r}; expected a whole number", line=line)
    value = int(token) if token.isdigit() and len(token) < 20 else int(number)
    if value >= 2**63:
        raise FormatError(f"{name} is {token}; expected less than 2^63", line=line)
    if value < at_least:
        raise FormatError(f"{name} is {token}; expected at least {at_least}", line=line)
    return value


def parse_amount(token: str, name: str, line: int | None) -> float:
    """Return a finite number, zero or more."""
    try:
        if not token.isascii() or "_" in token:
            raise ValueError
        value = float(token)
    except ValueError:
        raise FormatError(f"{name} is {shorten(token)}; expected a number", line=line) from None
    if not math.isfinite(value):
        raise FormatError(f"{name} is {token[:40]}; expected a finite number", line=line)
    if value < 0:
        raise FormatError(f"{name} is {token[:40]}; expected zero or more", line=line)
    return value


def shorten(text: str) -> str:
    """Return *text* quoted for an error message, cut where it is long."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


Rows = Iterator[tuple[int, list[str]]]  # the line number and the cells of each row


def _split_rows(source: Source) -> Rows:
    """Yield the rows of text that is separated by tabs, if its first line has one, or commas; blank lines give none."""
    lines = source.each_line()
    header = next(lines, "")
    reader = csv.reader(chain([header], lines), delimiter="\t" if "\t" in header else ",")
    try:
        yield from ((reader.line_num, cells) for cells in reader if len(cells) > 1 or "".join(cells).strip())
    except csv.Error as error:
        raise FormatError(f"{error}; expected separated text", source.path, reader.line_num) from None


def open_table(source: Source, needed: Sequence[str] = (), expected: str = "") -> tuple[list[str], Rows]:
    """Return a table's column names and rows; FormatError where the header lacks a *needed* column or repeats one."""
    rows = _split_rows(source)
    names = [name.strip() for name in next(rows, (1, [""]))[1]]
    if missing := [name for name in needed if name not in names]:
        raise FormatError(f"header lacks {', '.join(missing)}; expected {expected}", source.path, 1)
    expect(len(names) <= COLUMNS.most, COLUMNS.message, source.path, 1)
    if repeated := sorted(name for name, times in Counter(names).items() if times > 1):
        raise FormatError(f"header repeats {', '.join(map(shorten, repeated[:5]))}", source.path, 1)

    def complete_rows() -> Rows:
        for line, cells in rows:
            if len(cells) != len(names):
                raise FormatError(f"has {len(cells)} columns; expected {len(names)}", source.path, line)
            yield line, cells

    return names, complete_rows()


def open_columns(source: Source, names: Sequence[str], what: str) -> Rows:
    """Yield the line and the cells of the columns *names* of each row."""
    heads, rows = open_table(source, names, f"the columns of {what}")
    places = [heads.index(name) for name in names]
    return ((line, [row[place] for place in places]) for line, row in rows)


def csv_records(source: Source) -> tuple[list[str], Iterator[dict[str, str]]]:
    """Return the header's names, and each row by them; cells that are missing are empty."""
    rows = (row for _, row in _split_rows(source))
    names = next(rows, [])
    return names, (dict(zip(names, [*row, *[""] * (len(names) - len(row))], strict=False)) for row in rows)
