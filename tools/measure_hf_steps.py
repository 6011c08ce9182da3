# mypy: ignore-errors
"""Training steps of Hugging Face models built from their configs, on the GPU at hand.

    python tools/measure_hf_steps.py FOLDER --set eager [--only NAME ...] [--seconds 520]

Needs PyTorch and transformers, no network. Models and settings are in ``hf_steps.toml`` beside this file.
Writes ``steps_SET.jsonl``, a row when it is done: milliseconds of forward, backward, optimizer and the
whole step on the GPU's own clock (medians over steps that run without a pause for two seconds, after
one second of the same), milliseconds that the host took to issue them, bytes allocated after each phase
and at the peak, the clock and the power drawn. ``--set profiled`` writes the kernels of one step instead.
Rows that are there already are not measured again; one that fails is written with its error. A process of
its own takes the rows, since some errors of a GPU end with their process only.
"""

import argparse
import contextlib
import copy
import gc
import json
import math
import os
import subprocess
import sys
import time
import tomllib
from itertools import pairwise
from pathlib import Path
from statistics import median

from gpu_watch import Watch

WARM_S, RUN_S, WARM_STEPS, LEAST_STEPS = 1.0, 2.0, 3, 6
NEEDED_S = {"compile": 70, "": 15}  # what a row may take, so that the last one ends in time
PLAN = Path(__file__).with_name("hf_steps.toml")


def row_name(row) -> str:
    model, batch, seq, setting = row
    return " ".join([f"{model}/{batch}x{seq}", *sorted(setting.split())])


def config_keys(plan, name: str) -> dict:
    """The keys of a model; with fewer layers where its name says so."""
    base, _, layers = name.partition("@")
    keys = {key: None if value == "null" else value for key, value in plan["models"][base].items()}
    if layers:
        names = [name for name in ("n_layer", "n_layers", "num_layers") if name in keys]
        keys[names[0] if names else "num_hidden_layers"] = int(layers)
    return keys


def build(keys: dict, words: set[str], device: str):
    import torch
    import transformers
    from transformers import AutoConfig

    keys = dict(keys)
    made_by = getattr(transformers, keys.pop("auto", "AutoModelForCausalLM"))
    config = AutoConfig.for_model(keys.pop("model_type"), **keys)
    options = {"dtype": torch.float32 if words & {"fp32", "autocast"} else torch.bfloat16}
    if "attn-eager" in words:
        options["attn_implementation"] = "eager"
    if "experts-eager" in words:
        options["experts_implementation"] = "eager"
    with torch.device(device):
        model = made_by.from_config(config, **options)
    model.train()
    if "checkpoint" in words:
        model.gradient_checkpointing_enable()
    return model


class Trainer:
    """One model, its optimizer and its batch; ``step`` is what is measured."""

    def __init__(self, keys: dict, batch: int, seq: int, words: set[str], device: str) -> None:
        import torch

        self.torch, self.device = torch, device
        self.model = build(keys, words, device)
        self.called = torch.compile(self.model) if "compile" in words else self.model
        fused = {"fused": True} if "fused" in words else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, **fused)
        self.inputs = self._inputs(batch, seq, "cache" in words)
        self.autocast = "autocast" in words

    def _inputs(self, batch: int, seq: int, use_cache: bool) -> dict:
        """Random tokens that are their own targets, or random pictures."""
        config, torch = self.model.config, self.torch
        if hasattr(config, "image_size"):
            shape = (batch, config.num_channels, config.image_size, config.image_size)
            pixels = torch.randn(shape, device=self.device, dtype=self.model.dtype)
            labels = torch.zeros(batch, dtype=torch.long, device=self.device)
            return {"pixel_values": pixels, "labels": labels}
        ids = torch.randint(0, config.vocab_size, (batch, seq), device=self.device)
        cached = {"use_cache": use_cache} if hasattr(config, "use_cache") else {}
        return {"input_ids": ids, "labels": ids, **cached}

    def forward(self):
        casting = self.torch.autocast(self.device, self.torch.bfloat16)
        with casting if self.autocast else contextlib.nullcontext():
            return self.called(**self.inputs).loss

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, mark=lambda: None) -> None:
        """*mark* is called before each phase and after the last."""
        mark()
        loss = self.forward()
        mark()
        loss.backward()
        mark()
        self.update()
        mark()
        self.loss = loss.detach()

    def wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def phases_bytes(trainer: Trainer) -> dict[str, int]:
    """Bytes allocated after each phase of one step, and the highest during it."""
    cuda, found = trainer.torch.cuda, {}
    loss = None
    for phase in ("forward", "backward", "optimizer"):
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        if phase == "forward":
            found["bytes_before"] = cuda.memory_allocated()
            loss = trainer.forward()
        elif phase == "backward":
            loss.backward()
        else:
            trainer.update()
        cuda.synchronize()
        found[f"{phase}_peak_bytes"] = cuda.max_memory_allocated()
        found[f"{phase}_after_bytes"] = cuda.memory_allocated()
    return found


