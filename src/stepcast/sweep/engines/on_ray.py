"""A Ray cluster, through its public API: a task for each chunk, run again where a node is lost."""

from collections.abc import Iterator

import ray

from stepcast.sweep.chunks import Answer, Done, PointChunk, answered
from stepcast.sweep.engines.table import EngineSetting

# Beside those that run, so that no worker waits for the driver.
AHEAD = 2
TRIES = 8


def run(chunks: Iterator[PointChunk], answer: Answer, setting: EngineSetting) -> Iterator[Done]:
    """Chunks as Ray tasks, two for each CPU of the cluster at most under way."""
    began = not ray.is_initialized()
    if began:
        cpus = None if setting.address else setting.workers
        ray.init(address=setting.address, num_cpus=cpus, log_to_driver=False, include_dashboard=False)
    task = ray.remote(answered).options(max_retries=TRIES)
    waiting: list[ray.ObjectRef] = []
    try:
        while True:
            most = AHEAD * max(1, int(ray.cluster_resources().get("CPU", setting.workers)))
            while len(waiting) < most and (chunk := next(chunks, None)) is not None:
                waiting.append(task.remote(answer, chunk))
            if not waiting:
                return
            ready, waiting = ray.wait(waiting, num_returns=1)
            yield from ray.get(ready)
    finally:
        for each in waiting:
            ray.cancel(each)
        if began:
            ray.shutdown()
