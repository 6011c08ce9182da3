"""``stepcast calibrate RUN... -o C.toml``: named constants from measured runs."""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from stepcast.cli.documents import expand
from stepcast.cli.options import add_options
from stepcast.cli.output import write_file
from stepcast.cli.pages import show_view
from stepcast.cli.progress import open_source
from stepcast.cli.rules import check_applicable
from stepcast.inputs.source import FormatError
from stepcast.inputs.table import recognise

Facts = dict[str, Any]
Calibrate = Callable[[Sequence[str], argparse.Namespace], tuple[Facts, str]]


# By format of the runs: a module with calibrate(paths, args), which returns facts and the file to write.
CALIBRATIONS = {
    "op-times": "stepcast.cli.calibrate_operators",
    "kineto": "stepcast.cli.calibrate_kineto",
    "megatron": "stepcast.cli.calibrate_megatron",
    "optimus": "stepcast.cli.calibrate_optimus",
    "nccl-tests": "stepcast.cli.calibrate_collectives",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        runs RUN             measured operators (csv), profiler or Megatron traces, OptimusPrime or nccl-tests logs
        -o, --output C.toml  file to write the constants to
        --gpu G              GPU of the runs, if the files do not name it (csv, Megatron traces)
        --cluster C          cluster of the runs (needed for nccl-tests logs; OptimusPrime: default a40-pcie)
        --model M            model of the runs, if the files do not name it
        --sequence N,N,...   OptimusPrime: padded sequence lengths of steps 1, 2, ... (default: from
                             seqlen_per_step.json in the folder of the logs)
        --html
        --json
        """,
        runs={"nargs": "+"},
    )


def run(args: argparse.Namespace) -> int:
    paths = expand(args.runs)
    source = _source_of(paths)
    check_applicable(args, source=source)
    calibrate: Calibrate = import_module(CALIBRATIONS[source]).calibrate
    facts, text = calibrate(paths, args)
    if args.output:
        write_file(args.output, text.encode())
    from stepcast.views.costs import fit_view

    show_view(args, fit_view(facts))
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
