"""``--place``: which GPUs of each rack a job gets."""

import argparse

# Written out, so that the help does not load the hardware; a test compares them with Place.
PLACES = ("even", "packed")


def has_racks(args: argparse.Namespace) -> bool:
    """Whether the cluster joins several nodes in one scale-up domain; asked only where it matters."""
    from stepcast.hardware import load_cluster

    if "place" not in args.given or args.cluster is None:
        return False
    named = isinstance(args.cluster, str)
    cluster = load_cluster(args.cluster, args.set) if named else args.cluster
    return bool(cluster.topology.scale_up_nodes > 1)
