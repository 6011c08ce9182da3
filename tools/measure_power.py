# ruff: noqa: N812 -- F is PyTorch's own custom
# mypy: ignore-errors
"""How fast kernels run on a cool GPU, and how fast once it has reached its power limit.

    python tools/measure_power.py FOLDER [--only NAME ...] [--seconds 150]

Needs one CUDA GPU and PyTorch. Each kernel is run after a second of idling, first a few times (cold) and
then for three seconds without a pause (sustained); products are also mixed with kernels that move memory and
with waiting, so that they take 25, 50 and 75 % of the time. Writes ``power.jsonl``, a row when it is done:
milliseconds of the kernel cold, in windows of the sustained run and at its end, with clock and power there.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from gpu_watch import Watch
from torch.nn import functional as F

IDLE_S, RUN_S, AHEAD = 1.0, 3.0, 64
WINDOWS_S = (0.0, 0.02, 0.1, 0.3, 1.0, 2.0, 3.0)
BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def product(m: int, n: int, k: int, dtype=torch.bfloat16, fill=torch.randn):
    left, right = fill(m, k, device="cuda", dtype=dtype), fill(n, k, device="cuda", dtype=dtype)
    return lambda: left @ right.T


def product_fp8(m: int, n: int, k: int):
    e4m3 = torch.float8_e4m3fn
    left, right = torch.randn(m, k, **BF16).to(e4m3), torch.randn(n, k, **BF16).to(e4m3)
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(left, right.T, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)


def attention(batch: int, heads: int, seq: int, size: int, backward: bool = False):
    q, k, v = (torch.randn(batch, heads, seq, size, **BF16).requires_grad_(backward) for _ in range(3))
    if not backward:
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True)


def copy(size_bytes: int):
    source = torch.randn(size_bytes // 2, **BF16)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def add(numel: int):
    left, right = torch.randn(numel, **BF16), torch.randn(numel, **BF16)
    out = torch.empty_like(left)
    return lambda: torch.add(left, right, out=out)


def norm(rows: int, columns: int):
    x = torch.randn(rows, columns, **BF16)
    return lambda: F.layer_norm(x, (columns,))


def silu_float(numel: int):
    """Element-wise in fp32, as a loss or a norm is: more arithmetic for each byte."""
    x = torch.randn(numel, device="cuda")
    return lambda: F.silu(x)


def waiting(milliseconds: float):
    """A kernel of one thread that counts cycles: the GPU is as idle as between two launches."""
    cycles = int(milliseconds * 1e-3 * 1.755e9)
    return lambda: torch.cuda._sleep(cycles)


CASES = {
    "mm bf16 8192 8192 8192": lambda: product(8192, 8192, 8192),
    "mm bf16 4096 4096 4096": lambda: product(4096, 4096, 4096),
    "mm bf16 16384 2048 2048": lambda: product(16384, 2048, 2048),
    "mm bf16 8192 28672 4096": lambda: product(8192, 28672, 4096),
    "mm bf16 8192 4096 14336": lambda: product(8192, 4096, 14336),
    "mm bf16 16384 128256 2048": lambda: product(16384, 128256, 2048),
    "mm bf16 zeros 8192 8192 8192": lambda: product(8192, 8192, 8192, fill=torch.zeros),
    "mm fp16 8192 8192 8192": lambda: product(8192, 8192, 8192, dtype=torch.float16),
    "mm fp8 8192 8192 8192": lambda: product_fp8(8192, 8192, 8192),
    "mm fp32 8192 8192 8192": lambda: product(8192, 8192, 8192, dtype=torch.float32),
    "mm tf32 8192 8192 8192": lambda: product(8192, 8192, 8192, dtype=torch.float32),
    "attention 2 32 8192 128": lambda: attention(2, 32, 8192, 128),
    "attention backward 2 32 8192 128": lambda: attention(2, 32, 8192, 128, backward=True),
    "copy 4 GiB": lambda: copy(4 << 30),
    "add bf16 1 Gi": lambda: add(1 << 30),
    "norm bf16 65536 4096": lambda: norm(65536, 4096),
    "silu fp32 1 Gi": lambda: silu_float(1 << 30),
    "waiting 1 ms": lambda: waiting(1.0),
}
MIXED = ("mm bf16 8192 8192 8192", "mm bf16 16384 2048 2048", "mm fp8 8192 8192 8192", "attention 2 32 8192 128")
WITH = ("add bf16 64 Mi", "waiting 0.2 ms")
PARTNERS = {"add bf16 64 Mi": lambda: add(64 << 20), "waiting 0.2 ms": lambda: waiting(0.2)}
SHARES = (0.25, 0.5, 0.75)


def cold_ms(run, times: int = 5) -> list[float]:
    """Each of a few calls after idling; the first of all woke the library up before."""
    torch.cuda.synchronize()
    time.sleep(IDLE_S)
    torch.cuda._sleep(2_000_000)  # the host issues all of them meanwhile
    events = [torch.cuda.Event(enable_timing=True)]
    events[0].record()
    for _ in range(times):
        run()
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()
    torch.cuda.synchronize()
    return [round(a.elapsed_time(b), 5) for a, b in pairwise(events)]


def sustained(parts, seconds: float):
    """(seconds since the start, part, milliseconds) of every call of *parts* in turn, and when they ran."""
    torch.cuda.synchronize()
    marks, events = [], [torch.cuda.Event(enable_timing=True)]
    began_s, start = time.time(), time.perf_counter()
    events[0].record()
    while time.perf_counter() - start < seconds:
        for name, run, times in parts:
            for _ in range(times):
                run()
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
            marks.append((name, times))
        if len(events) > AHEAD:
            events[-AHEAD].synchronize()
    torch.cuda.synchronize()
    ended_s, found = time.time(), []
    for (name, times), before, after in zip(marks, events[:-1], events[1:], strict=True):
        at_s = events[0].elapsed_time(after) * 1e-3
        found.append((at_s, name, before.elapsed_time(after) / times))
    return found, began_s, ended_s


def windows(calls, name: str) -> dict[str, float]:
    """Median milliseconds of one part's calls in each window of time."""
    found = {}
    for low, high in pairwise(WINDOWS_S):
        times = [ms for at_s, part, ms in calls if part == name and low <= at_s < high]
        if times:
            found[f"{low}-{high}"] = round(median(times), 5)
    return found


