"""Engines of sweeps: processes of this machine, or a cluster through Ray, Dask or Slurm.

An engine takes chunks of points and yields them in any order with their answers. It takes a chunk only when a
worker is free for it.
"""

import atexit
import io
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, nullcontext, suppress
from dataclasses import field, replace
from importlib import import_module
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from stepcast.ir.children import Child
from stepcast.ir.types import FactDict, dataclass
from stepcast.outputs.files import write_file
from stepcast.sweep.spec import Words

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

Answers = list[FactDict]
Answer = Callable[[str, Sequence[Words]], Answers]
"""Return an answer for each point, in their order; a module-level function, so that workers can import it."""

# The seconds that a chunk should take: enough to hide the cost of sending it, and little work to lose.
CHUNK_S = 2.0
FIRST_SIZE, LARGEST_SIZE = 4, 10_000  # points of a chunk
# A point is blamed, and gets an error for an answer, after so many workers died while they answered it.
MOST_DEATHS = 2
# Chunks in flight per worker of Ray and Dask, so that no worker waits for the driver.
CHUNKS_PER_WORKER = 2
CONNECT_S = 10.0
KILLED = "killed on the cluster"  # in the error of a point, where Linux would name a signal
# Slurm: clusters that submitit simulates, the seconds between two looks at jobs, their time limit and tries.
SIMULATED_CLUSTERS = ("local", "debug")
POLL_S = 1.0
JOB_MINUTES, JOB_TRIES = 60, 3


@dataclass(frozen=True, slots=True)
class PointChunk:
    """Points that one worker answers at a time."""

    ask: str
    keys: tuple[bytes, ...]
    words: tuple[Words, ...]
    deaths: int = 0  # of workers while they answered it


@dataclass(frozen=True, slots=True)
class AnsweredChunk:
    """A chunk with its answers, and the seconds they took."""

    chunk: PointChunk
    answers: Answers
    seconds: float


@dataclass
class ChunkPace:
    """The number of points of the next chunk, by the time of the last ones."""

    size: int = FIRST_SIZE
    seen: list[tuple[int, float]] = field(default_factory=list)

    def note(self, answered: AnsweredChunk) -> None:
        self.seen = [*self.seen[-7:], (len(answered.answers), answered.seconds)]
        points, seconds = (sum(column) for column in zip(*self.seen, strict=True))
        target_points = points * CHUNK_S / max(seconds, 1e-3)
        # At most fourfold at a time: the first few points say little about the next.
        self.size = max(1, min(int(target_points), 4 * self.size, LARGEST_SIZE))


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """The settings of an engine, and what its workers need to give the same answers as the driver.

    *identify* returns the digest of a worker's program and data, which must be *program*. *files* are paths, relative
    to the driver's folder, and their bytes; a worker on another machine runs in a folder that holds them.
    """

    answer: Answer
    workers: int
    address: str | None  # of a cluster
    folder: str  # for files of the engine
    program: str
    identify: Callable[[], str] | None
    files: tuple[tuple[str, bytes], ...]


_folders: dict[tuple[tuple[str, bytes], ...], str] = {}


def answer_chunk(chunk: PointChunk, setting: EngineSetting) -> AnsweredChunk:
    """Answer a chunk, in a worker of any engine; raise a ValueError if its program is not the driver's."""
    if setting.identify is not None and setting.identify() != setting.program:
        raise ValueError(
            f"the worker on {platform.node()} runs another version of stepcast, or has other data, than the driver: "
            "install the same version on every node"
        )
    began = time.perf_counter()
    with chdir(_unpack(setting.files)) if setting.files else nullcontext():
        answers = setting.answer(chunk.ask, chunk.words)
    return AnsweredChunk(chunk, answers, time.perf_counter() - began)


