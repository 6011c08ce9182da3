"""``stepcast watch LOG|FOLDER|-``: follow the log of a running job, and say when it goes wrong."""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from stepcast.analyze.watch import StepWatch, WatchAlert, WatchedStep
from stepcast.cli.compare import read_printed
from stepcast.cli.interrupts import Interruptible
from stepcast.cli.output import print_view, terminal_width, write_view
from stepcast.cli.streams import show_status
from stepcast.inputs.step_logs import StepLines
from stepcast.ir.facts import FactDict
from stepcast.ir.limits import LINE
from stepcast.ir.measured import LoggedScore, LoggedTimer
from stepcast.views.declared import phrase
from stepcast.views.jobs import watch_view

POLL_S = 0.2


def run(args: argparse.Namespace) -> int:
    watch = StepWatch(read_forecast(args.forecast), args.steps)
    encode = msgspec.json.encode
    with suppress(KeyboardInterrupt), Interruptible():  # Ctrl-C is the usual end
        for number, event in enumerate(watch_events(args.file, watch, 0.0 if args.once else args.idle)):
            is_alert = isinstance(event, WatchAlert)
            if args.json:
                kind = {"event": "alert" if is_alert else "step"}
                print(encode({**kind, **msgspec.to_builtins(event)}).decode(), flush=True)
            elif isinstance(event, WatchAlert):
                show_status("")
                print(f"{event.kind.upper()} at step {event.step}: {event.text}", flush=True)
            elif number % args.every == 0 and not sys.stderr.isatty():
                print(_step_text(event)[: terminal_width()], flush=True)
            else:
                show_status(_step_text(event))
    show_status("")
    facts = {"event": "summary", **watch.facts()}
    view = watch_view(facts, watch.steps)
    write_view(args, view)
    if args.json:
        print(encode(facts).decode())
    else:
        print_view(args, view)
    return 0


def read_forecast(path: str | None) -> FactDict | None:
    """Return the forecast that ``predict --json`` printed."""
    forecast = read_printed(path) if path else None
    if path and (forecast is None or not isinstance(forecast["step_s"], int | float)):
        raise ValueError(f"{path}: is no forecast; expected the --json output of predict")
    return forecast


def _step_text(step: WatchedStep) -> str:
    return phrase("watched-step", msgspec.to_builtins(step))


def watch_events(path: str, watch: StepWatch, idle_s: float | None) -> Iterator[WatchedStep | WatchAlert]:
    """Yield the steps and alerts of a log, a folder of logs or standard input, as they are written.

    It ends after *idle_s* seconds without a line; with zero at the end of what is there.
    """
    readers: dict[str, StepLines] = {}
    stepping: str | None = None
    piped = (("-", line.decode(errors="replace")) for line in iter(lambda: sys.stdin.buffer.readline(LINE.most), b""))
    for name, line in piped if path == "-" else _follow(path, idle_s):
        reader = readers.setdefault(name, StepLines())
        for event in reader.feed(line):
            if isinstance(event, LoggedTimer):
                watch.time(event)
            elif isinstance(event, LoggedScore):
                yield from watch.score(event)
            elif stepping in (None, name):  # every rank prints the same steps
                stepping = name
                yield from watch.add(event, reader.total)


def _follow(path: str, idle_s: float | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file, or of the files of a folder, with the file's name; wait for more at their end."""
    places: dict[str, int] = {}
    rests: dict[str, bytes] = {}
    os.stat(path)  # an error names a file that is not there
    quiet_since = time.monotonic()
    while True:
        heard = False
        for name in _files(path):
            size = os.path.getsize(name)
            place = places.get(name, 0)
            if size < place:  # rotated: begin again
                place, rests[name] = 0, b""
            if size == place:
                continue
            heard = True
            with open(name, "rb") as file:
                file.seek(place)
                piece = file.read(LINE.most)
            places[name] = place + len(piece)
            *lines, rests[name] = (rests.get(name, b"") + piece).split(b"\n")
            if len(rests[name]) > LINE.most:
                raise ValueError(f"{name}: {LINE.message}")
            yield from ((name, line.decode(errors="replace")) for line in lines)
        now = time.monotonic()
        quiet_since = now if heard else quiet_since
        if not heard:
            if idle_s is not None and now - quiet_since >= idle_s:
                yield from ((name, rest.decode(errors="replace")) for name, rest in rests.items() if rest)
                return
            time.sleep(POLL_S)


def _files(path: str) -> list[str]:
    if not os.path.isdir(path):
        return [path]
    found = (os.path.join(path, name) for name in sorted(os.listdir(path)) if not name.startswith("."))
    return [name for name in found if os.path.isfile(name)]
