"""``stepcast calibrate RUN... -o C.toml``: named constants from measured runs."""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepcast.cli.documents import expand
from stepcast.cli.output import print_json, print_warnings, terminal_width
from stepcast.inputs.errors import FormatError
from stepcast.inputs.source import Source
from stepcast.inputs.table import recognise

if TYPE_CHECKING:
    from stepcast.analyze.optimus_fit import Fit, Observation

Facts = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", metavar="RUN", nargs="+", help="logs of measured runs, or folders of them")
    parser.add_argument("-o", "--output", metavar="C.toml", help="write the constants here")
    parser.add_argument("--cluster", metavar="C", help="what the runs ran on (OptimusPrime: a40-pcie)")
    parser.add_argument("--model", metavar="M", help="what was trained, where the runs do not tell")
    parser.add_argument(
        "--sequence",
        metavar="N,N,...",
        help="padded lengths of steps 1, 2, ... (OptimusPrime: from seqlen_per_step.json beside the logs)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    paths = expand(args.runs)
    source = _source_of(paths)
    found, text = CALIBRATIONS[source](paths, args)
    if args.output:
        Path(args.output).write_text(text, encoding="utf-8")
    if args.json:
        print_json(found)
        return 0
    from stepcast.report.optimus import calibration_text

    print(calibration_text(found, terminal_width()))
    print_warnings(found["warnings"])
    return 0


def _source_of(paths: Sequence[str]) -> str:
    """The one kind of run among *paths* that can be calibrated on."""
    kinds: dict[str, str] = {}
    for path in paths:
        try:
            kinds.setdefault(recognise(Source(path)).name, path)
        except FormatError:
            if len(paths) == 1:
                raise
    usable = [kind for kind in kinds if kind in CALIBRATIONS]
    if len(usable) != 1:
        what = " and ".join(kinds) or "no known format"
        raise ValueError(
            f"{paths[0]}: found {what}; calibrate needs runs of one of: {', '.join(CALIBRATIONS)}"
        )
    return usable[0]


def _optimus(paths: Sequence[str], args: argparse.Namespace) -> tuple[Facts, str]:
    from stepcast.analyze.optimus_fit import fit, observe
    from stepcast.analyze.optimus_plan import plan_of_log
    from stepcast.hardware import load_cluster
    from stepcast.models.catalog import load_model
    from stepcast.validate.optimus import CLUSTER, lengths_beside, machine_of, model_with, read_logs

    skipped: list[str] = []
    logs = read_logs(paths, lambda path, reason: skipped.append(f"{path}: left out: {reason}"))
    machine = machine_of(load_cluster(args.cluster or CLUSTER))
    lengths = _lengths(args.sequence) if args.sequence else lengths_beside(logs[0].source)
    observations = []
    for log in logs:
        model = load_model(args.model) if args.model else model_with(log.parameters)
        observations.append(observe(log, plan_of_log(log, model, lengths), machine))
    fitted = fit(observations, machine)
    return _optimus_facts(fitted, observations, lengths, machine.name, skipped)


def _lengths(text: str) -> tuple[float, ...]:
    try:
        lengths = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--sequence {text}: expected lengths such as 88,109,120") from None
    if not all(0 < length < 1e9 for length in lengths):
        raise ValueError(f"--sequence {text}: every length must be above zero")
    return lengths


def _optimus_facts(
    fitted: "Fit",
    observations: Sequence["Observation"],
    lengths: Sequence[float],
    cluster: str,
    skipped: list[str],
) -> tuple[Facts, str]:
    from stepcast.analyze.optimus_fit import TITLES
    from stepcast.validate.optimus import run_name

    names = [run_name(each.plan, each.measured_s) for each in observations]
    constants = {name: getattr(fitted.constants, name) for name in TITLES}
    found = {
        "kind": "calibration",
        "source": "optimus",
        "cluster": cluster,
        "constants": constants,
        "titles": TITLES,
        "spread": fitted.spread,
        "mean_abs_error": fitted.mean_abs_error,
        "runs": [
            {
                "file": os.path.basename(each.source),
                "run": name,
                "measured_s": each.measured_s,
                "predicted_s": each.measured_s * (1 + error),
                "error": error,
            }
            for name, each, error in zip(names, observations, fitted.errors, strict=True)
        ],
        "warnings": [*fitted.warnings, *skipped],
    }
    return found, _toml(found, names, lengths)


def _toml(found: Facts, names: Sequence[str], lengths: Sequence[float]) -> str:
    lines = [
        f'source = "stepcast calibrate on {len(names)} {found["source"]} runs, cluster {found["cluster"]}"',
        f"mean_abs_error = {found['mean_abs_error']:.4f}",
        f"sequences = [{', '.join(f'{length:g}' for length in lengths)}]",
        "runs = [",
        *(f'    "{name}",' for name in names),
        "]",
        "",
        "[constants]",
        *(f"{name} = {value:.6g}" for name, value in found["constants"].items()),
        "",
        "[spread]  # standard deviation of the logarithm",
        *(f"{name} = {value:.3g}" for name, value in found["spread"].items()),
    ]
    return "\n".join(lines) + "\n"


# By format of the runs.
CALIBRATIONS: dict[str, Callable[[Sequence[str], argparse.Namespace], tuple[Facts, str]]] = {
    "optimus": _optimus,
}
