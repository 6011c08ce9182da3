# ruff: noqa: B023, N812 -- every closure is called before its loop moves on; F is PyTorch's own custom
# mypy: ignore-errors
"""Measure the kernels of an eager training step that a plain operator sweep leaves out.

Run with PyTorch on the GPU in question; writes one csv row per case: ``case,a,b,c,dtype,us``. Each case is
queued many times between two CUDA events, so the figure is the time in a busy stream, with caches warm.
The rows of an H200 in ``src/stepcast/data/h200/kernels.csv`` came from this script.
"""

import sys
import time

import torch
import torch.nn.functional as F

BF16, FP32 = torch.bfloat16, torch.float32
ROWS = []


def timed(function, seconds=0.12):
    function()
    torch.cuda.synchronize()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    torch.cuda.synchronize()
    count = max(3, min(300, int(seconds * 1e3 / max(begin.elapsed_time(end), 1e-3))))
    begin.record()
    for _ in range(count):
        function()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / count * 1e3


def case(name, a, b, c, dtype, function, seconds=0.12):
    try:
        us = timed(function, seconds)
    except Exception as error:  # one failed case must not end the sweep
        print(name, a, b, c, "failed:", error, file=sys.stderr)
        return
    ROWS.append((name, a, b, c, dtype, us))
    print(f"{name},{a},{b},{c},{dtype},{us:.2f}", flush=True)


def rand(*shape, dtype=BF16, scale=1.0):
    return torch.randn(*shape, device="cuda", dtype=dtype) * scale


def matmuls():
    shapes = [(8192, 50257, 1280), (4096, 50257, 1280), (8192, 50304, 1280), (4096, 4097, 4096), (4096, 4096, 4097)]
    shapes += [(4096, 4098, 4096), (4096, 4100, 4096), (2048, 128256, 2048), (8192, 3840, 1280), (8192, 5120, 1280)]
    shapes += [(8192, 1280, 5120), (8192, 1280, 1280), (1001, 4096, 4096), (4096, 1001, 1001), (512, 30522, 768)]
    for m, n, k in shapes:
        x, w, g = rand(m, k), rand(n, k), rand(m, n)
        case("linear", m, n, k, "bf16", lambda x=x, w=w: F.linear(x, w))
        case("wgrad", m, n, k, "bf16", lambda x=x, g=g: g.t() @ x)
        case("dgrad", m, n, k, "bf16", lambda w=w, g=g: g @ w)
    for m, n, k in [
        (4096, 3840, 1280),
        (4096, 5120, 1280),
        (4096, 1280, 5120),
        (4096, 50257, 1280),
        (1024, 16384, 2048),
    ]:
        x, w, g = rand(m, k, dtype=FP32), rand(n, k, dtype=FP32), rand(m, n, dtype=FP32)
        case("linear", m, n, k, "fp32", lambda x=x, w=w: F.linear(x, w))
        case("wgrad", m, n, k, "fp32", lambda x=x, g=g: g.t() @ x)
        case("dgrad", m, n, k, "fp32", lambda w=w, g=g: g @ w)
    for name, scale in (("random", 1.0), ("zeros", 0.0), ("tiny", 1e-6)):
        x, w = rand(8192, 8192, scale=scale), rand(8192, 8192)
        case("data-" + name, 8192, 8192, 8192, "bf16", lambda x=x, w=w: F.linear(x, w), 1.0)


def losses():
    for tokens, vocab in ((4096, 50257), (4096, 50304), (4096, 128256)):
        logits = rand(tokens, vocab)
        target = torch.randint(0, vocab, (tokens,), device="cuda")
        wide = logits.float()
        case("cast-up", tokens, vocab, 0, "bf16", lambda: logits.float())
        case("cast-down", tokens, vocab, 0, "bf16", lambda: wide.to(BF16))
        case("log-softmax", tokens, vocab, 0, "fp32", lambda: F.log_softmax(wide, -1))
        leaf = wide.clone().requires_grad_()
        out = F.cross_entropy(leaf, target)
        case(
            "cross-entropy-backward",
            tokens,
            vocab,
            0,
            "fp32",
            lambda: torch.autograd.grad(out, leaf, retain_graph=True),
        )


def backward(name, a, b, dtype, function, *leaves):
    out = function()
    grad = torch.randn_like(out)
    label = "bf16" if dtype is BF16 else "fp32"
    case(name, a, b, 0, label, function)
    case(name + "-backward", a, b, 0, label, lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))