def timed(trainer: Trainer, seconds: float) -> tuple[dict, float, float]:
    """Medians over steps without a pause for *seconds*; and the wall-clock window they ran in."""
    torch, host, events = trainer.torch, [], []
    on_gpu = trainer.device == "cuda"

    def mark() -> None:
        host.append(time.perf_counter())
        if on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)

    trainer.wait()
    began_s, start = time.time(), time.perf_counter()
    while len(host) < 4 * LEAST_STEPS or time.perf_counter() - start < seconds:
        trainer.step(mark)
        if on_gpu and len(events) > 8:  # at most two steps ahead: as much as a loop that logs its loss
            events[-8].synchronize()
    trainer.wait()
    if on_gpu:
        marks = [0.0] + [events[0].elapsed_time(event) for event in events[1:]]
    else:
        marks = [(at - host[0]) * 1e3 for at in host]
    found = {}
    for name, line in (("", marks), ("host_", [(at - host[0]) * 1e3 for at in host])):
        for phase, label in enumerate(("forward", "backward", "optimizer")):
            spans = [line[at + phase + 1] - line[at + phase] for at in range(0, len(line), 4)]
            found[f"{name}{label}_ms"] = round(median(spans), 4)
    starts = marks[::4]
    steps = [after - before for before, after in pairwise(starts)]
    found |= {
        "step_ms": round(median(steps), 4),
        "step_p10_ms": round(sorted(steps)[len(steps) // 10], 4),
        "step_p90_ms": round(sorted(steps)[len(steps) * 9 // 10], 4),
        "steps": len(steps) + 1,
    }
    return found, began_s, time.time()


def measure(plan, row, watch: Watch, device: str) -> dict:
    import torch

    name, batch, seq, setting = row
    words, on_gpu = set(setting.split()), device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    trainer = Trainer(config_keys(plan, name), batch, seq, words, device)
    for _ in range(WARM_STEPS):
        trainer.step()
    trainer.wait()
    ready_s = time.perf_counter() - started
    first, *_ = timed(trainer, WARM_S)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    found, began_s, ended_s = timed(trainer, RUN_S)
    found["first_second_step_ms"] = first["step_ms"]
    found |= watch.over(began_s, ended_s)
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated()
        found["reserved_bytes"] = torch.cuda.max_memory_reserved()
        found |= phases_bytes(trainer)
    config = trainer.model.config
    found |= {
        "attention": config._attn_implementation,
        "experts": getattr(config, "_experts_implementation", None) or "",
        "params": sum(weight.numel() for weight in trainer.model.parameters()),
        "loss": float(trainer.loss) if math.isfinite(float(trainer.loss)) else str(float(trainer.loss)),
        "ready_s": round(ready_s, 1),
    }
    return found


def kernels(plan, row, watch: Watch, device: str) -> dict:
    """Which kernels a step launches, how often, and their microseconds, phase by phase."""
    from torch.profiler import ProfilerActivity, profile

    name, batch, seq, setting = row
    trainer = Trainer(config_keys(plan, name), batch, seq, set(setting.split()), device)
    for _ in range(WARM_STEPS):
        trainer.step()
    found, loss = {}, None
    for phase in ("forward", "backward", "optimizer"):
        trainer.wait()
        with profile(activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU]) as seen:
            if phase == "forward":
                loss = trainer.forward()
            elif phase == "backward":
                loss.backward()
            else:
                trainer.update()
            trainer.wait()
        rows = sorted(seen.key_averages(), key=lambda one: -one.self_device_time_total)
        found[phase] = [
            (one.key[:160], one.count, round(one.self_device_time_total, 1))
            for one in rows
            if one.self_device_time_total > 0
        ]
    return found


def take(arguments, plan, rows) -> None:
    """Measure *rows* in this process, one after another, each written when it is done."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    watch, out = Watch(), Path(arguments.folder) / f"steps_{arguments.set}.jsonl"
    facts = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    try:
        for row in rows:
            need_s = NEEDED_S["compile" if "compile" in row[3] else ""]
            if time.time() + need_s > arguments.until:
                print("no time left for", row_name(row), flush=True)
                continue
            started = time.perf_counter()
            labels = dict(zip(("model", "batch", "seq", "setting"), row, strict=True))
            record = {"name": row_name(row), **labels, "config": config_keys(plan, row[0]), **facts}
            try:
                record |= (kernels if arguments.set == "profiled" else measure)(plan, row, watch, device)
            except Exception as error:  # whatever a model does, the next one is measured
                record["error"] = f"{type(error).__name__}: {str(error)[:400]}"
            record["took_s"] = round(time.perf_counter() - started, 1)
            with out.open("a") as lines:
                lines.write(json.dumps(record) + "\n")
            shown = {key: record.get(key) for key in ("step_ms", "sm_mhz", "power_w", "took_s", "error")}
            print(row_name(row), {key: value for key, value in shown.items() if value}, flush=True)
            forget(torch)
            if "CUDA error" in record.get("error", ""):
                sys.exit(3)  # this process can do no more; the next one goes on
    finally:
        watch.close()


def forget(torch) -> None:
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def done(folder: str, name: str) -> set[str]:
    file = Path(folder) / f"steps_{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return {json.loads(line)["name"] for line in lines}


def main() -> None:
    parser = argparse.ArgumentParser(description="Training steps of Hugging Face models.")
    parser.add_argument("folder")
    parser.add_argument("--set", default="eager")
    parser.add_argument("--only", nargs="*", default=[], help="parts of names of rows")
    parser.add_argument("--seconds", type=float, default=520.0, help="start no row that may end later")
    parser.add_argument("--plan", default=str(PLAN))
    parser.add_argument("--until", type=float, help="of the process that takes the rows")
    arguments = parser.parse_args()
    plan = tomllib.loads(Path(arguments.plan).read_text())
    wanted = [
        row
        for row in plan["sets"][arguments.set]
        if not arguments.only or any(part in row_name(row) for part in arguments.only)
    ]
    rows = [row for row in wanted if row_name(row) not in done(arguments.folder, arguments.set)]
    if arguments.until is not None:
        take(arguments, plan, rows)
        return
    Path(arguments.folder).mkdir(parents=True, exist_ok=True)
    until, tries = time.time() + arguments.seconds, 0
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    while rows and time.time() + NEEDED_S[""] < until and tries < 5:
        command = [sys.executable, *copy.copy(sys.argv), "--until", str(until)]
        code = subprocess.run(command, env=environment, check=False).returncode
        left = [row for row in rows if row_name(row) not in done(arguments.folder, arguments.set)]
        if code == 0 or len(left) == len(rows):
            break
        rows, tries = left, tries + 1
    print(len(wanted), "rows asked for,", len(done(arguments.folder, arguments.set)), "there", flush=True)


if __name__ == "__main__":
    main()
