# mypy: ignore-errors
"""Measure the token mixers that are no attention: the gated delta rule and Mamba's selective scan.

Run with PyTorch on the GPU in question; writes one csv row per case and phase: microseconds of all kernels
of one forward or backward, launches, what stays allocated between forward and backward beyond the inputs,
and the most that the backward adds to that. The delta rule is flash-linear-attention's (queries and keys
already repeated to the heads of the values, normed inside, as transformers' Qwen3-Next calls it), the scan
mamba_ssm's CUDA kernel with its gate inside, as transformers' Jamba calls it. Both are looked for in
LIBRARIES: a folder with ``fla``, ``einops`` and the unpacked source of mamba_ssm as ``mamba_src``, whose
kernel is compiled here for bf16. The rows of an H200 in ``src/stepcast/data/h200/linear.csv`` came from it.

    python tools/measure_linear.py OUT.csv LIBRARIES [delta] [selective]
"""

import csv
import os
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

ROUNDS = 5
COLUMNS = (
    *("mixer", "heads", "key_dim", "value_dim", "chunk", "batch", "seq"),
    *("phase", "launches", "us", "saved_bytes", "peak_bytes"),
)
# (heads, key_dim, value_dim, batch, seq)
DELTA = (
    (4, 128, 128, 1, 4096),
    (8, 128, 128, 1, 8192),
    (16, 128, 128, 1, 4096),
    (32, 128, 128, 1, 2048),
    (32, 128, 128, 1, 4096),
    (32, 128, 128, 1, 8192),
    (32, 128, 128, 1, 16384),
    (32, 128, 128, 4, 4096),
    (32, 64, 128, 2, 4096),
    (16, 64, 64, 2, 4096),
    (64, 128, 128, 1, 8192),
    (48, 128, 128, 2, 8192),
)
# (inner width, state, batch, seq)
SCANS = (
    (1536, 16, 4, 2048),
    (2048, 16, 1, 4096),
    (5120, 16, 1, 2048),
    (8192, 16, 1, 2048),
    (8192, 16, 1, 4096),
    (8192, 16, 1, 8192),
    (8192, 16, 4, 4096),
    (16384, 16, 1, 4096),
    (16384, 16, 1, 16384),
    (8192, 8, 2, 4096),
    (8192, 32, 2, 4096),
    (8192, 64, 1, 4096),
)


def randn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


def delta_case(heads, key_dim, value_dim, batch, seq):
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    query, key = randn(batch, seq, heads, key_dim), randn(batch, seq, heads, key_dim)
    value = randn(batch, seq, heads, value_dim)
    decay = -torch.rand(batch, seq, heads, device="cuda")
    beta = torch.rand(batch, seq, heads, device="cuda").to(torch.bfloat16)
    inputs = [query, key, value, decay, beta]

    def run(query, key, value, decay, beta):
        return chunk_gated_delta_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return inputs, run, randn(batch, seq, heads, value_dim)


def selective_case(scan, inner, state, batch, seq):
    u, delta, z = (randn(batch, inner, seq) for _ in range(3))
    a = -torch.rand(inner, state, device="cuda") - 0.5
    b, c = randn(batch, 1, state, seq), randn(batch, 1, state, seq)
    d, bias = torch.ones(inner, device="cuda"), torch.rand(inner, device="cuda")

    class Scan(torch.autograd.Function):
        @staticmethod
        def forward(ctx, u, delta, a, b, c, d, z, bias):
            out, states, gated = scan.fwd(u, delta, a, b, c, d, z, bias, True)
            ctx.save_for_backward(u, delta, a, b, c, d, z, bias, states, out)
            return gated

        @staticmethod
        def backward(ctx, gradient):
            u, delta, a, b, c, d, z, bias, states, out = ctx.saved_tensors
            du, dd, da, db, dc, ds, dbias, dz, *_ = scan.bwd(
                u, delta, a, b, c, d, z, bias, gradient, states, out, None, True, False
            )
            return du, dd, da, db, dc, ds, dz, dbias

    return [u, delta, a, b, c, d, z, bias], Scan.apply, randn(batch, inner, seq)


def kernels(run):
    """Microseconds and launches of one *run*."""
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(ROUNDS):
            run()
        torch.cuda.synchronize()
    spent = sum(event.self_device_time_total for event in recorded.key_averages())
    count = sum(event.count for event in recorded.key_averages() if event.self_device_time_total > 0)
    return count / ROUNDS, spent / ROUNDS


def measured(inputs, run, gradient):
    inputs = [tensor.requires_grad_() for tensor in inputs]
    for _ in range(2):  # compile, choose
        torch.autograd.grad(run(*inputs), inputs, gradient)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = run(*inputs)
    torch.cuda.synchronize()
    saved = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(result, inputs, gradient)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - base
    del gradients, result
    kept = []

    def forward():
        kept[:] = [run(*inputs)]

    forward()
    ahead = kernels(forward)
    result = kept[0]
    back = kernels(lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True))
    return {"forward": (*ahead, saved, 0), "backward": (*back, 0, peak)}


def main():
    path, libraries = sys.argv[1], os.path.abspath(sys.argv[2])
    asked = sys.argv[3:] or ["delta", "selective"]
    sys.path.insert(0, libraries)
    started = time.time()
    with open(path, "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(COLUMNS)
        for heads, key_dim, value_dim, batch, seq in DELTA if "delta" in asked else ():
            rows = measured(*delta_case(heads, key_dim, value_dim, batch, seq))
            for phase, numbers in rows.items():
                out.writerow(("delta", heads, key_dim, value_dim, 64, batch, seq, phase, *numbers))
            file.flush()
            torch.cuda.empty_cache()
            print(f"{time.time() - started:.0f} s delta", heads, key_dim, value_dim, batch, seq, rows, flush=True)
        if "selective" not in asked:
            return
        scan = compiled(libraries)
        print(f"{time.time() - started:.0f} s scan compiled", flush=True)
        for inner, state, batch, seq in SCANS:
            rows = measured(*selective_case(scan, inner, state, batch, seq))
            for phase, numbers in rows.items():
                out.writerow(("selective", inner, state, 1, 0, batch, seq, phase, *numbers))
            file.flush()
            torch.cuda.empty_cache()
            print(f"{time.time() - started:.0f} s scan", inner, state, batch, seq, rows, flush=True)


def compiled(libraries):
    """mamba_ssm's selective scan; its other formats stay undefined, and are never called."""
    from torch.utils.cpp_extension import load

    os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"
    sys.setdlopenflags(os.RTLD_LAZY)
    folder = os.path.join(libraries, "mamba_src", "csrc", "selective_scan")
    names = ("selective_scan.cpp", "selective_scan_fwd_bf16.cu", "selective_scan_bwd_bf16_real.cu")
    undo = [f"-U__CUDA_NO_{what}__" for what in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_OPERATORS")]
    undo += ["-U__CUDA_NO_BFLOAT16_CONVERSIONS__", "-U__CUDA_NO_BFLOAT162_OPERATORS__"]
    fast = ["--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math"]
    return load(
        "selective_scan_cuda",
        [os.path.join(folder, name) for name in names],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3", *undo, *fast],
        extra_ldflags=["-Wl,-z,lazy"],
        extra_include_paths=[folder],
    )


if __name__ == "__main__":
    main()
