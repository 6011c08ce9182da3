# mypy: ignore-errors
"""How far the host's pace differs from visit to visit: steps that wait for it, again and again.

    python tools/measure_pace.py FOLDER [--set revisited] [--rounds 3] [--ways] [--seconds 150]

Rows of a set of ``hf_steps.toml``, each several times in turns; with --ways the first three also watched by
nvidia-smi, without the garbage collector, and on one core. Before each visit the time to issue a light and a
heavy operator and a plain loop of Python. Writes ``pace.jsonl``, a line for each visit.
"""

import argparse
import gc
import json
import os
import time
import tomllib
from pathlib import Path
from statistics import median

from gpu_watch import Watch
from measure_hf_steps import PLAN, Trainer, config_keys, forget, timed

STEPS_S = 0.8


def host_us(call, calls: int = 300) -> float:
    import torch

    from stepcast.pytorch.profile import host_s

    return 1e6 * host_s(torch, call, calls)


def pace() -> dict:
    """Microseconds of a light and a heavy operator, of a backward, and of a loop of 10,000 additions."""
    import torch

    tiny, weight = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    own = weight.clone().requires_grad_()

    def chain():
        made = tiny
        for _ in range(10):
            made = torch.nn.functional.linear(made, own) * tiny
        return made.sum()

    def loop():
        total = 0
        for at in range(10_000):
            total += at
        return total

    backwards = []
    for _ in range(12):
        loss = chain()
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss.backward()
        torch.cuda.synchronize()
        backwards.append((time.perf_counter() - start) * 1e6)
    return {
        "light_us": host_us(lambda: tiny + tiny),
        "heavy_us": host_us(lambda: torch.nn.functional.linear(tiny, weight)),
        "backward_us": median(backwards),
        "loop_us": host_us(loop, 30),
    }


def visit(plan, row, how: str) -> dict:
    import torch

    name, batch, seq, setting = row
    watch = Watch() if how == "watched" else None
    cores = os.sched_getaffinity(0)
    if how == "one core":
        os.sched_setaffinity(0, {sorted(cores)[2]})
    if how == "uncollected":
        gc.collect()
        gc.disable()
    try:
        found = pace()
        trainer = Trainer(config_keys(plan, name), batch, seq, set(setting.split()), "cuda")
        for _ in range(4):
            trainer.step()
        trainer.wait()
        found |= timed(trainer, STEPS_S)[0]
        del trainer
    finally:
        gc.enable()
        os.sched_setaffinity(0, cores)
        if watch:
            watch.close()
    forget(torch)
    return {"row": row, "how": how, "objects": len(gc.get_objects()), "loadavg": os.getloadavg()[0], **found}


def main() -> None:
    parser = argparse.ArgumentParser(description="The host's pace, again and again.")
    parser.add_argument("folder")
    parser.add_argument("--set", default="revisited")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", action="store_true")
    parser.add_argument("--seconds", type=float, default=150.0)
    arguments = parser.parse_args()
    until = time.time() + arguments.seconds
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch  # noqa: F401
    import transformers

    transformers.logging.set_verbosity_error()
    for file in ("/proc/cpuinfo", "/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu.stat"):
        if Path(file).exists():
            wanted = ("model name", "cpu MHz", "siblings") if "info" in file else ("",)
            text = Path(file).read_text().splitlines()
            print(file, sorted({line for line in text if line.startswith(wanted)})[:12], flush=True)
    plan = tomllib.loads(PLAN.read_text())
    out = Path(arguments.folder)
    out.mkdir(parents=True, exist_ok=True)
    rows = plan["sets"][arguments.set]
    ways = ("watched", "plain", "uncollected", "one core") if arguments.ways else ()
    visits = [(row, how) for how in ways for row in rows[:3]]
    visits += [(row, "plain") for _ in range(arguments.rounds) for row in rows]
    with (out / "pace.jsonl").open("w") as lines:
        for row, how in visits:
            if time.time() + 5 > until:
                print("no time left for", row, how, flush=True)
                continue
            try:
                found = visit(plan, row, how)
            except Exception as error:  # the next one is visited
                found = {"row": row, "how": how, "error": f"{type(error).__name__}: {str(error)[:300]}"}
            lines.write(json.dumps(found) + "\n")
            keys = ("light_us", "heavy_us", "backward_us", "loop_us", "forward_ms", "backward_ms", "step_ms")
            shown = {key: round(found[key], 2) for key in keys if key in found}
            print(row[0], how, shown, found.get("error", ""), flush=True)


if __name__ == "__main__":
    main()
