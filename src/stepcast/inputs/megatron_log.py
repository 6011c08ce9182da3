"""What Megatron-LM prints of its iterations (``megatron/training/training.py``, training_log)."""

import re

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.measured import LoggedStep, StepLog
from stepcast.units import MIB, MS

ITERATION = re.compile(r"iteration\s+(\d+)\s*/\s*(\d+)\s*\|")
MEMORY = re.compile(r"\[Rank (\d+)\].*memory \(MB\)(.*)")
TIME, RATE = "elapsed time per iteration (ms)", "throughput per GPU (TFLOP/s/GPU)"


def looks_like(head: str) -> bool:
    return bool(ITERATION.search(head)) and "elapsed time per iteration" in head


def read(source: Source) -> StepLog:
    steps: list[LoggedStep] = []
    peaks: dict[int, float] = {}
    total = 0
    for line in source.each_line(errors="replace"):
        if found := ITERATION.search(line):
            pairs = {name.strip(): float(value) for name, value in _pairs(line[found.end() :])}
            total = int(found[2])
            steps.append(
                LoggedStep(
                    step=int(found[1]),
                    seconds=_scaled(pairs.get(TIME), MS),
                    tflops_per_gpu=pairs.get(RATE),
                    samples=int(pairs["global batch size"]) if "global batch size" in pairs else None,
                    loss=pairs.get("lm loss"),
                )
            )
        elif found := MEMORY.search(line):
            pairs = {name.strip(): float(value) for name, value in _pairs(found[2].lstrip(" |"))}
            if "max allocated" in pairs:
                peaks[int(found[1])] = max(peaks.get(int(found[1]), 0.0), pairs["max allocated"] * MIB)
    if not steps:
        raise FormatError("holds no iteration of Megatron-LM", source.path)
    return StepLog(
        tuple(steps),
        source=source.path,
        program="Megatron-LM",
        peak_bytes=max(peaks.values(), default=None),
        facts={"iterations": total, "memory_bytes_by_rank": peaks},
    )


def _pairs(text: str) -> list[tuple[str, str]]:
    found = []
    for part in text.split("|"):
        name, colon, value = part.rpartition(":")
        if colon and _is_number(value.strip()):
            found.append((name, value.strip()))
    return found


def _is_number(text: str) -> bool:
    try:
        value = float(text)
    except ValueError:
        return False
    return value == value and abs(value) != float("inf")


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None or value < 0 else value * unit
