"""``stepcast show FILE...``, ``list`` and ``convert``: documents of any known format, and the catalogues."""

import argparse
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from operator import methodcaller

import msgspec

from stepcast.cli import output
from stepcast.cli.documents import apply_edits, load_lazily, open_sources, read_document
from stepcast.cli.options import check_applicable
from stepcast.cli.output import print_json, print_warnings, show_view, terminal_width
from stepcast.cli.streams import heading
from stepcast.frameworks.catalog import load_profile, looks_like_framework, profile_facts
from stepcast.hardware import Cluster, load_cluster, load_gpu
from stepcast.hardware.catalog import CatalogError, all_clusters, data_names, gpu_facts, looks_like_cluster
from stepcast.inputs.source import FormatError, Source, prefix_errors
from stepcast.inputs.table import FORMATS, Format, format_named, read_sources, recognise
from stepcast.ir.limits import RESULT
from stepcast.ir.types import FactDict, pick
from stepcast.outputs.table import TARGETS, target_named
from stepcast.views.documents import ANSWER_VIEWS, document_view, documents_view, list_view
from stepcast.views.terminal import render_text
from stepcast.views.text import visible

CLUSTER = Format("cluster", "cluster description (TOML)", "cluster", "stepcast.hardware")
FRAMEWORK = Format("framework", "framework profile (TOML)", "framework", "stepcast.frameworks")
CALIBRATION = Format("calibration", "calibration of a GPU (TOML)", "calibration", "stepcast.cost.calibration")
ANSWER = Format("answer", "saved answer", "answer", "stepcast.cli.show")

# A heading of calibrations, which ``profile`` and ``calibrate`` write.
CALIBRATION_CLASS = re.compile(r'^\[(?:class\."?[\w.-]+"?|constants)\]', re.MULTILINE)
# The kind of answers that state no command, and of those of several runs.
KIND_OF_KEY = {"same_run": "comparison", "measures": "verdict", "replayed_step_s": "replay", "verb": "alternatives"}
DAMAGED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
# Format -> the function that reads a description from the file with that name.
DESCRIBED = {"cluster": "hardware:load_cluster", "framework": "frameworks.catalog:load_profile"}
DESCRIBED |= {"calibration": "questions.settle:load_calibration"}


def run_show(args: argparse.Namespace) -> int:
    read = list(_documents(args))
    check_applicable(args, kinds={type(document).__name__ for _, _, document in read}, file=args.files[0])
    documents = []
    for where, entry, document in read:
        documents.append({"file": where, "format": entry.name, "title": entry.title, **facts_of(document)})
    view = documents_view(documents)
    output.write_view(args, view)
    if args.json:
        print_json(view.facts)
        return 0
    for document in documents:
        print(heading(f"{document['file']}: {document['title']}"))
        print(f"\n{render_text(document_view(document), terminal_width())}\n")
        print_warnings(document["warnings"])
    if args.html:
        print(output.page_note(args))
    return 0


def _documents(args: argparse.Namespace) -> Iterator[tuple[str, Format, object]]:
    """Yield each document that the arguments name; rank files of one format are one document."""
    runs: dict[tuple[str, str], list[Source]] = {}
    clusters: dict[str, Cluster] = {}  # of the catalogue, where no file has their names
    for name in () if args.format else args.files:
        if name and not (os.path.exists(name) or os.sep in name or name.endswith(".toml")):
            with suppress(CatalogError):
                clusters[name] = load_cluster(name)
    yield from ((name, CLUSTER, cluster) for name, cluster in clusters.items())
    for source in open_sources([file for file in args.files if file not in clusters], args.format, _recognise):
        entry = format_named(args.format) if args.format else _recognise(source)
        if entry in (CLUSTER, CALIBRATION, FRAMEWORK):
            if not source.path.endswith(".toml"):
                raise ValueError(f"{source.path}: is a {entry.title}; save it as NAME.toml to show it")
            yield source.path, entry, load_lazily(DESCRIBED[entry.name])(source.path)
        elif entry is ANSWER:
            answer = _read_answer(source)
            with prefix_errors("is no complete answer of a verb", source.path, DAMAGED):
                document_view(answer)
            yield source.path, entry, answer
        elif entry.joins:
            run_of = getattr(entry.load(), "run_of", None)
            runs.setdefault((entry.name, run_of(source.path) if run_of else ""), []).append(source)
        else:
            yield source.path, entry, apply_edits(read_sources([source], entry), args)
    for (name, run), sources in runs.items():
        entry = format_named(name)
        where = sources[0].path
        if len(sources) > 1:
            where = f"{run or os.path.dirname(where) or '.'} ({len(sources)} files)"
        yield where, entry, apply_edits(read_sources(sources, entry), args)


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
        if _read_answer(source):
            return ANSWER
        raise


def _read_answer(source: Source) -> FactDict:
    """Return the ``--json`` output of a verb with its kind, or nothing where the file is something else."""
    if not source.head.lstrip().startswith("{"):
        return {}
    with suppress(FormatError, msgspec.DecodeError, RecursionError):
        answer = msgspec.json.decode(source.data(RESULT), type=FactDict)
        verb = "".join(str(answer.get("command", "")).split()[1:2])
        kinds = (answer.get("kind"), *(KIND_OF_KEY[key] for key in KIND_OF_KEY if key in answer), f"answer of {verb}")
        kind = str(next(filter(None, kinds)))
        return {**answer, "kind": kind} if kind in ANSWER_VIEWS else {}
    return {}


