"""A Dask cluster, or one of this machine where no address is given."""

from collections.abc import Iterator

from distributed import Client, as_completed

from stepcast.sweep.chunks import Answer, Done, PointChunk, answered
from stepcast.sweep.engines.table import EngineSetting

AHEAD = 2
TRIES = 8


def run(chunks: Iterator[PointChunk], answer: Answer, setting: EngineSetting) -> Iterator[Done]:
    """Chunks as Dask tasks, two for each worker at most under way."""
    where = {"address": setting.address} if setting.address else {"n_workers": setting.workers}
    local = {} if setting.address else {"threads_per_worker": 1, "dashboard_address": None}
    with Client(**where, **local) as client:
        waiting = as_completed()
        while True:
            most = AHEAD * max(1, len(client.scheduler_info()["workers"]))
            while waiting.count() < most and (chunk := next(chunks, None)) is not None:
                waiting.add(client.submit(answered, answer, chunk, pure=False, retries=TRIES))
            if not waiting.count():
                return
            yield next(waiting).result()
