"""How long something takes, on a machine that does other things too."""

import time
from collections.abc import Callable


def best_of(run: Callable[[], object], tries: int = 5) -> float:
    """Seconds of the fastest of some *tries*."""
    took = []
    for _ in range(tries):
        began = time.perf_counter()
        run()
        took.append(time.perf_counter() - began)
    return min(took)
