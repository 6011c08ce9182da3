"""``stepcast demo``: the shipped examples, each understood, with one file written to look at."""

import argparse
from pathlib import Path
from typing import Any

from stepcast.cli.output import heading, print_json, terminal_width
from stepcast.cli.show import facts_of, warnings_of
from stepcast.inputs.source import Source
from stepcast.inputs.table import read_sources, recognise
from stepcast.outputs.table import target_named
from stepcast.report.text import bullet, table
from stepcast.units import format_bytes, format_seconds

NEXT_STEPS = (
    ("everything in one file", "stepcast show examples/simai-llama-405b.txt"),
    ("the same for a program", "stepcast show --json examples/megatron-rank7.txt"),
    ("a trace for ui.perfetto.dev", "stepcast convert examples/megatron-rank7.txt run.json --to perfetto"),
    ("a workload for other simulators", "stepcast convert examples/simai-gpt-13b.txt gpt.et --to chakra"),
    ("your own file", "stepcast show FILE"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--examples", default="examples", metavar="DIR", help="folder of the examples")
    parser.add_argument(
        "-o", "--output", default="demo-output", metavar="DIR", help="folder to write results to"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    folder = Path(args.examples)
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; run the demo in the checkout or name it with --examples")
    output = Path(args.output)
    output.mkdir(parents=True, exist_ok=True)
    documents = [_document(path) for path in sorted(folder.iterdir()) if path.is_file()]
    trace = _write_trace(folder, output)
    if args.json:
        print_json({"documents": documents, "written": [str(trace)]})
        return 0
    width = terminal_width()
    print(heading("What stepcast understood"))
    print()
    print(table(("document", "format", "layout", "what it holds"), map(_row, documents), width))
    print()
    for found in documents:
        for warning in found["warnings"]:
            print(bullet(f"{Path(found['file']).name}: {warning}", "note: ", width))
    print()
    print(f"wrote {trace}: open it at ui.perfetto.dev")
    print()
    print(heading("Try next"))
    print()
    print(table(("for", "type"), NEXT_STEPS, width))
    return 0


def _document(path: Path) -> dict[str, Any]:
    source = Source(path)
    entry = recognise(source)
    document = read_sources([source], entry)
    return {"file": str(path), "format": entry.name, **facts_of(document), "warnings": warnings_of(document)}


def _write_trace(folder: Path, output: Path) -> Path:
    source = Source(folder / "megatron-rank7.txt")
    timeline = read_sources([source], recognise(source))
    path = output / "megatron-rank7.perfetto.json"
    path.write_bytes(target_named("perfetto").write(timeline))
    return path


def _row(found: dict[str, Any]) -> tuple[str, str, str, str]:
    layout = " ".join(f"{name}{found[name]}" for name in ("tp", "pp", "dp") if found.get(name)) or "-"
    return Path(found["file"]).name, found["format"], layout, _essence(found)


def _essence(found: dict[str, Any]) -> str:
    """One line that a person can check against the file."""
    match found["kind"]:
        case "workload":
            moved = format_bytes(found["communication_bytes"])
            batches = found["micro_batches"]
            return (
                f"{found['lines']} lines, {batches} micro-batch{'es' if batches > 1 else ''}: "
                f"compute {format_seconds(found['compute_s'])}, messages {moved}"
            )
        case "timeline":
            ranks = len(found["ranks"])
            return f"{found['spans']} spans of {ranks} rank(s) over {format_seconds(found['span_s'])}"
        case "run log":
            return (
                f"{found['layer_records']} layer records, {found['batches']} batches: "
                f"median {format_seconds(found['median_batch_s'])}"
            )
        case "sweep":
            return f"{found['collective']} over {found['ranks']} ranks, {found['sizes']} sizes"
        case _:
            return f"{found['parameters']:,} parameters"
