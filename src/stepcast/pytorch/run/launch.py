"""Ranks as processes of this machine, or this one process as a rank of a job that torchrun started."""

import os
import socket
import statistics
from typing import Any

from stepcast.ir.group import Group
from stepcast.ir.work import Collective
from stepcast.pytorch.load import load_torch
from stepcast.pytorch.run.execute import Distributed, Executor, GpuClock, HostClock, NoExchange, Record, RunPlan
from stepcast.pytorch.run.operators import Operators

WAIT_S = 120
WARM_UP = 2


class RunError(ValueError):
    """A rank that failed."""


def run_alone(plan: RunPlan, rank: int, device: str) -> list[Record]:
    """One rank of *plan* on this machine, its messages left out."""
    torch = load_torch("run")
    return _steps(torch, plan, rank, device, NoExchange())


def run_here(plan: RunPlan, device: str) -> list[Record]:
    """All ranks of *plan* as processes of this machine."""
    torch = load_torch("run")
    ranks = plan.layout.gpus
    if ranks == 1:
        return run_alone(plan, 0, device)
    context = torch.multiprocessing.get_context("spawn")
    answers, port = context.Queue(), _free_port()
    workers = [
        context.Process(target=_worker, args=(plan, rank, port, device, answers), daemon=True) for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    found: list[Record] = []
    try:
        for _ in workers:
            rank, rows, error = answers.get(timeout=WAIT_S)
            if error:
                raise RunError(f"rank {rank}: {error}")
            found += rows
    except Exception as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"the ranks did not finish within {WAIT_S} s") from None
    finally:
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.terminate()
    return found


def run_as_rank(plan: RunPlan, device: str) -> list[Record] | None:
    """This process as the rank that torchrun says; the records of all on rank 0, and None elsewhere."""
    torch = load_torch("run")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world != plan.layout.gpus:
        raise RunError(f"torchrun started {world} ranks, and the workload has {plan.layout.gpus}")
    rows = _joined(torch, plan, rank, device, int(os.environ.get("LOCAL_RANK", rank)))
    gathered: list[Any] | None = [None] * world if rank == 0 else None
    torch.distributed.gather_object(rows, gathered)
    torch.distributed.destroy_process_group()
    return [row for each in gathered for row in each] if gathered is not None else None


def _worker(plan: RunPlan, rank: int, port: int, device: str, answers: Any) -> None:
    import warnings

    import torch

    warnings.simplefilter("ignore")  # names that torch.distributed is about to change
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(place, RANK=str(rank), WORLD_SIZE=str(plan.layout.gpus))
    if device == "cpu":
        torch.set_num_threads(1)
    try:
        answers.put((rank, _joined(torch, plan, rank, device, rank), ""))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except Exception as error:  # told to the process that asked
        answers.put((rank, [], f"{type(error).__name__}: {error}"))


def _joined(torch: Any, plan: RunPlan, rank: int, device: str, local: int) -> list[Record]:
    if device == "cuda":
        torch.cuda.set_device(local)
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank,
                                         world_size=plan.layout.gpus)  # fmt: skip
    exchange = Distributed(torch, plan.layout, rank, device, groups_of(plan))
    return _steps(torch, plan, rank, device, exchange)


def groups_of(plan: RunPlan) -> frozenset[Group]:
    works = (op.work for stage in plan.stages for layer, _ in stage.counted_layers(1) for op in layer.all_ops)
    return frozenset(work.group for work in works if isinstance(work, Collective))


def _steps(torch: Any, plan: RunPlan, rank: int, device: str, exchange: Any) -> list[Record]:
    """Every op of every step after the first ones."""
    clock = GpuClock(torch) if device == "cuda" else HostClock()
    weights = plan.weight_sizes(plan.stage_of_rank(rank))
    executor = Executor(plan, rank, Operators(torch, device, weights), exchange, clock)
    executor.prepare()
    found: list[Record] = []
    plain_s: list[float] = []
    for number in range(WARM_UP + plan.steps):
        if not isinstance(exchange, NoExchange):
            torch.distributed.barrier()
        rows = executor.step(number - WARM_UP)
        if number >= WARM_UP:
            found += rows
            if device == "cuda" and isinstance(exchange, NoExchange):
                plain_s.append(executor.elapsed_s())
    return _without_marks(found, plain_s, plan.steps) if plain_s else found


def _without_marks(records: list[Record], plain_s: list[float], steps: int) -> list[Record]:
    """*records* less what marking an op takes, so that they sum to steps that were not marked."""
    per_step = len(records) // steps
    marked_s = statistics.median(
        max(row.start_s + row.duration_s for row in records[at * per_step : (at + 1) * per_step]) for at in range(steps)
    )
    each_s = max(0.0, marked_s - statistics.median(plain_s)) / max(1, per_step)
    return [row._replace(duration_s=max(0.0, row.duration_s - each_s)) for row in records]


def medians(records: list[Record], steps: int) -> list[Record]:
    """One step, of which each op took the median of all steps and begins as in the last."""
    last = [row for row in records if row.step == steps - 1]
    times: dict[tuple[int, int], list[float]] = {}
    counts: dict[tuple[int, int], int] = {}
    for row in records:
        key = (row.rank, row.step)
        at = counts.get(key, 0)
        counts[key] = at + 1
        times.setdefault((row.rank, at), []).append(row.duration_s)
    found: list[Record] = []
    places: dict[int, int] = {}
    for row in last:
        at = places.get(row.rank, 0)
        places[row.rank] = at + 1
        found.append(row._replace(duration_s=statistics.median(times[row.rank, at])))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
