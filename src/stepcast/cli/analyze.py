"""``stepcast analyze FILE...``: where the time of a measured run went."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from stepcast.analyze.logs import AnalyzedLogs, join_recorded
from stepcast.analyze.result import AnalysisResult
from stepcast.cli.documents import load_lazily, open_sources
from stepcast.cli.output import print_json, print_notes, print_warnings, show_view, terminal_width, write_trace
from stepcast.inputs.recorded import STEPS, read_logs, read_steps
from stepcast.inputs.source import Source
from stepcast.inputs.table import Format, format_named, misused, read_as_one, recognise
from stepcast.ir.timeline import Timeline
from stepcast.ir.types import find_doubts
from stepcast.questions.question import AnalyzeQuestion, check_rules
from stepcast.views.terminal import render_text
from stepcast.views.text import visible
from stepcast.views.view import View

# Formats whose text has details that --verbose adds.
DETAILED = frozenset({"megatron", "kineto", "nsys", "stragglers"})


def run(args: argparse.Namespace) -> int:
    result, views = analyze_files(args.files, args.question, args.trace, with_page=bool(args.html))
    facts = result.facts()
    if args.verbose and (args.json or facts["format"] not in DETAILED):
        print_notes([f"--verbose has no effect: everything known about {args.files[0]} is shown already"])
    verbose = args.verbose or facts["format"] not in DETAILED
    if len(views) == 1:
        show_view(args, views[0], verbose)
    elif args.json:
        print_json(facts)
    else:
        width = terminal_width()
        named = zip((visible(run["file"]) for run in facts["runs"]), views, strict=True)
        print("\n\n".join(f"{name}\n\n{render_text(view, width, verbose)}" for name, view in named))
        print_warnings(facts["warnings"])
    return 0


def analyze_files(
    files: Sequence[str], question: AnalyzeQuestion, trace: str | None = None, with_page: bool = False
) -> tuple[AnalysisResult, list[View]]:
    """Return the result for measured *files*, and a view of each run in them; write *trace* if it is given."""
    if question.format is not None:
        format_named(question.format)
    sources = open_sources(files, question.format)
    entry = recognise(sources[0]) if len(sources) > 1 else None
    if entry and not entry.joins and entry.name in ANALYSES and all(recognise(source) is entry for source in sources):
        if trace or with_page:
            raise ValueError(f"{sources[0].path}: --trace and --html are for one run; name one of the files")
        return _analyze_each(sources, entry, question)
    entry, document = read_as_one(sources, question.format)
    if entry.name not in ANALYSES:
        raise misused(entry, files[0], "analyze needs the files of a measured run")
    _check(question, entry.name, files[0], trace)
    result = analyze_document(entry, document, question)
    if trace:
        write_trace(load_lazily("cli.analyses:measured_timeline")(document), trace)
    # What ``stepcast record`` wrote next to the traces.
    if entry.name == "kineto" and len(files) == 1 and (ranks := read_steps(os.path.join(files[0], STEPS))):
        result = replace(result, recorded=join_recorded(ranks, read_logs(files[0]), result.facts()["collectives"]))
    return result, [result.show(document if isinstance(document, Timeline) else None)]


def analyze_document(entry: Format, document: object, question: AnalyzeQuestion) -> AnalysisResult:
    """Return the result for a *document* of the format *entry*, with warnings of impossible values."""
    name = ANALYSES[entry.name]
    asked = (document, question) if name.startswith("cli.") else (document,)
    result: AnalysisResult = replace(load_lazily(name)(*asked), format=entry.name)
    facts = result.facts()
    return replace(result, warnings=[*facts["warnings"], *find_doubts(facts)])


def _check(question: AnalyzeQuestion, format_name: str, file: str, trace: str | None) -> None:
    facts = {"format": format_name, "file": file, "cluster": question.cluster}
    check_rules("analyze", question.given | ({"trace"} if trace else set()), facts)


def _analyze_each(
    sources: Sequence[Source], entry: Format, question: AnalyzeQuestion
) -> tuple[AnalysisResult, list[View]]:
    """Analyze each file alone, for formats in which a run has one file."""
    _check(question, entry.name, os.fspath(sources[0].path), None)
    documents = {os.fspath(source.path): read_as_one([source], question.format)[1] for source in sources}
    results = {path: analyze_document(entry, document, question) for path, document in documents.items()}
    runs = [{"file": file, **result.facts()} for file, result in results.items()]
    warnings = [f"{facts['file']}: {note}" for facts in runs for note in facts["warnings"]]
    return AnalyzedLogs(format=entry.name, runs=runs, warnings=warnings), [result.show() for result in results.values()]


def read_measured(paths: Sequence[str]) -> tuple[Format, Any]:
    """Return the run in *paths* and its format."""
    return read_as_one(open_sources(paths))


# The function that analyzes a measured run, by format; those outside of cli take the document alone.
STEP_LOG = "analyze.logs:analyze_step_log"
ANALYSES = {
    "megatron": "cli.analyses:analyze_megatron_run",
    "kineto": "analyze.kineto.analysis:analyze_kineto",
    "optimus": "cli.analyses:analyze_optimus_run",
    "nccl-tests": "cli.analyses:analyze_nccl_tests",
    **dict.fromkeys(("nsys", "rocprof", "otlp"), "analyze.logs:analyze_streams"),
    "stragglers": "analyze.stragglers:analyze_stragglers",
    **dict.fromkeys(("megatron-log", "torchtitan-log", "mlperf-log"), STEP_LOG),
    **dict.fromkeys(("nemo-log", "deepspeed-log", "trainer-log", "verl-log", "nemo-rl-log"), STEP_LOG),
    **dict.fromkeys(("flight-recorder", "nccl-inspector"), "analyze.logs:analyze_collective_log"),
}
