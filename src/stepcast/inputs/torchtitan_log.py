"""What torchtitan prints of its steps (``torchtitan/components/metrics.py``)."""

import re
from datetime import datetime

from stepcast.inputs.source import FormatError, Source
from stepcast.ir.measured import LoggedStep, StepLog
from stepcast.units import GIB

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STEP = re.compile(r"\bstep:\s*(\d+)\s+loss:\s*([-0-9.einfa]+)")
WHEN = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[.,]\d+|\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)")
FIELDS = {
    "memory": re.compile(r"memory:\s*([0-9.]+)\s*GiB"),
    "tps": re.compile(r"\btps:\s*([0-9,.]+)"),
    "tflops": re.compile(r"\btflops:\s*([0-9,.]+)"),
    "mfu": re.compile(r"\bmfu:\s*([0-9.]+)%"),
}


def looks_like(head: str) -> bool:
    plain = COLOUR.sub("", head)
    return bool(STEP.search(plain)) and "tps:" in plain and "memory:" in plain


def read(source: Source) -> StepLog:
    steps: list[LoggedStep] = []
    before: tuple[int, datetime] | None = None
    mfu: list[float] = []
    for line in source.each_line(errors="replace"):
        text = COLOUR.sub("", line)
        found = STEP.search(text)
        if found is None:
            continue
        number, at, seconds = int(found[1]), _when(text), None
        if at is not None:
            # Lines may be steps apart; a line's time is that of the steps since the one before.
            if before is not None and number > before[0]:
                seconds = max(0.0, (at - before[1]).total_seconds()) / (number - before[0])
            before = (number, at)
        values = {name: _number(pattern, text) for name, pattern in FIELDS.items()}
        mfu += [values["mfu"] / 100] if values["mfu"] is not None else []
        steps.append(
            LoggedStep(
                step=number,
                seconds=seconds or None,
                tflops_per_gpu=values["tflops"],
                tokens_per_s_per_gpu=values["tps"],
                memory_bytes=None if values["memory"] is None else values["memory"] * GIB,
                loss=_loss(found[2]),
            )
        )
    if not steps:
        raise FormatError("holds no step of torchtitan", source.path)
    peaks = [step.memory_bytes for step in steps if step.memory_bytes is not None]
    facts = {"mfu": sorted(mfu)[len(mfu) // 2]} if mfu else {}
    return StepLog(tuple(steps), source.path, "torchtitan", max(peaks, default=None), facts)


def _when(text: str) -> datetime | None:
    found = WHEN.search(text)
    return datetime.fromisoformat(found[1].replace(",", ".")) if found else None


def _number(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    try:
        return float(found[1].replace(",", "")) if found else None
    except ValueError:
        return None


def _loss(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None
