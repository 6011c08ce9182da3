"""A cluster's description from nccl-tests and rccl-tests logs."""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from stepcast.analyze.sweeps import MeasuredSweep
from stepcast.calibrate.collectives import CONSTANTS, Fitted, fit_collectives
from stepcast.cli.calibrate import of_kind
from stepcast.cli.progress import open_source
from stepcast.hardware import load_cluster
from stepcast.inputs.table import read_sources, recognise

Facts = dict[str, Any]


def calibrate(paths: Sequence[str], args: argparse.Namespace) -> tuple[Facts, str]:
    """Constants fitted to all logs together, and a description that builds on the one they were taken on."""
    if args.cluster is None:
        raise ValueError("say with --cluster what the logs were taken on: its description is what is fitted")
    if ":" in args.cluster:
        raise ValueError(
            f"--cluster {args.cluster}: the fitted description builds on a name or a file; "
            "write what differs to NAME.toml"
        )
    cluster = load_cluster(args.cluster)
    logs, skipped = [], []
    for path in of_kind(paths, "nccl-tests"):
        source = open_source(path)
        sweep = read_sources([source], recognise(source))
        log = MeasuredSweep(sweep, cluster)
        try:
            log.check()
        except ValueError as error:
            skipped.append(f"left out: {error}")
        else:
            logs.append(log)
    if not logs:
        raise ValueError(f"no log can be compared with {cluster.name}: {'; '.join(skipped)}")
    fitted = fit_collectives(logs)
    found = _facts(fitted, [log.sweep.source for log in logs], cluster.name, skipped)
    return found, _toml(fitted, found, args)


def _facts(fitted: Fitted, files: list[str], cluster: str, skipped: list[str]) -> Facts:
    helps = fitted.left_out < fitted.before
    constants = {
        constant.key: {
            "value": fitted.values[constant.key],
            "text": constant.text(fitted.values[constant.key]).strip('"'),
            "standard_error": fitted.spread[constant.key],
            "means": constant.means,
        }
        for constant in CONSTANTS
        if constant.key in fitted.values
    }
    reasons: dict[str, list[str]] = {}
    for key, why in fitted.unidentified.items():
        reasons.setdefault(why, []).append(key)
    warnings = [f"{', '.join(keys)} kept as described: {why}" for why, keys in reasons.items()]
    if not helps:
        warnings.append("sizes left out of the fit come no closer with it: the constants are shown and not written")
    return {
        "kind": "calibration",
        "source": "nccl-tests",
        "cluster": cluster,
        "logs": [os.path.basename(file) for file in files],
        "points": fitted.points,
        "constants": constants,
        "unidentified": dict(fitted.unidentified),
        "before": fitted.before,
        "after": fitted.after,
        "left_out": fitted.left_out,
        "used": helps,
        "warnings": [*warnings, *skipped],
    }


def _toml(fitted: Fitted, found: Facts, args: argparse.Namespace) -> str:
    base = args.cluster
    if base.endswith(".toml"):
        folder = os.path.dirname(os.path.abspath(args.output)) if args.output else os.getcwd()
        base = os.path.relpath(base, folder)
    logs = ", ".join(found["logs"])
    errors = ", ".join(f"{found[name]:.1%} {word}" for name, word in ERRORS.items())
    written = [constant for constant in CONSTANTS if constant.key in fitted.values] if found["used"] else []
    lines = [
        f'base = "{base}"',
        f'description = "{found["cluster"]} as measured by {len(found["logs"])} nccl-tests logs"',
    ]
    lines += [f"{constant.key} = {constant.text(fitted.values[constant.key])}" for constant in written]
    lines += ["", "[sources]"]
    source = f"stepcast calibrate on {logs}: mean error {errors}".replace('"', "'")
    lines += [f'"{constant.key}" = "{source}"' for constant in written]
    return "\n".join(lines) + "\n"


ERRORS = {"before": "before", "after": "after", "left_out": "on sizes left out"}
