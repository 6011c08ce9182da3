"""Named constants from OptimusPrime logs."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from stepcast.hardware import Cluster, load_cluster
from stepcast.inputs.optimus_log import read_logs
from stepcast.models.catalog import load_model
from stepcast.optimus.calibration import CLUSTER, TITLES, ConstantsFit, Observation, fit, lengths_of, observed
from stepcast.optimus.cost import machine_of

Facts = dict[str, Any]


def calibrate(paths: Sequence[str], args: argparse.Namespace) -> tuple[Facts, str]:
    """Constants fitted to all runs together, and the file that holds them."""
    skipped: list[str] = []
    logs = read_logs(paths, lambda path, reason: skipped.append(f"{path}: left out: {reason}"))
    cluster = load_cluster(args.cluster or CLUSTER)
    machine = machine_of(cluster)
    lengths = _lengths(args.sequence) if args.sequence else lengths_of(logs[0])
    model = load_model(args.model) if args.model else None
    observations = [observed(log, machine, lengths, model) for log in logs]
    fitted = fit(observations, machine)
    return _optimus_facts(fitted, observations, lengths, cluster, skipped)


def _lengths(text: str) -> tuple[float, ...]:
    try:
        lengths = tuple(float(word) for word in text.split(","))
    except ValueError:
        raise ValueError(f"--sequence {text}: expected lengths such as 88,109,120") from None
    if not all(0 < length < 1e9 for length in lengths):
        raise ValueError(f"--sequence {text}: every length must be above zero")
    return lengths


def _optimus_facts(
    fitted: ConstantsFit,
    observations: Sequence[Observation],
    lengths: Sequence[float],
    cluster: Cluster,
    skipped: list[str],
) -> tuple[Facts, str]:
    names = [each.name for each in observations]
    constants = {name: getattr(fitted.constants, name) for name in TITLES}
    found = {
        "kind": "calibration",
        "source": "optimus",
        "cluster": cluster.name,
        "gpu": cluster.gpu.name,
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
        f'gpu = "{found["gpu"]}"',
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
