"""Collective prices a second of one core: sizes in an array (bar: ten million), and one at a time."""

import time

import numpy as np

from stepcast.cost.collectives.choose import collective_s, price
from stepcast.cost.collectives.route import route_of
from stepcast.hardware import load_cluster, resolve
from stepcast.ir.work import CollectiveKind

SIZES = 1_000_000
SINGLY = 20_000
WANTED_PER_S = 10_000_000


def run() -> None:
    cluster = load_cluster("dgx-h100")
    sizes = np.random.default_rng(0).uniform(1, 2**34, SIZES)
    slowest = float("inf")
    for kind, ranks in (
        (CollectiveKind.ALL_REDUCE, 8),
        (CollectiveKind.ALL_REDUCE, 512),
        (CollectiveKind.ALL_GATHER, 512),
        (CollectiveKind.ALL_TO_ALL, 64),
    ):
        route = route_of(resolve(cluster, range(ranks)), cluster)
        start = time.process_time()
        collective_s(kind, sizes, route)
        together = SIZES / (time.process_time() - start)
        start = time.process_time()
        for size in sizes[:SINGLY]:
            price(kind, float(size), route)
        singly = SINGLY / (time.process_time() - start)
        slowest = min(slowest, together)
        print(f"{kind:12s} {ranks:4d} ranks: {together:12,.0f} prices/s in an array, {singly:10,.0f} singly")
    print(f"wanted {WANTED_PER_S:,} in an array, slowest {slowest:,.0f}")


if __name__ == "__main__":
    run()
