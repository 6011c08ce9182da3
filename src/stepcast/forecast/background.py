"""Repeating traffic of other jobs on the links of a cluster.

The fast engine knows when each communication of another training job runs. What a stage sends for one work is spread
evenly over the time from the first to the last of them in its step: the links carry that on average, and no more at
once.
"""

from collections.abc import Sequence

import numpy as np

from stepcast.cost.collectives.flows import message_flows
from stepcast.forecast.fluid import share_step
from stepcast.forecast.prediction import Prediction
from stepcast.hardware import Cluster
from stepcast.hardware.graph import Network, network_of, seats_on
from stepcast.ir.flows import FlowSet, FlowSpread, Pattern, Repeating
from stepcast.ir.types import dataclass

WITHIN = ("NVLink", "PCIe", "sockets")  # tiers of a node, which no other job has
ANY_TIME = 1e9  # seconds: a price that holds nothing back
LEAST = 1e-3  # of a job's largest traffic: what is less is left out


@dataclass(frozen=True, eq=False)
class Neighbour:
    """Another training job, which fills *nodes* in their order."""

    name: str
    nodes: tuple[int, ...]
    prediction: Prediction
    start_s: float = 0.0


Others = Sequence[Pattern | Neighbour]


def background_traffic(cluster: Cluster, own_gpus: int, others: Others) -> tuple[tuple[Repeating, ...], int]:
    """Return what *others* put on the links of *cluster* while a job of *own_gpus* has its first nodes, and how many
    nodes the network then has.
    """
    domain = cluster.topology.scale_up_nodes
    own = -(-own_gpus // (cluster.node.gpus * domain)) * domain
    _check_apart(own, others, cluster)
    nodes = max([own, *(1 + max(other.nodes) for other in others)])
    network = network_of(cluster, nodes)
    repeating: list[Repeating] = []
    for other in others:
        repeating += [_repeat_pattern(network, other)] if isinstance(other, Pattern) else _repeat_job(network, other)
    return tuple(repeating), network.nodes


def _check_apart(own: int, others: Others, cluster: Cluster) -> None:
    """Raise a ValueError where two jobs would have one node; plain patterns may run anywhere."""
    if cluster.node.nic is None:
        raise ValueError(f"{cluster.name} has no NICs, so nobody shares its network")
    taken: dict[int, str] = {}
    for other in others:
        last = max(other.nodes)
        if cluster.nodes is not None and last >= cluster.nodes:
            raise ValueError(f"{other.name}: node {last} is not in {cluster.name}, which has {cluster.nodes}")
        if isinstance(other, Pattern):
            continue
        for node in other.nodes:
            if node < own:
                raise ValueError(f"{other.name}: node {node} is the run's own, which has the first {own}")
            if node in taken:
                raise ValueError(f"{other.name}: node {node} is {taken[node]}'s already")
            taken[node] = other.name


def _repeat_pattern(network: Network, pattern: Pattern) -> Repeating:
    gpus = network.cluster.node.gpus
    nodes = np.asarray(pattern.nodes)
    ahead = np.arange(1, len(nodes)) if pattern.spread is FlowSpread.EXCHANGE else np.array([1])
    near = np.repeat(np.arange(len(nodes)), len(ahead))
    far = (near + np.tile(ahead, len(nodes))) % len(nodes)
    if pattern.spread is FlowSpread.INCAST:
        near, far = np.arange(1, len(nodes)), np.zeros(len(nodes) - 1, np.int64)
    source, target = ((nodes[end][:, None] * gpus + np.arange(gpus)).ravel() for end in (near, far))
    size = np.full(len(source), pattern.size_bytes / len(ahead))
    flows = _outside_flows(network, message_flows(network, source, target, size, ANY_TIME))
    if not len(flows):
        raise ValueError(f"{pattern.name}: its nodes are one scale-up domain: nothing of it leaves that")
    alone_s = float(flows.longest_s(network.links).max())
    return Repeating(pattern.name, flows, alone_s, pattern.period_s, pattern.start_s)


def _repeat_job(network: Network, job: Neighbour) -> list[Repeating]:
    """Return what a job's stages send for each work, spread over the time that it is done in."""
    prediction = job.prediction
    seats = seats_on(network.cluster, job.nodes, prediction.workload.layout.gpus)
    shared = share_step(prediction.step, prediction.pricer, network, seats)
    times = prediction.times
    sent: list[tuple[Repeating, float]] = []
    for number, own_flows in enumerate(shared.traffic.sets):
        tasks = np.flatnonzero(shared.flows_of == number)
        flows = _outside_flows(network, own_flows.times(len(tasks)))
        if len(tasks) and len(flows):
            start_s, end_s = float(times.start_s[tasks].min()), float(times.end_s[tasks].max())
            repeating = Repeating(job.name, flows, end_s - start_s, prediction.step_s, job.start_s + start_s)
            sent.append((repeating, float(flows.bytes_on.sum())))
    most = max((size for _, size in sent), default=0.0)
    return [repeating for repeating, size in sent if size >= LEAST * most]


def _outside_flows(network: Network, flows: FlowSet) -> FlowSet:
    """Return the flows that leave their node, and of them what others may meet."""
    tiers = network.links.tiers
    inside = [tiers.index(tier) for tier in WITHIN if tier in tiers]
    meets = ~np.isin(network.links.tier[flows.link], inside)
    entries = np.bincount(flows.flow[meets], minlength=len(flows))
    first = np.concatenate([[0], np.cumsum(entries[entries > 0])]).astype(np.int64)
    return FlowSet(first, flows.link[meets], flows.bytes_on[meets], flows.weight[entries > 0], flows.group[entries > 0])
