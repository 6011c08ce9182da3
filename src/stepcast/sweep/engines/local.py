"""Processes of this machine, each at the end of a pipe of its own: one that dies takes no other with it."""

import io
import os
import signal
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from stepcast.sweep.chunks import Answer, Done, PointChunk, answered
from stepcast.sweep.engines.table import EngineSetting

# A new process for each: one that is forked would share the driver's open store.
_CONTEXT = get_context("spawn")
# Workers that may die over a point before it is blamed for it.
DEATHS = 2


class _Worker:
    def __init__(self, answer: Answer) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self.process: BaseProcess = _CONTEXT.Process(target=_serve, args=(theirs, answer), daemon=True)
        self.process.start()
        theirs.close()
        self.chunk: PointChunk | None = None

    def give(self, chunk: PointChunk) -> None:
        self.chunk = chunk
        self.pipe.send(chunk)

    def take(self) -> Any:
        """A Done, or what went wrong."""
        found = self.pipe.recv()
        self.chunk = None
        return found

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def run(chunks: Iterator[PointChunk], answer: Answer, setting: EngineSetting) -> Iterator[Done]:
    """Chunks of workers that die go to new ones; a point over which two died is answered by that."""
    again: deque[PointChunk] = deque()
    workers = [_Worker(answer) for _ in range(setting.workers)]
    try:
        while True:
            for place, worker in enumerate(workers):
                chunk = None if worker.chunk else again.popleft() if again else next(chunks, None)
                if chunk is not None:
                    workers[place] = _given(worker, chunk, answer)
            busy = {worker.pipe: place for place, worker in enumerate(workers) if worker.chunk}
            if not busy:
                return
            for pipe in wait(list(busy)):
                assert isinstance(pipe, Connection)
                worker = workers[busy[pipe]]
                chunk = worker.chunk
                try:
                    found = worker.take()
                except (EOFError, OSError):
                    assert chunk is not None
                    worker.end()
                    workers[busy[pipe]] = _Worker(answer)
                    yield from _after_death(chunk, worker.process.exitcode, again)
                    continue
                if isinstance(found, BaseException):
                    raise found
                yield found
    finally:
        for worker in workers:
            worker.end()


def _given(worker: _Worker, chunk: PointChunk, answer: Answer) -> _Worker:
    """*worker* with *chunk*, or a new one where it died while it was idle."""
    try:
        worker.give(chunk)
    except (BrokenPipeError, ConnectionResetError):
        worker.end()
        worker = _Worker(answer)
        worker.give(chunk)
    return worker


def _after_death(chunk: PointChunk, code: int | None, again: deque[PointChunk]) -> Iterator[Done]:
    """What is left of *chunk*: smaller parts, until one point alone has killed its workers."""
    chunk = replace(chunk, deaths=chunk.deaths + 1)
    if len(chunk.keys) > 1 and chunk.deaths >= DEATHS:
        again.extend(replace(half, deaths=DEATHS - 1) for half in chunk.halves())
    elif chunk.deaths < DEATHS:
        again.append(chunk)
    else:
        how = signal.Signals(-code).name if code and code < 0 else f"exit status {code}"
        yield Done(chunk, [{"error": f"{DEATHS} workers died over this point ({how})"}], 0.0)


def _serve(pipe: Connection, answer: Answer) -> None:
    """A worker: it ends with its driver, whose end of the pipe closes then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver is told, and ends us
    sys.stderr = io.StringIO()  # what goes wrong is sent, and progress is the driver's to show
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    while True:
        try:
            chunk = pipe.recv()
        except EOFError:
            return
        try:
            found: Done | BaseException = answered(answer, chunk)
        except Exception as error:
            found = error
        try:
            pipe.send(found)
        except (BrokenPipeError, ConnectionResetError):
            return
