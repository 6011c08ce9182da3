"""Attention in the pieces that PyTorch's context parallelism cuts it into, on one GPU.

    python tools/measure_ring_attention.py $OUT/ring_attention.csv

A rank of cp works on its own slice under the causal mask, then on cp - 1 others: half of the keys with all of
its queries, or all of them with half of its queries, each summed up in fp32
(torch/distributed/tensor/experimental/_attention.py). Times are those of kernels kept up for a second,
FlashAttention 2's and cuDNN's.
"""

import csv
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

TOKENS, HEADS, WIDTH = 32768, 32, 128
BACKENDS = {"flash-2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
# name -> queries, keys (of the slice), causal, key heads
PIECES = {
    "own slice": (1.0, 1.0, True, 32),
    "own slice, 8 key heads": (1.0, 1.0, True, 8),
    "half the keys": (1.0, 0.5, False, 32),
    "half the queries": (0.5, 1.0, False, 32),
}
KEPT_UP_S = 1.0


def tensor(tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(1, heads, tokens, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def seconds(work) -> float:
    """Of one call among as many as take about a second."""
    for _ in range(2):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    times = max(3, int(KEPT_UP_S / (time.perf_counter() - start)))
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        work()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / times


def piece(backend: str, name: str) -> dict[str, object]:
    queries, keys, causal, key_heads = PIECES[name]
    q = tensor(int(TOKENS * queries), HEADS)
    k, v = tensor(int(TOKENS * keys), key_heads), tensor(int(TOKENS * keys), key_heads)
    shared = key_heads != HEADS
    with sdpa_kernel(BACKENDS[backend]):

        def forward() -> torch.Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=shared)

        with torch.no_grad():
            forward_s = seconds(forward)
        out = forward()
        gradient = torch.randn_like(out)

        def backward() -> None:
            torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)

        backward_s = seconds(backward)
    pairs = q.shape[2] * k.shape[2] * (0.5 if causal else 1.0)
    flops = 4.0 * HEADS * WIDTH * pairs
    return {
        "what": name,
        "kernel": backend,
        "forward_ms": round(forward_s * 1e3, 3),
        "backward_ms": round(backward_s * 1e3, 3),
        "forward_tflops": round(flops / forward_s / 1e12, 1),
        "backward_tflops": round(2.5 * flops / backward_s / 1e12, 1),
    }


def merging() -> dict[str, object]:
    """What follows each piece: outputs joined in fp32 by their log-sum-exps; gradients added in fp32."""
    shape = (1, HEADS, TOKENS, WIDTH)
    out = torch.randn(shape, device="cuda")
    other = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    lse, other_lse = (torch.randn(1, HEADS, TOKENS, 1, device="cuda") for _ in range(2))

    def joined() -> None:
        wide = other.to(torch.float32)
        out - torch.nn.functional.sigmoid(other_lse - lse) * (out - wide)

    total = torch.zeros(shape, device="cuda")

    def added() -> None:
        for _ in range(3):
            total.add_(other)

    return {
        "what": "joined in fp32",
        "kernel": "pytorch",
        "forward_ms": round(seconds(joined) * 1e3, 3),
        "backward_ms": round(seconds(added) * 1e3, 3),
    }


def main(path: str) -> None:
    rows = []
    for backend in BACKENDS:
        for name in PIECES:
            try:
                rows.append(piece(backend, name))
            except RuntimeError as error:
                rows.append({"what": name, "kernel": backend, "error": str(error).splitlines()[0][:80]})
            torch.cuda.empty_cache()
            print(rows[-1], flush=True)
    rows.append(merging())
    print(rows[-1], flush=True)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1])
