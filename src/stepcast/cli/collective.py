"""``stepcast collective``: what one collective costs on a cluster."""

import argparse

from stepcast.cli.options import check_applicable, has_racks, option_of
from stepcast.cli.output import show_view
from stepcast.cost.collectives.choose import Algorithm, CollectivePrice, price, send_receive_price
from stepcast.cost.collectives.route import Route, route_of, uneven_warning
from stepcast.hardware import Cluster, Place, load_cluster
from stepcast.hardware.path import job_path
from stepcast.ir.facts import FactDict, find_doubts, pick
from stepcast.ir.layout import Group, Layout
from stepcast.ir.work import Collective, CollectiveKind
from stepcast.units import GIB
from stepcast.views.costs import collective_view

SEND_RECEIVE = "send-receive"
SMALLEST_OF_SWEEP, LARGEST_OF_SWEEP = 8, 16 * GIB


def run(args: argparse.Namespace) -> int:
    if args.size is None and not args.sweep and args.kind != CollectiveKind.BARRIER:
        raise ValueError("say how large the buffer is with --size, or ask for a --sweep")
    check_applicable(args, racks=has_racks(args))
    cluster = load_cluster(args.cluster, args.set)
    route = _route(args, cluster)
    sizes = [args.size or 0]
    if args.sweep:
        largest = LARGEST_OF_SWEEP if args.size is None else args.size
        if largest < SMALLEST_OF_SWEEP:
            raise ValueError(f"a sweep starts at {SMALLEST_OF_SWEEP} bytes; --size must be at least that")
        sizes = [2**power for power in range(3, largest.bit_length())]
    if args.engine == "fluid":
        return _run_fluid(args, sizes, cluster)
    prices = [_price(args, size, route) for size in sizes]
    about = {"collective": args.kind, "cluster": cluster.name, "ranks": route.ranks, "nodes": route.nodes}
    rows = [_record(price) for price in prices]
    uneven = uneven_warning("a group of", route, cluster, Place(args.place))
    warnings = [*uneven, *cluster.topology.doubts, *find_doubts({"rows": rows})]
    answer = {"rows": rows} if args.sweep else rows[0]
    show_view(args, collective_view({**about, **answer, "warnings": warnings}))
    return 0


def _run_fluid(args: argparse.Namespace, sizes: list[int], cluster: Cluster) -> int:
    """Simulate the collective as flows of one group of all ranks on the links of the cluster."""
    from stepcast.forecast.fluid import shared_collective

    for option in ("sweep", "ranks_per_node"):
        if getattr(args, option):
            raise ValueError(f"{option_of(option)}: --engine fluid does not know it; leave it out")
    if args.kind == SEND_RECEIVE or args.imbalance != 1 or args.ranks_per_thread != 1:
        raise ValueError("--engine fluid runs even collectives, a process for each GPU; leave the engine out")
    if cluster.gpus is not None and args.ranks > cluster.gpus:
        raise ValueError(f"--ranks {args.ranks}: {cluster.name} has {cluster.gpus} GPUs")
    work = Collective(CollectiveKind(args.kind), sizes[0], Group.DP)
    algorithm = None if args.algorithm is None else Algorithm(args.algorithm)
    shared = shared_collective(cluster, Layout(dp=args.ranks), work, algorithm, place=Place(args.place))
    about = {"collective": args.kind, "cluster": cluster.name, "ranks": args.ranks, "engine": "fluid"}
    row = _record(shared.alone) | pick(shared, "time_s=seconds busbw_bytes_per_s alone_s=alone.seconds slowdown")
    row |= {"algbw_bytes_per_s": shared.alone.algbw_bytes_per_s / shared.slowdown, "rates_within": shared.near}
    links = [{"link": name, "busy": share} for name, share in shared.busiest()]
    show_view(args, collective_view({**about, **row, "links": links, "warnings": find_doubts({"rows": [row]})}))
    return 0


def _price(args: argparse.Namespace, size: int, route: Route) -> CollectivePrice:
    if args.kind == SEND_RECEIVE:
        if route.ranks != 2:
            raise ValueError(f"a message goes from one rank to another; --ranks must be 2, not {route.ranks}")
        return send_receive_price(size, route)
    algorithm = None if args.algorithm is None else Algorithm(args.algorithm)
    return price(CollectiveKind(args.kind), size, route, algorithm, args.imbalance)


def _route(args: argparse.Namespace, cluster: Cluster) -> Route:
    held = args.ranks_per_node
    if held is not None and not 1 <= held <= cluster.domain_gpus:
        raise ValueError(f"--ranks-per-node must lie between 1 and {cluster.domain_gpus}, not {held}")
    return route_of(job_path(cluster, args.ranks, held, Place(args.place)), cluster, args.ranks_per_thread)


def _record(price: CollectivePrice) -> FactDict:
    return pick(price, "size_bytes time_s=seconds algbw_bytes_per_s busbw_bytes_per_s algorithm protocol")