def _unpack(files: tuple[tuple[str, bytes], ...]) -> str:
    """Return a folder of this process that holds *files*; it is removed at the end."""
    if files not in _folders:
        folder = _folders[files] = tempfile.mkdtemp(prefix="stepcast-sweep-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        sys.path[:] = [os.path.abspath(entry) for entry in sys.path]  # relative to the folder that is left
        for name, data in files:
            os.makedirs(os.path.dirname(os.path.join(folder, name)), exist_ok=True)
            write_file(os.path.join(folder, name), data)
    return _folders[files]


SweepEngine = Callable[[Iterator[PointChunk], EngineSetting], Iterator[AnsweredChunk]]


def load_engine(name: str) -> SweepEngine:
    """Return the engine *name*; raise a ValueError that says what to install if its package is missing."""
    run, package = ENGINES[name]
    try:
        if package:
            import_module(package)
    except ImportError:
        raise ValueError(f"--engine {name} needs the package {package}: pip install 'stepcast[{name}]'") from None
    return run


Task = TypeVar("Task")


def run_tasks(
    chunks: Iterator[PointChunk],
    running: dict[Task, PointChunk],
    submit: Callable[[PointChunk], Task],
    take: Callable[[], tuple[Task, AnsweredChunk | str]],
    most: Callable[[], int],
    alone: bool = True,
) -> Iterator[AnsweredChunk]:
    """Yield the answered chunks of workers; find the point to blame where they die.

    A cluster suspects every task of a worker that died, so suspects run again one at a time, with nothing else.

    Args:
        chunks: the chunks to answer.
        running: the tasks that run, and their chunks.
        submit: starts a task.
        take: waits for a task; returns its answers, or how its worker died.
        most: the maximum number of tasks.
        alone: whether a suspect runs with nothing else.
    """
    suspects: deque[PointChunk] = deque()
    while True:
        while len(running) < (1 if alone and (suspects or any(chunk.deaths for chunk in running.values())) else most()):
            chunk = suspects.popleft() if suspects else next(chunks, None)
            if chunk is None:
                break
            running[submit(chunk)] = chunk
        if not running:
            return
        task, answered = take()
        chunk = running.pop(task)
        if isinstance(answered, AnsweredChunk):
            yield answered
            continue
        chunk = replace(chunk, deaths=chunk.deaths + 1)
        if len(chunk.keys) > 1 and chunk.deaths >= MOST_DEATHS:
            middle = len(chunk.keys) // 2
            for half in (slice(middle), slice(middle, None)):
                suspects.append(PointChunk(chunk.ask, chunk.keys[half], chunk.words[half], MOST_DEATHS - 1))
        elif chunk.deaths < MOST_DEATHS:
            suspects.append(chunk)
        else:
            yield AnsweredChunk(chunk, [{"error": f"{MOST_DEATHS} workers died over this point ({answered})"}], 0.0)


# ---- processes of this machine ----------------------------------------------------------------------------


class _Worker(Child):
    """A worker process with a pipe of its own, so that its death affects no other worker."""

    is_started = False


def run_locally(chunks: Iterator[PointChunk], setting: EngineSetting) -> Iterator[AnsweredChunk]:
    """Answer chunks in processes of this machine; the chunk of a worker that dies goes to another one."""
    from multiprocessing.connection import wait

    def start() -> _Worker:
        return _Worker(_serve, setting)

    def submit(chunk: PointChunk) -> _Worker:
        worker = idle.popleft()
        try:
            worker.pipe.send(chunk)
        except (BrokenPipeError, ConnectionResetError):  # it died while it was idle
            worker.end()
            worker = start()
            worker.pipe.send(chunk)
        return worker

    def take() -> tuple[_Worker, AnsweredChunk | str]:
        ready = wait([worker.pipe for worker in running])
        worker = next(worker for worker in running if worker.pipe in ready)
        try:
            if not worker.is_started:
                worker.is_started = worker.pipe.recv()
            result: AnsweredChunk | BaseException = worker.pipe.recv()
        except (EOFError, OSError):
            worker.end()
            if not worker.is_started:
                raise ChildProcessError(
                    "a worker ended before it could start: a program that sweeps needs its main code below "
                    'if __name__ == "__main__"'
                ) from None
            idle.append(start())
            code = worker.process.exitcode
            return worker, signal.Signals(-code).name if code and code < 0 else f"exit status {code}"
        if isinstance(result, BaseException):
            raise result
        idle.append(worker)
        return worker, result

    idle = deque(start() for _ in range(setting.workers))
    running: dict[_Worker, PointChunk] = {}
    try:
        yield from run_tasks(chunks, running, submit, take, lambda: setting.workers, alone=False)
    finally:
        for worker in (*idle, *running):
            worker.end()


def _serve(pipe: "Connection", setting: EngineSetting) -> None:
    """Answer the chunks that come through *pipe*, until the driver closes its end."""
    sys.stderr = io.StringIO()  # errors are sent, and the driver shows the progress
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the driver has ended
        pipe.send(True)
        while True:
            chunk = pipe.recv()
            try:
                result: AnsweredChunk | BaseException = answer_chunk(chunk, setting)
            except Exception as error:
                result = error
            pipe.send(result)


# ---- clusters ---------------------------------------------------------------------------------------------


def run_on_dask(chunks: Iterator[PointChunk], setting: EngineSetting) -> Iterator[AnsweredChunk]:
    """Answer chunks as Dask tasks on a cluster, or on this machine without an address."""
    import dask
    from distributed import Client, Future, KilledWorker, wait

    dask.config.set({"distributed.scheduler.allowed-failures": 1})  # of a cluster of our own; usually 3
    options: FactDict = {"n_workers": setting.workers, "threads_per_worker": 1, "dashboard_address": None}
    if setting.address:
        options = {"address": setting.address, "timeout": CONNECT_S}
    try:
        client = Client(**options)
    except (OSError, ValueError) as error:
        raise ValueError(f"--address {setting.address}: no Dask scheduler answers there ({error})") from None
    with client:
        running: dict[Future, PointChunk] = {}

        def submit(chunk: PointChunk) -> Future:
            return client.submit(answer_chunk, chunk, setting, pure=False)

        def count_workers() -> int:
            return len(client.scheduler_info()["workers"])

        def take() -> tuple[Future, AnsweredChunk | str]:
            while not (ready := [future for future in running if future.done()]):
                try:
                    wait(list(running), timeout=CONNECT_S, return_when="FIRST_COMPLETED")
                except TimeoutError:
                    if not setting.address and not count_workers():  # Dask gives up a worker that died as it started
                        client.cluster.scale(0)
                        client.cluster.scale(setting.workers)
            try:
                return ready[0], ready[0].result()
            except KilledWorker:
                return ready[0], KILLED

        yield from run_tasks(chunks, running, submit, take, lambda: CHUNKS_PER_WORKER * max(1, count_workers()))


def run_on_ray(chunks: Iterator[PointChunk], setting: EngineSetting) -> Iterator[AnsweredChunk]:
    """Answer chunks as Ray tasks, which run again if a node is lost."""
    import ray

    is_own_cluster = not ray.is_initialized()
    if is_own_cluster:
        _check_address(setting.address)
        cpus = None if setting.address else setting.workers
        ray.init(address=setting.address, num_cpus=cpus, log_to_driver=False, include_dashboard=False)
    task = ray.remote(answer_chunk).options(max_retries=1)
    running: dict[ray.ObjectRef, PointChunk] = {}

    def take() -> tuple[ray.ObjectRef, AnsweredChunk | str]:
        (ready, *_), _ = ray.wait(list(running), num_returns=1)
        try:
            return ready, ray.get(ready)
        except ray.exceptions.RayTaskError as error:  # an exception of the task itself
            raise error.cause if isinstance(error.cause, Exception) else error from None
        except ray.exceptions.RayError:
            return ready, KILLED

    def most() -> int:
        return CHUNKS_PER_WORKER * max(1, int(ray.cluster_resources().get("CPU", setting.workers)))

    try:
        yield from run_tasks(chunks, running, lambda chunk: task.remote(chunk, setting), take, most)
    finally:
        for reference in running:
            ray.cancel(reference)
        if is_own_cluster:
            ray.shutdown()


def _check_address(address: str | None) -> None:
    """Raise a ValueError if nothing listens at HOST:PORT; Ray itself would try for minutes."""
    import asyncio

    host, colon, port = (address or "").rpartition("://")[2].rpartition(":")
    if not colon or not port.isdigit():
        return
    try:
        asyncio.run(asyncio.wait_for(asyncio.open_connection(host, int(port)), CONNECT_S))
    except (OSError, TimeoutError, OverflowError) as error:
        reason = str(error) or "no answer"
        raise ValueError(f"--address {address}: no Ray cluster answers there ({reason})") from None


def run_on_slurm(chunks: Iterator[PointChunk], setting: EngineSetting) -> Iterator[AnsweredChunk]:
    """Answer chunks as Slurm jobs through submitit; lost jobs are submitted again.

    The address is a partition; ``local`` and ``debug`` are clusters that submitit simulates.
    """
    import submitit

    simulated = setting.address if setting.address in SIMULATED_CLUSTERS else None
    executor = submitit.AutoExecutor(folder=os.path.join(setting.folder, "slurm"), cluster=simulated)
    executor.update_parameters(timeout_min=JOB_MINUTES, cpus_per_task=1, name="stepcast-sweep")
    if setting.address and not simulated:
        executor.update_parameters(slurm_partition=setting.address)
    waiting: dict[submitit.Job[AnsweredChunk], tuple[PointChunk, int]] = {}
    try:
        while True:
            if new := list(islice(chunks, max(0, setting.workers - len(waiting)))):
                jobs = executor.map_array(lambda chunk: answer_chunk(chunk, setting), new)
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
                    waiting[executor.submit(answer_chunk, chunk, setting)] = (chunk, tries + 1)
            if not ready:
                time.sleep(POLL_S)
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