def memory_bound():
    for dtype in (BF16, FP32):
        for rows, cols in ((8192, 1280), (2048, 2048), (16384, 2048), (8192, 6144), (8192, 12288), (4096, 16384)):
            x = rand(rows, cols, dtype=dtype).requires_grad_()
            w, b = rand(cols, dtype=dtype).requires_grad_(), rand(cols, dtype=dtype).requires_grad_()
            backward("layer-norm", rows, cols, dtype, lambda: F.layer_norm(x, (cols,), w, b), x, w, b)
            backward("rms-norm", rows, cols, dtype, lambda: F.rms_norm(x, (cols,), w), x, w)
            y = rand(rows, 4 * cols, dtype=dtype).requires_grad_()
            backward("gelu", rows, 4 * cols, dtype, lambda: F.gelu(y), y)
            backward("gelu-tanh", rows, 4 * cols, dtype, lambda: F.gelu(y, approximate="tanh"), y)
            flat = y.detach()
            case("bias-grad", rows, 4 * cols, 0, "bf16" if dtype is BF16 else "fp32", lambda: flat.sum(0))
        for heads, seq in ((160, 1024), (64, 2048)):
            s = rand(heads, seq, seq, dtype=dtype).requires_grad_()
            backward("softmax", heads * seq, seq, dtype, lambda: F.softmax(s, -1), s)
            mask = torch.ones(seq, seq, device="cuda", dtype=torch.bool).triu(1)
            flat = s.detach()
            case(
                "masked-fill",
                heads * seq,
                seq,
                0,
                "bf16" if dtype is BF16 else "fp32",
                lambda: flat.masked_fill(mask, float("-inf")),
            )
            case("scale", heads * seq, seq, 0, "bf16" if dtype is BF16 else "fp32", lambda: flat * 0.125)
    for tokens, hidden, vocab in ((8192, 1280, 50257), (4096, 4096, 128256), (16384, 2048, 128256)):
        table = rand(vocab, hidden).requires_grad_()
        index = torch.randint(0, vocab, (tokens,), device="cuda")
        out = F.embedding(index, table)
        grad = torch.randn_like(out)
        case(
            "embedding-backward",
            tokens,
            hidden,
            vocab,
            "bf16",
            lambda: torch.autograd.grad(out, table, grad, retain_graph=True),
        )


def attention():
    for batch, seq, heads, dim, dtype in (
        (8, 1024, 20, 64, BF16),
        (4, 1024, 20, 64, FP32),
        (1, 1024, 32, 64, FP32),
        (4, 4096, 32, 64, BF16),
    ):
        q, k, v = (rand(batch, heads, seq, dim, dtype=dtype).requires_grad_() for _ in range(3))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        grad = torch.randn_like(out)
        label = "bf16" if dtype is BF16 else "fp32"
        case(
            f"attention-{dim}",
            batch,
            seq,
            heads,
            label,
            lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        )
        case(
            f"attention-{dim}-backward",
            batch,
            seq,
            heads,
            label,
            lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True),
        )


def optimizers():
    gpt = [
        (1280, 3840),
        (1280, 1280),
        (1280, 5120),
        (5120, 1280),
        (3840,),
        (1280,),
        (5120,),
        (1280,),
        (1280,),
        (1280,),
        (1280,),
        (1280,),
    ]
    llama = [(2048, 3072), (2048, 2048), (2048, 16384), (8192, 2048), (2048,), (2048,)]
    big = [(4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096), (4096,), (4096,)]
    lists = {"gpt2-large": gpt * 36 + [(50257, 1280)], "llama-1b": llama * 16 + [(128256, 2048)], "llama-8b-4": big * 4}
    lists["one"] = [(1 << 30,)]
    for name, shapes in lists.items():
        weights = [torch.nn.Parameter(rand(*shape)) for shape in shapes]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        adam = torch.optim.AdamW(weights, fused=True)
        case("adamw-" + name, sum(w.numel() for w in weights), len(weights), 0, "bf16", adam.step, 0.3)
        del adam, weights


def host():
    x, w = rand(16, 64).requires_grad_(), rand(64, 64).requires_grad_()
    cases = {
        "add": lambda: x + x,
        "linear": lambda: F.linear(x, w),
        "layer-norm": lambda: F.layer_norm(x, (64,)),
        "view": lambda: x.view(64, 16),
    }
    for name, function in cases.items():
        for _ in range(50):
            function()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            function()
        spent = (time.perf_counter() - start) / 500 * 1e6
        torch.cuda.synchronize()
        print(f"host-{name},0,0,0,bf16,{spent:.2f}")
    tiny = rand(4096)
    graph = torch.cuda.CUDAGraph()
    tiny + 1
    with torch.cuda.graph(graph):
        for _ in range(200):
            tiny + 1
    case("graph-tiny-200", 4096, 200, 0, "bf16", graph.replay)


if __name__ == "__main__":
    print("case,a,b,c,dtype,us")
    for part in (host, matmuls, losses, memory_bound, attention, optimizers):
        start = time.perf_counter()
        part()
        print(part.__name__, round(time.perf_counter() - start, 1), "s", file=sys.stderr)
