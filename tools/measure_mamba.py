# mypy: ignore-errors
"""Measure the kernels between the projections of a Mamba-2 block: convolution, chunked scan, gated norm.

Run with PyTorch, mamba_ssm and causal_conv1d on the GPU in question; writes one csv row per kernel of a case:
the mean microseconds of its launches in one forward or backward and how many there are. The call is that of
Megatron-LM's mixer in training: ``mamba_split_conv1d_scan_combined`` with the gate inside, then a norm by
groups. ``saved_bytes`` is what stays allocated between forward and backward beyond the call's inputs,
``peak_bytes`` the most that the backward adds to that. The rows of an H200 in
``src/stepcast/data/h200/mamba.csv`` came from this script.

    python tools/measure_mamba.py OUT.csv CHUNK HEAD_DIM STATE
"""

import csv
import sys
from collections import defaultdict

import torch
from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn
from mamba_ssm.ops.triton.ssd_combined import mamba_split_conv1d_scan_combined
from torch.profiler import ProfilerActivity, profile

ROUNDS, CONV = 6, 4
COLUMNS = (
    *("heads", "head_dim", "state", "groups", "chunk", "batch", "seq"),
    *("phase", "kernel", "launches", "us", "saved_bytes", "peak_bytes"),
)
# (heads, groups, batch, seq) on one rank: whole models, and their shares under tensor parallelism.
SIZES = (
    (8, 1, 1, 4096),
    (32, 1, 1, 8192),
    (32, 4, 2, 4096),
    (64, 8, 1, 8192),
    (64, 8, 4, 8192),
    (80, 1, 2, 2048),
    (128, 8, 1, 2048),
    (128, 8, 1, 8192),
    (128, 8, 1, 16384),
    (256, 8, 1, 8192),
)


class Case:
    def __init__(self, heads, groups, batch, seq, head_dim, state, chunk):
        inner, channels = heads * head_dim, heads * head_dim + 2 * groups * state
        self.chunk, self.head_dim, self.groups, self.inner = chunk, head_dim, groups, inner
        make = {"device": "cuda", "requires_grad": True}
        half = {**make, "dtype": torch.bfloat16}
        self.packed = torch.randn(batch, seq, inner + channels + heads, **half)
        self.weight, self.bias = torch.randn(channels, CONV, **half), torch.randn(channels, **half)
        self.dt_bias, self.decay = torch.rand(heads, **make), torch.ones(heads, **make)
        self.skip, self.norm = torch.ones(heads, **make), torch.ones(inner, **half)
        self.gradient = torch.randn(batch, seq, inner, device="cuda", dtype=torch.bfloat16)

    def forward(self):
        mixed = mamba_split_conv1d_scan_combined(
            self.packed,
            self.weight,
            self.bias,
            self.dt_bias,
            -torch.exp(self.decay),
            D=self.skip,
            chunk_size=self.chunk,
            activation="silu",
            headdim=self.head_dim,
            ngroups=self.groups,
            norm_before_gate=False,
        )
        size = self.inner // self.groups
        return rmsnorm_fn(mixed, self.norm, None, eps=1e-5, group_size=size, norm_before_gate=False)

    def clear(self):
        for value in vars(self).values():
            if isinstance(value, torch.Tensor):
                value.grad = None


def kernels(run):
    """Kernel -> (mean microseconds, launches in one run)."""
    spent, count = defaultdict(float), defaultdict(int)
    for event in run.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            name = event.name.split("<")[0].split("(")[0].replace("void ", "")
            name = "torch" if name.startswith("at::") else name  # sums of partial results and the like
            spent[name] += event.device_time
            count[name] += 1
    return {name: (spent[name] / count[name], count[name] / ROUNDS) for name in spent}


def measured(case):
    """Phase -> kernels, and the bytes kept and used on top."""
    for _ in range(2):
        case.forward().backward(case.gradient)
        case.clear()
    torch.cuda.synchronize()
    found = {}
    with profile(activities=[ProfilerActivity.CUDA]) as run, torch.no_grad():
        for _ in range(ROUNDS):
            case.forward()
        torch.cuda.synchronize()
    found["forward"] = kernels(run)
    with profile(activities=[ProfilerActivity.CUDA]) as run:
        for _ in range(ROUNDS):
            case.forward().backward(case.gradient)
            case.clear()
        torch.cuda.synchronize()
    both = kernels(run)
    found["both"] = both
    before = torch.cuda.memory_allocated()
    output = case.forward()
    saved = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    output.backward(case.gradient)
    peak = torch.cuda.max_memory_allocated() - before - saved
    del output
    case.clear()
    return found, saved, peak


def main():
    path, chunk, head_dim, state = sys.argv[1], *map(int, sys.argv[2:5])
    rows = []
    for heads, groups, batch, seq in SIZES:
        sizes = (heads, head_dim, state, groups, chunk, batch, seq)
        try:
            found, saved, peak = measured(Case(heads, groups, batch, seq, head_dim, state, chunk))
        except Exception as error:  # one failed case must not end the sweep
            print(sizes, "failed:", error, file=sys.stderr)
            continue
        for phase, named in found.items():
            for name, (us, launches) in sorted(named.items()):
                rows.append((*sizes, phase, name, f"{launches:g}", f"{us:.2f}", saved, peak))
        total = {phase: sum(us * launches for us, launches in named.values()) for phase, named in found.items()}
        print(sizes, total, saved, peak, flush=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        writer.writerows(rows)


if __name__ == "__main__":
    main()
