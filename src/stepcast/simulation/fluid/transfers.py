"""Flows by themselves, each from its own start: when each ends."""

from dataclasses import replace

import numpy as np

from stepcast.ir.flows import Floats, FlowSet, Ints, Links
from stepcast.simulation.fluid.maxmin import busiest_bytes, net_of
from stepcast.simulation.fluid.run import USUAL, Flows, Found, Precision, Tasks, run

MANY = 10_000
"""Flows that a processor no longer holds all near it."""


def transfers(
    links: Links,
    flows: FlowSet,
    start_s: Floats | None = None,
    alone_s: Floats | None = None,
    *,
    record: bool = False,
    compiled: bool | None = None,
    precision: Precision = USUAL,
) -> Found:
    """When each of *flows* begins and ends; none takes less than *alone_s*, or than its links allow."""
    count = len(flows)
    alone_s = flows.longest_s(links) if alone_s is None else alone_s
    start_s = np.zeros(count) if start_s is None else start_s
    if count < MANY:
        return _run(links, flows, start_s, alone_s, record, compiled, precision)
    order = _by_crowd(flows, len(links))
    found = _run(links, flows.at(order), start_s[order], alone_s[order], record, compiled, precision)
    place = np.argsort(order)
    return replace(found, start_s=found.start_s[place], end_s=found.end_s[place], flow=order[found.flow])


def _by_crowd(flows: FlowSet, links: int) -> Ints:
    """Flows in the order of the link on which each meets most others: what changes together lies together."""
    crowd = np.bincount(flows.link, minlength=links)[flows.link]
    fullest = np.lexsort((-crowd, flows.flow))[flows.first[:-1][np.diff(flows.first) > 0]]
    meets = np.full(len(flows), -1, np.int64)
    meets[flows.flow[fullest]] = flows.link[fullest]
    return np.argsort(meets, kind="stable")


def _run(
    links: Links,
    flows: FlowSet,
    start_s: Floats,
    alone_s: Floats,
    record: bool,
    compiled: bool | None,
    precision: Precision,
) -> Found:
    count = len(flows)
    moving = np.arange(count)
    kind = np.where((alone_s > 0) & (flows.longest_s(links) > 0), moving, -1)
    amount = busiest_bytes(flows) / flows.weight
    waits = np.zeros(count + 1, np.int64)
    tasks = Tasks(waits, np.zeros(0, np.int64), start_s, np.where(kind < 0, alone_s, 0.0), kind)
    sets = Flows(net_of(links, flows), amount, np.arange(count + 1), moving, alone_s, np.ones(count))
    return run(tasks, sets, record=record, compiled=compiled, precision=precision)
