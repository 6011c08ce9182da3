"""One price for any work on a cluster: computation by the GPU's model, communication by the group's links."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

from stepcast.cost.collectives import (
    Algorithm,
    CollectivePrice,
    Route,
    bus_factor,
    lost_share,
    price,
    route_of,
    send_receive_price,
    send_receive_s,
    uneven_warning,
)
from stepcast.cost.host import copy_price, host_of, update_price
from stepcast.cost.price import Bound, Price, PriceSource
from stepcast.hardware import Cluster, GroupPath, Place, group_path, neighbour_path
from stepcast.ir.group import Group
from stepcast.ir.identity import ByIdentity
from stepcast.ir.layout import Layout
from stepcast.ir.model_parts import Routing
from stepcast.ir.ranks import grid_of
from stepcast.ir.work import (
    COMPUTING,
    Collective,
    CollectiveKind,
    Communication,
    Compute,
    HostCopy,
    HostUpdate,
    Recorded,
    Transfer,
    Work,
)

# Nine rows in ten of nccl-tests lie within this, on the cluster the constants were fitted to.
COLLECTIVE_SPREAD = 0.15

ComputePrice = Callable[[Compute], Price]


def recorded_price(work: Compute) -> Price:
    """Prices recorded times alone: what a workload file with times needs."""
    if not isinstance(work, Recorded):
        raise ValueError(f"no compute model was given to price a {type(work).__name__}")
    time_s = work.duration_s
    return Price(time_s, PriceSource.MEASURED, Bound.COMPUTE, 1.0, time_s, time_s)


def unpriced(work: Compute) -> Price:
    """In place of a compute model that did not travel with its prices."""
    raise ValueError(f"a {type(work).__name__} that was not priced before: predict again")


@dataclass
class Pricer:
    """Prices each distinct work once."""

    cluster: Cluster
    layout: Layout
    compute: ComputePrice = recorded_price
    algorithms: Mapping[CollectiveKind, Algorithm] = field(default_factory=dict)
    # How tokens choose experts where one crosses the network once for each node, not for each expert.
    once_per_node: Routing | None = None
    # Collectives at the rate of the slowest link, without latency or protocol: what no algorithm can beat.
    ideal: bool = False
    place: Place = Place.EVEN
    # Each group as if the others of its family were still: who shares links with whom is found later.
    alone: bool = False
    _known: dict[int, tuple[Work, Price]] = field(default_factory=dict, repr=False)
    """By the identity of works: what prices computation compares them where that is needed."""
    _equal: dict[Work, Price] = field(default_factory=dict, repr=False)
    """Of communication, and of all that travelled."""
    _routes: dict[Group, Route] = field(default_factory=dict, repr=False)

    def __getstate__(self) -> dict[str, object]:
        """Pickled with the prices that are known: models of computation are functions, and stay behind."""
        return {**self.__dict__, "compute": unpriced, "_known": {}, "_equal": dict(self.known())}

    def known(self) -> Iterator[tuple[Work, Price]]:
        """What was priced, equal works perhaps more than once."""
        yield from self._equal.items()
        yield from self._known.values()

    def price(self, work: Work) -> Price:
        return (self._known.get(id(work)) or self._learnt(work))[1]

    def seconds(self, work: Work) -> float:
        return (self._known.get(id(work)) or self._learnt(work))[1].seconds

    def _learnt(self, work: Work) -> tuple[Work, Price]:
        """A work that was not seen before, with its price."""
        computes = type(work) in COMPUTING and self.compute is not unpriced
        price = self.compute(work) if computes else self._compared(work)  # type: ignore[arg-type]
        found = self._known[id(work)] = work, price
        return found

    def _compared(self, work: Work) -> Price:
        found = self._equal.get(work)
        if found is None:
            price = self.compute if type(work) in COMPUTING else self._priced
            found = self._equal[work] = price(work)  # type: ignore[arg-type]
        return found

    def low_s(self, work: Work) -> float:
        return self.price(work).low_s

    def high_s(self, work: Work) -> float:
        return self.price(work).high_s

    def sources(self) -> dict[str, str]:
        """Kind of work -> the least trusted source among its prices."""
        trust = list(PriceSource)
        worst: dict[str, PriceSource] = {}
        for work, found in self.known():
            kind = str(work.kind) if isinstance(work, Collective) else type(work).__name__.lower()
            known = worst.get(kind, found.source)
            worst[kind] = max(known, found.source, key=trust.index)
        return {kind: str(source) for kind, source in sorted(worst.items())}

    def _priced(self, work: Communication | HostUpdate) -> Price:
        match work:
            case Collective():
                route, algorithm = self._route_for(work), self.algorithms.get(work.kind)
                make = partial(_collective, work, route, algorithm, self.ideal)
                return _PRICES.get((route,), make, work, algorithm, self.ideal)
            case Transfer():
                route = self.neighbour_route(work.group)
                make = partial(_transfer, work, route, self.ideal)
                return _PRICES.get((route,), make, work, self.ideal)
            case HostCopy():
                return copy_price(work, host_of(self.cluster), self.node_gpus)
            case HostUpdate():
                return update_price(work, host_of(self.cluster), self.node_gpus)

    def chosen(self, work: Collective) -> CollectivePrice:
        """One of *work*, with the algorithm that is taken for it."""
        return price(work.kind, work.size_bytes, self._route_for(work), self.algorithms.get(work.kind))

    def _route_for(self, work: Collective) -> Route:
        route = self.route(work.group)
        if work.kind is CollectiveKind.ALL_TO_ALL and work.group is Group.EP:
            route = replace(route, exchange_share=self.cluster.communication.expert_share)
            if self.once_per_node:
                route = forwarding_route(route, self.once_per_node)
            route = _one(route)
        return route

    def start_share(self, work: Collective | Transfer) -> float:
        """The share of the time of *work* that does not depend on its bytes: its latency."""
        if self.ideal:
            return 0.0
        if isinstance(work, Collective):
            return self.chosen(work).start_share
        return send_receive_price(work.size_bytes, self.neighbour_route(work.group)).start_share

    def lost_share(self, work: Work) -> float:
        """Seconds of computing lost for each second of *work* beside it."""
        if not isinstance(work, Collective):
            return 0.0
        return lost_share(work, self.route(work.group), self.cluster.gpu.sms)

    def route(self, group: Group) -> Route:
        """The links that the slowest set of *group* crosses."""
        found = self._routes.get(group)
        if found is None:
            found = self._routes[group] = self._route(group, group_path)
        return found

    def _route(self, group: Group, path: Callable[..., GroupPath]) -> Route:
        """Of layouts that differ in their chunks alone, one object."""
        layout = self._unchunked

        def make() -> Route:
            active = 0 if self.alone else None
            found = path(self.cluster, grid_of(layout), str(group), self.place, active)
            return _one(route_of(found, self.cluster))

        return _ROUTES.get((self.cluster, path), make, layout, group, self.place, self.alone)

    @cached_property
    def _unchunked(self) -> Layout:
        """Chunks of the model are no matter to links."""
        return self.layout if self.layout.vpp == 1 else replace(self.layout, vpp=1)

    def neighbour_route(self, group: Group) -> Route:
        """The links between neighbours in *group*, at their slowest."""
        if self.layout.size(group) == 1:
            return self.route(group)
        return self._route(group, neighbour_path)

    def placement_warnings(self) -> list[str]:
        """The priced group that is spread most unevenly, where it is; the world carries next to nothing."""
        routes = {group: route for group, route in self._routes.items() if group is not Group.WORLD}
        if not routes:
            return []
        group = max(routes, key=lambda name: routes[name].unevenness)
        return uneven_warning(f"a {group} group of", routes[group], self.cluster, self.place)

    @property
    def node_gpus(self) -> int:
        """GPUs of a node that the job has."""
        return min(self.cluster.node.gpus, self.layout.gpus)


_ROUTES: ByIdentity[Route] = ByIdentity(4096)


@lru_cache(maxsize=4096)
def _one(route: Route) -> Route:
    """One object for equal routes, whatever layouts they come from: what they cost is found by it."""
    return route


def forwarding_route(route: Route, routing: Routing) -> Route:
    """Return *route* for an exchange that sends a token to each node once; ranks there forward it to experts.

    DeepEP and HybridEP do so. Ranks of a node then pass on what comes from all nodes, where a plain
    all-to-all moves only their own tokens inside it.
    """
    nodes = route.nodes
    if nodes == 1:
        return route
    share = crossing_share(nodes, routing)
    return replace(
        route,
        intra_bytes_per_s=route.intra_bytes_per_s / nodes,
        inter_bytes_per_s=route.inter_bytes_per_s / share,
        exchange_bytes_per_s=route.exchange_bytes_per_s / share,
    )


@lru_cache(maxsize=1024)
def crossing_share(nodes: int, routing: Routing) -> float:
    """Return the copies of a token that are sent to nodes, for each expert that it has."""
    return routing.nodes_per_token(nodes) / routing.top_k


def ideal_s(work: Collective, route: Route) -> float:
    """The whole buffer's share that must cross every rank's link, at the rate of the slowest."""
    if route.ranks == 1:
        return 0.0
    return bus_factor(work.kind, route.ranks) * work.size_bytes / _slowest_bytes_per_s(route)


def _slowest_bytes_per_s(route: Route) -> float:
    between = route.inter_bytes_per_s if route.nodes > 1 else math.inf
    return min(route.intra_bytes_per_s, between)


def _collective(work: Collective, route: Route, algorithm: Algorithm | None, ideal: bool) -> Price:
    if ideal:
        return _communication(ideal_s(work, route) * work.times, spread=0.0)
    return _communication(price(work.kind, work.size_bytes, route, algorithm).seconds * work.times)


def _transfer(work: Transfer, route: Route, ideal: bool) -> Price:
    if ideal:
        return _communication(work.size_bytes / _slowest_bytes_per_s(route), spread=0.0)
    return _communication(send_receive_s(work.size_bytes, route))


_PRICES: ByIdentity[Price] = ByIdentity(65536)
"""Of communication over a route, which tells all that it depends on: layouts of many strategies have few."""


def _communication(seconds: float, spread: float = COLLECTIVE_SPREAD) -> Price:
    source = PriceSource.FITTED if spread else PriceSource.ROOFLINE
    return Price(seconds, source, Bound.NETWORK, 1.0, seconds / (1 + spread), seconds * (1 + spread))
