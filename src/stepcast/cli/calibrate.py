"""``stepcast calibrate RUN... -o C.toml``: named constants from measured runs."""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

from stepcast.cli.documents import expand
from stepcast.cli.options import add_options
from stepcast.cli.output import write_file
from stepcast.cli.pages import show_answer
from stepcast.cli.progress import open_source
from stepcast.cli.rules import check_applicable
from stepcast.inputs.source import FormatError
from stepcast.inputs.table import recognise

Facts = dict[str, Any]
Calibrate = Callable[[Sequence[str], argparse.Namespace], tuple[Facts, str]]


class FitFunctions(NamedTuple):
    """Where the functions for one source are: what fits, and what writes the result as text."""

    calibrate: str  # a module with calibrate(paths, args) -> facts and the file to write
    text: str  # the function of report.calibration that writes (facts, width)


CLASSES = "calibration_text"
# By format of the runs.
CALIBRATIONS = {
    "op-times": FitFunctions("stepcast.cli.calibrate_operators", CLASSES),
    "kineto": FitFunctions("stepcast.cli.calibrate_kineto", CLASSES),
    "megatron": FitFunctions("stepcast.cli.calibrate_megatron", CLASSES),
    "optimus": FitFunctions("stepcast.cli.calibrate_optimus", "optimus_calibration_text"),
    "nccl-tests": FitFunctions("stepcast.cli.calibrate_collectives", "collective_calibration_text"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        runs RUN             measured operators (csv), profiler or Megatron traces, OptimusPrime and
                             nccl-tests logs
        -o, --output C.toml  write the constants here
        --gpu G              what the runs ran on, where they do not tell (csv, Megatron traces)
        --cluster C          what the runs ran on (OptimusPrime: a40-pcie; nccl-tests logs need it)
        --model M            what was trained, where the runs do not tell
        --sequence N,N,...   padded lengths of steps 1, 2, ... (OptimusPrime: from seqlen_per_step.json beside
                             the logs)
        --json
        """,
        runs={"nargs": "+"},
    )


def run(args: argparse.Namespace) -> int:
    paths = expand(args.runs)
    source = _source_of(paths)
    check_applicable(args, source=source)
    place = CALIBRATIONS[source]
    calibrate: Calibrate = import_module(place.calibrate).calibrate
    found, text = calibrate(paths, args)
    if args.output:
        write_file(args.output, text.encode())
    show_answer(args, found, getattr(import_module("stepcast.report.calibration"), place.text))
    return 0


def _source_of(paths: Sequence[str]) -> str:
    """The one kind of run among *paths* that can be calibrated on."""
    kinds: dict[str, str] = {}
    for path in paths:
        try:
            kinds.setdefault(recognise(open_source(path)).name, path)
        except FormatError:
            if len(paths) == 1:
                raise
    usable = [kind for kind in kinds if kind in CALIBRATIONS]
    if len(usable) > 1:
        found = ", ".join(f"{kinds[kind]} is {kind}" for kind in usable)
        raise ValueError(f"{found}; calibrate takes runs of one kind at a time: name those alone")
    if not usable:
        what = " and ".join(kinds) or "no known format"
        raise ValueError(f"{paths[0]}: found {what}; calibrate needs runs of one of: {', '.join(CALIBRATIONS)}")
    return usable[0]


def of_kind(paths: Sequence[str], kind: str) -> list[str]:
    """Those of *paths* that are of format *kind*; what lies beside a run is no run."""
    found = []
    for path in paths:
        try:
            if recognise(open_source(path)).name == kind:
                found.append(path)
        except FormatError:
            continue
    return found
