"""All-reduce over the GPUs of this machine, one process each, as training runs it."""

import os
import socket
import statistics
from typing import Any

SIZES = tuple(2**power for power in range(10, 31, 2))  # 1 KiB to 1 GiB
WARM_UP, RUNS = 3, 9
WAIT_S = 60


def all_reduce_points(torch: Any, ranks: int, backend: str = "nccl") -> list[dict[str, Any]]:
    """Seconds of an all-reduce over *ranks* GPUs, one point a size: the slowest rank's median."""
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    port = _free_port()
    workers = [
        context.Process(target=_worker, args=(rank, ranks, port, backend, answers), daemon=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(WAIT_S)
    stuck = [worker for worker in workers if worker.is_alive()]
    for worker in stuck:
        worker.terminate()
    if stuck or any(worker.exitcode for worker in workers):
        raise RuntimeError(f"all-reduce over {ranks} GPUs did not finish")
    times = [answers.get() for _ in workers]
    return [
        {"kind": "all-reduce", "ranks": ranks, "size_bytes": size, "seconds": max(own[at] for own in times)}
        for at, size in enumerate(SIZES)
    ]


def bus_bytes_per_s(point: dict[str, Any]) -> float:
    """What each GPU's links carry: 2 (n - 1) / n of the buffer."""
    ranks = int(point["ranks"])
    return 2.0 * (ranks - 1) / ranks * float(point["size_bytes"]) / float(point["seconds"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _worker(rank: int, ranks: int, port: int, backend: str, answers: Any) -> None:
    import torch
    import torch.distributed as group

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    on_gpu = backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(rank)
    group.init_process_group(backend, rank=rank, world_size=ranks)
    device = f"cuda:{rank}" if on_gpu else "cpu"
    medians = []
    for size in SIZES:
        buffer = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        medians.append(_median_s(torch, group, buffer, on_gpu))
    answers.put(medians)
    group.barrier()
    group.destroy_process_group()


def _median_s(torch: Any, group: Any, buffer: Any, on_gpu: bool) -> float:
    import time

    found = []
    for run in range(WARM_UP + RUNS):
        group.barrier()
        if on_gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        group.all_reduce(buffer)
        if on_gpu:
            torch.cuda.synchronize()
        if run >= WARM_UP:
            found.append(time.perf_counter() - start)
    return statistics.median(found)
