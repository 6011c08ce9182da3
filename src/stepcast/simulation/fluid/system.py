"""Sets of flows and who runs them, made ready for the kernel: what can never share keeps its price."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from stepcast.ir.flows import Floats, FlowSet, Ints, Links, joined
from stepcast.simulation.fluid.alike import Alike, Merged, alike, merged
from stepcast.simulation.fluid.filling import SAME
from stepcast.simulation.fluid.maxmin import busiest_bytes
from stepcast.simulation.fluid.run import Flows, one_by_one
from stepcast.simulation.fluid.tables import Net


@dataclass(frozen=True, eq=False)
class Traffic:
    """Sets of flows that begin together, and kinds of them: so many times the bytes of a set, and as long as
    that takes alone.

    A set runs in a place: what is in one place (a lane of a stage, another job) runs one after the other.
    """

    links: Links
    sets: tuple[FlowSet, ...]
    place: Ints
    kind_set: Ints
    kind_alone_s: Floats
    kind_scale: Floats

    @cached_property
    def flows(self) -> FlowSet:
        return joined(self.sets)

    @cached_property
    def set_of(self) -> Ints:
        """Of each flow its set."""
        return np.repeat(np.arange(len(self.sets)), [len(each) for each in self.sets])

    @cached_property
    def alike(self) -> Alike:
        return alike(self.links, self.flows, self.set_of)

    @cached_property
    def merged(self) -> Merged:
        return merged(self.alike, self.flows)

    @cached_property
    def classes(self) -> "Classes":
        return Classes.of(self)


@dataclass(frozen=True, eq=False)
class Classes:
    """Flows that are alike taken together, and links that are."""

    set_of: Ints
    """Of each class of flows its set."""
    amount: Floats
    """Of one flow of each class the bytes on its busiest link, by its weight."""
    capacity: Floats
    """Of one link of each class."""
    entries: Merged

    @classmethod
    def of(cls, traffic: Traffic) -> "Classes":
        found, flows = traffic.alike, traffic.flows
        _, one_flow = np.unique(found.flow, return_index=True)
        _, one_link = np.unique(found.link, return_index=True)
        return cls(
            traffic.set_of[one_flow],
            (busiest_bytes(flows) / flows.weight)[one_flow],
            traffic.links.capacity_bytes_per_s[one_link],
            traffic.merged,
        )


@dataclass(frozen=True, eq=False)
class System:
    """What the kernel gets of some traffic, and which kinds need not come to it at all."""

    flows: Flows
    fixed: Ints
    """The kinds that no other can slow: each takes what it takes alone."""
    class_of: Ints
    """Of each flow of the kernel its class."""


def system_of(traffic: Traffic) -> System:
    """Links that cannot be short, whatever runs at once, are left out, and kinds that have no others."""
    classes = traffic.classes
    flow, link, bytes_on = classes.entries
    short = _most_wanted(traffic) > classes.capacity * (1 + SAME)
    kept = short[link] & (bytes_on > 0)
    # A set is fixed where none of its flows has a link that may be short.
    shared = np.zeros(len(traffic.sets), bool)
    shared[classes.set_of[flow[kept]]] = True
    flows_kept = np.flatnonzero(shared[classes.set_of])
    place = np.full(len(classes.amount), -1, np.int64)
    place[flows_kept] = np.arange(len(flows_kept))
    links_kept, link_of = np.unique(link[kept], return_inverse=True)
    amount = classes.amount[flows_kept]
    owner = place[flow[kept]]
    net = Net(
        first=one_by_one(np.bincount(owner, minlength=len(flows_kept)).tolist()),
        link=link_of.ravel().astype(np.int64),
        owner=owner,
        use=bytes_on[kept] / amount[owner],
        capacity=classes.capacity[links_kept],
    )
    sizes = np.bincount(classes.set_of[flows_kept], minlength=len(traffic.sets))
    flows = Flows(
        net, amount, one_by_one(sizes.tolist()), traffic.kind_set, traffic.kind_alone_s, traffic.kind_scale
    )
    return System(flows, np.flatnonzero(~shared[traffic.kind_set]), flows_kept)


def _most_wanted(traffic: Traffic) -> Floats:
    """Of each class of links, what is asked of one link at most: in each place the most that one set asks."""
    classes = traffic.classes
    flow, link, bytes_on = classes.entries
    pace = np.zeros(len(traffic.sets))
    np.maximum.at(pace, traffic.kind_set, traffic.kind_scale / traffic.kind_alone_s)
    links = len(classes.capacity)
    sets, by_set = np.unique(classes.set_of[flow] * links + link, return_inverse=True)
    asked = np.bincount(by_set.ravel(), bytes_on, len(sets)) * pace[sets // links]
    places, by_place = np.unique(traffic.place[sets // links] * links + sets % links, return_inverse=True)
    most = np.zeros(len(places))
    np.maximum.at(most, by_place.ravel(), asked)
    return np.bincount(places % links, most, links).astype(np.float64)
