"""An OptimusPrime log with what its analysis needs besides: model, machine, constants, sequence lengths."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepcast.ir.runlog import RunLog


def optimus_facts(log: "RunLog", args: argparse.Namespace) -> dict[str, Any]:
    """The log explained with the shipped constants, on ``--cluster`` or the host they were fitted on."""
    from stepcast.analyze.optimus import analyze_optimus
    from stepcast.hardware import load_cluster
    from stepcast.validate.optimus import CLUSTER, lengths_beside, machine_of, model_with, shipped

    cluster = load_cluster(getattr(args, "cluster", None) or CLUSTER, getattr(args, "set", []))
    model = model_with(log.parameters)
    lengths = lengths_beside(log.source)
    return analyze_optimus(log, model, machine_of(cluster), shipped().constants, lengths).facts()
