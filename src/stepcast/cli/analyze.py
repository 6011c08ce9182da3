"""``stepcast analyze FILE...``: where a measured run's time went."""

import argparse
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from stepcast.cli.documents import open_sources
from stepcast.cli.loaded import loaded
from stepcast.cli.options import add_options
from stepcast.cli.output import print_json, print_warnings, terminal_width, write_trace
from stepcast.cli.pages import print_view, write_view
from stepcast.cli.rules import check_applicable
from stepcast.inputs.table import FORMATS, Format, read_as_one, recognise
from stepcast.ir.facts import find_doubts
from stepcast.ir.timeline import Timeline
from stepcast.views.text import visible

if TYPE_CHECKING:
    from stepcast.analyze.megatron.analysis import BusBandwidth, MeetingTraffic
    from stepcast.inputs.source import Source
    from stepcast.views.view import View

Analyze = Callable[[Any, argparse.Namespace], dict[str, Any]]
ViewOf = Callable[..., "View"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        files FILE            a measured run: Megatron traces of one, some or all ranks (or their folder), a
                              Kineto trace, an OptimusPrime log, an nccl-tests or rccl-tests log
        --format NAME         read as this format instead of recognising it: one of 'stepcast list formats'
        --cluster C           what it ran on: achieved bandwidths are compared with it (nccl-tests logs need
                              it)
        --set
        --calibration C.toml  OptimusPrime: constants that 'stepcast calibrate' wrote
        --trace FILE          write the run, with its waits, as Perfetto / Chrome JSON
        --verbose             add the details: operations, communication, kernels, the critical path
        --html
        --json
        """,
        files={"nargs": "+"},
        format=[entry.name for entry in FORMATS],
    )


def analysed(args: argparse.Namespace) -> "tuple[dict[str, Any], list[View]]":
    """Return the facts of the files of *args*, and a view for each run in them."""
    sources = open_sources(args.files, args.format)
    if len(sources) > 1 and (logs := _logs(sources, args)):
        return logs
    entry, document = read_as_one(sources, args.format)
    analyze, view_of = ANALYSES[entry.name] if entry.name in ANALYSES else _not_measured(args.files[0], entry)
    check_applicable(args, format=entry.name, file=args.files[0], detailed=entry.name in DETAILED)
    found = {"format": entry.name, **analyze(document, args)}
    found["warnings"] = [*found["warnings"], *find_doubts(found)]
    if entry.name == "kineto" and (recorded := _recorded(args.files, found)):
        found["recorded"] = recorded
    view = view_of(found, document if isinstance(document, Timeline) else None)
    write_view(args, view)
    return found, [view]


def _recorded(paths: list[str], found: dict[str, Any]) -> dict[str, Any] | None:
    """What ``stepcast record`` left beside the traces, where *paths* is its folder."""
    from stepcast.analyze.recorded import join_recorded
    from stepcast.inputs.recorded import STEPS, read_logs, read_steps

    ranks = read_steps(os.path.join(paths[0], STEPS)) if len(paths) == 1 else []
    if not ranks:
        return None
    return join_recorded([rank.facts() for rank in ranks], read_logs(paths[0]), found["collectives"]).facts()


def _logs(sources: "Sequence[Source]", args: argparse.Namespace) -> "tuple[dict[str, Any], list[View]] | None":
    """Each of *sources* alone, where they are of a format that no two files of one run have."""
    entry = recognise(sources[0])
    if entry.joins or entry.name not in ANALYSES or any(recognise(each) is not entry for each in sources):
        return None
    if args.trace or args.html:
        raise ValueError(f"{sources[0].path}: --trace and --html are of one run; name one of the files")
    analyze, view_of = ANALYSES[entry.name]
    check_applicable(args, format=entry.name, file=sources[0].path, detailed=entry.name in DETAILED)
    runs = []
    for source in sources:
        facts = analyze(read_as_one([source], args.format)[1], args)
        facts["warnings"] = [*facts["warnings"], *find_doubts(facts)]
        runs.append({"file": os.fspath(source.path), **facts})
    warnings = [f"{each['file']}: {note}" for each in runs for note in each["warnings"]]
    views = [view_of({"format": entry.name, **each}) for each in runs]
    return {"format": entry.name, "runs": runs, "warnings": warnings}, views


def run(args: argparse.Namespace) -> int:
    found, views = analysed(args)
    verbose = args.verbose or found["format"] not in DETAILED
    if len(views) == 1:
        print_view(args, views[0], verbose)
    elif args.json:
        print_json(found)
    else:
        from stepcast.views.terminal import render_text

        width = terminal_width()
        texts = [f"{visible(view.facts['file'])}\n\n{render_text(view, width, verbose)}" for view in views]
        print("\n\n".join(texts))
        print_warnings(found["warnings"])
    return 0


def read_measured(paths: list[str], format_name: str | None) -> tuple[Format, Any]:
    """The one run that *paths* hold, and its format."""
    return read_as_one(open_sources(paths, format_name), format_name)


def _not_measured(path: str, entry: Format) -> tuple[Analyze, ViewOf]:
    raise ValueError(
        f"{path}: is {entry.name}, which does not say what happened; analyze needs a measured run "
        f"({', '.join(ANALYSES)}); 'stepcast simulate' runs a workload"
    )


def _megatron(timeline: "Timeline", args: argparse.Namespace) -> dict[str, Any]:
    from stepcast.analyze.megatron.analysis import analyze_megatron

    busbw = _cluster_busbw(args) if args.cluster else None
    analysis = analyze_megatron(timeline, busbw)
    if args.trace:
        from stepcast.analyze.play import measured, timeline_of

        write_trace(timeline_of({"measured": measured(analysis.recording)}), args.trace)
    return analysis.facts()


def _facts_of(name: str) -> Analyze:
    """The facts of what the function *name*, which takes the document alone, finds."""
    analyze = loaded(name)

    def facts(document: Any, args: argparse.Namespace) -> dict[str, Any]:
        found: dict[str, Any] = analyze(document).facts()
        return found

    return facts


# By format: the facts of a measured run, and the view of those facts and of its timeline, where it has one.
STEP_LOG = _facts_of("analyze.logs:analyze_step_log"), loaded("views.jobs:step_log_view")
COLLECTIVE_LOG = _facts_of("analyze.logs:analyze_collective_log"), loaded("views.jobs:collective_log_view")
ANALYSES: dict[str, tuple[Analyze, ViewOf]] = {
    "megatron": (_megatron, loaded("views.measured:megatron_view")),
    "kineto": (_facts_of("analyze.kineto.analysis:analyze_kineto"), loaded("views.traces:kineto_view")),
    "optimus": (loaded("cli.optimus:optimus_facts"), loaded("views.traces:optimus_view")),
    "nccl-tests": (loaded("cli.sweeps:sweep_facts"), loaded("views.traces:link_sweep_view")),
    "nsys": (_facts_of("analyze.logs:analyze_streams"), loaded("views.jobs:streams_view")),
    "stragglers": (_facts_of("analyze.stragglers:analyze_stragglers"), loaded("views.jobs:stragglers_view")),
    **dict.fromkeys(("megatron-log", "torchtitan-log", "mlperf-log"), STEP_LOG),
    **dict.fromkeys(("flight-recorder", "nccl-inspector"), COLLECTIVE_LOG),
}


# Formats whose text has details that --verbose adds.
DETAILED = frozenset({"megatron", "kineto", "nsys", "stragglers"})


def _cluster_busbw(args: argparse.Namespace) -> "BusBandwidth":
    """What the cluster reaches for a collective of the same size over as many neighbouring ranks."""
    from stepcast.cost.collectives.sweep import reached_busbw
    from stepcast.hardware import load_cluster

    cluster = load_cluster(args.cluster, args.set)

    def busbw(traffic: "MeetingTraffic") -> float | None:
        if not traffic.size_bytes or traffic.ranks < 2 or traffic.overlapped:
            return None
        return reached_busbw(traffic.kind, traffic.size_bytes, traffic.ranks, cluster)

    return busbw
