# mypy: ignore-errors
"""Time training scripts on a GPU as they are: each in a process of its own, forked after PyTorch was imported.

    python tools/measure_scripts.py CASES.json FOLDER [--seconds 270] [--each 2.5]

A case is ``{"id": ..., "argv": ["gpt.py", ...], "cwd": ..., "how": ["time", "profile", "memory"]}``. Loops of 20 or 30
steps become long ones; a hook after the first optimizer's step records a CUDA event, and the script is stopped when the
time is over. While a script builds its model, processes of the next ones start CUDA and wait. Writes
``measured.jsonl``, a line for each case (median of the intervals between events, the CPU's milliseconds in the
backward, the update, clipping and clearing of gradients, peak bytes, the GPU's clock; the CPU's pace where the case is
"pace"), ``ID.profile.json`` (GPU time by operator, shapes and kernel, CPU time by operator) and
``ID.memory.json.gz`` (every allocation of the first steps).
"""

import argparse
import contextlib
import gzip
import json
import os
import re
import select
import signal
import sys
import time
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

WARM_STEPS, PROFILED_STEPS, LIMIT_S = 6, 2, 45.0
AHEAD = 9  # processes that start together
BLOCK = 2**20  # random numbers that weights repeat
LOOPS = re.compile(r"range\((?:20|30)\)|(?<=\"--steps\", type=int, default=)(?:20|30)|(?<=total_steps=)40")


def measure_pace() -> dict:
    """Return the microseconds of an addition, of a linear layer and its gradient, and of a loop of Python."""
    import torch

    own = torch.randn(64, 64, device="cuda", requires_grad=True)
    x = torch.randn(64, 64, device="cuda")

    def timed(call, calls):
        call()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        took = time.perf_counter() - began
        torch.cuda.synchronize()
        return 1e6 * took / calls

    def backward():
        y = x
        for _ in range(10):
            y = torch.nn.functional.linear(y, own)
        y.sum().backward()
        torch.cuda.synchronize()

    return {
        "small_step_ms": time_small_step(),
        "add_us": median(timed(lambda: x + x, 200) for _ in range(5)),
        "linear_us": median(timed(lambda: torch.nn.functional.linear(x, own), 200) for _ in range(5)),
        "backward_us": median(timed(backward, 1) for _ in range(20)),
        "loop_us": median(timed(lambda: sum(range(10_000)), 5) for _ in range(5)),
    }


def time_small_step(runs=30) -> float:
    """Return the CPU's milliseconds for the training step by which ``stepcast profile`` and ``check`` find its pace."""
    import torch

    nn, width = torch.nn, 64
    with torch.random.fork_rng():
        sizes = ((width, 4 * width), (4 * width, width))
        layers = [(nn.LayerNorm(width), *(nn.Linear(*size) for size in sizes)) for _ in range(12)]
        data = torch.randn(8, 8, width, device="cuda")
    model = nn.ModuleList(module for layer in layers for module in layer).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, foreach=True)
    for number in range(runs + 3):
        if number == 3:
            torch.cuda.synchronize()
            began = time.perf_counter()
        stream = data
        for norm, up, down in layers:
            rows = norm(stream).transpose(0, 1).reshape(64, width)
            stream = stream + down(nn.functional.gelu(up(rows))).view(8, 8, width)
        stream.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    took = time.perf_counter() - began
    torch.cuda.synchronize()
    return 1e3 * took / runs


