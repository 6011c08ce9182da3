"""A file as readers see it: decompressed, decoded, with lines of bounded length."""

import codecs
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import BinaryIO

from stepcast.inputs.errors import FormatError

HEAD_BYTES = 64 * 1024
# No format here has longer lines (JSON traces, which may be one line, are not read by line).
LONGEST_LINE_BYTES = 16 * 2**20
CHUNK_BYTES = 2**20

GZIP_MAGIC = b"\x1f\x8b"
BYTE_ORDER_MARKS = (
    (b"\xef\xbb\xbf", "utf-8"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)


Progress = Callable[[int], None]
"""Told how many bytes of the file have been read."""


class Source:
    """One input file, or bytes given in its place."""

    def __init__(
        self, path: str | os.PathLike[str], data: bytes | None = None, progress: Progress | None = None
    ) -> None:
        self.path = os.fspath(path)
        self._data = data
        self._progress = progress

    def _open_raw(self) -> BinaryIO:
        if self._data is not None:
            return io.BytesIO(self._data)
        if self._progress is not None:
            return _Watched(self.path, self._progress)
        file = open(self.path, "rb")  # noqa: SIM115  # the caller closes it
        if file.seekable():
            return file
        with file:  # a pipe gives its bytes once, and readers look at the beginning first
            self._data = file.read()
        return io.BytesIO(self._data)

    def open(self) -> BinaryIO:
        """The decompressed bytes as a stream."""
        raw = self._open_raw()
        magic = raw.read(2)
        raw.seek(0)
        if magic != GZIP_MAGIC:
            return raw
        stream = gzip.GzipFile(fileobj=raw)
        # A GzipFile closes what it opened itself; tell it that this file is its own.
        stream.myfileobj = raw  # type: ignore[assignment]
        return stream  # type: ignore[return-value]

    @cached_property
    def head_bytes(self) -> bytes:
        """The first bytes, for recognising the format; a damaged gzip gives what can be had."""
        damage: list[str] = []
        head = next(self.salvaged_chunks(damage, HEAD_BYTES), b"")
        if damage and not head:
            raise FormatError(damage[0], self.path)
        return head

    @cached_property
    def encoding(self) -> tuple[str, int]:
        """Text encoding and the length of its byte-order mark."""
        head = self.head_bytes
        for mark, name in BYTE_ORDER_MARKS:
            if head.startswith(mark):
                return name, len(mark)
        # UTF-16 without a mark: ASCII text has a zero in every second byte.
        half = len(head) // 2
        if half >= 4:
            if head[1::2].count(0) > 0.9 * half and head[0::2].count(0) < 0.1 * half:
                return "utf-16-le", 0
            if head[0::2].count(0) > 0.9 * half and head[1::2].count(0) < 0.1 * half:
                return "utf-16-be", 0
        return "utf-8", 0

    @cached_property
    def head(self) -> str:
        """The first characters; damaged ones are replaced."""
        name, skip = self.encoding
        return self.head_bytes[skip:].decode(name, errors="replace")

    def chunks(self) -> Iterator[bytes]:
        """The decompressed bytes, piece by piece."""
        with self._translated(), self.open() as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk

    def salvaged_chunks(self, damage: list[str], chunk_bytes: int = CHUNK_BYTES) -> Iterator[bytes]:
        """Like chunks; but where a gzip file is cut off or damaged, gives what comes before and notes why."""
        with self._translated(), self._open_raw() as raw:
            packed = raw.read(chunk_bytes)
            if not packed.startswith(GZIP_MAGIC):
                while packed:
                    yield packed
                    packed = raw.read(chunk_bytes)
                return
            member = zlib.decompressobj(wbits=31)
            while packed or not member.eof:
                try:
                    piece = member.decompress(packed, chunk_bytes)
                except zlib.error as error:
                    damage.append(f"the gzip file is damaged: {error}")
                    return
                if piece:
                    yield piece
                packed = member.unconsumed_tail or member.unused_data
                if member.eof:
                    packed = (packed or raw.read(chunk_bytes)).lstrip(b"\0")
                    if not packed:
                        return
                    member = zlib.decompressobj(wbits=31)
                elif not packed:
                    packed = raw.read(chunk_bytes)
                    if not packed and not piece:
                        damage.append("the gzip file is cut off")
                        return

    def data(self) -> bytes:
        """All decompressed bytes, without a byte-order mark, as UTF-8 where the file was UTF-16."""
        name, skip = self.encoding
        if name != "utf-8":
            return "".join(self.slabs(longest_line=None)).encode()
        if self._data is not None and not self._data.startswith(GZIP_MAGIC):
            data = self._data
        else:
            data = b"".join(self.chunks())
        return data[skip:] if skip else data

    def slabs(self, errors: str = "strict", longest_line: int | None = LONGEST_LINE_BYTES) -> Iterator[str]:
        """The text in pieces of whole lines with plain line feeds. Refuses lines no format here has."""
        name, skip = self.encoding
        decoder = codecs.getincrementaldecoder(name)(errors)
        rest, line = "", 1
        for chunk in self.chunks():
            try:
                piece = decoder.decode(chunk[skip:] if skip else chunk)
            except UnicodeDecodeError as error:
                raise self._not_text(error, line) from None
            skip = 0
            last = piece.rfind("\n") + 1
            if last:
                slab = rest + piece[:last]
                rest = piece[last:]
                line += slab.count("\n")
                yield slab.replace("\r\n", "\n") if "\r" in slab else slab
            else:
                rest += piece
            if longest_line is not None and len(rest) > longest_line:
                size = f"{longest_line // 2**20} MiB"
                raise FormatError(f"line is longer than {size}; expected lines of text", self.path, line)
        try:
            rest += decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise self._not_text(error, line) from None
        if rest:
            yield rest.replace("\r\n", "\n").replace("\r", "\n")

    def text(self, errors: str = "strict") -> str:
        """All text, with plain line feeds."""
        return "".join(self.slabs(errors))

    def each_line(self, errors: str = "strict") -> Iterator[str]:
        """The lines without their ends; a final line end adds no empty line."""
        for slab in self.slabs(errors):
            lines = slab.split("\n")
            if not lines[-1]:
                lines.pop()
            yield from lines

    def lines(self, errors: str = "strict") -> list[str]:
        """All lines at once."""
        return list(self.each_line(errors))

    def _not_text(self, error: UnicodeDecodeError, line: int) -> FormatError:
        line += error.object.count(b"\n", 0, error.start)
        byte = f"byte {error.object[error.start]:#04x}"
        return FormatError(
            f"{byte} is not {error.encoding.upper()} text; expected a text file", self.path, line
        )

    def _translated(self) -> "_Translated":
        return _Translated(self.path)


class _Watched(io.FileIO):
    """A file that tells how far it has been read."""

    def __init__(self, path: str, progress: Progress) -> None:
        super().__init__(path)
        self._progress = progress

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(-1 if size is None else size)
        self._progress(self.tell())
        return data


class _Translated:
    """Turns errors of the operating system and of gzip into FormatError."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, IsADirectoryError):
            raise FormatError("is a directory; expected a file", self.path) from None
        if isinstance(error, EOFError | gzip.BadGzipFile | zlib.error):
            raise FormatError(f"damaged or truncated gzip: {error}", self.path) from None
        if isinstance(error, OSError):
            reason = (error.strerror or str(error)).lower()
            raise FormatError(f"cannot be read: {reason}", self.path) from None
