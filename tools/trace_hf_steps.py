# mypy: ignore-errors
"""Kernels of one training step, in order, each with the operator that launched it; and the host's pace.

    python tools/trace_hf_steps.py FOLDER [--set traced] [--seconds 300]

Models and settings are those of ``hf_steps.toml``, rows of its sets ``paced`` (few tokens, two counts of
layers: what the host needs for a layer), ``traced`` and ``late`` (kernels, after a second of the same steps)
and ``hot`` (the same without a pause, without operators). ``traced.jsonl.gz`` has a line per row: kernels as
[phase, operator, its root, shapes, formats, kernel, microseconds, microseconds idle before], and the
operators that the host dispatched, counted by phase. ``paced.jsonl.gz`` has milliseconds of each phase, on
the GPU and on the host.
"""

import argparse
import gc
import gzip
import json
import os
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path

from measure_hf_steps import PLAN, Trainer, config_keys, forget, row_name, timed

PHASES = ("forward", "backward", "optimizer")
WARM_S, PACED_S, HOT_S = 0.8, 0.5, 2.0
NEEDED_S = {"compile": 45, "": 12}
LONGEST_NAME = 110


def warm(trainer, seconds: float) -> None:
    start, steps = time.perf_counter(), 0
    while steps < 3 or time.perf_counter() - start < seconds:
        trainer.step()
        trainer.wait()
        steps += 1


def traced_step(trainer) -> list[dict]:
    """The events of one step, phases marked; two steps before it warm the profiler itself up."""
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    activities = [ProfilerActivity.CPU]
    if trainer.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    file = Path(tempfile.mkdtemp()) / "trace.json"
    with profile(
        activities=activities,
        record_shapes=True,
        acc_events=True,
        schedule=schedule(wait=0, warmup=2, active=1, repeat=1),
        on_trace_ready=lambda seen: seen.export_chrome_trace(str(file)),
    ) as seen:
        for _ in range(3):
            with record_function("phase forward"):
                loss = trainer.forward()
            with record_function("phase backward"):
                loss.backward()
            with record_function("phase optimizer"):
                trainer.update()
            del loss
            trainer.wait()
            seen.step()
    events = json.loads(file.read_text())["traceEvents"]
    file.unlink()
    return events


def roots(operators: list[dict]) -> dict[int, str]:
    """External id of every operator -> the operator of the host that it lies within."""
    found, by_thread = {}, {}
    for event in operators:
        by_thread.setdefault(event["tid"], []).append(event)
    for events in by_thread.values():
        events.sort(key=lambda event: (event["ts"], -event["dur"]))
        until, root = -1.0, ""
        for event in events:
            if event["ts"] >= until:
                until, root = event["ts"] + event["dur"], event["name"]
            found[event["args"].get("External id", -1)] = root
    return found