def alone(name: str, watch: Watch) -> dict:
    torch.backends.cuda.matmul.allow_tf32 = "tf32" in name
    run = CASES[name]()
    run()
    cold = cold_ms(run)
    calls, began_s, ended_s = sustained([(name, run, 1)], RUN_S)
    found = {"cold_ms": cold, "windows_ms": windows(calls, name), "calls": len(calls)}
    found["sustained_ms"] = round(median([ms for at_s, _, ms in calls if at_s > RUN_S / 2] or [0.0]), 5)
    return found | watch.over(began_s, ended_s)


def mixed(name: str, partner: str, share: float, watch: Watch) -> dict:
    """*name* takes about *share* of the time that both take cold."""
    run, other = CASES[name](), PARTNERS[partner]()
    run(), other()
    run_ms, other_ms = median(cold_ms(run)), median(cold_ms(other))
    others = max(1, round(run_ms * (1 - share) / share / other_ms))
    runs = max(1, round(others * other_ms * share / (1 - share) / run_ms))
    calls, began_s, ended_s = sustained([(name, run, runs), (partner, other, others)], RUN_S)
    late = [call for call in calls if call[0] > RUN_S / 2]
    found = {"runs": runs, "others": others, "cold_ms": [run_ms], "other_cold_ms": [other_ms]}
    for label, part, times in (("", name, runs), ("other_", partner, others)):
        milliseconds = [ms for _, one, ms in late if one == part]
        found[f"{label}sustained_ms"] = round(median(milliseconds), 5)
        found[f"{label}busy_ms"] = round(sum(milliseconds) * times, 3)
    found["share"] = round(found["busy_ms"] / (found["busy_ms"] + found["other_busy_ms"]), 4)
    return found | watch.over(began_s, ended_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels cold and at the power limit.")
    parser.add_argument("folder")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--seconds", type=float, default=150.0)
    arguments = parser.parse_args()
    out, until, watch = Path(arguments.folder) / "power.jsonl", time.time() + arguments.seconds, Watch()
    out.parent.mkdir(parents=True, exist_ok=True)
    cases = [(name, "", 1.0) for name in CASES]
    cases += [(name, partner, share) for name in MIXED for partner in WITH for share in SHARES]
    for name, partner, share in cases:
        label = f"{name} {share:.0%} with {partner}" if partner else name
        if arguments.only and not any(part in label for part in arguments.only):
            continue
        if time.time() + 8 > until:
            print("no time left for", label, flush=True)
            continue
        record = {"name": label, "kernel": name, "partner": partner, "asked_share": share}
        try:
            record |= mixed(name, partner, share, watch) if partner else alone(name, watch)
        except Exception as error:  # one kernel that this PyTorch lacks does not end the rest
            record["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        with out.open("a") as lines:
            lines.write(json.dumps(record) + "\n")
        keys = ("cold_ms", "sustained_ms", "sm_mhz", "power_w", "error")
        print(label, {key: record[key] for key in keys if record.get(key)}, flush=True)
        torch.cuda.empty_cache()
    watch.close()


if __name__ == "__main__":
    main()
