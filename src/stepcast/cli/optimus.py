"""An OptimusPrime log with what its analysis needs besides: model, machine, constants, sequence lengths."""

import argparse
from typing import Any

from stepcast.hardware import load_cluster
from stepcast.inputs.source import Source
from stepcast.ir.limits import DESCRIPTION
from stepcast.ir.measured import RunLog
from stepcast.optimus.analysis import analyze_optimus
from stepcast.optimus.calibration import CLUSTER, calibrated_of, lengths_of, planned, shipped
from stepcast.optimus.cost import machine_of


def optimus_facts(log: RunLog, args: argparse.Namespace) -> dict[str, Any]:
    """The log explained with the shipped constants, or those of ``--calibration``.

    On ``--cluster``, or the host that the shipped ones were fitted on.
    """
    cluster = load_cluster(args.cluster or CLUSTER, args.set)
    used, lengths = shipped(), lengths_of(log)
    if args.calibration:
        used = calibrated_of(Source(args.calibration).text(DESCRIPTION), args.calibration)
        lengths = used.lengths_of(log)
    return analyze_optimus(log, planned(log, lengths), machine_of(cluster), used.constants).facts()
