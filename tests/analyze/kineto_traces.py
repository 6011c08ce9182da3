"""Made-up profiler traces whose answers are known."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stepcast.ir.timeline import SpanKind, Timeline, TimelineBuilder

US = 1e-6
RANKS = 8
SLOW_RANK, SLOW_FACTOR = 5, 1.5
LAYERS, STEPS = 6, 2
MATMUL_US, NORM_US, TRANSFER_US, REST_US, LAUNCH_US = 200.0, 40.0, 90.0, 2.0, 5.0
SIZE = 8_000_000  # elements, bf16


def device_timeline(spans: list[tuple[int, SpanKind, int, int]], steps: Sequence[tuple[float, float]] = ()) -> Timeline:
    """(stream, kind, start, length) in whole microseconds on rank 0."""
    builder = TimelineBuilder()
    for stream, kind, start, length in spans:
        name = {SpanKind.COMPUTE: "gemm", SpanKind.COMMUNICATION: "ncclDevKernel", SpanKind.COPY: "Memcpy"}[kind]
        builder.add(name, builder.lane(0, f"stream {stream}"), start * US, length * US, kind=kind)
    for number, (begin, lasts) in enumerate(steps):
        builder.add(f"ProfilerStep#{number}", builder.lane(0, "steps"), begin * US, lasts * US, kind=SpanKind.STEP)
    return builder.build(measured=True, rebase=False)


def host_ahead(steps: int, kernels: int, kernel_us: float, host_us: float, backlog: int) -> list[dict[str, Any]]:
    """Marked steps of a host that never waits for its GPU, which still runs *backlog* kernels of before.

    Half of the backlog was launched before the trace began: its launches are not in it.
    """
    events = []
    free_us = 0.0
    for number in range(backlog):
        call, kernel = launch_and_work("gemm", 7, number - 100.0, free_us, kernel_us, number)
        events += [call, kernel] if number >= backlog / 2 else [kernel]
        free_us += kernel_us
    for step in range(steps):
        events.append(mark(step, step * host_us, host_us))
        for number in range(kernels):
            call_us = step * host_us + number * host_us / kernels
            free_us = max(free_us, call_us + 10.0)
            events += launch_and_work("gemm", 7, call_us, free_us, kernel_us, 100 + step * kernels + number)
            free_us += kernel_us
    return events


def mark(step: int, start_us: float, length_us: float) -> dict[str, Any]:
    place = {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "pid": 1, "tid": 1}
    return {**place, "ts": start_us, "dur": length_us}


def launch_and_work(
    name: str, stream: int, call_us: float, start_us: float, length_us: float, correlation: int
) -> list[dict[str, Any]]:
    tied = {"ph": "X", "args": {"correlation": correlation}}
    call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1, "ts": call_us, "dur": 5.0}
    kernel = {"cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start_us, "dur": length_us}
    return [{**tied, **call}, {**tied, **kernel}]


def write_ranks(folder: Path) -> None:
    """Eight ranks that meet in an all-reduce after each layer; rank 5 computes half as long again.

    Every rank computes a layer, then its all-reduce runs on another stream beside the norm of the next
    layer, and the matmul waits for it. Clocks of the ranks differ by milliseconds.
    """
    starts = dict.fromkeys(range(RANKS), 1_000_000.0)
    events: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(RANKS)}
    sequence = 0
    for step in range(STEPS):
        begun = dict(starts)
        for _ in range(LAYERS):
            sequence += 1
            ready = {}
            for rank in range(RANKS):
                length = MATMUL_US * (SLOW_FACTOR if rank == SLOW_RANK else 1.0)
                _kernel(events[rank], "sm90_xmma_gemm_bf16", 7, starts[rank], length)
                ready[rank] = starts[rank] + length
            end = max(ready.values()) + TRANSFER_US
            for rank in range(RANKS):
                _all_reduce(events[rank], ready[rank], end - ready[rank], sequence)
                norm = NORM_US * (SLOW_FACTOR if rank == SLOW_RANK else 1.0)
                _kernel(events[rank], "vectorized_layer_norm_kernel", 7, ready[rank] + REST_US, norm)
                starts[rank] = end + REST_US
        for rank in range(RANKS):
            events[rank].append(
                {
                    "ph": "X",
                    "cat": "user_annotation",
                    "name": f"ProfilerStep#{step}",
                    "pid": 1,
                    "tid": 1,
                    "ts": begun[rank],
                    "dur": starts[rank] - begun[rank],
                }
            )
    for rank in range(RANKS):
        for event in events[rank]:
            event["ts"] += 3_000.0 * rank
        info = {"backend": "nccl", "rank": rank, "world_size": RANKS}
        head = {"schemaVersion": 1, "distributedInfo": info, "deviceProperties": [{"id": 0, "name": "H100"}]}
        (folder / f"rank{rank}.json").write_text(json.dumps({**head, "traceEvents": events[rank]}))


def _kernel(events: list[dict[str, Any]], name: str, stream: int, start: float, length: float) -> None:
    launch = {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "pid": 1, "tid": 1}
    events.append({**launch, "ts": start - 50.0, "dur": LAUNCH_US})
    events.append({"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": start, "dur": length})


def _all_reduce(events: list[dict[str, Any]], start: float, length: float, sequence: int) -> None:
    _kernel(events, "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 20, start, length)
    events[-1]["args"] = {
        "Collective name": "allreduce",
        "In msg nelems": SIZE,
        "Out msg nelems": SIZE,
        "dtype": "BFloat16",
        "Group size": RANKS,
        "Process Group Name": "1",
        "Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP",
        "Process Group Ranks": str(list(range(RANKS))),
        "Seq": sequence,
    }
