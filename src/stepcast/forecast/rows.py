"""Answers as rows of a table: one level deep, plain values, names that say their unit."""

from collections.abc import Mapping
from typing import Any

Cell = str | int | float | bool | None

ASKED = ("model", "parameters", "cluster", "gpu", "framework")
REACHED = ("step_s", "tokens_per_s", "tflops_per_gpu", "mfu", "bubble_fraction")


def row_of(facts: Mapping[str, Any]) -> dict[str, Cell]:
    """The facts of a prediction as one row; what a workload file does not know is None."""
    row: dict[str, Cell] = {name: facts.get(name) for name in ASKED}
    row |= facts.get("strategy") or {"gpus": facts["gpus"], "schedule": facts["schedule"]}
    row |= {name: facts[name] for name in REACHED}
    row |= {name: facts["uncertainty"][name] for name in ("low_s", "high_s")}
    memory = facts["memory_bytes"] or {}
    row |= {"memory_bytes": memory.get("total"), "fits": memory.get("fits")}
    return row | {f"{part}_s": seconds for part, seconds in facts["breakdown_s"].items()}
