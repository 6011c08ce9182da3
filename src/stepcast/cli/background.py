"""``--background FILE``: what other jobs send over the network meanwhile."""

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from stepcast.forecast.background import Others
    from stepcast.hardware import Cluster


def add_background_argument(group: "argparse._ArgumentGroup | argparse.ArgumentParser") -> None:
    group.add_argument(
        "--background",
        metavar="JOB.toml",
        help="with --engine fluid: other jobs, or plain flows, that share the network meanwhile",
    )


def background_of(path: str, cluster: "Cluster", named: str, sets: list[str]) -> "Others":
    """The others of the file at *path*; jobs run on *cluster*, which was *named* and changed by *sets*."""
    from stepcast.cli.forecasting import asked_by
    from stepcast.cli.sweep_points import parsed
    from stepcast.forecast.background import Neighbour
    from stepcast.hardware.background import read_background
    from stepcast.inputs.errors import FormatError
    from stepcast.ir.background import OtherJob, Pattern

    others: list[Neighbour | Pattern] = []
    for other in read_background(path):
        if not isinstance(other, OtherJob):
            others.append(other)
            continue
        usual = {"cluster": named, "set": sets, "gpus": len(other.nodes) * cluster.node.gpus}
        try:
            prediction = asked_by(parsed("predict", {**usual, **other.words})).predicted
        except ValueError as error:
            raise FormatError(f"{other.name}: {error}", path) from None
        if prediction.cluster.node != cluster.node or prediction.cluster.topology != cluster.topology:
            told = f"{other.name}: runs on another cluster than {named}; leave its cluster out"
            raise FormatError(told, path)
        others.append(Neighbour(other.name, other.nodes, prediction, other.start_s))
    return others
