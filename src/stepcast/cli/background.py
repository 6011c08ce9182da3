"""``--background FILE``: what other jobs send over the network meanwhile."""

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from stepcast.inputs.errors import FormatError

if TYPE_CHECKING:
    from stepcast.forecast.background import Others
    from stepcast.forecast.options import Options
    from stepcast.hardware import Cluster


def with_background(options: "Options", args: argparse.Namespace, cluster: "Cluster", gpus: int) -> "Options":
    """*options* with what the file that *args* name says of others, beside a run of so many *gpus*."""
    path = getattr(args, "background", None)
    if path is None:
        return options
    from stepcast.forecast.background import beside

    try:
        others, nodes = beside(cluster, gpus, _others(path, cluster, args))
    except FormatError:
        raise
    except ValueError as error:
        raise FormatError(str(error), path) from None
    return replace(options, others=others, network_nodes=nodes)


def _others(path: str, cluster: "Cluster", args: argparse.Namespace) -> "Others":
    """The others of the file at *path*; jobs run on the same *cluster*."""
    from stepcast.cli.forecasting import asked_by
    from stepcast.cli.sweep_points import parsed
    from stepcast.forecast.background import Neighbour
    from stepcast.hardware.background import read_background
    from stepcast.ir.background import OtherJob, Pattern

    others: list[Neighbour | Pattern] = []
    for other in read_background(path):
        if not isinstance(other, OtherJob):
            others.append(other)
            continue
        usual = {"cluster": args.cluster, "set": args.set, "gpus": len(other.nodes) * cluster.node.gpus}
        try:
            prediction = asked_by(parsed("predict", {**usual, **other.words})).prediction
        except ValueError as error:
            raise FormatError(f"{other.name}: {error}", path) from None
        if prediction.cluster.node != cluster.node or prediction.cluster.topology != cluster.topology:
            raise FormatError(f"{other.name}: runs on another cluster; leave its cluster out", path)
        others.append(Neighbour(other.name, other.nodes, prediction, other.start_s))
    return others
