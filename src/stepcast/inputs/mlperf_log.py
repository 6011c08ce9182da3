"""Result logs of MLPerf Training: lines of ``:::MLLOG`` and a JSON object (mlcommons/logging)."""

from itertools import pairwise
from typing import Any

import msgspec

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.measured import LoggedStep, StepLog
from stepcast.units import MS

MARK = ":::MLLOG"
# What a submission states of its run.
STATED = (
    *("submission_benchmark", "submission_org", "submission_platform", "global_batch_size", "max_sequence_length"),
    *("gradient_accumulation_steps", "seed", "max_steps", "opt_base_learning_rate", "train_samples"),
    *("tensor_parallelism", "pipeline_parallelism", "context_parallelism", "expert_parallelism"),
    *("micro_batch_size", "world_size", "number_of_nodes", "accelerators_per_node"),
)


def looks_like(head: str) -> bool:
    return MARK in head


def read(source: Source) -> StepLog:
    facts: dict[str, Any] = {}
    marks: dict[str, float] = {}
    blocks: list[tuple[int, float]] = []
    throughputs: list[float] = []
    for line in source.each_line(errors="replace"):
        _, found, text = line.partition(MARK)
        if not found:
            continue
        try:
            event = msgspec.json.decode(text.strip())
        except msgspec.DecodeError:
            continue  # cut off, as the last line of a killed run
        if not isinstance(event, dict) or not isinstance(event.get("time_ms"), int | float):
            continue
        key, value, more = event.get("key"), event.get("value"), event.get("metadata")
        at_s, more = float(event["time_ms"]) * MS, more if isinstance(more, dict) else {}
        if key in STATED and value is not None:
            facts[str(key)] = value
        elif key in ("init_start", "init_stop", "run_start", "run_stop"):
            marks[str(key)] = at_s
            if key == "run_stop":
                facts["status"] = more.get("status")
        elif key in ("eval_accuracy", "eval_error"):
            facts.setdefault("evaluations", []).append([_samples(more), value])
        elif key == "tracked_stats" and isinstance(value, dict):
            if isinstance(value.get("throughput"), int | float):
                throughputs.append(float(value["throughput"]))
            blocks.append((_samples(more), at_s))
        elif key == "block_stop":
            blocks.append((_samples(more), at_s))
    if not marks and not facts:
        raise FormatError("holds no event of MLPerf", source.path)
    if {"run_start", "run_stop"} <= marks.keys():
        facts["run_s"] = marks["run_stop"] - marks["run_start"]
    if throughputs:
        facts["samples_per_s"] = sorted(throughputs)[len(throughputs) // 2]
    return StepLog(_steps(facts, blocks, throughputs), source.path, "MLPerf", None, facts)


def _samples(more: dict[str, Any]) -> int:
    for name in ("samples_count", "step", "epoch_count", "epoch_num"):
        if isinstance(more.get(name), int | float):
            return int(more[name])
    return -1


def _steps(facts: dict[str, Any], blocks: list[tuple[int, float]], rates: list[float]) -> tuple[LoggedStep, ...]:
    """A step's time follows from samples a second, or from samples between two blocks."""
    batch = facts.get("global_batch_size")
    if not isinstance(batch, int) or batch < 1:
        return ()
    if rates:
        return tuple(LoggedStep(at, batch / rate, samples=batch) for at, rate in enumerate(rates) if rate > 0)
    found = []
    for (before, began_s), (after, ended_s) in pairwise(blocks):
        steps = (after - before) / batch
        if steps > 0 and before >= 0:
            found.append(LoggedStep(after // batch, (ended_s - began_s) / steps, samples=batch))
    return tuple(found)
