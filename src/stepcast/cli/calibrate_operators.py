"""Corrections from tables of measured operators."""

import argparse
from collections.abc import Sequence

from stepcast.calibrate.classes import calibrate_operators
from stepcast.cli.calibrate import Facts, of_kind
from stepcast.cli.progress import open_source
from stepcast.inputs.table import read_as_one

FORMAT = "op-times"


def calibrate(paths: Sequence[str], args: argparse.Namespace) -> tuple[Facts, str]:
    measured = [read_as_one([open_source(path)], FORMAT)[1] for path in of_kind(paths, FORMAT)]
    return calibrate_operators(measured, args.gpu, FORMAT)
