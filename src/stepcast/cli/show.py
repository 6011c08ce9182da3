"""``stepcast show FILE...``"""

import argparse
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from stepcast.cli.applicable import check_applicable
from stepcast.cli.documents import add_edit_arguments, apply_edits, open_sources
from stepcast.cli.options import add_options
from stepcast.cli.output import print_json, print_warnings, terminal_width
from stepcast.cli.streams import heading
from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source
from stepcast.inputs.table import Format, format_named, read_sources, recognise
from stepcast.report.show import show_text
from stepcast.report.text import facts

if TYPE_CHECKING:
    from stepcast.hardware import Cluster

CLUSTER = Format("cluster", "cluster description (TOML)", "cluster", "stepcast.hardware")
FRAMEWORK = Format("framework", "framework profile (TOML)", "framework", "stepcast.frameworks")
CALIBRATION = Format("calibration", "calibration of a GPU (TOML)", "calibration", "stepcast.cost.calibration")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        files FILE  files of any known format, the files of one run (or its folder) together; names of
                    clusters
        --json
        """,
        files={"nargs": "+"},
    )
    add_edit_arguments(parser)


def run(args: argparse.Namespace) -> int:
    read = list(_documents(args))
    check_applicable(args, kinds={type(document).__name__ for _, _, document in read}, file=args.files[0])
    documents = [
        {
            "file": where,
            "format": entry.name,
            "title": entry.title,
            **facts_of(document),
            "warnings": warnings_of(document),
        }
        for where, entry, document in read
    ]
    if args.json:
        print_json(documents[0] if len(documents) == 1 else {"documents": documents})
        return 0
    width = terminal_width()
    for found in documents:
        print(heading(f"{found['file']}: {found['title']}"))
        print()
        print(_text(found, width))
        print()
        print_warnings(found["warnings"])
    return 0


def _text(found: dict[str, Any], width: int) -> str:
    if found["kind"] == "cluster":
        from stepcast.report.hardware import cluster_pairs

        return facts(cluster_pairs(found), width)
    if found["kind"] == "framework":
        from stepcast.cli.frameworks import profile_pairs

        return facts(profile_pairs(found), width)
    if found["kind"] == "calibration":
        from stepcast.cli.calibrations import calibration_text

        return calibration_text(found, width)
    if found["kind"] == "wiring":
        from stepcast.report.hardware import wiring_pairs

        return facts(wiring_pairs(found), width)
    if found["kind"] in ("step log", "collectives", "worker steps"):
        from stepcast.cli.logs import log_text

        return log_text(found, width)
    if found["kind"] == "captured":
        from stepcast.report.captured import captured_text

        return captured_text(found, width)
    return show_text(found, width)


def _documents(args: argparse.Namespace) -> Iterator[tuple[str, Format, Any]]:
    """Each document the arguments name; rank files of one format make one."""
    runs: dict[tuple[str, str], list[Source]] = {}
    found = {} if args.format else {file: _catalogued(file) for file in args.files}
    for name, cluster in found.items():
        if cluster is not None:
            yield name, CLUSTER, cluster
    files = [file for file in args.files if found.get(file) is None]
    for source in open_sources(files, args.format, _recognise):
        entry = format_named(args.format) if args.format else _recognise(source)
        if entry in (CLUSTER, CALIBRATION, FRAMEWORK):
            yield source.path, entry, _described(source.path, entry)
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


def _catalogued(name: str) -> "Cluster | None":
    """The cluster of the catalogue that has that name, where no file has."""
    if not name or os.path.exists(name) or os.sep in name or name.endswith(".toml"):
        return None
    from stepcast.hardware import CatalogError, load_cluster

    try:
        return load_cluster(name)
    except CatalogError:
        return None


def _described(path: str, entry: Format) -> Any:
    """The hardware or the software that a TOML file describes, which may build on files beside it."""
    if not path.endswith(".toml"):
        raise ValueError(f"{path}: is a {entry.title}; save it as NAME.toml to show it")
    if entry is CALIBRATION:
        from stepcast.cli.calibrations import load_calibration

        return load_calibration(path)
    if entry is FRAMEWORK:
        from stepcast.frameworks.catalog import load_profile

        return load_profile(path)
    from stepcast.hardware import load_cluster

    return load_cluster(path)


def _recognise(source: Source) -> Format:
    """The format of *source*; what no reader knows may be the description of a cluster or a GPU."""
    try:
        return recognise(source)
    except FormatError:
        from stepcast.cli.calibrations import looks_like_calibration
        from stepcast.frameworks.catalog import looks_like_framework
        from stepcast.hardware.facts import looks_like_cluster

        if looks_like_calibration(source.head):
            return CALIBRATION
        if looks_like_framework(source.head):
            return FRAMEWORK
        if looks_like_cluster(source.head):
            return CLUSTER
        raise


def facts_of(document: Any) -> dict[str, Any]:
    """The facts of any noun; report modules load only for the noun at hand."""
    match type(document).__name__:
        case "Workload":
            from stepcast.report.workload import workload_facts

            return workload_facts(document)
        case "Timeline":
            from stepcast.report.timeline import timeline_facts

            return timeline_facts(document)
        case "RunLog":
            from stepcast.report.measured import run_log_facts

            return run_log_facts(document)
        case "CollectiveSweep":
            from stepcast.report.measured import sweep_facts

            return sweep_facts(document)
        case "OperatorTimes":
            from stepcast.report.measured import operator_times_facts

            return operator_times_facts(document)
        case "Model":
            from stepcast.report.model import model_facts

            return model_facts(document)
        case "StepLog" | "CollectiveLog" | "WorkerSteps":
            from stepcast.cli.logs import log_facts

            return log_facts(document)
        case "Captured":
            from stepcast.cli.captured import captured_facts

            return captured_facts(document)
        case "Wiring":
            found: dict[str, Any] = document.facts()
            return found
        case "Cluster":
            from stepcast.hardware.facts import cluster_facts

            return cluster_facts(document)
        case "Profile":
            from stepcast.cli.frameworks import profile_facts

            return profile_facts(document)
        case "Calibration":
            from stepcast.cli.calibrations import calibration_facts

            return calibration_facts(document)
    raise AssertionError(f"no facts for {type(document).__name__}")


def warnings_of(document: Any) -> list[str]:
    return list(getattr(document, "warnings", ()))
