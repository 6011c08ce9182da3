"""How many operator prices a second: shapes in arrays, and one at a time.

    python benchmarks/compute.py

Fails below a million matmul prices a second, or when a single price takes more than 50 microseconds.
"""

import time
from collections.abc import Callable

import numpy as np

from stepcast.cost.attention import AttentionSizes, attention_seconds
from stepcast.cost.compute import compute_price
from stepcast.cost.fits import default_fit
from stepcast.cost.matmul import matmul_seconds
from stepcast.cost.memory_bound import stream_seconds
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Compute, Elementwise, ElementwiseKind, Matmul

SHAPES = 1_000_000
SINGLY = 2_000
WANTED_PER_S = 1_000_000
SINGLE_S = 50e-6


def run() -> None:
    gpu, fit = load_gpu("h200"), default_fit()
    rng = np.random.default_rng(0)
    m, n, k = (rng.integers(1, 512, SHAPES).astype(np.float64) * 64 for _ in range(3))
    one = np.ones(SHAPES)
    together = {}
    start = time.perf_counter()
    matmul_seconds(m, n, k, one, DType.BF16, gpu, fit)
    together["matmul"] = SHAPES / (time.perf_counter() - start)
    start = time.perf_counter()
    sizes = AttentionSizes(one, m, m, 32 * one, 8 * one, 128 * one, 128 * one)
    attention_seconds(sizes, True, False, DType.BF16, gpu, fit)
    together["attention"] = SHAPES / (time.perf_counter() - start)
    start = time.perf_counter()
    stream_seconds("add", m, n, 4 * m * n, 2 * m * n, gpu, fit)
    together["add"] = SHAPES / (time.perf_counter() - start)
    works: dict[str, Callable[[int], Compute]] = {
        # Products are remembered, so that each has a size of its own here.
        "matmul": lambda number: Matmul(4096 + number, 12288, 4096),
        "attention": lambda number: Attention(2, 4096, 4096, 32, 8, 128, 128),
        "add": lambda number: Elementwise(ElementwiseKind.ADD, 4096, 4096, 6.7e7, 3.4e7),
    }
    slowest_s = 0.0
    for name, work in works.items():
        best_s = float("inf")
        for part in range(5):  # the best of a few: other programs share the machine
            several = [work(part * SINGLY + number) for number in range(SINGLY // 5)]
            start = time.process_time()
            for each in several:
                compute_price(each, gpu, fit)
            best_s = min(best_s, (time.process_time() - start) / len(several))
        slowest_s = max(slowest_s, best_s)
        print(f"{name:10s} {together[name] / 1e6:6.1f} M prices/s in arrays, {best_s * 1e6:5.1f} us singly")
    good = min(together.values()) >= WANTED_PER_S and slowest_s <= SINGLE_S
    print(f"wanted {WANTED_PER_S / 1e6:.0f} M and {SINGLE_S * 1e6:.0f} us: {'held' if good else 'missed'}")


if __name__ == "__main__":
    run()
