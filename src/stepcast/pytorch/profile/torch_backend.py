"""Timing operators with PyTorch on this machine's GPU.

Each run starts with a cold L2 cache: a buffer larger than it is overwritten in between. The GPU is kept
spinning while the host issues the operator, so that a time between two events is the GPU's alone. Data is
random: zeros draw less power and run faster.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from stepcast.ir.dtype import DType
from stepcast.ir.work import Attention, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.pytorch.profile.cases import Operator

K = ElementwiseKind
Call = Callable[[], Any]

WARM_UP = 3
FEWEST, MOST = 7, 25  # runs of a case
KEPT_UP_S = 1.2  # of one operator without a pause; the second half counts
CASE_S = 0.15  # GPU time that the runs of one case may take together
SPIN_CYCLES = 600_000  # about 0.3 ms: longer than the host needs to issue a backward call
HOST_CALLS = 300


class NoGpuError(ValueError):
    """There is nothing here to measure."""


def load_torch() -> Any:
    """PyTorch with a CUDA GPU, or an error that says what is missing."""
    try:
        import torch
    except ImportError:
        raise NoGpuError(
            "profile measures this machine's GPU with PyTorch, which is not installed; "
            "run it where both are, and use the file it writes anywhere"
        ) from None
    if not torch.cuda.is_available():
        raise NoGpuError("PyTorch finds no CUDA GPU here; run profile on the machine whose GPU it is to measure")
    return torch


class TorchBackend:
    """Times operators on GPU 0."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
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
        """The matrix formats that this GPU and PyTorch multiply in."""
        capability = self._torch.cuda.get_device_capability(0)
        found = [DType.BF16, DType.TF32] if capability >= (8, 0) else []
        if capability >= (8, 9) and hasattr(self._torch, "float8_e4m3fn"):
            found.append(DType.FP8)
        return (*found, DType.FP16, DType.FP32)

    def seconds(self, work: Operator) -> float:
        try:
            return self._median_s(self._call(work))
        finally:
            self._torch.backends.cuda.matmul.allow_tf32 = False
            self._torch.cuda.empty_cache()

    def sustained_s(self, work: Operator) -> float:
        """Runs in batches of about 20 ms, the host one batch ahead."""
        torch = self._torch
        try:
            call = self._call(work)
            runs = max(1, round(0.02 / self._median_s(call)))
            events: list[Any] = []
            start = time.monotonic()
            while time.monotonic() - start < KEPT_UP_S or len(events) < 4:
                events.append(torch.cuda.Event(enable_timing=True))
                events[-1].record()
                for _ in range(runs):
                    call()
                if len(events) > 2:
                    events[-2].synchronize()
            torch.cuda.synchronize()
            spans = [float(before.elapsed_time(after)) for before, after in itertools.pairwise(events)]
            return statistics.median(spans[len(spans) // 2 :]) * 1e-3 / runs
        finally:
            torch.backends.cuda.matmul.allow_tf32 = False
            torch.cuda.empty_cache()

    def _median_s(self, call: Call) -> float:
        for _ in range(WARM_UP):
            call()
        self._torch.cuda.synchronize()
        first_s = self._once_s(call)
        runs = max(FEWEST, min(MOST, int(CASE_S / max(first_s, 1e-6))))
        return statistics.median(self._once_s(call) for _ in range(runs))

    def launch(self) -> dict[str, float]:
        """Host seconds to issue a light and a heavy operator, and the GPU's shortest kernel."""
        torch = self._torch
        tiny, weight = self._random(64, 64), self._random(64, 64)
        return {
            "kernel_s": statistics.median(self._once_s(lambda: tiny + tiny) for _ in range(MOST)),
            "light_host_s": self._host_s(lambda: tiny + tiny),
            "heavy_host_s": self._host_s(lambda: torch.nn.functional.linear(tiny, weight)),
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

    def _host_s(self, call: Call) -> float:
        for _ in range(20):
            call()
        self._torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        spent = (time.perf_counter() - start) / HOST_CALLS
        self._torch.cuda.synchronize()
        return spent

    def _random(self, *shape: int, dtype: DType = DType.BF16) -> Any:
        torch = self._torch
        formats = {
            DType.BF16: torch.bfloat16,
            DType.FP16: torch.float16,
            DType.FP32: torch.float32,
            DType.TF32: torch.float32,
        }
        if dtype is DType.FP8:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(torch.float8_e4m3fn)
        return torch.randn(*shape, device="cuda", dtype=formats[dtype])

    def _call(self, work: Operator) -> Call:
        match work:
            case Matmul():
                return self._matmul(work)
            case GroupedMatmul():
                return self._grouped(work)
            case Attention():
                return self._attention(work)
        return self._stream(work)

    def _matmul(self, work: Matmul) -> Call:
        torch = self._torch
        if work.dtype is DType.FP8:
            rows, weight = (
                self._random(work.m, work.k, dtype=work.dtype),
                self._random(work.n, work.k, dtype=work.dtype),
            )
            one = torch.ones((), device="cuda")
            return partial(torch._scaled_mm, rows, weight.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        torch.backends.cuda.matmul.allow_tf32 = work.dtype is DType.TF32
        if work.batch > 1:
            left = self._random(work.batch, work.m, work.k, dtype=work.dtype)
            return partial(torch.bmm, left, self._random(work.batch, work.k, work.n, dtype=work.dtype))
        rows, weight = (self._random(work.m, work.k, dtype=work.dtype), self._random(work.n, work.k, dtype=work.dtype))
        return partial(torch.nn.functional.linear, rows, weight)

    def _grouped(self, work: GroupedMatmul) -> Call:
        torch = self._torch
        rows = self._random(work.m, work.k, dtype=work.dtype)
        weights = self._random(work.groups, work.n, work.k, dtype=work.dtype).transpose(-2, -1)
        each = work.m // work.groups
        ends = torch.arange(each, work.m + 1, each, device="cuda", dtype=torch.int32)
        return partial(torch._grouped_mm, rows, weights, offs=ends)

    def _attention(self, work: Attention) -> Call:
        torch = self._torch
        attend = torch.nn.functional.scaled_dot_product_attention
        shared = work.kv_heads < work.heads

        def tensor(heads: int, length: int) -> Any:
            shape = (work.batch, length, heads, work.head_dim)
            return self._random(*shape, dtype=work.dtype).transpose(1, 2).detach()

        inputs = [tensor(work.heads, work.query_len)]
        inputs += [tensor(work.kv_heads, work.key_len) for _ in range(2)]
        forward = partial(attend, *inputs, is_causal=work.causal, enable_gqa=shared)
        if not work.backward:
            return forward
        for one in inputs:
            one.requires_grad_()
        result = forward()
        gradient = torch.randn_like(result)
        return partial(torch.autograd.grad, result, inputs, gradient, retain_graph=True)

    def _stream(self, work: Elementwise) -> Call:
        torch, functional = self._torch, self._torch.nn.functional
        if work.kind is K.OPTIMIZER:
            return self._optimizer(work)
        first = self._random(work.rows, work.columns, dtype=work.dtype)
        match work.kind:
            case K.ADD:
                return partial(torch.add, first, torch.randn_like(first))
            case K.COPY:
                return lambda: first.clone()
            case K.GELU:
                return partial(functional.gelu, first)
            case K.SOFTMAX:
                return partial(functional.softmax, first, -1)
            case K.CAST:
                return lambda: first.float()
            case K.RMS_NORM:
                return partial(functional.rms_norm, first, (work.columns,), torch.randn_like(first[0]))
            case K.LAYER_NORM:
                scale, shift = torch.randn_like(first[0]), torch.randn_like(first[0])
                return partial(functional.layer_norm, first, (work.columns,), scale, shift)
        raise ValueError(f"no way to run {work.kind}")

    def _optimizer(self, work: Elementwise) -> Call:
        torch = self._torch
        weight = torch.nn.Parameter(self._random(work.columns, dtype=work.dtype))
        weight.grad = torch.randn_like(weight)
        step: Call = torch.optim.AdamW([weight], fused=True).step
        return step
