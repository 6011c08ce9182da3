"""``stepcast compare FIRST SECOND``: two steps, each predicted or measured."""

import argparse
import os

import msgspec

from stepcast.analyze.compare import account_of, compare_files
from stepcast.analyze.megatron.record import record_megatron
from stepcast.analyze.play import PlayedStep, measured, timeline_of
from stepcast.cli.analyze import ANALYSES, analyze_document, read_measured
from stepcast.cli.output import open_source, show_view, write_trace
from stepcast.inputs.source import FormatError, prefix_errors
from stepcast.ir.facts import FactDict
from stepcast.ir.limits import RESULT
from stepcast.questions.measured import AnalyzeQuestion
from stepcast.views.compare import compare_view
from stepcast.views.view import View

NOT_THE_SAME = 1  # exit status if a prediction is compared with a measurement of another run


def run(args: argparse.Namespace) -> int:
    files = [args.predicted, args.measured]
    found = compare_files(files, [read_facts(path) for path in files]).facts()
    args.predicted, args.measured = (side["file"] for side in found["sides"])
    if args.trace:
        write_trace(timeline_of({"first": _play(args.predicted), "second": _play(args.measured)}), args.trace)
    show_view(args, _build_view(args, found))
    judged = len(set(found["kinds"])) > 1
    return NOT_THE_SAME if judged and not found["same_run"] else 0


def read_facts(path: str) -> FactDict:
    """Return the facts of the step in *path*: printed by a verb, or analyzed from a run."""
    printed = read_printed(path)
    if printed is not None:
        return printed
    entry, document = read_measured([path])
    if entry.name not in ANALYSES:
        raise ValueError(
            f"{path}: is {entry.name}; compare needs a measured run or the --json output of simulate, "
            "predict, analyze or replay"
        )
    return analyze_document(entry, document, AnalyzeQuestion()).facts()


def read_printed(path: str) -> FactDict | None:
    """Read a JSON object with a step; return None for any other file."""
    if os.path.isdir(path):
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
        found = msgspec.json.decode(data)
    if isinstance(found, dict) and "sensitivity" in found and found.get("rows") == []:
        raise ValueError(f"{path}: the search found no strategy, so it has no step to compare")
    return dict(account_of(found)) if isinstance(found, dict) and "step_s" in account_of(found) else None


def _build_view(args: argparse.Namespace, found: FactDict) -> View:
    """Return the view of both sides, with the timelines of two Megatron runs."""
    names = (os.path.basename(args.predicted) or args.predicted, os.path.basename(args.measured) or args.measured)
    if names[0] == names[1]:
        names = (f"{names[0]} (first)", f"{names[1]} (second)")
    if not args.html:
        return compare_view(found, names)
    try:
        timeline = timeline_of({"first": _play(args.predicted), "second": _play(args.measured)})
    except ValueError:  # only the facts of a side are known
        timeline = None
    return compare_view(found, names, timeline)


def _play(path: str) -> PlayedStep:
    if read_printed(path) is not None:
        raise ValueError(f"{path}: has no timeline; --trace needs two Megatron runs")
    entry, document = read_measured([path])
    if entry.name != "megatron":
        raise ValueError(f"{path}: is {entry.name}; --trace needs two Megatron runs")
    return measured(record_megatron(document))
