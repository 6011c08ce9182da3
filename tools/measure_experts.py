# ruff: noqa: N812 -- F is PyTorch's own custom
# mypy: ignore-errors
"""What the experts of a mixture take beside one grouped product: on the GPU, and on the host that issues it.

- a gated activation weighted by the router, compiled as Megatron-Core does, forward and backward
- a clamped gate and a weighted bias, expert by expert, in eager PyTorch as Megatron-Core has them
- rows gathered into the experts' order and added back
- the products themselves: one kernel for all, or one for each expert on one and on four streams

Needs one CUDA GPU and PyTorch; prints one csv row per kernel and size: microseconds on the GPU, and on the
host that issues it. The rows of an H200 in ``src/stepcast/data/h200/experts.csv`` came from this script.
"""

import sys
import time
from collections.abc import Callable
from statistics import median

import torch
from torch.nn import functional as F

REPEATS, WARM_UP = 15, 4
SIZES = ((32768, 768, 2048, 16), (65536, 2880, 2880, 2), (65536, 2880, 2880, 16), (32768, 2048, 7168, 32))


def activate(y, weight):
    gate, up = torch.chunk(y, 2, -1)
    return (F.silu(gate) * up * weight).to(y.dtype)


def activate_back(gradient, y, weight):
    gate, up = torch.chunk(y, 2, -1)
    inner = gradient * weight
    sigmoid = torch.sigmoid(gate)
    both = torch.cat((inner * sigmoid * (1 + gate * (1 - sigmoid)) * up, inner * F.silu(gate)), -1)
    of_weight = (F.silu(gate) * up * gradient.to(weight.dtype)).sum(-1, keepdim=True)
    return both.to(y.dtype), of_weight


def clamp(y):
    gate, up = y.chunk(2, -1)
    return torch.cat((gate.clamp(max=7.0), up.clamp(min=-7.0, max=7.0)), -1)


def add_bias(result, biases, weight, counts):
    parts = zip(torch.split(result, counts), biases, torch.split(weight, counts), strict=True)
    return torch.cat([part + bias * own for part, bias, own in parts]).to(result.dtype)


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Median microseconds on the GPU, kept busy until all is issued, and on the host."""
    gpu, host = [], []
    for number in range(WARM_UP + REPEATS):
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        started = time.perf_counter()
        run()
        issued = time.perf_counter()
        end.record()
        torch.cuda.synchronize()
        if number >= WARM_UP:
            gpu.append(begin.elapsed_time(end) * 1e3)
            host.append((issued - started) * 1e6)
    return median(gpu), median(host)


def report(kernel: str, rows: int, columns: int, groups: int, run: Callable[[], object]) -> None:
    gpu_us, host_us = timed(run)
    print(f"{kernel},{rows},{columns},{groups},{gpu_us:.2f},{host_us:.2f}", flush=True)


def on_streams(pairs, outputs, streams):
    main = torch.cuda.current_stream()
    for stream in streams:
        stream.wait_stream(main)
    for at, ((left, right), out) in enumerate(zip(pairs, outputs, strict=True)):
        with torch.cuda.stream(streams[at % len(streams)]):
            torch.mm(left, right, out=out)
    for stream in streams:
        main.wait_stream(stream)


def measure(rows: int, inner: int, width: int, groups: int) -> None:
    make = {"device": "cuda", "dtype": torch.bfloat16}
    y = torch.randn(rows, 2 * inner, **make)
    weight = torch.rand(rows, 1, **make)
    gradient = torch.randn(rows, inner, **make)
    torch._dynamo.reset()
    compiled, compiled_back = torch.compile(activate), torch.compile(activate_back)
    with torch.no_grad():
        for fewer in (64, 32):  # as many rows as a router chose: the compiler learns that they change
            few = slice(rows - fewer)
            compiled(y[few], weight[few]), compiled_back(gradient[few], y[few], weight[few])
        report("activation", rows, inner, groups, lambda: compiled(y, weight))
        report("activation backward", rows, inner, groups, lambda: compiled_back(gradient, y, weight))
        report("clamp", rows, inner, groups, lambda: clamp(y))
    leaf = y.clone().requires_grad_()
    clamped = clamp(leaf)
    report("clamp backward", rows, inner, groups, lambda: torch.autograd.grad(clamped, leaf, y, retain_graph=True))
    counts = [rows // groups] * groups
    result = torch.randn(rows, width, **make).requires_grad_()
    biases = [torch.randn(width, **make).requires_grad_() for _ in range(groups)]
    own = weight.clone().requires_grad_()
    report("weighted bias", rows, width, groups, lambda: add_bias(result, biases, own, counts))
    added, back = add_bias(result, biases, own, counts), torch.randn(rows, width, **make)
    report(
        "weighted bias backward",
        rows,
        width,
        groups,
        lambda: torch.autograd.grad(added, [result, own, *biases], back, retain_graph=True),
    )
    with torch.no_grad():
        tokens = torch.randn(rows // 8, width, **make)
        order = torch.randperm(rows, device="cuda") % (rows // 8)
        report("permute", rows, width, groups, lambda: tokens.index_select(0, order))
        shuffled = torch.randperm(rows, device="cuda")
        report("sort", rows, width, groups, lambda: back.index_select(0, shuffled))
        report("unpermute", rows, width, groups, lambda: torch.zeros_like(tokens).index_add_(0, order, back))
        weights = torch.randn(groups, width, 2 * inner, **make)
        pairs = list(zip(torch.split(back, counts), weights, strict=True))
        out = torch.empty(rows, 2 * inner, **make)
        outputs = torch.split(out, counts)
        ends = torch.arange(1, groups + 1, device="cuda", dtype=torch.int32) * (rows // groups)
        report("one product", rows, width, groups, lambda: torch._grouped_mm(back, weights, ends))
        for count in (1, 4):
            streams = [torch.cuda.Stream() for _ in range(count)]
            name = f"products on {count} stream" + ("s" if count > 1 else "")
            report(name, rows, width, groups, lambda streams=streams: on_streams(pairs, outputs, streams))


def main() -> None:
    print("kernel,rows,columns,groups,gpu_us,host_us")
    for size in SIZES:
        try:
            measure(*size)
        except RuntimeError as error:
            print(size, error, file=sys.stderr)


if __name__ == "__main__":
    main()
