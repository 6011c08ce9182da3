"""Slurm, through submitit: a job for each chunk, as many at once as workers were asked for.

``--address`` names the partition; ``local`` and ``debug`` run submitit's own stand-ins for a cluster.
"""

import os
import time
from collections.abc import Iterator

import submitit

from stepcast.sweep.chunks import Answer, Done, PointChunk, answered
from stepcast.sweep.engines.table import EngineSetting

STAND_INS = ("local", "debug")
LOOK_EVERY_S = 1.0
MINUTES = 60
TRIES = 3


def run(chunks: Iterator[PointChunk], answer: Answer, setting: EngineSetting) -> Iterator[Done]:
    """Chunks as jobs; one that is lost is given again."""
    stand_in = setting.address if setting.address in STAND_INS else None
    executor = submitit.AutoExecutor(folder=os.path.join(setting.folder, "slurm"), cluster=stand_in)
    executor.update_parameters(timeout_min=MINUTES, cpus_per_task=1, name="stepcast-sweep")
    if setting.address and not stand_in:
        executor.update_parameters(slurm_partition=setting.address)
    waiting: dict[submitit.Job[Done], tuple[PointChunk, int]] = {}
    try:
        while True:
            new: list[PointChunk] = []
            while len(waiting) + len(new) < setting.workers and (chunk := next(chunks, None)) is not None:
                new.append(chunk)
            if new:
                given = executor.map_array(lambda chunk: answered(answer, chunk), new)
                waiting.update(zip(given, ((chunk, 1) for chunk in new), strict=True))
            if not waiting:
                return
            ready = [job for job in waiting if job.done()]
            for job in ready:
                chunk, tries = waiting.pop(job)
                try:
                    yield job.result()
                except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError):
                    if tries >= TRIES:
                        raise
                    waiting[executor.submit(answered, answer, chunk)] = (chunk, tries + 1)
            if not ready:
                time.sleep(LOOK_EVERY_S)
    finally:
        for job in waiting:
            job.cancel(check=False)
