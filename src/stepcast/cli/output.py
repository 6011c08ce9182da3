"""Output of verbs: one JSON object or text on standard output, warnings on standard error, and files; files that are
read, with a progress bar for large ones on a terminal.
"""

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from stepcast.cli.streams import show_status, unpainted, waiting_notes
from stepcast.cli.streams import terminal_width as terminal_width
from stepcast.inputs.source import Source, read_most
from stepcast.ir.limits import PIPE
from stepcast.ir.types import ChangeFacts, FactDict, group_by_key, pick
from stepcast.outputs import files
from stepcast.outputs.files import file_identity, unwritable
from stepcast.version import __version__
from stepcast.views.terminal import render_text
from stepcast.views.text import UNSEEN, bullet, message, visible
from stepcast.views.view import View

if TYPE_CHECKING:
    from stepcast.forecast.prediction import Prediction
    from stepcast.ir.timeline import Timeline

# Characters within strings of JSON; outside of them there are none.
UNSEEN_IN_JSON = re.compile(f"[{UNSEEN}]")
BEYOND_ASCII = re.compile(r"[^\n -~]")
SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/")  # in a URL
# Arguments of verbs that name files to write and files to read.
WRITTEN = ("trace", "html", "to_workload", "output", "out", "save", "to_file", "markdown", "junit")
READ = (
    *("what", "workload", "captured", "file", "run", "config", "files", "runs", "input", "predicted", "measured"),
    *("model", "cluster", "gpu", "calibration", "framework", "failures", "schedule", "data", "baseline", "forecast"),
)
# Smaller files need no progress bar.
SMALLEST_BYTES = 32 * 2**20
EVERY_S = 0.1
LONG_S = 1.0
MOVING = "###"
BAR_WIDTH = 30


def print_json(value: object) -> None:
    """Print one JSON object on standard output."""
    try:
        data = msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:  # file names may have bytes that are not text
        data = msgspec.json.encode(_as_text(msgspec.to_builtins(value, enc_hook=_plain)))
    text = msgspec.json.format(data, indent=2).decode()
    if not text.isascii() or "\x7f" in text:  # JSON itself escapes the other control characters of ASCII
        every = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
        # As escapes, which JSON readers read as the same text and terminals do not interpret.
        text = (UNSEEN_IN_JSON if every else BEYOND_ASCII).sub(lambda match: json.dumps(match[0])[1:-1], text)
    with unpainted():
        sys.stdout.write(text + "\n")


def _plain(value: object) -> object:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"cannot write {type(value).__name__} as JSON")


