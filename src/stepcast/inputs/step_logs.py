"""Step times that training programs print: Megatron-LM, torchtitan, and MLPerf Training result logs."""

import math
import re
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.measured import LoggedStep, StepLog
from stepcast.units import GIB, MIB, MS

# Megatron-LM (megatron/training/training.py, training_log).
ITERATION = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|")
RANK_MEMORY = re.compile(r"\[Rank (\d+)\].*memory \(MB\)(.*)")


def looks_like_megatron(head: str) -> bool:
    return bool(ITERATION.search(head)) and "elapsed time per iteration" in head


def read_megatron(source: Source) -> StepLog:
    steps: list[LoggedStep] = []
    peaks: dict[int, float] = {}
    total = 0
    for line in source.each_line(errors="replace"):
        if match := ITERATION.search(line):
            values = _named_numbers(line[match.end() :])
            total = int(match[2])
            milliseconds = values.get("elapsed time per iteration (ms)", -1.0)
            steps.append(
                LoggedStep(
                    step=int(match[1]),
                    seconds=milliseconds * MS if milliseconds >= 0 else None,
                    tflops_per_gpu=values.get("throughput per GPU (TFLOP/s/GPU)"),
                    samples=int(values["global batch size"]) if "global batch size" in values else None,
                    loss=values.get("lm loss"),
                )
            )
        elif match := RANK_MEMORY.search(line):
            values = _named_numbers(match[2].lstrip(" |"))
            if "max allocated" in values:
                peaks[int(match[1])] = max(peaks.get(int(match[1]), 0.0), values["max allocated"] * MIB)
    if not steps:
        raise FormatError("holds no iteration of Megatron-LM", source.path)
    facts = {"iterations": total, "memory_bytes_by_rank": peaks}
    return StepLog(tuple(steps), source.path, "Megatron-LM", max(peaks.values(), default=None), facts)


def _named_numbers(text: str) -> dict[str, float]:
    """Return the finite numbers of ``name: value | name: value``."""
    numbers = {}
    for part in text.split("|"):
        name, colon, value = part.rpartition(":")
        number = _finite(value) if colon else None
        if number is not None:
            numbers[name.strip()] = number
    return numbers


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


# torchtitan (torchtitan/components/metrics.py).
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:\s*([-0-9.einfa]+)")
LINE_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
FIELDS = {
    "memory": re.compile(r"memory:\s*([0-9.]+)\s*GiB"),
    "tps": re.compile(r"\btps:\s*([0-9,.]+)"),
    "tflops": re.compile(r"\btflops:\s*([0-9,.]+)"),
    "mfu": re.compile(r"\bmfu:\s*([0-9.]+)%"),
}


def looks_like_torchtitan(head: str) -> bool:
    plain = COLOUR.sub("", head)
    return bool(STEP.search(plain)) and "tps:" in plain and "memory:" in plain


