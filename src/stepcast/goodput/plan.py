"""A training run planned: days, GPU-hours, energy and cost of phases of steps under an operation.

An operation is failures, checkpoints, restarts, stragglers and power; failure profiles have names.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from functools import reduce
from pathlib import Path

import numpy as np

from stepcast.goodput.process import (
    RunProcess,
    Shortage,
    SimulatedRuns,
    TimeSplit,
    best_interval_s,
    daly_s,
    expect_split,
    simulate_runs,
    young_s,
)
from stepcast.hardware.catalog import CatalogError, Description, data_names, flat, read_chained
from stepcast.inputs.source import DATA
from stepcast.ir.tables import Share, convert_table
from stepcast.ir.types import FactDict, Facts, dataclass, pick, require
from stepcast.units import DAY, DEFAULT_CURRENCY, GB, HOUR, MINUTE, format_percent, nearest, parse_duration_s
from stepcast.views.answer import Answer


@dataclass(frozen=True, slots=True)
class Failures:
    """Mean times between the interruptions that one GPU, node or link causes."""

    name: str = "none"
    gpu_s: float = math.inf
    node_s: float = math.inf
    link_s: float = math.inf
    broken_share: float = 0.0  # share of interruptions after which a node is taken out
    repair_s: float = DAY
    description: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, hash=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("gpu_s", "node_s", "link_s"):
            require(getattr(self, name) > 0, f"a time between failures must be above zero ({name})")

    def per_s(self, gpus: int, nodes: int, links: int) -> float:
        """Return the interruptions per second of a job with these parts; a failure of any stops it."""
        return gpus / self.gpu_s + nodes / self.node_s + links / self.link_s


NO_FAILURES = Failures()


@dataclass(frozen=True, slots=True)
class Saving:
    """A checkpoint: its size, and how fast it is copied from the GPUs and written."""

    size_bytes: float = 0.0
    node_bytes_per_s: float = 1 * GB
    store_bytes_per_s: float = math.inf
    background: bool = True  # training continues while the copy in host memory is written
    copy_bytes_per_s: float = 25 * GB  # from a GPU to its host
    # Planning who writes what (PyTorch 2024, "Reducing Model Checkpointing Times by Over 10x": of 148.8 s, a pause
    # of 6.3 s remains with the rest deferred).
    planning_s: float = 6.3

    def __post_init__(self) -> None:
        for name in ("node_bytes_per_s", "store_bytes_per_s", "copy_bytes_per_s"):
            require(getattr(self, name) > 0, f"{name} must be above zero")
        require(self.size_bytes >= 0, "a checkpoint has a size of zero or more")

    def write_s(self, nodes: int) -> float:
        return self.size_bytes / min(nodes * self.node_bytes_per_s, self.store_bytes_per_s)

    def pause_s(self, nodes: int, gpus: int) -> float:
        if not self.size_bytes:
            return 0.0
        copied_s = self.size_bytes / (gpus * self.copy_bytes_per_s)
        return self.planning_s + (copied_s if self.background else self.write_s(nodes))

    def lag_s(self, nodes: int) -> float:
        return self.write_s(nodes) if self.background else 0.0


@dataclass(frozen=True, slots=True)
class Restart:
    """The times of a restart, from an interruption to the first step, without reading the checkpoint.

    MegaScale's times: detected and diagnosed within ten minutes, training within fifteen (Jiang et al. 2024,
    section 6.3).
    """

    detect_s: float = 10 * MINUTE
    reschedule_s: float = 4 * MINUTE
    warm_up_s: float = 1 * MINUTE

    @property
    def total_s(self) -> float:
        return self.detect_s + self.reschedule_s + self.warm_up_s


@dataclass(frozen=True, slots=True)
class Stragglers:
    """Slow periods: how many a node has per day, their duration, and the relative increase of the step time."""

    per_node_day: float = 0.0
    spell_s: float = 0.0
    slowdown: float = 0.0

    def factor(self, nodes: int) -> float:
        """Return the mean step time relative to one without stragglers; a second slow node changes nothing."""
        active = nodes * self.per_node_day * self.spell_s / DAY
        return 1 + self.slowdown * -math.expm1(-active)


@dataclass(frozen=True, slots=True)
class Pause:
    """A planned pause, such as an evaluation."""

    every_steps: int
    for_s: float


@dataclass(frozen=True, slots=True)
class Operation:
    failures: Failures = NO_FAILURES
    saving: Saving = Saving()
    restart: Restart = Restart()
    stragglers: Stragglers = Stragglers()
    pause: Pause | None = None
    interval_s: float | None = None  # work between checkpoints; None: the best
    spares: int | None = None
    shortage: Shortage = Shortage.WAIT


# Shares of a GPU's power limit. Measured on an H200 (tools/measure_hf_steps.py, measure_power.py): 653 W of 700
# over 56 training steps that kept it busy, 121 W with a kernel that only waits. Exposed communication was not
# measured: a third is assumed, between waiting and moving memory (560 W).
COMPUTING, EXCHANGING, IDLE = 0.93, 0.33, 0.17
BUSY_PARTS = ("compute", "optimizer")


def node_watts(gpu_power_w: float, gpus: int, host_w: float, breakdown_s: Mapping[str, float]) -> float:
    """Return the mean power of a node over a step with this breakdown."""
    total_s = sum(breakdown_s.values())
    busy_s = sum(breakdown_s.get(part, 0.0) for part in BUSY_PARTS)
    idle_s = breakdown_s.get("bubble", 0.0)
    share = (COMPUTING * busy_s + IDLE * idle_s + EXCHANGING * (total_s - busy_s - idle_s)) / (total_s or 1)
    return host_w + gpus * gpu_power_w * share


def idle_node_watts(gpu_power_w: float, gpus: int, host_w: float) -> float:
    return host_w + gpus * gpu_power_w * IDLE


NONE = "none"


# Keys of a profile and the fields of Failures and Restart that they set.
KEYS = {"description": "description", "repair.share": "broken_share", "repair.takes": "repair_s"}
KEYS |= {f"between.{part}": f"{part}_s" for part in ("gpu", "node", "link")}
KEYS |= {f"restart.{name.removesuffix('_s')}": name for name in Restart.__slots__}


def load_failures(name_or_path: str) -> tuple[Failures, Restart]:
    """Return the failures and restart times of data/failures/NAME.toml or of a file of the same form."""
    name, known, path, file = name_or_path.lower(), data_names("failures"), name_or_path, name_or_path
    if name == NONE:
        return NO_FAILURES, Restart()
    if not name_or_path.endswith(".toml"):
        if name not in known:
            problem = f"failure profile {name_or_path!r} is not known{nearest(name, [*known, NONE])}"
            raise CatalogError("", "", problem)
        path, file = str(DATA / "failures" / f"{name}.toml"), f"{name}.toml"
    text, _ = read_chained(path, (), "", "")
    described = Description.parse(text, file)
    values = flat(described.table)
    described.check_keys(values, [*KEYS])
    fields = FactDict()
    for key, value in values.items():
        field_name = KEYS[key]
        try:
            if field_name.endswith("_s"):
                require(isinstance(value, str), f'{value!r} has no unit; write it like "500 h"')
                fields[field_name] = parse_duration_s(str(value).replace("_", ""))
            else:
                fields[field_name] = convert_table(value, Share if field_name == "broken_share" else str)
        except ValueError as error:
            raise described.error(key, str(error)) from None
    restart = {name: fields.pop(name) for name in Restart.__slots__ if name in fields}
    sources = {key: str(value) for key, value in described.sources.items()}
    try:
        return replace(NO_FAILURES, name=Path(path).stem, sources=sources, **fields), Restart(**restart)
    except ValueError as error:
        raise CatalogError(file, "", str(error)) from None


QUANTILES = {"p10": 0.1, "median": 0.5, "p90": 0.9}


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """Steps of one kind on a number of GPUs."""

    steps: int
    step_s: float
    tokens_per_step: float
    gpus: int
    gpus_per_node: int = 8
    links_per_node: int = 8
    replicas: int = 1  # copies of the model; a job can continue without some
    busy_node_w: float = 0.0  # power of a node with its GPUs during a step
    idle_node_w: float = 0.0
    # The memory of a predicted step: total, capacity and fits. None: the step was measured.
    memory_bytes: Facts | None = None

    def __post_init__(self) -> None:
        require(self.steps >= 0, "a phase has steps")
        require(math.isfinite(self.step_s) and self.step_s > 0, "a step takes time")
        require(self.gpus >= 1 and self.gpus_per_node >= 1, "a phase runs on GPUs, in nodes")

    @property
    def nodes(self) -> int:
        return math.ceil(self.gpus / self.gpus_per_node)


def build_process(phase: TrainingPhase, operation: Operation) -> RunProcess:
    """Return *phase* as a renewal process with the checkpoint interval of *operation*, or the best one."""
    nodes, saving, failures = phase.nodes, operation.saving, operation.failures
    step_s = phase.step_s * operation.stragglers.factor(nodes)
    if operation.pause:  # a share of the planned pauses
        step_s += operation.pause.for_s / operation.pause.every_steps
    process = RunProcess(
        work_s=phase.steps * step_s,
        pause_s=saving.pause_s(nodes, phase.gpus),
        lag_s=saving.lag_s(nodes),
        failures_per_s=failures.per_s(phase.gpus, nodes, nodes * phase.links_per_node if nodes > 1 else 0),
        restart_s=operation.restart.total_s + saving.write_s(nodes),
        **pick(failures, "broken_share repair_s"),
        **pick(operation, "spares shortage"),
        replicas=phase.replicas,
        nodes_per_replica=phase.gpus / phase.replicas / phase.gpus_per_node,
    )
    if operation.interval_s is None:
        return replace(process, interval_s=best_interval_s(process, step_s))
    # A checkpoint begins after a step, and when the previous one is safe.
    steps = max(1, round(operation.interval_s / step_s), math.ceil(process.lag_s / step_s))
    return replace(process, interval_s=steps * step_s)


@dataclass(frozen=True, slots=True)
class PlannedPhase:
    """A phase with its process and its expected time by part."""

    phase: TrainingPhase
    process: RunProcess
    split: TimeSplit
    stragglers_s: float
    pauses_s: float

    def facts(self) -> FactDict:
        process = self.process
        return {
            **pick(self.phase, "gpus steps step_s tokens_per_step"),
            "interruptions": self.split.failures,
            "between_interruptions_s": 1 / process.failures_per_s if process.failures_per_s else None,
            "interval_s": process.interval_s if process.checkpoints else None,
            "young_s": _finite(young_s(process.pause_s, process.failures_per_s)),
            "daly_s": _finite(daly_s(process.pause_s, process.failures_per_s)),
            **pick(process, "checkpoints checkpoint_pause_s=pause_s"),
            "checkpoint_write_s": process.lag_s or process.pause_s,
            "restart_s": process.restart_s,
            "days": self.split.total_s / DAY,
            "memory_bytes": self.phase.memory_bytes,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Plan(Answer):
    """A training run from its first step to its last."""

    view, title = "plan.plan_view", "plan"
    phases: tuple[PlannedPhase, ...]
    operation: Operation
    simulated: SimulatedRuns
    price_per_gpu_hour: float | None = None
    pue: float = 1.0
    currency: str = DEFAULT_CURRENCY
    electricity: float = 0.0  # price per kWh, if it is paid apart
    carbon: float | None = None  # grams of CO2 equivalents per kWh
    describe: Callable[["Plan"], FactDict] | None = None

    def __repr__(self) -> str:
        days, gpus = self.mean_s / DAY, self.phases[-1].phase.gpus
        return f"Plan({self.steps:,} steps on {gpus:,} GPUs: {days:,.1f} days, goodput {format_percent(self.goodput)})"

    @property
    def fits(self) -> bool | None:
        """True if every phase fits into GPU memory; None if the step of one was measured."""
        verdicts = [planned.phase.memory_bytes for planned in self.phases]
        if any(memory and not memory["fits"] for memory in verdicts):
            return False
        return None if None in verdicts else True

    @property
    def ideal_s(self) -> float:
        """The time of all steps without interruption."""
        return sum(planned.phase.steps * planned.phase.step_s for planned in self.phases)

    @property
    def expected_s(self) -> float:
        """The expected time in closed form."""
        return sum(planned.split.total_s for planned in self.phases)

    @property
    def mean_s(self) -> float:
        return float(self.simulated.total_s.mean())

    @property
    def goodput(self) -> float:
        return self.ideal_s / self.mean_s if self.mean_s else 1.0

    @property
    def steps(self) -> int:
        return sum(planned.phase.steps for planned in self.phases)

    @property
    def tokens(self) -> float:
        return sum(planned.phase.steps * planned.phase.tokens_per_step for planned in self.phases)

    @property
    def gpu_hours(self) -> float:
        """GPU-hours of all reserved GPUs, with spares, from first to last step."""
        scale = self.mean_s / self.expected_s if self.expected_s else 1.0
        spares = self.operation.spares or 0
        phases = ((planned.phase, planned.split.total_s) for planned in self.phases)
        return scale * sum((phase.gpus + spares * phase.gpus_per_node) * total_s / HOUR for phase, total_s in phases)

    @property
    def energy_mwh(self) -> float:
        joules = 0.0
        for planned in self.phases:
            split, phase = planned.split, planned.phase
            busy_s = split.work_s + split.lost_s + split.shrunk_s - planned.pauses_s
            idle_s = split.total_s - busy_s
            joules += phase.nodes * (busy_s * phase.busy_node_w + idle_s * phase.idle_node_w)
            joules += (self.operation.spares or 0) * split.total_s * phase.idle_node_w
        return joules * self.pue / HOUR / 1e6

    @property
    def split_s(self) -> dict[str, float]:
        """The mean time by part; the parts sum to it."""
        simulated = self.simulated
        stragglers_s = sum(planned.stragglers_s for planned in self.phases)
        pauses_s = sum(planned.pauses_s for planned in self.phases)
        return {
            "steps": simulated.work_s - stragglers_s - pauses_s,
            "stragglers": stragglers_s,
            "pauses": pauses_s,
            "checkpoints": simulated.checkpoints_s,
            "lost_work": float(simulated.lost_s.mean()),
            "restarts": float(simulated.restarts_s.mean()),
            "waiting_for_repair": float(simulated.waiting_s.mean()),
            "missing_replicas": float(simulated.shrunk_s.mean()),
        }

    def facts(self) -> FactDict:
        """Return the plan with the keys of its JSON."""
        hours, energy_mwh, cost, currency = self.gpu_hours, self.energy_mwh, None, None
        if self.price_per_gpu_hour is not None:
            cost = hours * self.price_per_gpu_hour + 1e3 * energy_mwh * self.electricity
            currency = self.currency
        quantiles = {name: float(np.quantile(self.simulated.total_s, share)) for name, share in QUANTILES.items()}
        others = "standard_error=simulated.error_s closed_form=expected_s without_interruption=ideal_s"
        times_s = {"mean": self.mean_s, **quantiles, **pick(self, others)}
        return {
            "days": {name: seconds / DAY for name, seconds in times_s.items()},
            **pick(self, "steps tokens"),
            "tokens_per_s": self.tokens / self.mean_s if self.mean_s else None,
            "gpu_hours": hours,
            "cost": cost,
            "currency": currency,
            "energy_mwh": energy_mwh or None,
            "carbon_t": None if self.carbon is None else energy_mwh * self.carbon / 1e3,
            **pick(self, "goodput split_s"),
            "interruptions": float(self.simulated.failures.mean()),
            "runs": len(self.simulated.total_s),
            "phases": [planned.facts() for planned in self.phases],
            **pick(self.operation, "failures=failures.name spares checkpoint_bytes=saving.size_bytes"),
            "step_band_days": None,
            **{name: [] for name in ("choices", "assumptions", "warnings")},
        }


def plan(
    phases: Sequence[TrainingPhase],
    operation: Operation,
    price_per_gpu_hour: float | None = None,
    pue: float = 1.0,
    runs: int = 1000,
    seed: int = 0,
    currency: str = DEFAULT_CURRENCY,
    electricity: float = 0.0,
    carbon: float | None = None,
) -> Plan:
    """Plan the run of *phases*, one after the other, under *operation*.

    *electricity* is the price per kWh if it is paid apart, *carbon* the grams of CO2 equivalents of a kWh.
    """
    require(bool(phases), "a run has at least one phase")
    require(runs >= 1, "at least one run is simulated")
    planned, simulated = list[PlannedPhase](), list[SimulatedRuns]()
    generator = np.random.default_rng(seed)
    for phase in phases:
        process = build_process(phase, operation)
        stragglers_s = phase.steps * phase.step_s * (operation.stragglers.factor(phase.nodes) - 1)
        pauses_s = max(0.0, process.work_s - phase.steps * phase.step_s - stragglers_s)
        planned.append(PlannedPhase(phase, process, expect_split(process), stragglers_s, pauses_s))
        simulated.append(simulate_runs(process, runs, generator))
    total = reduce(SimulatedRuns.then, simulated)
    return Plan(tuple(planned), operation, total, price_per_gpu_hour, pue, currency, electricity, carbon)


def expected_s(phases: Sequence[TrainingPhase], operation: Operation) -> float:
    """Return the expected time of the run of *phases* in closed form."""
    return sum(expect_split(build_process(phase, operation)).total_s for phase in phases)


def plan_alternatives(
    phases: Sequence[TrainingPhase], operation: Operation, spares: Sequence[int | None]
) -> list[FactDict]:
    """Return the goodput in closed form for other checkpoint intervals and numbers of spare nodes.

    The keys of a row are spares, times_best (its interval over the best one), interval_s, goodput and days.
    """
    ideal_s = sum(phase.steps * phase.step_s for phase in phases)
    rows: list[FactDict] = []
    for count in spares or (operation.spares,):
        processes = [build_process(phase, replace(operation, spares=count)) for phase in phases]
        for factor in (0.25, 0.5, 1, 2, 4):
            total_s, interval_s = 0.0, 0.0
            for phase, best in zip(phases, processes, strict=True):
                if not best.checkpoints:
                    total_s += expect_split(best).total_s
                    continue
                wanted = replace(operation, spares=count, interval_s=best.interval_s * factor)
                try:
                    process = build_process(phase, wanted)
                    total_s += expect_split(process).total_s
                    interval_s = process.interval_s
                except ValueError:
                    total_s = math.inf
            goodput, every_s = ideal_s / total_s if total_s else 1.0, interval_s or None
            row = {"spares": count, "times_best": factor, "interval_s": every_s, "goodput": goodput}
            rows.append({**row, "days": _finite(total_s / DAY)})
    return rows


def steps_within(phase: TrainingPhase, operation: Operation, available_s: float) -> int:
    """Return the mean number of steps that finish within *available_s*."""
    counts = range(1, int(available_s / phase.step_s) + 1)
    steps = bisect_right(counts, available_s, key=lambda steps: expected_s([replace(phase, steps=steps)], operation))
    require(steps > 0, "not one step finishes in that time")
    return steps
