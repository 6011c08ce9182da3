"""Engines of sweeps: processes of this machine, or a cluster through Ray, Dask or Slurm.

An engine takes chunks of points and yields them in any order with their answers. It takes a chunk only when a
worker is free for it.
"""

import io
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepcast.ir.children import follow_parent
from stepcast.ir.dataclass import dataclass
from stepcast.sweep.spec import Words

if TYPE_CHECKING:
    from multiprocessing.connection import Connection
    from multiprocessing.process import BaseProcess

Answers = list[dict[str, Any]]
Answer = Callable[[str, Sequence[Words]], Answers]
"""Return an answer for each point, in their order; a module-level function, so that workers can import it."""

# A chunk takes this long: enough to hide the cost of sending it, and little work to lose.
CHUNK_S = 2.0
FIRST, LARGEST = 4, 10_000
# Workers that may die over a point before it is blamed.
DEATHS = 2
# Chunks in flight per worker of Ray and Dask, so that no worker waits for the driver.
AHEAD = 2
TRIES = 8
# Slurm: clusters that submitit simulates, and how jobs run.
STAND_INS = ("local", "debug")
LOOK_EVERY_S = 1.0
JOB_MINUTES, JOB_TRIES = 60, 3


@dataclass(frozen=True, slots=True)
class PointChunk:
    """Points that one worker answers at a time."""

    ask: str
    keys: tuple[bytes, ...]
    words: tuple[Words, ...]
    # Workers that died over it.
    deaths: int = 0

    def halves(self) -> "tuple[PointChunk, PointChunk]":
        middle = len(self.keys) // 2
        return (
            PointChunk(self.ask, self.keys[:middle], self.words[:middle], self.deaths),
            PointChunk(self.ask, self.keys[middle:], self.words[middle:], self.deaths),
        )


@dataclass(frozen=True, slots=True)
class AnsweredChunk:
    """A chunk with its answers, and the seconds they took."""

    chunk: PointChunk
    answers: Answers
    seconds: float


@dataclass
class ChunkPace:
    """The number of points of the next chunk, by the time of the last ones."""

    aim_s: float = CHUNK_S
    size: int = FIRST
    seen: list[tuple[int, float]] = field(default_factory=list)

    def note(self, answered: AnsweredChunk) -> None:
        self.seen = [*self.seen[-7:], (len(answered.answers), answered.seconds)]
        points, seconds = (sum(column) for column in zip(*self.seen, strict=True))
        wanted = points * self.aim_s / max(seconds, 1e-3)
        # At most fourfold at a time: the first few points say little about the next.
        self.size = max(1, min(int(wanted), 4 * self.size, LARGEST))


def answer_chunk(answer: Answer, chunk: PointChunk) -> AnsweredChunk:
    """Answer a chunk, in a worker of any engine."""
    began = time.perf_counter()
    answers = answer(chunk.ask, chunk.words)
    return AnsweredChunk(chunk, answers, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """The *workers* of an engine, the *address* of its cluster, and the *folder* for its files."""

    workers: int
    address: str | None
    folder: str


SweepEngine = Callable[[Iterator[PointChunk], Answer, EngineSetting], Iterator[AnsweredChunk]]


def load_engine(name: str) -> SweepEngine:
    """Return the engine *name*; raise a ValueError that says what to install if its package is missing."""
    run, package = ENGINES[name]
    try:
        if package:
            import_module(package)
    except ImportError:
        raise ValueError(f"--engine {name} needs the package {package}: pip install 'stepcast[{name}]'") from None
    return run


# ---- processes of this machine ----------------------------------------------------------------------------


class _Worker:
    """A process at the end of its own pipe, so that one that dies affects no other."""

    def __init__(self, answer: Answer) -> None:
        from multiprocessing import get_context

        context = get_context("spawn")  # a forked process would share the driver's open store
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, answer, os.getpid()), daemon=True)
        self.process.start()
        theirs.close()
        self.chunk: PointChunk | None = None

    def give(self, chunk: PointChunk) -> None:
        self.chunk = chunk
        self.pipe.send(chunk)

    def take(self) -> AnsweredChunk | BaseException:
        """Return the answered chunk, or the error of the worker."""
        result: AnsweredChunk | BaseException = self.pipe.recv()
        self.chunk = None
        return result

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def run_locally(chunks: Iterator[PointChunk], answer: Answer, setting: EngineSetting) -> Iterator[AnsweredChunk]:
    """Answer chunks in processes; those of workers that die go to new ones, at most DEATHS times a point."""
    from multiprocessing.connection import Connection, wait

    again: deque[PointChunk] = deque()
    workers = [_Worker(answer) for _ in range(setting.workers)]
    try:
        while True:
            for index, worker in enumerate(workers):
                chunk = None if worker.chunk else again.popleft() if again else next(chunks, None)
                if chunk is not None:
                    workers[index] = _give(worker, chunk, answer)
            busy = {worker.pipe: index for index, worker in enumerate(workers) if worker.chunk}
            if not busy:
                return
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker = workers[busy[pipe]]
                chunk = worker.chunk
                try:
                    result = worker.take()
                except (EOFError, OSError):
                    assert chunk is not None
                    worker.end()
                    workers[busy[pipe]] = _Worker(answer)
                    yield from _divide_after_death(chunk, worker.process.exitcode, again)
                    continue
                if isinstance(result, BaseException):
                    raise result
                yield result
    finally:
        for worker in workers:
            worker.end()


