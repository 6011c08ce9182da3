"""Time operators and all-reduces with PyTorch on this machine's GPUs.

Each run starts with a cold L2 cache: a buffer larger than the cache is overwritten in between. The GPU is kept busy
while the host issues the operator, so that the time between two events is the GPU's alone. Data is random: zeros
draw less power and run faster.
"""

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

from stepcast.cost.calibration import LOOKS, STEP, Calibration, calibration
from stepcast.hardware import load_gpu
from stepcast.ir.types import DType
from stepcast.pytorch.profile.cases import Operator
from stepcast.pytorch.profile.measure import CollectiveRow
from stepcast.pytorch.run.launch import call_on_ranks
from stepcast.pytorch.run.operators import Call, Operators

WARM_UP = 3
FEWEST, MOST = 7, 25  # runs of a case
SUSTAINED_S = 1.2  # seconds of one operator without a pause; the second half counts
CASE_S = 0.15  # GPU time of all runs of one case
SPIN_CYCLES = 600_000  # about 0.3 ms: longer than the host needs to issue a backward call
HOST_CALLS = 300
STEP_LAYERS, STEP_WIDTH, STEP_RUNS = 12, 64, 30
WATCH_LAYERS, WATCH_CALLS = 4, 2  # of the smaller step that is repeated while a run goes on: 8 ms in all
HOST_LOOKS = 12  # one of these steps says as much as so many spread over a profile, being next to what is forecast
ALL_REDUCE_SIZES = tuple(2**power for power in range(10, 31, 2))  # 1 KiB to 1 GiB
ALL_REDUCE_RUNS = 9
ALL_REDUCE_WAIT_S = 60


class ProfiledOperators(Operators):
    """Operators with the kernel of attention that PyTorch chooses by itself."""

    def _attend(self, *inputs: Any, **options: Any) -> Any:
        return self._torch.nn.functional.scaled_dot_product_attention(*inputs, **options)


