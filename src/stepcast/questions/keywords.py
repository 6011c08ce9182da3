"""Keywords of the functions that search, plan, analyze and replay; a test compares them with options."""

import datetime
import os
from typing import TypedDict

from stepcast.questions.question import StepChoices

Words = list[str] | tuple[str, ...] | str | None
Count = int | str | None
Amount = float | str | None
Name = str | os.PathLike[str] | None
Date = datetime.date | str | None


class SearchChoices(TypedDict, total=False):
    """Choices of ``stepcast.search``; a value of ``tp`` and the like fixes it."""

    gpu: str | None
    set: Words
    tokens_per_batch: Amount
    any_framework: bool | None
    tp: Count
    cp: Count
    ep: Count
    expert_tp: Count
    pp: Count
    vpp: Count
    micro_batch: Count
    schedule: str | None
    recompute: str | None
    sharding: int | str | None
    precision: str | None
    fix: Words
    allow: Words
    objective: str | None
    max_memory: Amount
    memory_reserve: Amount
    tokens: Amount
    price: Amount
    currency: str | None
    time: Amount
    workers: Count


class PlanChoices(StepChoices, total=False):
    """Choices of ``stepcast.plan``: those of a step, the length of the run, and how it is operated."""

    model: str | None
    cluster: str | None
    framework: str | None
    calibration: Name
    config: Name
    ignore_unknown: bool | None
    tokens: Amount
    price: Amount
    steps: Count
    until: Date
    from_: Date
    step_s: Amount
    stage: Words
    host_power: Amount
    failures: Name
    mtbf: str | None
    checkpoint_every: str | None
    checkpoint_size: Amount
    node_write: str | None
    store_write: str | None
    blocking: bool | None
    restart: str | None
    spares: Count
    shrink: bool | None
    repair: str | None
    stragglers: str | None
    evaluate: str | None
    allow_oom: bool | None


class AnalyzeChoices(TypedDict, total=False):
    """Choices of ``stepcast.analyze``."""

    format: str | None
    cluster: str | None
    set: Words
    calibration: Name
    trace: Name


class ReplayChoices(TypedDict, total=False):
    """Choices of ``stepcast.replay``."""

    scale_to: Count
    gpu: str | None
    cluster: str | None
    set: Words
    trace: Name
    engine: str | None
