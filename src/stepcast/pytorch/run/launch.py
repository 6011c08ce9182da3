"""Run ranks as processes of this machine, or this process as a rank of a job that torchrun started."""

import os
import queue
import socket
import statistics
import warnings
from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from types import ModuleType
from typing import Any

from stepcast.ir.children import follow_parent
from stepcast.pytorch.load import load_torch
from stepcast.pytorch.run.execute import Exchange, Executor, OpClock, OpRecord, RunPlan
from stepcast.pytorch.run.operators import Operators

WAIT_S = 120
WARM_UP = 2


def call_on_ranks(
    torch: ModuleType, function: Callable[..., Any], ranks: int, *args: object, wait_s: float = WAIT_S
) -> list[Any]:
    """Return the results of ``function(rank, *args)``, each called in a process of its own."""
    context = torch.multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    answers = context.Queue()
    workers, results = [], []
    for rank in range(ranks):
        words = (os.getpid(), function, rank, ranks, port, answers, args)
        workers.append(context.Process(target=_call_as_rank, args=words, daemon=True))
        workers[-1].start()
    try:
        for _ in workers:
            rank, result, error = answers.get(timeout=wait_s)
            if error:
                raise ValueError(f"rank {rank}: {error}")
            results.append(result)
    except queue.Empty:
        raise ValueError(f"the ranks did not finish within {wait_s} s") from None
    finally:
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.terminate()
    return results


def _call_as_rank(
    parent: int, function: Callable[..., Any], rank: int, ranks: int, port: int, answers: Any, args: tuple[object, ...]
) -> None:
    import torch

    follow_parent(parent)
    warnings.simplefilter("ignore")  # torch.distributed is about to change some names
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    try:
        answers.put((rank, function(rank, *args), ""))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except Exception as error:  # reported to the process that started this one
        answers.put((rank, None, f"{type(error).__name__}: {error}"))


def run_alone(plan: RunPlan, rank: int, device: str) -> list[OpRecord]:
    """Run one rank of *plan* on this machine, without its messages."""
    return _run_steps(load_torch("run"), plan, rank, device)


def run_here(plan: RunPlan, device: str) -> list[OpRecord]:
    """Run all ranks of *plan* as processes of this machine."""
    if plan.layout.gpus == 1:
        return run_alone(plan, 0, device)
    return [*chain.from_iterable(call_on_ranks(load_torch("run"), _run_distributed, plan.layout.gpus, plan, device))]


def run_as_rank(plan: RunPlan, device: str) -> list[OpRecord] | None:
    """Run this process as the rank that torchrun set; return the records of all ranks on rank 0, else None."""
    torch = load_torch("run")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != plan.layout.gpus:
        raise ValueError(f"torchrun started {world} ranks, and the workload has {plan.layout.gpus}")
    records = _run_distributed(rank, plan, device, int(os.environ.get("LOCAL_RANK", rank)))
    gathered: list[list[OpRecord]] | None = [[]] * world if rank == 0 else None
    torch.distributed.gather_object(records, gathered)
    torch.distributed.destroy_process_group()
    return [*chain.from_iterable(gathered)] if gathered is not None else None


def _run_distributed(rank: int, plan: RunPlan, device: str, local: int | None = None) -> list[OpRecord]:
    """Run a rank in this process, on the GPU *local*; a process of our own has the GPU of its rank, or one core."""
    import torch

    if device == "cuda":
        torch.cuda.set_device(rank if local is None else local)
    elif local is None:
        torch.set_num_threads(1)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, rank=rank, world_size=plan.layout.gpus)
    return _run_steps(torch, plan, rank, device, Exchange(torch, plan, rank, device))


def _run_steps(
    torch: ModuleType, plan: RunPlan, rank: int, device: str, exchange: Exchange | None = None
) -> list[OpRecord]:
    """Return every op of every step after the warm-up."""
    operators = Operators(torch, device, plan.weight_sizes(plan.stage_of_rank(rank)))
    executor = Executor(plan, rank, operators, exchange, OpClock(torch, device))
    executor.prepare()
    records: list[OpRecord] = []
    unmarked_s: list[float] = []
    for number in range(-WARM_UP, plan.steps):
        if exchange is not None:
            torch.distributed.barrier()
        own = executor.step(number)
        if number >= 0:
            records += own
            if device == "cuda" and exchange is None:
                unmarked_s.append(executor.elapsed_s())
    return _subtract_marks(records, unmarked_s, plan.steps) if unmarked_s else records


def _subtract_marks(records: list[OpRecord], unmarked_s: list[float], steps: int) -> list[OpRecord]:
    """Return *records* less the time of an event between ops, so that they sum to steps without events."""
    ops = len(records) // steps
    ends_s = [record.start_s + record.duration_s for record in records]
    marked_s = statistics.median(max(ends_s[step * ops : (step + 1) * ops]) for step in range(steps))
    mark_s = max(0.0, marked_s - statistics.median(unmarked_s)) / max(1, ops)
    return [record._replace(duration_s=max(0.0, record.duration_s - mark_s)) for record in records]


def medians(records: list[OpRecord], steps: int) -> list[OpRecord]:
    """Return one step: each op has the median duration of all steps and begins as in the last."""
    by_step: dict[int, list[list[OpRecord]]] = defaultdict(lambda: [[] for _ in range(steps)])
    for record in records:
        by_step[record.rank][record.step].append(record)
    return [
        same_op[-1]._replace(duration_s=statistics.median(record.duration_s for record in same_op))
        for own_steps in by_step.values()
        for same_op in zip(*own_steps, strict=True)
    ]