def read_torchtitan(source: Source) -> StepLog:
    steps: list[LoggedStep] = []
    before: tuple[int, datetime] | None = None
    mfu: list[float] = []
    for line in source.each_line(errors="replace"):
        text = COLOUR.sub("", line)
        match = STEP.search(text)
        if match is None:
            continue
        number, seconds = int(match[1]), None
        if printed := LINE_TIME.search(text):
            time = datetime.fromisoformat(printed[1].replace(",", "."))
            # Lines may be steps apart; a line's time is that of the steps since the one before.
            if before is not None and number > before[0]:
                seconds = max(0.0, (time - before[1]).total_seconds()) / (number - before[0])
            before = (number, time)
        printed_fields = {name: pattern.search(text) for name, pattern in FIELDS.items()}
        values = {name: _finite(field[1].replace(",", "")) for name, field in printed_fields.items() if field}
        memory, share = values.get("memory"), values.get("mfu")
        mfu += [] if share is None else [share / 100]
        steps.append(
            LoggedStep(
                step=number,
                seconds=seconds or None,
                tflops_per_gpu=values.get("tflops"),
                tokens_per_s_per_gpu=values.get("tps"),
                memory_bytes=None if memory is None else memory * GIB,
                loss=_finite(match[2]),
            )
        )
    if not steps:
        raise FormatError("holds no step of torchtitan", source.path)
    peaks = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    facts = {"mfu": sorted(mfu)[len(mfu) // 2]} if mfu else {}
    return StepLog(tuple(steps), source.path, "torchtitan", max(peaks, default=None), facts)


# MLPerf Training: lines of ``:::MLLOG`` and a JSON object (mlcommons/logging).
MLPERF_MARK = ":::MLLOG"
# What a submission states of its run.
MLPERF_FACTS = (
    *("submission_benchmark", "submission_org", "submission_platform", "global_batch_size", "max_sequence_length"),
    *("gradient_accumulation_steps", "seed", "max_steps", "opt_base_learning_rate", "train_samples"),
    *("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism"),
    *("micro_batch_size", "world_size", "number_of_nodes", "accelerators_per_node"),
)


def looks_like_mlperf(head: str) -> bool:
    return MLPERF_MARK in head


def read_mlperf(source: Source) -> StepLog:
    facts: dict[str, object] = {}
    evaluations: list[list[object]] = []
    times: dict[str, float] = {}
    blocks: list[tuple[int, float]] = []
    throughputs: list[float] = []
    for line in source.each_line(errors="replace"):
        _, mark, text = line.partition(MLPERF_MARK)
        try:
            event = msgspec.json.decode(text.strip()) if mark else None
        except msgspec.DecodeError:
            continue  # cut off, as the last line of a killed run
        if not isinstance(event, dict) or not isinstance(event.get("time_ms"), int | float):
            continue
        key, value, metadata = event.get("key"), event.get("value"), event.get("metadata")
        time_s = float(event["time_ms"]) * MS
        metadata = metadata if isinstance(metadata, dict) else {}
        if key in MLPERF_FACTS and value is not None:
            facts[str(key)] = value
        elif key in ("init_start", "init_stop", "run_start", "run_stop"):
            times[str(key)] = time_s
            if key == "run_stop":
                facts["status"] = metadata.get("status")
        elif key in ("eval_accuracy", "eval_error"):
            evaluations.append([_mlperf_samples(metadata), value])
            facts["evaluations"] = evaluations
        elif key == "tracked_stats" and isinstance(value, dict):
            if isinstance(value.get("throughput"), int | float):
                throughputs.append(float(value["throughput"]))
            blocks.append((_mlperf_samples(metadata), time_s))
        elif key == "block_stop":
            blocks.append((_mlperf_samples(metadata), time_s))
    if not times and not facts:
        raise FormatError("holds no event of MLPerf", source.path)
    if {"run_start", "run_stop"} <= times.keys():
        facts["run_s"] = times["run_stop"] - times["run_start"]
    if throughputs:
        facts["samples_per_s"] = sorted(throughputs)[len(throughputs) // 2]
    steps = _mlperf_steps(facts.get("global_batch_size"), blocks, throughputs)
    return StepLog(steps, source.path, "MLPerf", None, facts)


def _mlperf_samples(metadata: Mapping[str, object]) -> int:
    for name in ("samples_count", "step", "epoch_count", "epoch_num"):
        if isinstance(value := metadata.get(name), int | float):
            return int(value)
    return -1


def _mlperf_steps(batch: object, blocks: list[tuple[int, float]], rates: list[float]) -> tuple[LoggedStep, ...]:
    """Return steps whose times follow from samples per second, or from samples between two blocks."""
    if not isinstance(batch, int) or batch < 1:
        return ()
    if rates:
        return tuple(LoggedStep(index, batch / rate, samples=batch) for index, rate in enumerate(rates) if rate > 0)
    steps = []
    for (before, began_s), (after, ended_s) in pairwise(blocks):
        count = (after - before) / batch
        if count > 0 and before >= 0:
            steps.append(LoggedStep(after // batch, (ended_s - began_s) / count, samples=batch))
    return tuple(steps)
