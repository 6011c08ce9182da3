"""The price of any work on a cluster: computation by the GPU's model, communication by the group's links."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from functools import lru_cache, partial

from stepcast.cost.collectives.choose import Algorithm, CollectivePrice, price, send_receive_price
from stepcast.cost.collectives.route import Route, lost_share, route_of, uneven_warning
from stepcast.cost.compute import Spent
from stepcast.cost.exchange import mean_exchange_s, multiprocessors_of
from stepcast.cost.host import copy_price, host_of, update_price
from stepcast.cost.price import Bound, Price, PriceSource
from stepcast.hardware import Cluster, Gpu, Place, group_path
from stepcast.hardware.path import GroupPath, neighbour_path
from stepcast.ir.layout import Group, Layout
from stepcast.ir.model_parts import Routing
from stepcast.ir.tables import constants
from stepcast.ir.types import ByIdentity, cached_property, dataclass, replace
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
    bus_factor,
)

# Half width of the 90 % range of nccl-tests rows, on the cluster the constants were fitted to.
COLLECTIVE_SPREAD = 0.15

# Seconds of computation lost for each second of an exchange of tokens that overlaps it, beyond its multiprocessors.
EXCHANGE_LOSS: float = constants("overlap")["exchange_loss"]

ComputePrice = Callable[[Compute], Price]


def recorded_price(work: Compute) -> Price:
    """Return the price of recorded times, which is all that a workload file with times needs."""
    if not isinstance(work, Recorded):
        raise ValueError(f"no compute model was given to price a {type(work).__name__}")
    return Price.spread(work.duration_s, PriceSource.MEASURED, Bound.COMPUTE, 0.0)


def refuse_to_price(work: Compute) -> Price:
    """Replace a compute model that was not pickled with its prices."""
    raise ValueError(f"a {type(work).__name__} that was not priced before: predict again")


@dataclass(frozen=True, eq=False)
class CollectiveTerms:
    """All that decides the prices of a kind of collective of a group but its size: many strategies have few."""

    route: Route
    gpu: Gpu
    kind: CollectiveKind
    algorithm: Algorithm | None
    ideal: bool
    exchanges_tokens: bool
    # How tokens choose experts where an exchange sends each of them to a node once.
    routing: Routing | None

    def seconds(self, work: Collective) -> float:
        if self.ideal:
            seconds = ideal_s(work, self.route)
        elif self.routing is None:
            seconds = self.choose(work).seconds
        elif self.route.ranks == 1 or work.size_bytes == 0:
            seconds = 0.0
        else:
            seconds = self._exchange_s(work, self.routing)[0]
        return seconds * work.times

    def choose(self, work: Collective) -> CollectivePrice:
        """Return the price of one collective of *work*, with the algorithm that is chosen for it."""
        return price(self.kind, work.size_bytes, self.route, self.algorithm)

    def start_share(self, work: Collective) -> float:
        """Return the share of the time of *work* that does not depend on its bytes."""
        if self.routing is None:
            return self.choose(work).start_share
        total_s, start_s = self._exchange_s(work, self.routing)
        return start_s / total_s

    def _exchange_s(self, work: Collective, routing: Routing) -> tuple[float, float]:
        return mean_exchange_s(work.size_bytes, routing, self.route, self.gpu.architecture)

    @cached_property
    def lost_share(self) -> float:
        """The seconds of computation lost for each second that the collective overlaps it."""
        share = lost_share(self.kind, self.route, self.gpu.sms)
        if not self.exchanges_tokens or self.route.ranks == 1:
            return share
        return EXCHANGE_LOSS + (multiprocessors_of(self.routing.library) / self.gpu.sms if self.routing else share)


class GroupLinks:
    """The routes, terms and seconds that all layouts share whose groups use the same links."""

    def __init__(self) -> None:
        self.routes: dict[tuple[Group, Callable[..., GroupPath]], Route] = {}
        self.terms: dict[tuple[CollectiveKind, Group], CollectiveTerms] = {}
        self.seconds: dict[int, Spent] = {}  # of works by identity


@dataclass
class Pricer:
    """Prices each distinct work once."""

    cluster: Cluster
    layout: Layout
    compute: ComputePrice = recorded_price
    algorithms: Mapping[CollectiveKind, Algorithm] = field(default_factory=dict)
    # How tokens choose experts where one crosses the network once for each node, not for each expert.
    once_per_node: Routing | None = None
    # Collectives at the rate of the slowest link, without latency or protocol: a bound for every algorithm.
    ideal: bool = False
    place: Place = Place.EVEN
    # Prices of a group while the others of its family are idle: who shares links with whom is found later.
    alone: bool = False
    # Prices by identity, which is faster, and those that were pickled by value.
    _by_identity: dict[int, tuple[Work, Price]] = field(default_factory=dict, repr=False)
    _by_value: dict[Work, Price] = field(default_factory=dict, repr=False)
    _routes: dict[Group, Route] = field(default_factory=dict, repr=False)

    @cached_property
    def links(self) -> GroupLinks:
        choices = (self.once_per_node, self.ideal, self.place, self.alone, tuple(self.algorithms.items()))
        return _LINKS.get((self.cluster,), GroupLinks, without_chunks(self.layout), *choices)

    def __reduce__(self) -> tuple[Callable[..., "Pricer"], tuple[object, ...]]:
        """Return a copy with the prices that are known, but without the compute model, which is a function."""
        changed = {"compute": refuse_to_price, "_by_identity": {}, "_by_value": dict(self.known())}
        return Pricer, tuple(changed.get(name, getattr(self, name)) for name in Pricer.__match_args__)

    def known(self) -> Iterator[tuple[Work, Price]]:
        """Yield the works that were priced, equal ones perhaps more than once."""
        yield from self._by_value.items()
        yield from self._by_identity.values()

    def price(self, work: Work) -> Price:
        return (self._by_identity.get(id(work)) or self._add_price(work))[1]

    def seconds(self, work: Work) -> float:
        return (self._by_identity.get(id(work)) or self._add_price(work))[1].seconds

    def _add_price(self, work: Work) -> tuple[Work, Price]:
        price = self._by_value.get(work) if self._by_value else None
        if price is None:
            price = self.compute(work) if type(work) in COMPUTING else self.price_other(work)  # type: ignore[arg-type]
        entry = self._by_identity[id(work)] = work, price
        return entry

    def low_s(self, work: Work) -> float:
        return self.price(work).low_s

    def high_s(self, work: Work) -> float:
        return self.price(work).high_s

    def sources(self) -> dict[str, str]:
        """Return kind of work -> the least trusted source among its prices."""
        trust = list(PriceSource)
        worst: dict[str, PriceSource] = {}
        for work, known in self.known():
            kind = str(work.kind) if isinstance(work, Collective) else type(work).__name__.lower()
            worst[kind] = max(worst.get(kind, known.source), known.source, key=trust.index)
        return {kind: str(source) for kind, source in sorted(worst.items())}

    def price_other(self, work: Communication | HostUpdate) -> Price:
        """Return the price of work that no GPU computes."""
        if isinstance(work, HostCopy | HostUpdate):
            price = copy_price if isinstance(work, HostCopy) else update_price
            return price(work, host_of(self.cluster), self.node_gpus)  # type: ignore[arg-type]
        if self.ideal:
            return Price.spread(self.other_s(work), PriceSource.ROOFLINE, Bound.NETWORK, 0.0)
        return Price.spread(self.other_s(work), PriceSource.FITTED, Bound.NETWORK, COLLECTIVE_SPREAD)

    def other_s(self, work: Communication | HostUpdate) -> float:
        """Return the seconds of work that no GPU computes."""
        if isinstance(work, Collective):
            return _SECONDS.of(self._find_terms(work.kind, work.group), CollectiveTerms.seconds, work)
        if isinstance(work, Transfer):
            return _SECONDS.of(self.neighbour_route(work.group), _time_message, (work.size_bytes, self.ideal))
        return self.price_other(work).seconds

    def choose(self, work: Collective) -> CollectivePrice:
        """Return the price of one collective of *work*, with the algorithm that is chosen for it."""
        return self._find_terms(work.kind, work.group).choose(work)

    def _find_terms(self, kind: CollectiveKind, group: Group) -> CollectiveTerms:
        terms, route = self.links.terms.get((kind, group)), self.route(group)
        if terms is None:
            exchanges = kind is CollectiveKind.ALL_TO_ALL and group is Group.EP
            routing = self.once_per_node if exchanges else None
            if exchanges:
                route = replace(route, exchange_share=self.cluster.communication.expert_share)
                route = _intern(forwarding_route(route, routing) if routing and self.ideal else route)
            values = (kind, self.algorithms.get(kind), self.ideal, exchanges, routing)
            make = partial(CollectiveTerms, route, self.cluster.gpu, *values)
            terms = self.links.terms[kind, group] = _TERMS.get((route, self.cluster), make, *values)
        return terms

    def start_share(self, work: Collective | Transfer) -> float:
        """Return the share of the time of *work* that does not depend on its bytes: its latency."""
        if self.ideal:
            return 0.0
        if isinstance(work, Collective):
            return self._find_terms(work.kind, work.group).start_share(work)
        return send_receive_price(work.size_bytes, self.neighbour_route(work.group)).start_share

    def lost_share(self, kind: CollectiveKind, group: Group) -> float:
        """Return the seconds of computation lost for each second that a collective of *group* overlaps it."""
        return (self.links.terms.get((kind, group)) or self._find_terms(kind, group)).lost_share

    def route(self, group: Group) -> Route:
        """Return the links that the slowest set of *group* crosses."""
        if group not in self._routes:
            self._routes[group] = self._route(group, group_path)
        return self._routes[group]

    def _route(self, group: Group, path: Callable[..., GroupPath]) -> Route:
        known = self.links.routes
        if (group, path) not in known:
            active, layout = 0 if self.alone else None, without_chunks(self.layout)
            group_links = path(self.cluster, layout, str(group), self.place, active)
            known[group, path] = _intern(route_of(group_links, self.cluster))
        return known[group, path]

    def neighbour_route(self, group: Group) -> Route:
        """Return the slowest links between neighbours in *group*."""
        route = self.links.routes.get((group, neighbour_path))
        is_alone = route is None and self.layout.size(group) == 1
        return self.route(group) if is_alone else route or self._route(group, neighbour_path)

    def placement_warnings(self) -> list[str]:
        """Return a warning of the priced group that is spread most unevenly; the world carries next to nothing."""
        routes = {group: route for group, route in self._routes.items() if group is not Group.WORLD}
        if not routes:
            return []
        group = max(routes, key=lambda name: routes[name].unevenness)
        return uneven_warning(f"a {group} group of", routes[group], self.cluster, self.place)

    @property
    def node_gpus(self) -> int:
        """The number of GPUs of a node that the job has."""
        return min(self.cluster.node.gpus, self.layout.gpus)


_LINKS: ByIdentity[GroupLinks] = ByIdentity(512)
_TERMS: ByIdentity[CollectiveTerms] = ByIdentity(4096)


@lru_cache(maxsize=4096)
def without_chunks(layout: Layout) -> Layout:
    """Return one object for equal layouts without model chunks, which links do not depend on."""
    return layout if layout.vpp == 1 else without_chunks(replace(layout, vpp=1))


@lru_cache(maxsize=4096)
def _intern(route: Route) -> Route:
    """Return one object for equal routes, whatever layouts they come from: prices are looked up by it."""
    return route


def forwarding_route(route: Route, routing: Routing) -> Route:
    """Return *route* for a bound of an exchange that sends a token to each node and rank once (DeepEP, HybridEP)."""
    share = crossing_share(route.nodes, routing) if route.nodes > 1 else 1.0
    return replace(
        route,
        intra_bytes_per_s=route.intra_bytes_per_s / crossing_share(route.ranks, routing),
        inter_bytes_per_s=route.inter_bytes_per_s / share,
        exchange_bytes_per_s=route.exchange_bytes_per_s / share,
    )


@lru_cache(maxsize=1024)
def crossing_share(nodes: int, routing: Routing) -> float:
    """Return the copies of a token that are sent to *nodes* (or ranks), for each expert that it has."""
    return routing.nodes_per_token(nodes) / routing.top_k


def ideal_s(work: Collective, route: Route) -> float:
    """Return the seconds of what must cross every rank's link, at the rate of the slowest."""
    if route.ranks == 1:
        return 0.0
    return bus_factor(work.kind, route.ranks) * work.size_bytes / _slowest_bytes_per_s(route)


def _slowest_bytes_per_s(route: Route) -> float:
    network_bytes_per_s = route.inter_bytes_per_s if route.nodes > 1 else math.inf
    return min(route.intra_bytes_per_s, network_bytes_per_s)


_SECONDS: ByIdentity[float] = ByIdentity(65536)
"""Seconds of communication by its terms, or by the route of a message."""


def _time_message(route: Route, key: tuple[int, bool]) -> float:
    size_bytes, ideal = key
    ideal_s = size_bytes / _slowest_bytes_per_s(route)
    return ideal_s if ideal else send_receive_price(size_bytes, route).seconds
