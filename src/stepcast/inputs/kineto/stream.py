"""The events of a trace, batch by batch, without holding the file in memory.

The array of events is cut between two events, which only a JSON decoder can find for sure (names may hold
brackets, arguments may hold objects). So a likely position is found by searching backwards for the key that
events begin with, and the decoder proves it: no prefix of an array that ends inside an event is an array.
"""

import codecs
import re
from collections.abc import Iterator
from typing import NoReturn

import msgspec

from stepcast.inputs.source import FormatError, Source

LONGEST_PIECE_BYTES = 64 * 2**20  # of one event, or of what precedes the events

# Strings, brackets, and a quote that opens a string whose end is not there.
TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]|"', re.DOTALL)
STEPS = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}  # by how much a bracket changes the depth
FIRST_KEY = re.compile(rb'\s*\{\s*("[^"\\]*")\s*:')
EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
# C++ streams write these where a number is not finite; JSON has no word for it.
NOT_FINITE = re.compile(rb"(?<=[:\[,\s])[-+]?(?:nan|inf|infinity)(?=\s*[,}\]])", re.IGNORECASE)
BETWEEN_EVENTS = re.compile(rb"\}\s*,\s*\{\s*\Z")
TRIES = 4
EMPTY = msgspec.Raw()


class TraceEvent(msgspec.Struct, gc=False):
    """The used fields of one entry of traceEvents. Times are microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: float | None = None
    dur: float | None = None
    args: msgspec.Raw = EMPTY


BATCH = msgspec.json.Decoder(list[TraceEvent])
PIECES = msgspec.json.Decoder(list[msgspec.Raw])
LENIENT = msgspec.json.Decoder(TraceEvent, strict=False)


class EventStream:
    """Yields batches of events; *metadata*, *warnings* and *skipped* are complete afterwards."""

    def __init__(self, source: Source) -> None:
        self.metadata: dict[str, object] = {}
        self.warnings: list[str] = []
        self.skipped = 0
        self._source = source
        self._chunks = self._text()
        self._buffer = b""
        self._lines = 0
        self._ended = False

    def __iter__(self) -> Iterator[list[TraceEvent]]:
        bare, is_closed = self._open_array(), False
        while not is_closed:
            if not self._ended:
                self._read_more()
            # The separator between these events and those before.
            self._consume(len(self._buffer) - len(self._buffer.lstrip(b" \t\r\n,")))
            events = None if self._ended else self._decode_likely()
            if events is None:
                cut, close = _scan(self._buffer)
                is_closed = close >= 0
                if is_closed and self._buffer[close] != ord("]"):
                    self._fail("a bracket closes in the array of events that was not opened there")
                if self._ended and not cut and not is_closed:
                    # The array form of Chrome traces may leave out its closing bracket.
                    if self._buffer.strip(b" \t\r\n,") or not bare:
                        self.warnings.append("the file ends before its events do; the complete events before are used")
                    return
                events = []
                if cut:
                    text = b"[" + self._buffer[:cut] + b"]"
                    try:
                        events = BATCH.decode(text)
                    except (msgspec.DecodeError, UnicodeDecodeError):
                        events = self._decode_each(text)
                    self._consume(cut)
            if events:
                yield events
        self._close_array(bare)

    def _text(self) -> Iterator[bytes]:
        """Yield the file as UTF-8; a gzip file that is cut off ends early, with a warning."""
        name, skip = self._source.encoding
        decoder = None if name == "utf-8" else codecs.getincrementaldecoder(name)("replace")
        for chunk in self._source.salvage_chunks(self.warnings):
            text, skip = chunk[skip:], 0
            yield decoder.decode(text).encode() if decoder else text

    def _read_more(self) -> bool:
        """Lengthen the buffer; False at the end of the file."""
        chunk = next(self._chunks, None)
        if chunk is None:
            self._ended = True
            return False
        if len(self._buffer) > LONGEST_PIECE_BYTES:
            self._fail(f"no event ends within {LONGEST_PIECE_BYTES // 2**20} MiB; expected an array of events")
        self._buffer += chunk
        return True

    def _consume(self, length: int) -> bytes:
        text, self._buffer = self._buffer[:length], self._buffer[length:]
        self._lines += text.count(b"\n")
        return text

    def _fail(self, message: str) -> NoReturn:
        raise FormatError(message, self._source.path, self._lines + 1)

    def _open_array(self) -> bool:
        """Read up to the first event; True for a bare array. Keys before it become metadata."""
        while self._read_more() and not self._buffer.strip():
            pass
        start = self._buffer.lstrip(b"\xef\xbb\xbf \t\r\n")
        skipped = len(self._buffer) - len(start)
        if start.startswith(b"["):
            self._consume(skipped + 1)
            return True
        if not start.startswith(b"{"):
            self._fail("expected a JSON object with traceEvents, or an array of events")
        self._consume(skipped)
        while (bounds := _find_events_key(self._buffer)) is None:
            if not self._read_more():
                self._fail("has no array traceEvents; expected a PyTorch profiler trace")
        key, array = bounds
        head = self._consume(array)[:key].rstrip(b" \t\r\n,")
        self._add_metadata(head + b"}")
        return False

    def _decode_likely(self) -> list[TraceEvent] | None:
        """Return the events up to a position near the end of the buffer at which the decoder finds them complete."""
        for cut in _likely_boundaries(self._buffer):
            text = b"[" + self._buffer[:cut] + b"]"
            try:
                try:
                    events = BATCH.decode(text)
                except msgspec.ValidationError:
                    PIECES.decode(text)  # what follows an event of odd types has not been looked at
                    events = self._decode_each(text)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            self._consume(cut)
            return events
        repaired = NOT_FINITE.sub(b"null", self._buffer)
        if repaired == self._buffer:
            return None
        self._buffer = repaired
        return self._decode_likely()

    def _decode_each(self, text: bytes) -> list[TraceEvent]:
        """Leave out and count events of odd types; raise a FormatError for text that is not JSON."""
        text = NOT_FINITE.sub(b"null", text.decode(errors="replace").encode())
        try:
            pieces = PIECES.decode(text)
        except msgspec.DecodeError as error:
            reason = str(error).replace("JSON is malformed: ", "").rpartition(" (byte")[0] or str(error)
            self._fail(f"the events from here on are not JSON: {reason}")
        events = []
        for piece in pieces:
            try:
                events.append(LENIENT.decode(piece))
            except (msgspec.DecodeError, UnicodeDecodeError):
                self.skipped += 1
        return events

    def _close_array(self, bare: bool) -> None:
        """Read what follows the events: more metadata."""
        self._consume(_scan(self._buffer)[1] + 1)
        while self._read_more():
            pass
        rest = self._buffer.strip()
        if bare:
            if rest:
                self.warnings.append("text after the array of events is not read")
            return
        if rest.startswith(b","):
            rest = b"{" + rest[1:]
        elif rest.startswith(b"}"):
            rest = b"{}"
        if not self._add_metadata(rest):
            self.warnings.append("the file is cut off after its events")

    def device_names(self) -> list[str]:
        devices = self.metadata.get("deviceProperties")
        entries = devices if isinstance(devices, list) else []
        return [entry["name"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)]

    def _add_metadata(self, text: bytes) -> bool:
        try:
            read = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        if isinstance(read, dict):
            self.metadata |= read
        return True


def _walk(text: bytes) -> Iterator[tuple[re.Match[bytes], int]]:
    """Yield strings and brackets with the depth after each, up to a string whose end is not there."""
    depth = 0
    for token in TOKEN.finditer(text):
        if token[0] == b'"':
            return
        depth += STEPS.get(token[0], 0)
        yield token, depth


def _find_events_key(text: bytes) -> tuple[int, int] | None:
    """Return where the top-level key traceEvents begins and where its array's content does."""
    for token, depth in _walk(text):
        if depth == 1 and token[0] == b'"traceEvents"' and (match := EVENTS_KEY.match(text, token.start())):
            return token.start(), match.end()
    return None


def _likely_boundaries(text: bytes) -> Iterator[int]:
    """Yield ends of events near the end of *text*, last first: before a comma and the first key of events."""
    first = FIRST_KEY.match(text)
    if first is None:
        return
    end = len(text)
    for _ in range(TRIES):
        end = text.rfind(first[1], 0, end)
        if end <= first.start(1):
            return
        begin = max(0, end - 256)
        if boundary := BETWEEN_EVENTS.search(text[begin:end]):
            yield begin + boundary.start() + 1


def _scan(text: bytes) -> tuple[int, int]:
    """Return the end of the last complete event, exactly, and the position of the closing bracket, or -1."""
    complete = 0
    for token, depth in _walk(text):
        if depth < 0:
            return complete, token.start()
        if depth == 0 and token[0] in STEPS:
            complete = token.end()
    return complete, -1
