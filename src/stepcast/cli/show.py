"""``stepcast show FILE...``"""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from operator import methodcaller

from stepcast.cli.documents import apply_edits, load_lazily, open_sources
from stepcast.cli.options import check_applicable
from stepcast.cli.output import page_note, print_json, print_warnings, terminal_width, write_view
from stepcast.cli.streams import heading
from stepcast.frameworks.catalog import looks_like_framework
from stepcast.hardware import Cluster, load_cluster
from stepcast.hardware.catalog import CatalogError
from stepcast.hardware.facts import looks_like_cluster
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import Format, format_named, read_sources, recognise
from stepcast.ir.facts import FactDict
from stepcast.views.documents import document_view, documents_view
from stepcast.views.terminal import render_text

CLUSTER = Format("cluster", "cluster description (TOML)", "cluster", "stepcast.hardware")
FRAMEWORK = Format("framework", "framework profile (TOML)", "framework", "stepcast.frameworks")
CALIBRATION = Format("calibration", "calibration of a GPU (TOML)", "calibration", "stepcast.cost.calibration")

# A heading of calibrations, which ``profile`` and ``calibrate`` write.
CALIBRATION_CLASS = re.compile(r'^\[(?:class\."?[\w.-]+"?|constants)\]', re.MULTILINE)
DESCRIBED = {
    CLUSTER.name: load_lazily("hardware:load_cluster"),
    FRAMEWORK.name: load_lazily("frameworks.catalog:load_profile"),
    CALIBRATION.name: load_lazily("questions.settle:load_calibration"),
}


def run(args: argparse.Namespace) -> int:
    read = list(_documents(args))
    check_applicable(args, kinds={type(document).__name__ for _, _, document in read}, file=args.files[0])
    documents = []
    for where, entry, document in read:
        facts = {**facts_of(document), "warnings": warnings_of(document)}
        documents.append({"file": where, "format": entry.name, "title": entry.title, **facts})
    view = documents_view(documents)
    write_view(args, view)
    if args.json:
        print_json(view.facts)
        return 0
    for document in documents:
        print(heading(f"{document['file']}: {document['title']}"))
        print(f"\n{render_text(document_view(document), terminal_width())}\n")
        print_warnings(document["warnings"])
    if args.html:
        print(page_note(args))
    return 0


def _documents(args: argparse.Namespace) -> Iterator[tuple[str, Format, object]]:
    """Yield each document that the arguments name; rank files of one format are one document."""
    runs: dict[tuple[str, str], list[Source]] = {}
    found = {} if args.format else {file: _find_cluster(file) for file in args.files}
    for name, cluster in found.items():
        if cluster is not None:
            yield name, CLUSTER, cluster
    files = [file for file in args.files if found.get(file) is None]
    for source in open_sources(files, args.format, _recognise):
        entry = format_named(args.format) if args.format else _recognise(source)
        if entry in (CLUSTER, CALIBRATION, FRAMEWORK):
            if not source.path.endswith(".toml"):
                raise ValueError(f"{source.path}: is a {entry.title}; save it as NAME.toml to show it")
            yield source.path, entry, DESCRIBED[entry.name](source.path)
        elif entry.joins:
            run_of = getattr(entry.load(), "run_of", None)
            runs.setdefault((entry.name, run_of(source.path) if run_of else ""), []).append(source)
        else:
            yield source.path, entry, apply_edits(read_sources([source], entry), args)
    for (name, _), sources in runs.items():
        entry = format_named(name)
        where = sources[0].path
        if len(sources) > 1:
            where = f"{os.path.dirname(where) or '.'} ({len(sources)} files)"
        yield where, entry, apply_edits(read_sources(sources, entry), args)


def _find_cluster(name: str) -> Cluster | None:
    """Return the cluster of the catalogue with that name, if no file has it."""
    if not name or os.path.exists(name) or os.sep in name or name.endswith(".toml"):
        return None
    try:
        return load_cluster(name)
    except CatalogError:
        return None


def _recognise(source: Source) -> Format:
    """Return the format of *source*, which may also be the description of a cluster, a framework or a GPU."""
    try:
        return recognise(source)
    except FormatError:
        if CALIBRATION_CLASS.search(source.head):
            return CALIBRATION
        if looks_like_framework(source.head):
            return FRAMEWORK
        if looks_like_cluster(source.head):
            return CLUSTER
        raise


def facts_of(document: object) -> FactDict:
    """Return the facts of any document."""
    found: FactDict = FACTS[type(document).__name__](document)
    return found


def _analyze_log(kind: str, analyze: str) -> Callable[[object], FactDict]:
    """Return a function that analyzes a log."""
    return lambda document: {"kind": kind, **load_lazily(analyze)(document).facts()}


# The facts of each noun.
FACTS: Mapping[str, Callable[..., FactDict]] = {
    "Workload": load_lazily("inputs.documents:workload_facts"),
    "Timeline": load_lazily("inputs.documents:timeline_facts"),
    "RunLog": load_lazily("inputs.documents:run_log_facts"),
    "CollectiveSweep": load_lazily("inputs.documents:sweep_facts"),
    "OperatorTimes": load_lazily("inputs.documents:operator_times_facts"),
    "Model": load_lazily("inputs.documents:model_facts"),
    "StepLog": _analyze_log("step log", "analyze.logs:analyze_step_log"),
    "CollectiveLog": _analyze_log("collectives", "analyze.logs:analyze_collective_log"),
    "WorkerSteps": _analyze_log("worker steps", "analyze.stragglers:analyze_stragglers"),
    "Captured": load_lazily("cli.captured:captured_facts"),
    "Wiring": methodcaller("facts"),
    "Cluster": load_lazily("hardware.facts:cluster_facts"),
    "Profile": load_lazily("frameworks.catalog:profile_facts"),
    "Calibration": lambda calibration: {
        "kind": "calibration",
        "gpu": calibration.gpu,
        "classes": {name: asdict(correction) for name, correction in calibration.corrections.items()},
        "constants": dict(calibration.constants),
    },
}


def warnings_of(document: object) -> list[str]:
    return list(getattr(document, "warnings", ()))
