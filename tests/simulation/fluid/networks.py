"""Small networks and flows drawn for tests."""

import numpy as np
from hypothesis import strategies as st

from stepcast.ir.arrays import FloatArray
from stepcast.ir.flows import FlowSet, Links
from stepcast.simulation.fluid.engine import busiest_bytes, transfers


def links_of(*capacity: float) -> Links:
    return Links(("link",), np.zeros(len(capacity), np.int64), np.array(capacity, np.float64))


def flows_of(*paths: dict[int, float], weight: list[float] | None = None) -> FlowSet:
    """A flow for each of *paths*, which say the bytes on its links."""
    first = np.cumsum([0, *map(len, paths)])
    link = np.array([link for path in paths for link in path], np.int64)
    size = np.array([size for path in paths for size in path.values()], np.float64)
    return FlowSet.of(first, link, size, None if weight is None else np.array(weight, np.float64))


def rates(links: Links, flows: FlowSet, alone_s: FloatArray | None = None, compiled: bool | None = None) -> FloatArray:
    """The share of its bytes that each flow moves per second while all are active: those of the first moment."""
    times = transfers(links, flows, alone_s=alone_s, record=True, compiled=compiled)
    at_start = times.from_s == 0.0
    level = np.full(len(flows), np.nan)
    level[times.flow[at_start]] = times.level[at_start]
    shares: FloatArray = level * flows.weight / busiest_bytes(flows)
    return shares


@st.composite
def networks(draw: st.DrawFn) -> tuple[Links, FlowSet, FloatArray, FloatArray]:
    """Links, flows, when each begins and what it takes alone."""
    count = draw(st.integers(1, 6))
    rates = st.sampled_from([1.0, 2.0, 3.0, 5.0, 10.0])
    links = links_of(*draw(st.lists(rates, min_size=count, max_size=count)))
    sizes = st.floats(0.1, 10.0)
    paths = draw(
        st.lists(st.dictionaries(st.integers(0, count - 1), sizes, min_size=1, max_size=4), min_size=1, max_size=12)
    )

    def each(values: list[float]) -> FloatArray:
        """One of *values* for each flow."""
        return np.array(draw(st.lists(st.sampled_from(values), min_size=len(paths), max_size=len(paths))), np.float64)

    flows = flows_of(*paths, weight=each([0.5, 1.0, 1.0, 2.0]).tolist())
    start_s = each([0.0, 0.0, 0.5, 1.0, 3.0])
    slack = each([1.0, 1.0, 1.5, 4.0])
    return links, flows, start_s, flows.longest_s(links) * slack
