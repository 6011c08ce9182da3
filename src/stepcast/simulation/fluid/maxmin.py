"""Weighted max-min fair rates of flows: the rate of each, by itself or bound by what it can take alone."""

import numpy as np

from stepcast.ir.flows import Floats, FlowSet, Ints, Links
from stepcast.simulation.fluid.compiled import kernel_of
from stepcast.simulation.fluid.filling import BOUND, CAPACITY, LEVEL, PER_FLOW, PER_LINK
from stepcast.simulation.fluid.tables import Net, Now, Scratch


def rates(
    links: Links, flows: FlowSet, alone_s: Floats | None = None, compiled: bool | None = None
) -> Floats:
    """The share of its bytes that each flow moves per second while all are under way.

    None is faster than it takes *alone_s*; without that its links alone bound it.
    """
    net = net_of(links, flows)
    alone_s = flows.longest_s(links) if alone_s is None else alone_s
    amount = busiest_bytes(flows) / flows.weight
    bound = np.divide(amount, alone_s, out=np.zeros(len(flows)), where=alone_s > 0)
    kernel = kernel_of(compiled)
    now, scratch = now_of(net, bound), scratch_of(net)
    kernel.fill(net, now, scratch)
    found: Floats = np.divide(
        now.flows[LEVEL::PER_FLOW], amount, out=np.full(len(flows), np.inf), where=amount > 0
    )
    return found


def net_of(links: Links, flows: FlowSet) -> Net:
    """Flow by flow. The level of a flow is its bytes per second on its busiest link over its weight."""
    most = busiest_bytes(flows)
    use = flows.bytes_on * (flows.weight / np.where(most > 0, most, 1.0))[flows.flow]
    kept = use > 0
    first = np.concatenate([[0], np.cumsum(np.bincount(flows.flow[kept], minlength=len(flows)))])
    return Net(
        first.astype(np.int64),
        flows.link[kept],
        flows.flow[kept],
        use[kept],
        links.capacity_bytes_per_s,
    )


def busiest_bytes(flows: FlowSet) -> Floats:
    """Of each flow the bytes on the link that carries most of it."""
    most = np.zeros(len(flows))
    np.maximum.at(most, flows.flow, flows.bytes_on)
    return most


def now_of(net: Net, bound: Floats) -> Now:
    """Nothing is under way."""
    links, entries, flows = len(net.capacity), len(net.link), len(net.first) - 1
    slots = np.concatenate([[0], np.cumsum(np.bincount(net.link, minlength=links))])
    of_links, of_flows = np.zeros((links, PER_LINK)), np.zeros((flows, PER_FLOW))
    of_links[:, CAPACITY] = net.capacity
    of_flows[:, BOUND] = bound
    return Now(
        slot_first=slots.astype(np.int64),
        slot_entry=_places(entries),
        slot_flow=_places(entries),
        slot=_places(entries),
        members=_places(links),
        wanted=np.zeros(links),
        links=of_links.ravel(),
        flows=of_flows.ravel(),
    )


def scratch_of(net: Net) -> Scratch:
    links, flows = len(net.capacity), len(net.first) - 1
    return Scratch(
        fresh=_places(flows),
        touched=_places(links),
        touch_mark=_places(links),
        flows=_places(flows),
        look_mark=_places(links),
        looks=_places(links),
        key=np.full(links, np.inf),
        heap=_places(links),
        heap_place=np.full(links, -1, np.int64),
    )


def _places(count: int) -> Ints:
    return np.zeros(count, np.int64)
