# mypy: ignore-errors
"""Time the kernels that torch.compile makes of memory-bound functions and of their backward, on a GPU.

    python tools/measure_compiled.py FILE [--seconds 100]

Writes a line of JSON for each function: its name, the sizes, and for each kernel its name, how often it runs in a
forward and backward, and its microseconds (data/captured/fused_kernels.csv has what an H200 took).
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

RUNS = 8


def functions(torch):
    """Return the functions by name: each with the shapes and formats of its operands."""
    F = torch.nn.functional  # noqa: N806
    bf16, fp32 = torch.bfloat16, torch.float32

    def norm(x, w, b):
        return F.layer_norm(x, (x.shape[-1],), w, b)

    def norm_cast(x, w, b):
        return F.layer_norm(x, (x.shape[-1],), w, b).to(bf16)

    def rms(x, w):
        return F.rms_norm(x, (x.shape[-1],), w)

    def residual_norm(x, r, w, b):
        s = x + r
        return s + F.layer_norm(s, (s.shape[-1],), w, b)

    wide, long = (49152, 3072), (12288, 4096)
    vision = (25216, 768)
    return {
        "add": (lambda x, y: x * 0.5 + y, [(wide, bf16)] * 2),
        "gelu": (F.gelu, [(wide, bf16)]),
        "gelu-fp32": (F.gelu, [(wide, fp32)]),
        "gelu-tanh": (lambda x: F.gelu(x, approximate="tanh"), [(wide, bf16)]),
        "silu-mul": (lambda x, y: F.silu(x) * y, [(wide, bf16)] * 2),
        "layer-norm-4096": (norm, [(long, bf16), ((4096,), bf16), ((4096,), bf16)]),
        "layer-norm-768": (norm, [((65536, 768), bf16), ((768,), bf16), ((768,), bf16)]),
        "layer-norm-768-vision": (norm_cast, [(vision, fp32), ((768,), fp32), ((768,), fp32)]),
        "rms-norm-4096": (rms, [(long, bf16), ((4096,), bf16)]),
        "residual-norm-1024": (residual_norm, [((49152, 1024), bf16)] * 2 + [((1024,), bf16)] * 2),
        "softmax-1024": (lambda x: F.softmax(x.float(), -1).to(bf16), [((98304, 1024), bf16)]),
        "dropout-add": (lambda x, y: F.dropout(x, 0.1) + y, [(wide, bf16)] * 2),
        "bias-gelu": (lambda x, b: F.gelu(x + b), [(wide, bf16), ((3072,), bf16)]),
        "mish": (F.mish, [(wide, bf16)]),
        "sigmoid-mul": (lambda x, y: torch.sigmoid(x) * y, [(wide, bf16)] * 2),
        "layer-norm-768-gelu": (
            lambda x, w, b: F.gelu(norm(x, w, b)),
            [((65536, 768), bf16), ((768,), bf16), ((768,), bf16)],
        ),
        "tanh": (torch.tanh, [(wide, bf16)]),
        "cross-entropy": (
            lambda x, t: F.cross_entropy(x.float(), t), [((8192, 50304), bf16), ((8192,), torch.long)]
        ),
    }  # fmt: skip


def measure(torch, function, operands):
    from torch.profiler import ProfilerActivity, profile

    made = []
    for shape, dtype in operands:
        if dtype is torch.long:
            made.append(torch.randint(0, 50000, shape, device="cuda"))
        else:
            made.append(torch.randn(shape, device="cuda", dtype=dtype).requires_grad_())
    compiled = torch.compile(function, dynamic=False)
    gradient = torch.randn_like(compiled(*made))

    def step():
        for operand in made:
            operand.grad = None
        compiled(*made).backward(gradient)

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(RUNS):
            step()
        torch.cuda.synchronize()
    table = defaultdict(lambda: [0, 0.0])
    for event in profiler.events():
        if event.device_type.name == "CUDA":
            table[event.name[:160]][0] += 1
            table[event.name[:160]][1] += event.device_time_total
    return sorted(([name, count / RUNS, us / count] for name, (count, us) in table.items()), key=lambda row: -row[2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    began = time.time()
    import torch

    for name, (function, operands) in functions(torch).items():
        if args.only and name not in args.only:
            continue
        if time.time() - began > args.seconds:
            break
        torch._dynamo.reset()
        try:
            row = {"name": name, "operands": [[list(shape), str(dtype)] for shape, dtype in operands]}
            row["kernels"] = measure(torch, function, operands)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        row["at_s"] = round(time.time() - began, 1)
        with args.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row)[:700], flush=True)


if __name__ == "__main__":
    main()
