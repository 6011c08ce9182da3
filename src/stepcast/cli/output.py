"""How verbs print: JSON alone on standard output, or text that fits the terminal; warnings aside."""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from stepcast.cli import reads
from stepcast.cli.streams import terminal_width as terminal_width
from stepcast.cli.streams import unpainted
from stepcast.outputs import files
from stepcast.outputs.files import file_identity, unwritable
from stepcast.views.text import UNSEEN, bullet, message, visible

if TYPE_CHECKING:
    from stepcast.ir.timeline import Timeline

# Within strings of JSON; outside of them there is none.
UNSEEN_IN_JSON = re.compile(f"[{UNSEEN}]")
BEYOND_ASCII = re.compile(r"[^\n -~]")


def print_json(value: Any) -> None:
    """One JSON object on standard output and nothing else there."""
    import msgspec

    try:
        data = msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:  # a file name may have bytes that are no text
        data = msgspec.json.encode(_as_text(msgspec.to_builtins(value, enc_hook=_plain)))
    text = msgspec.json.format(data, indent=2).decode()
    if not text.isascii() or "\x7f" in text:  # JSON itself escapes the other control characters of ASCII
        every = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
        text = (UNSEEN_IN_JSON if every else BEYOND_ASCII).sub(_json_escape, text)
    with unpainted():
        sys.stdout.write(text + "\n")


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {_as_text(key): _as_text(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_as_text(each) for each in value]
    return visible(value) if isinstance(value, str) else value


def _json_escape(found: re.Match[str]) -> str:
    """The same text to every reader of JSON, and none that a terminal obeys or lacks."""
    words = found[0].encode("utf-16-be")
    return "".join(f"\\u{words[at]:02x}{words[at + 1]:02x}" for at in range(0, len(words), 2))


def print_data(data: bytes) -> int:
    """A document on standard output: byte for byte, unless a person looks at it."""
    if sys.stdout.isatty():
        with unpainted():
            sys.stdout.write(data.decode("utf-8", "surrogateescape"))
        return len(data)
    return sys.stdout.buffer.write(data)


def new_file(name: str) -> str:
    """A file to write beside what is printed, as an argparse type: it cannot be standard output.

    That it can be written is seen before the work is done, and not after.
    """
    if name in ("", "-"):
        raise argparse.ArgumentTypeError(f"expected the name of a file to write, not {name!r}")
    if why := unwritable(name):
        raise argparse.ArgumentTypeError(f"{name}: {why}")
    return name


# Arguments of verbs that name files to write, and those that name files to read.
WRITTEN = ("trace", "html", "to_workload", "output", "save", "to_file")
READ = (
    "what",
    "workload",
    "captured",
    "file",
    "run",
    "config",
    "files",
    "runs",
    "input",
    "predicted",
    "measured",
    "model",
    "cluster",
    "gpu",
    "calibration",
    "framework",
    "failures",
    "schedule",
    "data",
)


def check_files(args: argparse.Namespace) -> None:
    """No verb writes over what it reads, or two things into one file, by whatever name.

    What is no argument itself, as a file that another one builds on, is seen when it would be written over.
    """
    taken: dict[object, str] = {}
    for name in READ:
        for path in _paths(args, name):
            if place := file_identity(0 if path == "-" else path):
                taken[place] = "to read"
    for stream in (1, 2):
        if taken.get(place := file_identity(stream)) == "to read":
            raise ValueError("what is printed goes into a file to read; print it into another")
        if place:
            taken[place] = "into which this prints"
    for name in WRITTEN:
        for path in _paths(args, name):
            place = file_identity(path)
            if path == "-" or (place is None and os.path.exists(path)):
                continue
            where = place or os.path.realpath(path)
            if where in taken:
                raise ValueError(f"{path}: is the file {taken[where]}; give another name to write")
            taken[where] = f"that --{name.replace('_', '-')} writes"
    if any(getattr(args, name, None) for name in WRITTEN):
        reads.watch()


def _paths(args: argparse.Namespace, name: str) -> list[str]:
    value = getattr(args, name, None)
    given = value if isinstance(value, list) else [value]
    # --runs is a number elsewhere, and what names nothing is told when it is opened.
    return [path for path in given if isinstance(path, str) and path]


def write_file(path: str, data: bytes, resumes: bool = False) -> int:
    """Write *data*, compressed where the name ends in .gz; the bytes written.

    A file that was read is not written over, unless this is what *resumes* it.
    """
    return sum(write_files([(path, data)], resumes).values())


def write_files(given: Iterable[tuple[str, bytes]], resumes: bool = False) -> dict[str, int]:
    """The same of several files, all or none; the bytes of each."""
    names = []

    def checked() -> Iterator[tuple[str, bytes]]:
        for name, data in given:
            if why := unwritable(name):
                raise ValueError(f"{name}: {why}")
            if not resumes and file_identity(name) in reads.identities():
                raise ValueError(f"{name}: is a file to read; give another name to write")
            names.append(name)
            yield name, data

    sizes = files.write_files(checked())
    return dict(zip(names, sizes, strict=True))


def write_trace(timeline: "Timeline", path: str) -> None:
    """Write *timeline* for a trace viewer."""
    from stepcast.outputs.perfetto import write

    write_file(path, write(timeline))


def print_warnings(warnings: Iterable[str]) -> None:
    """Warnings go to standard error, so that they never mix with a result that is piped on."""
    for warning in warnings:
        print(bullet(message(warning), "warning: ", terminal_width()), file=sys.stderr)


def print_notes(notes: Iterable[str]) -> None:
    """What a user may want to know and need not act on: one line each, as errors have."""
    for note in notes:
        print(f"note: {message(note)}", file=sys.stderr)
