"""One collective, or one family of groups that run it at once, on the links of a cluster."""

from dataclasses import dataclass
from functools import cached_property
from math import ceil

import numpy as np

from stepcast.cost.collectives import Algorithm, CollectivePrice, price
from stepcast.cost.collectives.flows import collective_flows
from stepcast.cost.pricing import Pricer
from stepcast.forecast.fluid import MOST_STILL, unshared
from stepcast.hardware import Cluster, Place
from stepcast.hardware.graph import Network, network_of, seats_of
from stepcast.ir.arrays import FloatArray
from stepcast.ir.flows import FlowSet
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import grid_of
from stepcast.ir.work import Collective
from stepcast.simulation.fluid.filling import SAME
from stepcast.simulation.fluid.run import transfers


@dataclass(frozen=True, eq=False)
class SharedCollective:
    """What a collective takes where all groups of its family run it at once."""

    alone: CollectivePrice
    seconds: float
    network: Network
    flows: FlowSet
    near: float = 0.0
    """Changes of rates below this share were not followed."""

    @property
    def slowdown(self) -> float:
        """Against one group alone on a network that lacks nothing."""
        return self.seconds / self.alone.seconds if self.alone.seconds > 0 else 1.0

    @property
    def busbw_bytes_per_s(self) -> float:
        return self.alone.busbw_bytes_per_s / self.slowdown

    @cached_property
    def busy(self) -> FloatArray:
        """For each link the share of the time that it is busy."""
        links = self.network.links
        carried = self.flows.on_links(len(links)) / links.capacity_bytes_per_s
        return carried / self.seconds if self.seconds > 0 else carried

    def busiest(self, most: int = 5) -> list[tuple[str, float]]:
        """The busiest links and the share of the time that each is busy."""
        order = np.argsort(-self.busy, kind="stable")[:most].tolist()
        names = self.network.links.name
        return [(names(link), float(self.busy[link])) for link in order if self.busy[link] > 0]


def shared_collective(
    cluster: Cluster,
    layout: Layout,
    work: Collective,
    algorithm: Algorithm | None = None,
    *,
    place: Place = Place.EVEN,
    crossing: float = 1.0,
) -> SharedCollective:
    """*work* by all its groups in *layout* at once, on the links of *cluster*."""
    pricer = Pricer(unshared(cluster), layout, place=place, alone=True)
    alone = price(work.kind, work.size_bytes, pricer.route(work.group), algorithm)
    seats = seats_of(cluster, layout, place)
    network = network_of(cluster, ceil((int(seats.max()) + 1) / cluster.node.gpus))
    if alone.algorithm is None:
        empty = FlowSet.of(np.zeros(1, np.int64), np.zeros(0, np.int64), np.zeros(0))
        return SharedCollective(alone, alone.seconds, network, empty)
    still_s = alone.seconds * min(alone.start_share, MOST_STILL)
    moving_s = alone.seconds - still_s
    flows = collective_flows(network, seats, grid_of(layout), work, alone.algorithm, moving_s, crossing=crossing)
    found = transfers(network.links, flows, alone_s=np.full(len(flows), moving_s))
    slowed = float((found.end_s / moving_s).max(initial=1.0)) > 1 + SAME
    seconds = float(found.end_s.max()) + still_s if slowed else alone.seconds
    return SharedCollective(alone, seconds, network, flows, 0.0 if found.exact else found.near)