class Watch:
    """Follow the first optimizer of a script and stop the script when enough was seen."""

    def __init__(self, case: dict, folder: Path, each_s: float, orders: int, reports: int) -> None:
        self.case, self.folder, self.each_s, self.orders, self.reports = case, folder, each_s, orders, reports
        self.how, self.steps, self.events, self.first, self.times = case.get("how", ["time"]), 0, [], None, []
        self.result, self.profiler = {"id": case["id"], "argv": case["argv"]}, None
        self.phases, self.phases_of_steps, self.last_step = {}, [], None

    def time_phase(self, owner, name, phase) -> None:
        """Count the CPU's time in a function as that of a phase."""
        own = getattr(owner, name)

        def timed(*args, **kwargs):
            began = time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - began

        setattr(owner, name, timed)

    def before_step(self, *_arguments) -> None:
        self.update_began = time.perf_counter()

    def after_step(self, optimizer, *_arguments) -> None:
        import torch

        if self.first is None:
            self.first = id(optimizer)
        now = time.perf_counter()
        self.phases["update"] = self.phases.get("update", 0.0) + now - self.update_began
        if id(optimizer) != self.first:
            return
        if self.events:
            self.phases_of_steps.append({"total": now - self.last_step, **self.phases})
        self.last_step, self.phases = now, {}
        self.steps += 1
        self.times.append(time.time())
        if self.profiler is not None:
            if self.steps == self.until:
                self.write_profile()
                self.end()
            return
        if self.steps == WARM_STEPS - 3:
            os.read(self.orders, 1)  # until the next process has started
        if self.steps < WARM_STEPS:
            return
        if self.steps == WARM_STEPS:
            torch.cuda.synchronize()
            if "memory" in self.how:
                self.write_memory()
            torch.cuda.reset_peak_memory_stats()
            self.began = time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.events.append(event)
        if time.perf_counter() - self.began > self.each_s and len(self.events) > 6:
            self.write_times()
            if "profile" not in self.how:
                self.end()
            from torch.profiler import ProfilerActivity, profile

            activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
            self.profiler = profile(activities=activities, record_shapes=True)
            self.profiler.__enter__()
            self.until = self.steps + PROFILED_STEPS

    def write_times(self) -> None:
        import torch

        torch.cuda.synchronize()
        wall = (time.perf_counter() - self.began) / max(1, len(self.events) - 1)
        intervals = [a.elapsed_time(b) for a, b in pairwise(self.events)]
        stats = torch.cuda.memory_stats()
        self.result |= {
            "ms": median(intervals),
            "mean_ms": mean(intervals),
            "wall_ms": 1e3 * wall,
            "steps": len(intervals),
            "tenths_ms": [sorted(intervals)[len(intervals) * tenth // 10] for tenth in range(10)],
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "after": torch.cuda.memory_allocated(),
            "retries": stats.get("num_alloc_retries"),
            "gpu_MHz": clock_of_gpu(),
        }
        names = sorted({name for phases in self.phases_of_steps for name in phases})
        self.result["phases_ms"] = {
            name: 1e3 * median(phases.get(name, 0.0) for phases in self.phases_of_steps) for name in names
        }
        self.result["small_step_ms"] = time_small_step()

    def write_memory(self) -> None:
        import torch

        traces = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        entries = [(e["action"], e["addr"], e["size"], e["stream"], e.get("time_us", 0)) for e in traces]
        with gzip.open(self.folder / f"{self.case['id']}.memory.json.gz", "wt") as file:
            json.dump({"steps": self.times[:8], "entries": entries}, file)

    def write_profile(self) -> None:
        import torch

        torch.cuda.synchronize()
        self.profiler.__exit__(None, None, None)
        table, busy, host = {}, 0.0, {}
        for event in self.profiler.events():
            count, us = host.get(event.name, (0, 0.0))
            host[event.name] = count + 1, us + event.self_cpu_time_total
            for kernel in event.kernels:
                key = json.dumps([event.name, event.input_shapes, kernel.name[:160]])
                count, us = table.get(key, (0, 0.0))
                table[key] = count + 1, us + kernel.duration
                busy += kernel.duration
        self.result["profiled_us"] = busy / PROFILED_STEPS
        rows = [[*json.loads(key), count, us] for key, (count, us) in table.items()]
        rows.sort(key=lambda row: -row[-1])
        calls = sorted(((name, *value) for name, value in host.items()), key=lambda row: -row[-1])
        text = json.dumps({"kernels": rows, "calls": calls[:150]})
        (self.folder / f"{self.case['id']}.profile.json").write_text(text)

    def end(self) -> None:
        with (self.folder / "measured.jsonl").open("a") as lines:
            lines.write(json.dumps(self.result) + "\n")
        print(json.dumps({key: self.result.get(key) for key in ("id", "ms", "error")}), flush=True)
        sys.stderr.flush()
        sys.stdout.flush()
        os.write(self.reports, b"d")
        os._exit(0)


def clock_of_gpu() -> int | None:
    import subprocess

    words = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(words, capture_output=True, text=True, timeout=3, check=False).stdout.strip()
    except (OSError, ValueError):
        return None


def start_cuda(source: str) -> None:
    """Load what most scripts load, and leave no memory of it behind."""
    import torch

    if "transformers" in source:
        import transformers  # noqa: F401
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = torch.randn(2, 8, 64, 64, device="cuda", dtype=dtype, requires_grad=True)
        y = torch.nn.functional.conv2d(x, torch.randn(8, 8, 3, 3, device="cuda", dtype=dtype, requires_grad=True))
        z = torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        (y.float().sum() + torch.nn.functional.layer_norm(z @ z, (64,)).float().logsumexp(-1).sum()).backward()
    torch.cuda.synchronize()
    del x, y, z
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def draw_weights_quickly() -> None:
    """Fill large tensors of the host with copies of a million random numbers: a model takes seconds to draw."""
    import torch

    def quicken(draw):
        def fill(tensor, *args, **kwargs):
            if tensor.device.type != "cpu" or tensor.numel() <= BLOCK or not tensor.is_contiguous():
                return draw(tensor, *args, **kwargs)
            block = draw(torch.empty(BLOCK, dtype=tensor.dtype), *args, **kwargs)
            with torch.no_grad():
                flat, copies = tensor.data.view(-1), tensor.numel() // BLOCK
                flat[: copies * BLOCK].view(copies, BLOCK).copy_(block.expand(copies, BLOCK))
                flat[copies * BLOCK :] = block[: tensor.numel() % BLOCK]
            return tensor

        return fill

    for name in ("normal_", "uniform_"):
        setattr(torch.Tensor, name, quicken(getattr(torch.Tensor, name)))


def run_case(watch: Watch) -> None:
    """Run a script in this process, until it has been seen; never returns."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    case, log = watch.case, (watch.folder / "scripts.log").open("a")
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    try:
        os.chdir(case.get("cwd", "."))
        sys.argv = list(case["argv"])
        sys.path.insert(0, os.getcwd())
        source = "" if "pace" in watch.how else Path(sys.argv[0]).read_text()
        start_cuda(source)
        draw_weights_quickly()
        os.write(watch.reports, b"s")
        os.read(watch.orders, 1)
        if "pace" in watch.how:
            os.read(watch.orders, 1)
            watch.result |= measure_pace()
            watch.end()
        if "memory" in watch.how:
            torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=120_000)
        watch.result["held"] = torch.cuda.memory_allocated()
        register_optimizer_step_pre_hook(watch.before_step)
        register_optimizer_step_post_hook(watch.after_step)
        watch.time_phase(torch.autograd, "backward", "backward")
        watch.time_phase(torch.nn.utils, "clip_grad_norm_", "clipping")
        watch.time_phase(torch.optim.Optimizer, "zero_grad", "clearing")
        source = LOOPS.sub(lambda found: "100000" if found.group().isdigit() else "range(100000)", source)
        exec(compile(source, sys.argv[0], "exec"), {"__name__": "__main__", "__file__": sys.argv[0]})
        if len(watch.events) > 3 and "ms" not in watch.result:
            watch.write_times()
    except BaseException as error:  # also SystemExit; the next script is measured
        import traceback

        traceback.print_exc()
        watch.result["error"] = f"{type(error).__name__}: {str(error)[:300]}"
    watch.end()


class Process:
    """A script in a process of its own, which waits for its turn."""

    def __init__(self, case: dict, folder: Path, each_s: float) -> None:
        self.case, self.is_ready = case, False
        reads, self.orders = os.pipe()
        self.reports, writes = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            os.setsid()
            run_case(Watch(case, folder, case.get("each_s", each_s), reads, writes))
        os.close(reads)
        os.close(writes)

    def order(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            os.write(self.orders, b"g")

    def wait(self, until: float) -> bool:
        """Return True once the process has reported; False if it ended or took too long, which ends it."""
        if select.select([self.reports], [], [], max(0.0, until - time.time()))[0]:
            return bool(os.read(self.reports, 1))
        os.killpg(self.child, signal.SIGKILL)
        print("killed", self.case["id"], flush=True)
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description="Time training scripts on a GPU.")
    parser.add_argument("cases")
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=270.0)
    parser.add_argument("--each", type=float, default=2.5)
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    folder = Path(arguments.folder).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    import torch  # noqa: F401  # before the fork; CUDA starts in each process

    cases = json.loads(Path(arguments.cases).read_text())
    waiting = [Process(case, folder, arguments.each) for case in cases[:AHEAD]]
    for process in waiting:
        process.wait(until)
    for number, case in enumerate(cases):
        began = time.time()
        if began + 6 > until:
            print("no time left for", case["id"], flush=True)
            continue
        process = waiting.pop(0)
        process.order()
        if number % AHEAD == 0:
            started = [Process(later, folder, arguments.each) for later in cases[number + AHEAD : number + 2 * AHEAD]]
            for later in started:
                later.wait(min(until, began + LIMIT_S))
            waiting += started
        process.order()
        process.wait(min(until, began + LIMIT_S))
        print(f"{case['id']}: {time.time() - began:.1f} s", flush=True)
    for process in waiting:
        os.killpg(process.child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
