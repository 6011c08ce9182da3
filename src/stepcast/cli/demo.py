"""``stepcast demo``: the shipped examples, each understood, with one file written to look at."""

import argparse
import sys
from pathlib import Path
from typing import Any

from stepcast.cli.demo_pages import write_pages
from stepcast.cli.options import add_options
from stepcast.cli.output import print_json, terminal_width, write_trace
from stepcast.cli.show import facts_of, warnings_of
from stepcast.cli.streams import heading
from stepcast.inputs.source import Source
from stepcast.inputs.table import read_sources, recognise
from stepcast.units import format_seconds
from stepcast.views.text import bullet, table, wrap

NEXT_STEPS = (
    ("a model that has no file yet", "predict --model llama-3.1-70b --cluster dgx-h100 --gpus 64 --tp 8 --pp 2"),
    ("where a measured run's time went", "analyze examples/megatron-rank7.txt"),
    ("everything in one file, or as JSON", "show examples/simai-llama-405b.txt --json"),
    ("a workload for other simulators", "convert examples/simai-gpt-13b.txt gpt.et --to chakra"),
    ("your own file", "show FILE"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        --examples DIR    folder of the examples (default: those that came with stepcast)
        -o, --output DIR  folder to write results to
        --json
        """,
        output={"default": "demo-output", "type": str},
    )


def run(args: argparse.Namespace) -> int:
    folder = Path(args.examples) if args.examples else shipped_examples()
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; name the one of the examples with --examples")
    output = Path(args.output)
    if output.exists() and not output.is_dir():
        raise ValueError(f"{output}: is a file; name a folder to write to with --output")
    output.mkdir(parents=True, exist_ok=True)
    documents = [_document(path) for path in sorted(folder.iterdir()) if path.is_file()]
    trace = _write_trace(folder, output)
    width = terminal_width()
    simulated, forecast = _forecast(folder, output, width)
    index = write_pages([(found["file"], found["format"]) for found in documents], output)
    if args.json:
        print_json({"documents": documents, "written": [str(trace), str(simulated), str(index)]})
        return 0
    print(heading("What stepcast understood"))
    print()
    print(table(("document", "format", "layout", "what it holds"), map(_row, documents), width))
    print()
    for found in documents:
        for warning in found["warnings"]:
            print(bullet(f"{Path(found['file']).name}: {warning}", "note: ", width))
    print()
    print(heading("A forecast: the Llama-405B workload on 1,024 H100s"))
    print()
    print(forecast)
    print()
    print("\n".join(wrap(f"wrote {trace} and {simulated}: open them at ui.perfetto.dev", width)))
    print(f"wrote {index}: pages of every document and of a prediction, to open in a browser")
    print()
    print(heading("Try next"))
    print()
    command = sys.argv[0] if sys.argv[0].endswith("stepcast") else "stepcast"
    for purpose, words in NEXT_STEPS:
        print(f"# {purpose}\n{command} {words.replace('examples/', f'{folder}/')}")
    return 0


def shipped_examples() -> Path:
    """The folder of the examples: of this checkout, else the one inside the package."""
    package = Path(__file__).resolve().parents[1]
    places = (Path("examples"), package / "examples", package.parents[1] / "examples")
    return next((place for place in places if place.is_dir()), places[0])


def _document(path: Path) -> dict[str, Any]:
    source = Source(path)
    entry = recognise(source)
    document = read_sources([source], entry)
    return {"file": str(path), "format": entry.name, **facts_of(document), "warnings": warnings_of(document)}


def _write_trace(folder: Path, output: Path) -> Path:
    source = Source(folder / "megatron-rank7.txt")
    timeline = read_sources([source], recognise(source))
    path = output / "megatron-rank7.perfetto.json"
    write_trace(timeline, str(path))
    return path


def _forecast(folder: Path, output: Path, width: int) -> tuple[Path, str]:
    """Simulate the shipped workload; the trace it wrote, and the result as text."""
    from stepcast.forecast.simulate import simulate
    from stepcast.hardware import load_cluster
    from stepcast.views.gantt import gantt
    from stepcast.views.step import step_view
    from stepcast.views.terminal import render_text

    source = Source(folder / "simai-llama-405b.txt")
    prediction = simulate(read_sources([source], recognise(source)), load_cluster("dgx-h100"))
    path = output / "simai-llama-405b.perfetto.json"
    write_trace(prediction.timeline, str(path))
    found = prediction.report.facts() | {"stages": []}
    return path, render_text(step_view(found), width) + "\n\n" + gantt(prediction.timeline, width)


def _row(found: dict[str, Any]) -> tuple[str, str, str, str]:
    layout = " ".join(f"{name}{found[name]}" for name in ("tp", "pp", "dp") if found.get(name)) or "-"
    return Path(found["file"]).name, found["format"], layout, _essence(found)


def _essence(found: dict[str, Any]) -> str:
    """A few words that a person can check against the file."""
    match found["kind"]:
        case "workload":
            return f"{found['lines']} lines, compute {format_seconds(found['compute_s'])}"
        case "timeline":
            return f"{found['spans']} spans over {format_seconds(found['span_s'])}"
        case "run log":
            return f"{found['layer_records']} layer times, batch {format_seconds(found['median_batch_s'])}"
        case "sweep":
            return f"{found['collective']}, {found['ranks']} ranks, {found['sizes']} sizes"
        case "model":
            return f"{found['parameters']:,} parameters"
        case kind:
            return str(kind)