class TorchBackend:
    """Times operators on GPU 0."""

    def __init__(self, torch: ModuleType) -> None:
        self._torch = torch
        self._operators = ProfiledOperators(torch, "cuda")
        self._step = small_step(torch, "cuda")
        l2_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", 0) or 64 * 2**20
        self._flush = torch.empty(4 * l2_bytes, dtype=torch.int8, device="cuda")
        torch.backends.cuda.matmul.allow_tf32 = False

    @property
    def device(self) -> str:
        return str(self._torch.cuda.get_device_name(0))

    @property
    def software(self) -> str:
        return f"torch {self._torch.__version__}, CUDA {self._torch.version.cuda}"

    @property
    def formats(self) -> tuple[DType, ...]:
        """Return the matrix formats that this GPU and PyTorch multiply in."""
        capability = self._torch.cuda.get_device_capability(0)
        formats = [DType.BF16, DType.TF32] if capability >= (8, 0) else []
        if capability >= (8, 9) and hasattr(self._torch, "float8_e4m3fn"):
            formats.append(DType.FP8)
        return (*formats, DType.FP16, DType.FP32)

    def seconds(self, work: Operator) -> float:
        """Return the median seconds of runs with a cold cache."""
        return self._time(work, self._median_s)

    def sustained_s(self, work: Operator) -> float:
        """Return the seconds of a run among runs without a pause."""
        return self._time(work, self._sustained_s)

    def _time(self, work: Operator, measure: Callable[[Call], float]) -> float:
        try:
            return measure(self._operators.build(work))
        finally:
            self._torch.backends.cuda.matmul.allow_tf32 = False
            self._torch.cuda.empty_cache()

    def _sustained_s(self, call: Call) -> float:
        """Run batches of about 20 ms, the host one batch ahead of the GPU."""
        torch = self._torch
        runs = max(1, round(0.02 / self._median_s(call)))
        events: list[Any] = []
        start = time.monotonic()
        while time.monotonic() - start < SUSTAINED_S or len(events) < 4:
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
            for _ in range(runs):
                call()
            if len(events) > 2:
                events[-2].synchronize()
        torch.cuda.synchronize()
        spans = [float(before.elapsed_time(after)) for before, after in pairwise(events)]
        return statistics.median(spans[len(spans) // 2 :]) * 1e-3 / runs

    def _median_s(self, call: Call) -> float:
        for _ in range(WARM_UP):
            call()
        self._torch.cuda.synchronize()
        first_s = self._once_s(call)
        runs = max(FEWEST, min(MOST, int(CASE_S / max(first_s, 1e-6))))
        return statistics.median(self._once_s(call) for _ in range(runs))

    def launch(self) -> dict[str, float]:
        """Return the host's seconds for a small step, a light and a heavy operator, and the GPU's shortest kernel."""
        torch = self._torch
        tiny, weight = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        return {
            "step_host_s": host_s(torch, self._step, STEP_RUNS),
            "kernel_s": statistics.median(self._once_s(lambda: tiny + tiny) for _ in range(MOST)),
            "light_host_s": host_s(torch, lambda: tiny + tiny),
            "heavy_host_s": host_s(torch, lambda: torch.nn.functional.linear(tiny, weight)),
        }

    def _once_s(self, call: Call) -> float:
        torch = self._torch
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        call()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def host_s(torch: ModuleType, call: Call, calls: int = HOST_CALLS) -> float:
    """Return the seconds of the host for one call, the GPU not waited for."""
    for _ in range(max(1, calls // 10)):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    spent = (time.perf_counter() - start) / calls
    torch.cuda.synchronize()
    return spent


def measure_host(torch: ModuleType, gpu: str) -> Calibration:
    """Return the pace of this host, which changes with what else runs on it, in a quarter of a second."""
    seconds = min(0.09, host_s(torch, small_step(torch, "cuda"), STEP_RUNS))
    return calibration({"gpu": load_gpu(gpu).name, "launch": {STEP: seconds, LOOKS: HOST_LOOKS}}, "this host")


def watch_host(torch: ModuleType) -> Callable[[], float]:
    """Return a function that returns how many times as long as now this host takes whenever it is called."""
    step = small_step(torch, "cuda", WATCH_LAYERS)
    now_s = host_s(torch, step, STEP_RUNS)
    return lambda: host_s(torch, step, WATCH_CALLS) / now_s


def small_step(torch: Any, device: str, count: int = STEP_LAYERS) -> Call:
    """Return a training step of *count* layers whose kernels are shorter than the host's time to issue them. Random
    numbers that the caller draws later stay the same.
    """
    nn = torch.nn
    with torch.random.fork_rng():
        layers = [
            (nn.LayerNorm(STEP_WIDTH), nn.Linear(STEP_WIDTH, 4 * STEP_WIDTH), nn.Linear(4 * STEP_WIDTH, STEP_WIDTH))
            for _ in range(count)
        ]
        data = torch.randn(8, 8, STEP_WIDTH, device=device)
    model = nn.ModuleList(module for layer in layers for module in layer).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)

    def step() -> None:
        stream = data
        for norm, up, down in layers:
            stream = stream + down(nn.functional.gelu(up(norm(stream).transpose(0, 1).reshape(64, STEP_WIDTH)))).view(
                8, 8, STEP_WIDTH
            )
        stream.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def all_reduce_points(torch: ModuleType, ranks: int) -> list[CollectiveRow]:
    """Return the seconds of an all-reduce over the GPUs of this machine for each size: the slowest rank's median."""
    times = call_on_ranks(torch, _time_all_reduces, ranks, ranks, wait_s=ALL_REDUCE_WAIT_S)
    return [
        {"kind": "all-reduce", "ranks": ranks, "size_bytes": size, "seconds": max(seconds)}
        for size, *seconds in zip(ALL_REDUCE_SIZES, *times, strict=True)
    ]


def bus_bytes_per_s(row: CollectiveRow) -> float:
    """Return the rate of each GPU's links, which carry 2 (n - 1) / n of the buffer."""
    ranks = int(row["ranks"])
    return 2.0 * (ranks - 1) / ranks * float(row["size_bytes"]) / float(row["seconds"])


def _time_all_reduces(rank: int, ranks: int) -> list[float]:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks)
    medians = []
    for size in ALL_REDUCE_SIZES:
        buffer = torch.zeros(size // 2, dtype=torch.bfloat16, device=f"cuda:{rank}")
        seconds = []
        for _ in range(WARM_UP + ALL_REDUCE_RUNS):
            dist.barrier()
            torch.cuda.synchronize()
            start = time.perf_counter()
            dist.all_reduce(buffer)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        medians.append(statistics.median(seconds[WARM_UP:]))
    return medians
