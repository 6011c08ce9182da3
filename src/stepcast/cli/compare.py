"""Steps that are compared: ``stepcast compare`` two, each predicted or measured; ``gate`` a run, for CI, with the runs
before it or with its forecast; and ``watch`` the log of a running job, to say when it goes wrong.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress

import msgspec

from stepcast.analyze import compare as comparing
from stepcast.analyze.compare import GateResult, GateRun
from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.recording import PlayedStep, play_measured, timeline_of
from stepcast.analyze.watch import StepWatch, WatchAlert, WatchedStep
from stepcast.cli.analyze import ANALYSES, analyze_document, read_measured
from stepcast.cli.interrupts import Interruptible
from stepcast.cli.output import open_source, print_view, show_view, terminal_width, write_file, write_trace, write_view
from stepcast.cli.streams import show_status
from stepcast.inputs.source import FormatError, Source, prefix_errors
from stepcast.inputs.step_logs import StepLines
from stepcast.inputs.table import misused
from stepcast.ir.limits import LINE, RESULT
from stepcast.ir.measured import LoggedScore, LoggedTimer
from stepcast.ir.types import FactDict, dataclass, require
from stepcast.outputs.gate import add_runs, open_history, read_runs, write_junit, write_markdown
from stepcast.questions.question import AnalyzeQuestion
from stepcast.views.compare import compare_view, gate_view
from stepcast.views.declared import phrase
from stepcast.views.measured import watch_view

NOT_THE_SAME = 1  # exit status if a prediction is compared with a measurement of another run
SLOWER = 1  # exit status of a regression
BASELINE = "stepcast baseline"
# The commit under test, as GitHub and GitLab name it.
COMMITS = ("GITHUB_SHA", "CI_COMMIT_SHA")
POLL_S = 0.2


def run_compare(args: argparse.Namespace) -> int:
    files = [args.predicted, args.measured]
    facts = comparing.compare_files(files, [read_facts(path) for path in files]).facts()
    args.predicted, args.measured = (side["file"] for side in facts["sides"])
    timeline = None
    if args.trace or args.html:
        try:
            timeline = timeline_of({"first": _play(args.predicted), "second": _play(args.measured)})
        except ValueError:
            if args.trace:
                raise  # a page does without the timelines, which two Megatron runs have
    if args.trace and timeline is not None:
        write_trace(timeline, args.trace)
    names = (os.path.basename(args.predicted) or args.predicted, os.path.basename(args.measured) or args.measured)
    if names[0] == names[1]:
        names = (f"{names[0]} (first)", f"{names[1]} (second)")
    show_view(args, compare_view(facts, names, timeline if args.html else None))
    return NOT_THE_SAME if len(set(facts["kinds"])) > 1 and not facts["same_run"] else 0


def read_facts(path: str) -> FactDict:
    """Return the facts of the step in *path*: printed by a verb, or analyzed from a run."""
    printed = read_printed(path)
    if printed is not None:
        return printed
    entry, document = read_measured([path])
    if entry.name not in ANALYSES:
        raise misused(entry, path, "a measured run or the --json output of a verb is needed")
    return analyze_document(entry, document, AnalyzeQuestion()).facts()


def read_printed(path: str) -> FactDict | None:
    """Read a JSON object with a step; return None for any other file."""
    if os.path.isdir(path) or not (path == "-" or os.path.exists(path)):  # such as the prefix of a set
        return None
    source = open_source(path)
    if not source.head.lstrip().startswith("{"):
        return None
    try:
        data = source.data(RESULT)
    except FormatError:  # larger than any result: a trace
        return None
    if b'"step_s"' not in data and b'"sensitivity"' not in data:
        return None
    with prefix_errors(f"{path}: is not complete JSON", kinds=(msgspec.DecodeError,)):
        printed = msgspec.json.decode(data)
    if isinstance(printed, dict) and "sensitivity" in printed and printed.get("rows") == []:
        raise ValueError(f"{path}: the search found no strategy, so it has no step to compare")
    account = comparing.account_of(printed) if isinstance(printed, dict) else {}
    if "same_run" in account or ("command" in account and "step_s" not in account):
        raise ValueError(f"{path}: is the --json output of a verb, and states no step of its own")
    return dict(account) if "step_s" in account else None


def _play(path: str) -> PlayedStep:
    require(read_printed(path) is None, f"{path}: has no timeline; --trace needs two Megatron runs")
    entry, document = read_measured([path])
    require(entry.name == "megatron", f"{path}: is {entry.name}; --trace needs two Megatron runs")
    return play_measured(record_megatron(document))


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The options of a gate."""

    history: str | None = None
    name: str = "default"
    label: str = ""
    accept: bool = False
    baseline: str | None = None
    save: str | None = None
    forecast: str | None = None
    min_change: float = 0.01


def run_gate(args: argparse.Namespace) -> int:
    names = GateOptions.__dataclass_fields__
    result = gate_files(args.measured, GateOptions(**{name: getattr(args, name) for name in names}))
    facts = result.facts()
    if args.markdown:
        rows = sorted(result.measures, key=lambda row: (row.name != "step", -abs(row.difference)))
        write_file(args.markdown, write_markdown(facts, [(row.name, row.texts) for row in rows]))
    if args.junit:
        write_file(args.junit, write_junit(facts))
    show_view(args, gate_view(facts))
    return SLOWER if result.failed else 0


