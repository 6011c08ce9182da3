"""Corrections from profiler traces: the operators of a training step, as its kernels were timed."""

import argparse
from collections.abc import Sequence

from stepcast.calibrate.classes import calibrate_operators
from stepcast.cli.calibrate import Facts, of_kind
from stepcast.cli.progress import open_source
from stepcast.inputs.kineto.ops import read_operators


def calibrate(paths: Sequence[str], args: argparse.Namespace) -> tuple[Facts, str]:
    measured = read_operators([open_source(path) for path in of_kind(paths, "kineto")])
    return calibrate_operators([measured], args.gpu, "kineto")
