"""Max-min fair flows the slow way: every rate found anew at every event, by filling in small words."""

import numpy as np

from stepcast.ir.arrays import FloatArray
from stepcast.ir.flows import FlowSet, Links


def filled(links: Links, flows: FlowSet, alone_s: FloatArray, active: list[int]) -> dict[int, float]:
    """The share of its bytes that each of *active* moves per second: all levels rise until one is stopped."""
    most = {f: flows.bytes_on[flows.first[f] : flows.first[f + 1]].max() for f in active}
    unit = {f: most[f] / flows.weight[f] for f in active}
    use = np.zeros((len(links), len(flows)))
    for f in active:
        for k in range(flows.first[f], flows.first[f + 1]):
            use[flows.link[k], f] += flows.bytes_on[k] / unit[f]
    level: dict[int, float] = {}
    rest = links.capacity_bytes_per_s.copy()
    while len(level) < len(active):
        free = [f for f in active if f not in level]
        bounds = {f: unit[f] / alone_s[f] for f in free}
        open_use = use[:, free].sum(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            fair = np.where(open_use > 1e-15 * use.max(), rest / open_use, np.inf)
        lowest = min(min(bounds.values()), fair.min())
        stopped = [f for f in free if bounds[f] <= lowest * (1 + 1e-12)]
        stopped += [f for f in free if f not in stopped and (fair[use[:, f] > 0] <= lowest * (1 + 1e-12)).any()]
        for f in stopped:
            level[f] = lowest
            rest = rest - use[:, f] * lowest
    return {f: level[f] / unit[f] for f in active}


def ends(links: Links, flows: FlowSet, start_s: FloatArray, alone_s: FloatArray) -> FloatArray:
    left = np.ones(len(flows))
    found = np.full(len(flows), np.nan)
    coming = sorted(range(len(flows)), key=lambda f: start_s[f])
    active: list[int] = []
    now_s = 0.0
    while active or coming:
        rate = filled(links, flows, alone_s, active) if active else {}
        done_s = min((now_s + left[f] / rate[f] for f in active), default=np.inf)
        next_s = min(done_s, start_s[coming[0]] if coming else np.inf)
        for f in active:
            left[f] -= (next_s - now_s) * rate[f]
        now_s = next_s
        for f in [f for f in active if left[f] <= 1e-13]:
            found[f] = now_s
            active.remove(f)
        while coming and start_s[coming[0]] <= now_s:
            active.append(coming.pop(0))
    return found