def kernels(events: list[dict]) -> dict:
    marks = {
        event["name"].removeprefix("phase "): (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("phase ")
    }
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    outer = roots(operators)
    by_id = {event["args"].get("External id"): event for event in operators}
    launched = {
        event["args"].get("correlation"): event["ts"]
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver")
    }
    calls = Counter(event["name"] for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver"))

    def phase_of(at: float) -> str:
        return next((name for name, (low, high) in marks.items() if low <= at <= high), "")

    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    on_gpu.sort(key=lambda event: event["ts"])
    rows, free_at = [], on_gpu[0]["ts"] if on_gpu else 0.0
    for event in on_gpu:
        given = event.get("args", {})
        operator = by_id.get(given.get("External id"))
        own = operator["args"] if operator else {}
        rows.append(
            [
                phase_of(launched.get(given.get("correlation"), event["ts"])),
                operator["name"] if operator else "",
                outer.get(given.get("External id"), ""),
                json.dumps(own.get("Input Dims", []), separators=(",", ":"))[:LONGEST_NAME],
                " ".join(str(kind) for kind in own.get("Input type", []) if kind)[:LONGEST_NAME],
                event["name"][:LONGEST_NAME],
                round(event["dur"], 2),
                round(max(0.0, event["ts"] - free_at), 2),
            ]
        )
        free_at = max(free_at, event["ts"] + event["dur"])
    dispatched = {name: Counter() for name in PHASES}
    for operator in operators:
        phase = phase_of(operator["ts"])
        if phase:
            dispatched[phase][operator["name"]] += 1
    return {
        "kernels": rows,
        "dispatched": {phase: dict(names.most_common(60)) for phase, names in dispatched.items()},
        "host_us": {name: round(high - low, 1) for name, (low, high) in marks.items()},
        "runtime": dict(calls.most_common(12)),
    }


def hot(plan, row, device: str) -> dict:
    """Kernels of the last of steps that run for two seconds, the profiler on all the while."""
    from torch.profiler import ProfilerActivity, profile

    trainer = trainer_of(plan, row, device)
    warm(trainer, WARM_S)
    found, *_ = timed(trainer, 0.4)
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    file = Path(tempfile.mkdtemp()) / "trace.json"
    with profile(activities=[activity]) as seen:
        start, steps = time.perf_counter(), 0
        while steps < 4 or time.perf_counter() - start < HOT_S:
            trainer.step()
            steps += 1
            if steps % 2 == 0:
                trainer.wait()  # the host would else be seconds ahead
        trainer.wait()
    seen.export_chrome_trace(str(file))
    events = json.loads(file.read_text())["traceEvents"]
    file.unlink()
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    on_gpu.sort(key=lambda event: event["ts"])
    last = on_gpu[-2 * (len(on_gpu) // steps) :]
    rows = [[event["name"][:LONGEST_NAME], round(event["dur"], 2)] for event in last]
    first = on_gpu[: 2 * (len(on_gpu) // steps)]
    return found | {
        "steps_seen": steps,
        "kernels": rows,
        "first": [[event["name"][:LONGEST_NAME], round(event["dur"], 2)] for event in first],
    }


def trainer_of(plan, row, device: str):
    name, batch, seq, setting = row
    return Trainer(config_keys(plan, name), batch, seq, set(setting.split()), device)


def traced(plan, row, device: str) -> dict:
    trainer = trainer_of(plan, row, device)
    warm(trainer, WARM_S)
    found, *_ = timed(trainer, 0.4)
    return found | kernels(traced_step(trainer))


def paced(plan, row, device: str) -> dict:
    trainer = trainer_of(plan, row, device)
    warm(trainer, 0.2)
    found, *_ = timed(trainer, PACED_S)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="Kernels of training steps, in order.")
    parser.add_argument("folder")
    parser.add_argument("--set", nargs="*", default=["paced", "traced"])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of rows")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--plan", default=str(PLAN))
    arguments = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plan, until = tomllib.loads(Path(arguments.plan).read_text()), time.time() + arguments.seconds
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    for kind in arguments.set:
        out = Path(arguments.folder) / f"{kind}.jsonl.gz"
        for row in plan["sets"][kind]:
            if arguments.only and not any(part in row_name(row) for part in arguments.only):
                continue
            if time.time() + NEEDED_S["compile" if "compile" in row[3] else ""] > until:
                print("no time left for", row_name(row), flush=True)
                continue
            started, record = time.perf_counter(), {"name": row_name(row), "row": row}
            try:
                record |= {"paced": paced, "hot": hot}.get(kind, traced)(plan, row, device)
            except Exception as error:  # whatever a model does, the next one is traced
                record["error"] = f"{type(error).__name__}: {str(error)[:400]}"
            record["took_s"] = round(time.perf_counter() - started, 1)
            with gzip.open(out, "at") as lines:
                lines.write(json.dumps(record) + "\n")
            keys = ("step_ms", "forward_ms", "backward_ms", "optimizer_ms", "took_s", "error")
            print(row_name(row), {key: record[key] for key in keys if record.get(key)}, flush=True)
            gc.collect()
            forget(torch)


if __name__ == "__main__":
    main()