def gate_files(measured: Sequence[str], options: GateOptions) -> GateResult:
    """Return the verdict on the last of *measured* runs; add all to the history, and write the baseline."""
    if options.history and options.baseline:
        raise ValueError("use --history or --baseline: the baseline is part of a history")
    if not (options.history or options.baseline or options.save or options.forecast):
        raise ValueError("nothing to compare with: use --history FILE, --baseline FILE, --save FILE or --forecast FILE")
    require(not options.accept or bool(options.history), "--accept has no effect without --history")
    label = options.label or next((os.environ[name][:12] for name in COMMITS if os.environ.get(name)), "")
    forecast = read_forecast(options.forecast)
    given = [_measure(path, label) for path in measured]
    with ExitStack() as stack:
        base, history = None, _read_baseline(options.baseline) if options.baseline else []
        if options.history:
            base = stack.enter_context(open_history(options.history))
            history = [_decode(run, options.history) for run in read_runs(base, options.name)]
        read = [*([] if options.history else history), *given]
        first = len(history) + 1
        alone = not options.history and len(given) == 1
        for path, current in zip(measured, given, strict=True):
            with prefix_errors(path):
                result = comparing.judge(history, current, options.name, options.min_change, strict=alone)
            history.append(comparing.advance(current, result, options.accept and current is given[-1]))
        if base is not None:
            add_runs(base, options.name, first, history[first - 1 :])
    if options.save:
        saved = {"format": BASELINE, "name": options.name, "runs": given}
        write_file(options.save, msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")
    warnings = [text for run in read for text in run.warnings]
    if options.accept and not result.since:
        warnings.append("--accept has no effect: no regression began before this run")
    elif options.accept and result.status == comparing.REGRESSION:
        verdict = f"{result.verdict}; a new baseline begins with that run"
        result = msgspec.structs.replace(result, status=comparing.ACCEPTED, verdict=verdict)
    result = msgspec.structs.replace(result, warnings=[*warnings, *result.warnings])
    return comparing.check_forecast(result, forecast, given[-1].identity) if forecast else result


def _measure(path: str, label: str) -> GateRun:
    facts = read_facts(path)
    require("uncertainty" not in facts, f"{path}: is a prediction; gate judges measured runs, use it as --forecast")
    with prefix_errors(path):
        measures = comparing.measures_of(facts)
    identity = {name: value for name, value in comparing.identity_of(facts).items() if name != "cluster"}
    warnings = [f"{path}: {text}" for text in facts.get("warnings", ())]
    return GateRun(measures, identity, label, spread=comparing.spread_of(facts), warnings=warnings)


def _read_baseline(path: str) -> list[GateRun]:
    """Return the runs of a baseline that ``--save`` wrote, or a measured run."""
    if os.path.isfile(path) and BASELINE in (source := Source(path)).head[:200]:
        with prefix_errors(f"{path}: is not a complete baseline", kinds=(msgspec.DecodeError, KeyError, TypeError)):
            runs = [*msgspec.json.decode(source.data(RESULT))["runs"]]
        return [_decode(msgspec.json.encode(run), path) for run in runs]
    return [_measure(path, "baseline")]


def _decode(run: "bytes | str", path: str) -> GateRun:
    with prefix_errors(f"{path}: holds a run that cannot be read", kinds=(msgspec.MsgspecError, TypeError)):
        decoded = msgspec.json.decode(run, type=GateRun)
    require(comparing.STEP in decoded.measures, f"{path}: holds a run without a step")
    return decoded


def run_watch(args: argparse.Namespace) -> int:
    watch = StepWatch(read_forecast(args.forecast), args.steps)
    encode = msgspec.json.encode
    show_status(f"waiting for the first step in {args.file}")
    with suppress(KeyboardInterrupt), Interruptible():  # Ctrl-C is the usual end
        for number, event in enumerate(watch_events(args.file, watch, 0.0 if args.once else args.idle)):
            is_alert = isinstance(event, WatchAlert)
            if args.json:
                kind = {"event": "alert" if is_alert else "step"}
                print(encode({**kind, **msgspec.to_builtins(event)}).decode(), flush=True)
            elif isinstance(event, WatchAlert):
                show_status("")
                print(f"{event.kind.upper()} at step {event.step}: {event.text}", flush=True)
            else:
                words = phrase("watched-step", msgspec.to_builtins(event))
                if number % args.every == 0 and not sys.stderr.isatty():
                    print(words[: terminal_width()], flush=True)
                else:
                    show_status(words)
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
    require(not (forecast and comparing.is_measured(forecast)), f"{path}: is a measured run, and no forecast")
    return forecast


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
        names = [path]
        if os.path.isdir(path):
            inside = (os.path.join(path, name) for name in sorted(os.listdir(path)) if not name.startswith("."))
            names = [name for name in inside if os.path.isfile(name)]
        for name in names:
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
            require(len(rests[name]) <= LINE.most, f"{name}: {LINE.message}")
            yield from ((name, line.decode(errors="replace")) for line in lines)
        now = time.monotonic()
        quiet_since = now if heard else quiet_since
        if not heard:
            if idle_s is not None and now - quiet_since >= idle_s:
                yield from ((name, rest.decode(errors="replace")) for name, rest in rests.items() if rest)
                return
            time.sleep(POLL_S)