def _give(worker: _Worker, chunk: PointChunk, answer: Answer) -> _Worker:
    """Return *worker* with *chunk*, or a new one if it died while it was idle."""
    try:
        worker.give(chunk)
    except (BrokenPipeError, ConnectionResetError):
        worker.end()
        worker = _Worker(answer)
        worker.give(chunk)
    return worker


def _divide_after_death(chunk: PointChunk, code: int | None, again: deque[PointChunk]) -> Iterator[AnsweredChunk]:
    """Add smaller parts of *chunk* to *again*, until a single point has killed its workers."""
    chunk = replace(chunk, deaths=chunk.deaths + 1)
    if len(chunk.keys) > 1 and chunk.deaths >= DEATHS:
        again.extend(replace(half, deaths=DEATHS - 1) for half in chunk.halves())
    elif chunk.deaths < DEATHS:
        again.append(chunk)
    else:
        how = signal.Signals(-code).name if code and code < 0 else f"exit status {code}"
        yield AnsweredChunk(chunk, [{"error": f"{DEATHS} workers died over this point ({how})"}], 0.0)


def _serve(pipe: "Connection", answer: Answer, driver: int) -> None:
    """Work until the driver ends, which closes its end of the pipe."""
    follow_parent(driver)
    sys.stderr = io.StringIO()  # errors are sent, and the driver shows the progress
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    while True:
        try:
            chunk = pipe.recv()
        except EOFError:
            return
        try:
            result: AnsweredChunk | BaseException = answer_chunk(answer, chunk)
        except Exception as error:
            result = error
        try:
            pipe.send(result)
        except (BrokenPipeError, ConnectionResetError):
            return


# ---- clusters ---------------------------------------------------------------------------------------------


def run_on_dask(chunks: Iterator[PointChunk], answer: Answer, setting: EngineSetting) -> Iterator[AnsweredChunk]:
    """Answer chunks as Dask tasks on a cluster, or on this machine without an address."""
    from distributed import Client, as_completed

    where = {"address": setting.address} if setting.address else {"n_workers": setting.workers}
    local = {} if setting.address else {"threads_per_worker": 1, "dashboard_address": None}
    with Client(**where, **local) as client:
        waiting = as_completed()
        while True:
            most = AHEAD * max(1, len(client.scheduler_info()["workers"]))
            while waiting.count() < most and (chunk := next(chunks, None)) is not None:
                waiting.add(client.submit(answer_chunk, answer, chunk, pure=False, retries=TRIES))
            if not waiting.count():
                return
            yield next(waiting).result()


def run_on_ray(chunks: Iterator[PointChunk], answer: Answer, setting: EngineSetting) -> Iterator[AnsweredChunk]:
    """Answer chunks as Ray tasks, which run again if a node is lost."""
    import ray

    began = not ray.is_initialized()
    if began:
        cpus = None if setting.address else setting.workers
        ray.init(address=setting.address, num_cpus=cpus, log_to_driver=False, include_dashboard=False)
    task = ray.remote(answer_chunk).options(max_retries=TRIES)
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
        for reference in waiting:
            ray.cancel(reference)
        if began:
            ray.shutdown()


def run_on_slurm(chunks: Iterator[PointChunk], answer: Answer, setting: EngineSetting) -> Iterator[AnsweredChunk]:
    """Answer chunks as Slurm jobs through submitit; lost jobs are submitted again.

    The address is a partition; ``local`` and ``debug`` are clusters that submitit simulates.
    """
    import submitit

    stand_in = setting.address if setting.address in STAND_INS else None
    executor = submitit.AutoExecutor(folder=os.path.join(setting.folder, "slurm"), cluster=stand_in)
    executor.update_parameters(timeout_min=JOB_MINUTES, cpus_per_task=1, name="stepcast-sweep")
    if setting.address and not stand_in:
        executor.update_parameters(slurm_partition=setting.address)
    waiting: dict[submitit.Job[AnsweredChunk], tuple[PointChunk, int]] = {}
    try:
        while True:
            new: list[PointChunk] = []
            while len(waiting) + len(new) < setting.workers and (chunk := next(chunks, None)) is not None:
                new.append(chunk)
            if new:
                jobs = executor.map_array(lambda chunk: answer_chunk(answer, chunk), new)
                waiting.update(zip(jobs, ((chunk, 1) for chunk in new), strict=True))
            if not waiting:
                return
            ready = [job for job in waiting if job.done()]
            for job in ready:
                chunk, tries = waiting.pop(job)
                try:
                    yield job.result()
                except (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError):
                    if tries >= JOB_TRIES:
                        raise
                    waiting[executor.submit(answer_chunk, answer, chunk)] = (chunk, tries + 1)
            if not ready:
                time.sleep(LOOK_EVERY_S)
    finally:
        for job in waiting:
            job.cancel(check=False)


# Name -> the engine, and the package that it needs.
ENGINES: dict[str, tuple[SweepEngine, str]] = {
    "local": (run_locally, ""),
    "ray": (run_on_ray, "ray"),
    "dask": (run_on_dask, "distributed"),
    "slurm": (run_on_slurm, "submitit"),
}
