"""``stepcast calibrate RUN... -o C.toml``: named constants from measured runs."""

import argparse
import os
from collections.abc import Callable, Sequence

from stepcast.analyze.megatron.analysis import analyze_megatron
from stepcast.analyze.sweeps import MeasuredSweep
from stepcast.calibrate.classes import calibrate_operators
from stepcast.calibrate.collectives import CONSTANTS, FittedConstants, fit_collectives
from stepcast.calibrate.megatron import calibrate_megatron
from stepcast.cli.options import check_applicable
from stepcast.cli.output import open_source, show_view, write_file
from stepcast.hardware import load_cluster, load_gpu
from stepcast.inputs.kineto.ops import read_operators
from stepcast.inputs.optimus_log import read_logs
from stepcast.inputs.source import FormatError
from stepcast.inputs.table import folder_files, format_named, read_as_one, read_sources, recognise
from stepcast.ir.types import FactDict, group_by_key, pick, require
from stepcast.models.catalog import load_model
from stepcast.optimus.calibration import CLUSTER, TITLES, fit, lengths_of, observe_run
from stepcast.optimus.step import machine_of
from stepcast.units import format_percent
from stepcast.views.costs import fit_view

ERRORS = {"before": "before", "after": "after", "left_out": "on sizes left out"}


def run(args: argparse.Namespace) -> int:
    paths = [file for path in args.runs for file in (folder_files(path) if os.path.isdir(path) else [path])]
    kinds: dict[str, list[str]] = {}  # other files in the folder of a run are left out
    for path in paths:
        try:
            kinds.setdefault(recognise(open_source(path)).name, []).append(path)
        except FormatError:
            if len(paths) == 1:
                raise
    usable = [kind for kind in kinds if kind in CALIBRATIONS]
    if len(usable) > 1:
        listed = ", ".join(f"{kinds[kind][0]} is {kind}" for kind in usable)
        raise ValueError(f"{listed}; calibrate takes runs of one kind at a time: leave the others out")
    if not usable:
        what = " and ".join(kinds) or "no known format"
        raise ValueError(f"{paths[0]}: found {what}; calibrate needs runs of one of: {', '.join(CALIBRATIONS)}")
    source = usable[0]
    check_applicable(args, source=source)
    facts, text = CALIBRATIONS[source](paths if source == "optimus" else kinds[source], args)
    if args.output:
        write_file(args.output, text.encode())
    show_view(args, fit_view(facts))
    return 0


def _calibrate_operators(paths: Sequence[str], args: argparse.Namespace) -> tuple[FactDict, str]:
    measured = [read_as_one([open_source(path)], "op-times")[1] for path in paths]
    return calibrate_operators(measured, args.gpu, "op-times")


def _calibrate_megatron(paths: Sequence[str], args: argparse.Namespace) -> tuple[FactDict, str]:
    if not (args.gpu or args.cluster):
        raise ValueError(
            f"{paths[0]}: a Megatron trace does not name its GPU; use --gpu or --cluster, such as --cluster a800-node"
        )
    gpu = load_gpu(args.gpu) if args.gpu else load_cluster(args.cluster).gpu
    reader = format_named("megatron")
    runs = {
        folder if len(files) > 1 else files[0]: analyze_megatron(read_sources(list(map(open_source, files)), reader))
        for folder, files in group_by_key((os.path.dirname(path), path) for path in paths).items()
    }
    return calibrate_megatron(runs, gpu, args.cluster, args.model)


def _calibrate_optimus(paths: Sequence[str], args: argparse.Namespace) -> tuple[FactDict, str]:
    """Return constants fitted to all runs together, and the file that holds them."""
    skipped: list[str] = []
    logs = read_logs(paths, lambda path, reason: skipped.append(f"{path}: left out: {reason}"))
    cluster = load_cluster(args.cluster or CLUSTER)
    machine = machine_of(cluster)
    lengths = _read_lengths(args.sequence) if args.sequence else lengths_of(logs[0])
    model = load_model(args.model) if args.model else None
    observations = [observe_run(log, machine, lengths, model) for log in logs]
    fitted, names = fit(observations, machine), [run.name for run in observations]
    runs = []
    for run, error in zip(observations, fitted.errors, strict=True):
        times = {"measured_s": run.measured_s, "predicted_s": run.measured_s * (1 + error), "error": error}
        runs.append({"file": os.path.basename(run.source), "run": run.name, **times})
    facts: FactDict = {
        "kind": "calibration",
        "source": "optimus",
        **pick(cluster, "cluster=name gpu=gpu.name"),
        "constants": pick(fitted.constants, " ".join(TITLES)),
        "titles": TITLES,
        **pick(fitted, "spread mean_abs_error"),
        "runs": runs,
        "warnings": [*fitted.warnings, *skipped],
    }
    lines = [
        f'gpu = "{facts["gpu"]}"',
        f'source = "stepcast calibrate on {len(names)} {facts["source"]} runs, cluster {facts["cluster"]}"',
        f"mean_abs_error = {facts['mean_abs_error']:.4f}",
        f"sequences = [{', '.join(f'{length:g}' for length in lengths)}]",
        "runs = [",
        *(f'    "{name}",' for name in names),
        "]",
        "",
        "[constants]",
        *(f"{name} = {value:.6g}" for name, value in facts["constants"].items()),
        "",
        "[spread]  # standard deviation of the logarithm",
        *(f"{name} = {value:.3g}" for name, value in facts["spread"].items()),
    ]
    return facts, "\n".join(lines) + "\n"