def _as_text(value: object) -> object:
    if isinstance(value, dict):
        return {_as_text(key): _as_text(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return visible(value) if isinstance(value, str) else value


def print_data(data: bytes) -> int:
    """Print a document: byte for byte, unless standard output is a terminal."""
    if sys.stdout.isatty():
        with unpainted():
            sys.stdout.write(data.decode("utf-8", "surrogateescape"))
        return len(data)
    return sys.stdout.buffer.write(data)


def new_file(name: str) -> str:
    """Check the name of a file to write, as an argparse type, before the work is done."""
    if name in ("", "-"):
        raise argparse.ArgumentTypeError(f"expected the name of a file to write, not {name!r}")
    if why := unwritable(name):
        raise argparse.ArgumentTypeError(f"{name}: {why}")
    return name


def check_files(args: argparse.Namespace) -> None:
    """Raise a ValueError if a verb would write to a file that it reads, or twice to the same file.

    Files that are no arguments, such as one that another extends, are checked when they would be replaced.
    """
    written = [(name, path) for name in WRITTEN for path in _paths(args, name)]
    read = [path for name in READ for path in _paths(args, name) if path == "-" or os.path.exists(path)]
    if not (written or read):
        return
    places = (file_identity(0 if path == "-" else path) for path in read)
    taken: dict[object, str] = {place: "to read" for place in places if place}
    for stream in (1, 2):
        if taken.get(place := file_identity(stream)) == "to read":
            raise ValueError("standard output goes to a file that is read; use another one")
        if place:
            taken[place] = "into which this prints"
    for name, path in written:
        place = file_identity(path)
        if path == "-" or (place is None and os.path.exists(path)):
            continue
        where = place or os.path.realpath(path)
        if where in taken:
            raise ValueError(f"{path}: is the file {taken[where]}; use another name")
        taken[where] = f"that --{name.replace('_', '-')} writes"
    if written:  # remember the files opened from now on
        global _watching
        if not _watching:
            sys.addaudithook(_note_open)
            _watching = True
        _opened.clear()


def _paths(args: argparse.Namespace, name: str) -> list[str]:
    value = getattr(args, name, None)
    # --runs is a number in other verbs; a name without a file is an error when it is opened.
    return [path for path in (value if isinstance(value, list) else [value]) if isinstance(path, str) and path]


def write_file(path: str, data: bytes, resumes: bool = False) -> int:
    """Write *data*, compressed if the name ends in .gz; return the number of bytes.

    A file that was read is not replaced, unless this *resumes* it.
    """
    return sum(write_files([(path, data)], resumes).values())


def write_files(given: Iterable[tuple[str, bytes]], resumes: bool = False) -> dict[str, int]:
    """Write several files, all or none; return the number of bytes of each."""
    names = []

    def check() -> Iterator[tuple[str, bytes]]:
        for name, data in given:
            if why := files.unwritable(name):
                raise ValueError(f"{name}: {why}")
            if not resumes and files.file_identity(name) in set(filter(None, map(files.file_identity, _opened))):
                raise ValueError(f"{name}: is a file that is read; use another name")
            names.append(name)
            yield name, data

    sizes = files.write_files(check())
    return dict(zip(names, sizes, strict=True))


def write_trace(timeline: "Timeline", path: str) -> None:
    """Write *timeline* for a trace viewer."""
    from stepcast.outputs.perfetto import write

    write_file(path, write(timeline))


def print_warnings(warnings: Iterable[str]) -> None:
    """Print warnings to standard error, so that they do not mix with piped results."""
    for warning in warnings:
        print(bullet(message(warning), "warning: ", terminal_width()), file=sys.stderr)


def print_notes(notes: Iterable[str]) -> None:
    """Print notes, which need no action, one line each, when the command ends; an error is printed without them."""
    waiting_notes.extend(f"note: {message(note)}" for note in notes)


# ---- files that were read -----------------------------------------------------------------------------------
# A cluster may extend another file, and a run's folder may have a log next to its traces, so the files that an
# output must not replace are known only when they were opened. Python reports every file it opens (PEP 578).

_watching = False
_opened: set[str] = set()


def _note_open(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str | bytes) and isinstance(flags, int) and not flags & (os.O_WRONLY | os.O_RDWR):
            _opened.add(os.fsdecode(path))
    elif event == "sqlite3.connect" and isinstance(arguments[0], str):  # sqlite opens its files itself
        name = arguments[0].removeprefix("file://").removeprefix("file:").partition("?")[0]
        _opened.add(re.sub("%([0-9a-fA-F]{2})", lambda match: chr(int(match[1], 16)), name))


def origin(args: argparse.Namespace) -> FactDict:
    """Return the facts of an answer about the command that asked for it."""
    return {"command": args.command, "version": __version__}


def show_view(args: argparse.Namespace, view: View, verbose: bool = True, below: Sequence[str] = ()) -> None:
    """Write the page of an answer if ``--html`` asks for it, then print the answer, with texts *below* it."""
    write_view(args, view)
    print_view(args, view, verbose, below)


def write_view(args: argparse.Namespace, view: View) -> None:
    """Write the page of an answer if ``--html`` asks for it, with a link to the trace that was written with it."""
    if not args.html:
        return
    from stepcast.views.document import About
    from stepcast.views.html import render_page

    links = []
    if trace := getattr(args, "trace", None):
        where = os.path.relpath(trace, os.path.dirname(os.path.abspath(args.html)))
        data = os.fsencode(where.replace(os.sep, "/"))
        url = "./" + "".join(chr(byte) if byte in SAFE else f"%{byte:02X}" for byte in data)
        links.append(("Trace for ui.perfetto.dev", url))
    about = About(args.verb, getattr(args, "command", ""), __version__, tuple(links))
    write_file(args.html, render_page(view, about))


def print_view(args: argparse.Namespace, view: View, verbose: bool = True, below: Sequence[str] = ()) -> None:
    """Print JSON, or the answer as text, the name of the page that was written, and the warnings."""
    if args.json:
        print_json(view.facts)
        return
    if text := render_text(view, terminal_width(), verbose):
        print(text)
    for more in below:
        print(f"\n{more}")
    if args.html:
        print(f"\n{page_note(args)}")
    print_warnings(view.warnings)


def page_note(args: argparse.Namespace) -> str:
    return f"wrote {visible(args.html)}: open it in a browser"


def open_source(path: str) -> Source:
    """Open the file at *path*, or standard input for ``-``; a large file shows its progress."""
    if path == "-":
        if sys.stdin.isatty():
            print("reading standard input; end it with Ctrl-D", file=sys.stderr)
        return Source("standard input", _read_all(sys.stdin.buffer))
    if not sys.stderr.isatty() or not os.path.isfile(path) or os.path.getsize(path) < SMALLEST_BYTES:
        return Source(path)
    size, bar = os.path.getsize(path), ProgressBar(os.path.basename(path)[:30], " MB")
    return Source(path, progress=lambda done: bar(done / 1e6, size / 1e6))


@lru_cache(maxsize=1)
def _read_all(stream: BinaryIO) -> bytes:
    """Return all of *stream*, which can be read only once."""
    return read_most(stream, PIPE, "standard input")


class ProgressBar:
    """A progress bar with the time left, shown after one second on a terminal."""

    def __init__(self, label: str, unit: str = "") -> None:
        self.label, self.unit = label, unit
        self.began = self.last = time.monotonic()

    def __call__(self, done: float, total: float) -> None:
        now = time.monotonic()
        if done >= total:
            show_status("")
        elif now - self.began >= LONG_S and now - self.last >= EVERY_S:
            self.last = now
            left = (now - self.began) * (total - done) / done if done else None
            show_status(bar_text(self.label, done, total, f"{done:,.0f} of {total:,.0f}{self.unit}", left))


def bar_text(label: str, done: float, total: float, text: str, left_s: float | None = None) -> str:
    """Return ``name [####......] 3 of 9, 12 s left``."""
    filled = int(BAR_WIDTH * done / total) if total else 0
    left = "" if left_s is None else f", {left_s:,.0f} s left"
    return f"{label} [{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {text}{left}"


def moving_text(label: str, ticks: int, text: str) -> str:
    """Return a bar that moves, for work of unknown length."""
    start = ticks % (BAR_WIDTH - len(MOVING) + 1)
    return f"{label} [{'.' * start}{MOVING}{'.' * (BAR_WIDTH - len(MOVING) - start)}] {text}"


def show_prediction(
    prediction: "Prediction", args: argparse.Namespace, asked: FactDict, changes: Callable[[], list[ChangeFacts]] = list
) -> None:
    """Print the report, and write or draw what was asked for; *changes* are predictions with one choice changed."""
    from stepcast.views.step import step_view

    facts = {**asked, **prediction.report.facts(), **origin(args)}
    if args.jitter is not None:
        from stepcast.simulation.unfolded import simulate_jitter

        spread = simulate_jitter(prediction.step, args.jitter, args.runs, args.seed)
        percentiles_s = {f"p{rank}": seconds for rank, seconds in spread.percentiles_s.items()}
        about = {"deviation": args.jitter, "runs": spread.runs, "seed": args.seed}
        facts["jitter"] = {**about, **pick(spread, "mean_s deviation_s"), "percentiles_s": percentiles_s}
    if args.critical_path:
        facts["critical_path"] = _path_rows(prediction)
    if args.trace:
        facts["trace"] = args.trace
        write_trace(replace(prediction.timeline, facts={**origin(args), "step_s": prediction.step_s}), args.trace)
    explained, below = getattr(args, "explain_memory", False), []
    if args.html:  # its page also has the timeline, the roofline and the changes to try
        from stepcast.forecast.prediction import roofline

        view = step_view(facts, prediction.shown_timeline, roofline(prediction), changes(), explained)
    else:
        view = step_view(facts, explain_memory=explained)
    if args.gantt and not args.json:
        from stepcast.views.timeline import gantt

        below.append(gantt(prediction.timeline, terminal_width()))
    if args.trace:
        below.append(f"wrote {visible(args.trace)}: open it at ui.perfetto.dev")
    show_view(args, view, below=below)


def _path_rows(prediction: "Prediction") -> list[FactDict]:
    """Return the critical path summed by name, longest first."""
    path, program = prediction.critical_path, prediction.step.program.written_out
    steps = zip(path.call.tolist(), path.op.tolist(), path.duration_s.tolist(), strict=True)
    times_s = group_by_key((program.segments[program.segment[call]].names[op], step_s) for call, op, step_s in steps)
    rows = sorted(((sum(times), len(times), name) for name, times in times_s.items()), key=lambda row: -row[0])
    return [{"name": name, "count": count, "seconds": seconds} for seconds, count, name in rows[:20] if seconds > 0]
