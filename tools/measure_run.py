# mypy: ignore-errors
"""Runs workloads of one rank on the GPU at hand, and records a training job of one rank.

    PYTHONPATH=src python tools/measure_run.py FOLDER [--runs] [--with-kernels]

Writes ``run_NAME.json`` (measured and predicted by kind of op, ``stepcast run --rank``), and of the recorded
job ``plain.json`` (its own clock, without the recorder), ``watched.json`` (with it), ``record.json`` and the
traces. ``python tools/measure_run.py --train FILE`` is that job: a transformer under DistributedDataParallel.
``--kernels NAME FILE``, and ``--with-kernels`` for both runs, writes which kernels each work of a run took,
and their microseconds in a step; ``--runs`` leaves the recorded job out.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

RUNS = {
    "llama-70b-tp8-pp16": "--model llama-3.1-70b --cluster hgx-h200 --gpus 128 --tp 8 --pp 16 --seq 8192 "
    "--micro-batch 1 --global-batch 16 --rank 24",
    "mixtral-ep8": "--model mixtral-8x7b --cluster hgx-h200 --gpus 8 --ep 8 --seq 4096 --micro-batch 1 "
    "--global-batch 32 --rank 0",
}
STEPS, SKIP, SEEN = 50, 20, 5


def train(file: str) -> None:
    """Steps of a small transformer under DistributedDataParallel of one rank; its own wall clock."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width, layers, batch, seq = (2048, 12, 8, 1024) if device == "cuda" else (64, 2, 2, 32)
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True, dropout=0.0)
    model = torch.nn.TransformerEncoder(layer, layers).to(device, torch.bfloat16)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    data = torch.randn(batch, seq, width, device=device, dtype=torch.bfloat16)
    ends = []
    for _ in range(STEPS):
        loss = model(data).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as a loop that logs its loss
        ends.append(time.time())
    Path(file).write_text(json.dumps(ends))
    dist.destroy_process_group()


def kernels(name: str, file: str) -> None:
    """Kernels by work, within one step under PyTorch's profiler."""
    import bisect
    import tempfile
    from collections import defaultdict

    import torch

    from stepcast.analyze.logs import kind_of
    from stepcast.cli.capture import _plan_run, _predict_workload
    from stepcast.cli.main import build_parser
    from stepcast.pytorch.run.execute import Executor, OpClock
    from stepcast.pytorch.run.operators import Operators

    arguments = build_parser().parse_args(["run", *RUNS[name].split()])
    prediction, _ = _predict_workload(arguments)
    plan, rank = _plan_run(prediction, 1), arguments.rank
    operators = Operators(torch, "cuda", plan.weight_sizes(plan.stage_of_rank(rank)))
    executor = Executor(plan, rank, operators, None, OpClock(torch, "cuda"))
    executor.prepare()
    executor.clock.quiet = True
    for _ in range(4):
        executor.run_once()
    torch.cuda.synchronize()
    calls, call = {}, operators.call

    def marked(work):
        calls[repr(work)] = work
        made = call(work)

        def run():
            with torch.profiler.record_function(f"work {work!r}"):
                made()

        return run

    operators.call = marked
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as seen:
        executor.run_once()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        seen.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    marks = sorted(
        (one["ts"], one["ts"] + one["dur"], one["name"][5:])
        for one in events
        if one.get("cat") == "user_annotation" and one["name"].startswith("work ")
    )
    starts = [one[0] for one in marks]
    launched = {
        one["args"]["correlation"]: one["ts"]
        for one in events
        if one.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in one.get("args", {})
    }
    found = defaultdict(lambda: defaultdict(lambda: [0, 0.0]))
    for one in events:
        if one.get("cat") not in ("kernel", "gpu_memset", "gpu_memcpy"):
            continue
        at = bisect.bisect_right(starts, launched.get(one["args"]["correlation"], 0)) - 1
        own = found[marks[at][2] if at >= 0 else ""][one["name"][:90]]
        own[0] += 1
        own[1] += one["dur"]
    rows = [
        {
            "work": work,
            "kind": kind_of(calls[work]) if work in calls else "",
            "ops": sum(1 for one in marks if one[2] == work),
            "predicted_us": prediction.pricer.seconds(calls[work]) * 1e6 if work in calls else None,
            "kernels": own,
        }
        for work, own in found.items()
    ]
    Path(file).write_text(json.dumps(rows, indent=1))


def command(words: str, **options) -> None:
    print(words[:200], flush=True)
    started = time.time()
    done = subprocess.run(words, shell=True, check=False, **options)
    print("status", done.returncode, f"{time.time() - started:.0f} s", flush=True)


def main() -> None:
    if sys.argv[1] == "--train":
        train(sys.argv[2])
        return
    if sys.argv[1] == "--kernels":
        kernels(*sys.argv[2:])
        return
    folder, me = Path(sys.argv[1]), Path(__file__).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "PYTHONPATH": str(me.parents[1] / "src"), "PYTHONUNBUFFERED": "1"}
    python = sys.executable
    for name, words in RUNS.items():
        command(f"{python} -m stepcast run {words} --steps 5 -o {folder}/run_{name}.json", env=environment, timeout=150)
        if "--with-kernels" in sys.argv:
            file = f"{folder}/kernels_{name}.json"
            command(f"{python} {me} --kernels {name} {file}", env=environment, timeout=100)
    if "--runs" in sys.argv:
        return
    job = f"{python} -m torch.distributed.run --nproc-per-node 1 {me} --train"
    command(f"{job} {folder}/plain.json", env=environment, timeout=100)
    command(
        f"{python} -m stepcast record -o {folder}/record --skip {SKIP} --steps {SEEN} --json -- "
        f"{job} {folder}/watched.json > {folder}/record.json",
        env=environment,
        timeout=100,
    )
    command(f"gzip {folder}/record/*.json", env=environment)
    command(f"{python} -m stepcast analyze {folder}/record --json > {folder}/analyzed.json", env=environment)


if __name__ == "__main__":
    main()