def _read_lengths(text: str) -> tuple[float, ...]:
    try:
        lengths = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--sequence {text}: expected lengths such as 88,109,120") from None
    require(all(0 < length < 1e9 for length in lengths), f"--sequence {text}: every length must be above zero")
    return lengths


def _calibrate_collectives(paths: Sequence[str], args: argparse.Namespace) -> tuple[FactDict, str]:
    """Return constants fitted to all logs together, and a description that extends that of their cluster."""
    if args.cluster is None:
        raise ValueError("no cluster given: use --cluster to name the cluster of the logs, whose description is fitted")
    if ":" in args.cluster:
        raise ValueError(
            f"--cluster {args.cluster}: the fitted description extends a name or a file; write the differences to "
            "NAME.toml"
        )
    cluster = load_cluster(args.cluster)
    logs, skipped = [], []
    for path in paths:
        source = open_source(path)
        sweep = read_sources([source], recognise(source))
        try:
            logs.append(MeasuredSweep(sweep, cluster))
        except ValueError as error:
            skipped.append(f"left out: {error}")
    require(logs != [], f"no log can be compared with {cluster.name}: {'; '.join(skipped)}")
    fitted = fit_collectives(logs)
    facts = _collective_facts(fitted, [log.sweep.source for log in logs], cluster.name, skipped)
    return facts, _write_cluster(fitted, facts, args)


def _collective_facts(fitted: FittedConstants, files: list[str], cluster: str, skipped: list[str]) -> FactDict:
    helps = fitted.left_out < fitted.before
    constants, unknown = {}, fitted.unidentified
    for constant in (constant for constant in CONSTANTS if constant.key in fitted.values):
        value = fitted.values[constant.key]
        known = {"value": value, "text": constant.text(value).strip('"')}
        constants[constant.key] = {**known, "standard_error": fitted.spread[constant.key], "means": constant.means}
    reasons = {why: ", ".join(key for key in unknown if unknown[key] == why) for why in unknown.values()}
    warnings = [f"{keys} not fitted: {why}" for why, keys in reasons.items()]
    if not helps:
        warnings.append("the fit does not improve sizes that were left out of it: its constants are not written")
    return {
        "kind": "calibration",
        "source": "nccl-tests",
        "cluster": cluster,
        "logs": [os.path.basename(file) for file in files],
        "points": fitted.points,
        "constants": constants,
        "unidentified": dict(unknown),
        **pick(fitted, "before after left_out"),
        "used": helps,
        "warnings": [*warnings, *skipped],
    }


def _write_cluster(fitted: FittedConstants, facts: FactDict, args: argparse.Namespace) -> str:
    base = args.cluster
    if base.endswith(".toml"):
        base = os.path.relpath(base, os.path.dirname(args.output or "") or ".")
    errors = ", ".join(f"{format_percent(facts[name])} {word}" for name, word in ERRORS.items())
    written = [constant for constant in CONSTANTS if constant.key in fitted.values] if facts["used"] else []
    source = f"stepcast calibrate on {', '.join(facts['logs'])}: mean error {errors}".replace('"', "'")
    lines = [
        f'base = "{base}"',
        f'description = "{facts["cluster"]} as measured by {len(facts["logs"])} nccl-tests logs"',
        *(f"{constant.key} = {constant.text(fitted.values[constant.key])}" for constant in written),
        "",
        "[sources]",
        *(f'"{constant.key}" = "{source}"' for constant in written),
    ]
    return "\n".join(lines) + "\n"


# By format of the runs: the facts of a fit and the file to write.
CALIBRATIONS: dict[str, Callable[[Sequence[str], argparse.Namespace], tuple[FactDict, str]]] = {
    "op-times": _calibrate_operators,
    "kineto": lambda paths, args: calibrate_operators([read_operators([*map(open_source, paths)])], args.gpu, "kineto"),
    "megatron": _calibrate_megatron,
    "optimus": _calibrate_optimus,
    "nccl-tests": _calibrate_collectives,
}
