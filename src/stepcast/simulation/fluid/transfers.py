"""Flows by themselves, each from its own start: when each ends."""

import numpy as np

from stepcast.ir.flows import Floats, FlowSet, Links
from stepcast.simulation.fluid.maxmin import busiest_bytes, net_of
from stepcast.simulation.fluid.run import USUAL, Flows, Found, Precision, Tasks, run


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
    longest_s = flows.longest_s(links)
    alone_s = longest_s if alone_s is None else alone_s
    moving = np.arange(count)
    kind = np.where((alone_s > 0) & (longest_s > 0), moving, -1)
    amount = busiest_bytes(flows) / flows.weight
    tasks = Tasks(
        np.zeros(count + 1, np.int64),
        np.zeros(0, np.int64),
        np.zeros(count) if start_s is None else start_s,
        np.where(kind < 0, alone_s, 0.0),
        kind,
    )
    sets = Flows(net_of(links, flows), amount, np.arange(count + 1), moving, alone_s, np.ones(count))
    return run(tasks, sets, record=record, compiled=compiled, precision=precision)