def facts_of(document: object) -> FactDict:
    """Return the facts of any document, with its warnings."""
    facts = FACTS[type(document).__name__](document)
    return {**facts, "warnings": list(getattr(document, "warnings", facts.get("warnings") or ()))}


def _analyze_log(kind: str, analyze: str) -> Callable[[object], FactDict]:
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
    "Captured": load_lazily("cli.capture:captured_facts"),
    "Wiring": methodcaller("facts"),
    "Cluster": load_lazily("hardware.catalog:cluster_facts"),
    "Profile": profile_facts,
    "dict": dict,
    "Calibration": lambda calibration: {
        "kind": "calibration",
        "gpu": calibration.gpu,
        "classes": {name: asdict(correction) for name, correction in calibration.corrections.items()},
        "constants": dict(calibration.constants),
    },
}


def run_list(args: argparse.Namespace) -> int:
    show_view(args, list_view(args.what, LISTED[args.what]()))
    return 0


def _formats() -> list[FactDict]:
    read, written = {entry.name for entry in FORMATS}, {target.name for target in TARGETS}
    rows = [(entry.name, entry.gives, entry.title) for entry in FORMATS]
    rows += [(target.name, target.takes or "anything", target.title) for target in TARGETS if target.name not in read]
    return [
        {"format": name, "holds": holds, "read": name in read, "written": name in written, "title": title}
        for name, holds, title in rows
    ]


def _gpus() -> list[FactDict]:
    from stepcast.cost.serving import cost_evidence

    gpus = {name: load_gpu(name) for name in data_names("gpus")}
    return [{"gpu": name, **gpu_facts(gpu), "costs": cost_evidence(gpu)} for name, gpu in gpus.items()]


def _failures() -> list[FactDict]:
    from stepcast.goodput.plan import load_failures

    rows: list[FactDict] = []
    for name in data_names("failures"):
        failures, restart = load_failures(name)
        between = pick(failures, "gpu_s node_s link_s").items()
        times_s = {part: value if value < float("inf") else None for part, value in between}
        about = {"restart_s": restart.total_s, "description": failures.description, "sources": dict(failures.sources)}
        rows.append({"failures": name, **times_s, **about})
    return rows


def _models() -> list[FactDict]:
    from stepcast.models.catalog import load_model, model_names

    rows = []
    for model in map(load_model, model_names()):
        sizes = pick(model, "model=name parameters layers hidden heads kv_heads")
        rows.append({**sizes, "experts": model.experts.count if model.experts else 0, "vocab": model.vocab})
    return rows


LISTED: dict[str, Callable[[], list[FactDict]]] = {
    "formats": _formats,
    "gpus": _gpus,
    "clusters": all_clusters,
    "models": _models,
    "frameworks": lambda: [
        {"framework": name, **profile_facts(load_profile(name))} for name in data_names("frameworks")
    ],
    "failures": _failures,
    "prices": load_lazily("questions.settle:list_prices"),
}


def run_convert(args: argparse.Namespace) -> int:
    if (args.out is None) == (args.output is None):
        mistake = "no file to write given" if args.out is None else f"two files to write: {args.out} and {args.output}"
        raise ValueError(f"{mistake}; use stepcast convert IN OUT, or IN -o OUT")
    args.output = args.out if args.output is None else args.output
    to_stdout = args.output == "-"
    if to_stdout and args.json:
        raise ValueError("--json and - both take standard output: write to a file, or leave --json out")
    to = args.to or ("cluster" if args.output.endswith(".toml") else None)
    if to is None:
        known = ", ".join(target.name for target in TARGETS)
        raise ValueError(f"no format given: use --to with one of {known}; OUT.toml is a cluster description")
    document = read_document([args.input], args)
    check_applicable(args, kinds={type(document).__name__}, file=args.input)
    target = target_named(to)
    if type(document).__name__ == "Captured" and target.takes == "workload":
        from stepcast.cli.capture import build_workload

        document = build_workload(document, args)
    elif args.gpu and type(document).__name__ == "Wiring":
        document = replace(document, gpu=args.gpu)
    elif args.gpu:
        raise ValueError("--gpu has no effect: it is for captured programs and topologies")
    files = target.files(document, args.output)
    sizes = {name: output.print_data(data) for name, data in files} if to_stdout else output.write_files(files)
    names, size = list(sizes), sum(sizes.values())
    warnings = [*getattr(document, "warnings", ()), *target.losses(document)]
    if args.json:
        result = {"format": target.name, "output": args.output, "files": names, "bytes": size}
        print_json({**result, "warnings": warnings})
    else:
        print_warnings(warnings)
        if not to_stdout:
            written = " to ".join(visible(name) for name in dict.fromkeys((names[0], names[-1])))
            print(f"wrote {written}: {target.title}, {size:,} bytes")
    return 0
