"""``stepcast record -o DIR -- torchrun ... train.py``: record a real job, a trace per rank."""

import argparse
import os
import shutil
import subprocess
from collections.abc import Sequence

from stepcast.cli.output import print_json, print_warnings, terminal_width, write_file
from stepcast.inputs.recorded import FLIGHT, INSPECTOR, STEPS, read_steps
from stepcast.inputs.source import Source
from stepcast.ir.limits import RESULT
from stepcast.ir.types import FactDict
from stepcast.units import format_seconds
from stepcast.views.declared import build_view
from stepcast.views.terminal import render_text
from stepcast.views.text import visible

LONGEST_FIRST_LINE = 4096
FLIGHT_CALLS = "2000"  # that the flight recorder keeps


def run(args: argparse.Namespace) -> int:
    folder = os.path.abspath(args.output_folder)
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise ValueError(f"{args.output_folder}: exists already; use a new folder")
    words = args.words[1:] if args.words[0] == "--" else args.words
    _check_pytorch(words)
    status = subprocess.run(words, env=_environment(folder, args), check=False).returncode
    taken = [*_taken(args.flight_recorder, folder, FLIGHT), *_taken(args.inspector, folder, INSPECTOR)]
    ranks = read_steps(os.path.join(folder, STEPS))
    traces = sorted(name for name in os.listdir(folder) if name.endswith(".json")) if ranks else []
    warnings = []
    if status:
        warnings.append(f"the job ended with status {status}")
    if not ranks:
        warnings.append("nothing was recorded: no process finished an optimizer step of PyTorch within this job")
    elif len(traces) < len(ranks):
        warnings.append(
            f"{len(ranks) - len(traces)} of {len(ranks)} ranks ended before step "
            f"{args.skip + args.steps + 1}: no trace of them; lower --skip or --steps"
        )
    facts = {"folder": args.output_folder, "status": status, "ranks": ranks, "traces": traces}
    facts["warnings"] = [*warnings, *taken]
    (print_json if args.json else _show)(facts)
    return 0 if ranks and not status else 1


def _check_pytorch(words: Sequence[str]) -> None:
    """Raise a ValueError before the job starts if its command cannot run, or if its Python has no PyTorch."""
    program = shutil.which(words[0])
    if program is None:
        raise ValueError(f"{visible(words[0])}: no such program")
    python = [program]  # the command of the Python that runs it: itself, or the one that its first line names
    if not os.path.basename(program).startswith("python"):
        with open(program, "rb") as file:
            first = file.readline(LONGEST_FIRST_LINE)
        python = first[2:].decode("utf-8", "replace").split() if first.startswith(b"#!") else []
        if not python or "python" not in os.path.basename(python[-1]):
            return  # a launcher of its own: known only once it has ended
    looking = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    if subprocess.run([*python, "-c", looking], capture_output=True, check=False).returncode == 1:
        raise ValueError(
            f"record needs PyTorch in the Python that runs the job ({visible(' '.join(python))}), which has none: "
            "pip install torch there, or name another python"
        )


def _environment(folder: str, args: argparse.Namespace) -> dict[str, str]:
    """Return the environment of the job, with our sitecustomize before its own."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = [os.path.join(package, "pytorch", "record", "site"), os.path.dirname(package)]
    if os.environ.get("PYTHONPATH"):
        paths.append(os.environ["PYTHONPATH"])
    flight = {}
    if args.flight_recorder is not None:  # under its new and old names, unless the user set them
        names = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
        flight = {name: os.environ.get(name, FLIGHT_CALLS) for name in names}
        flight |= {} if args.flight_recorder else {"STEPCAST_RECORD_FLIGHT": "1"}
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "STEPCAST_RECORD": folder,
        "STEPCAST_RECORD_WINDOW": f"{args.skip},{args.steps}",
        **flight,
    }


def _taken(given: str | None, folder: str, name: str) -> list[str]:
    """Copy what the job wrote to the folder *given*; return warnings."""
    if not given:
        return []
    files = sorted(os.listdir(given)) if os.path.isdir(given) else []
    if not files:
        return [f"{visible(given)}: the job wrote nothing there"]
    os.makedirs(os.path.join(folder, name), exist_ok=True)
    for file in files:
        path = os.path.join(given, file)
        if os.path.isfile(path):
            write_file(os.path.join(folder, name, file), Source(path).raw(RESULT))
    return []


def _show(facts: FactDict) -> None:
    view = build_view("record", facts, clock_off_by=lambda rank: format_seconds(abs(rank["ahead_s"])))
    print(render_text(view, terminal_width()))
    if facts["traces"]:
        print(f"\n'stepcast analyze {facts['folder']}' explains where the time of the window went")
    print_warnings(facts["warnings"])
