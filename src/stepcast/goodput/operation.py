"""The operation of a run: failures, checkpoints, restarts, stragglers and power; failure profiles by name."""

import math
from collections.abc import Mapping
from dataclasses import field, replace
from pathlib import Path

from stepcast.goodput.process import Shortage
from stepcast.hardware.catalog import CatalogError, Description, data_names, flat
from stepcast.inputs.source import DATA, FormatError, Source
from stepcast.ir.limits import DESCRIPTION
from stepcast.ir.tables import Share, convert_table
from stepcast.ir.types import FactDict, dataclass, require
from stepcast.units import DAY, GB, MINUTE, nearest, parse_duration_s


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
    """From an interruption to the first step, without reading the checkpoint.

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
KEYS = {
    "description": "description",
    "between.gpu": "gpu_s",
    "between.node": "node_s",
    "between.link": "link_s",
    "repair.share": "broken_share",
    "repair.takes": "repair_s",
    "restart.detect": "detect_s",
    "restart.reschedule": "reschedule_s",
    "restart.warm_up": "warm_up_s",
}


def load_failures(name_or_path: str) -> tuple[Failures, Restart]:
    """Return the failures and restart times of data/failures/NAME.toml or of a file of the same form."""
    name, known, path, file = name_or_path.lower(), data_names("failures"), Path(name_or_path), name_or_path
    if name == NONE:
        return NO_FAILURES, Restart()
    if not name_or_path.endswith(".toml"):
        if name not in known:
            problem = f"failure profile {name_or_path!r} is not known{nearest(name, [*known, NONE])}"
            raise CatalogError("", "", problem)
        path, file = DATA / "failures" / f"{name}.toml", f"{name}.toml"
    try:
        described = Description.parse(Source(path).text(DESCRIPTION), file)
    except FormatError as error:
        raise CatalogError(file, "", error.message) from None
    values = flat(described.table)
    described.check_keys(values, [*KEYS])
    fields = FactDict()
    for key, value in values.items():
        field_name = KEYS[key]
        try:
            if not field_name.endswith("_s"):
                fields[field_name] = convert_table(value, Share if field_name == "broken_share" else str)
            elif isinstance(value, str):
                fields[field_name] = parse_duration_s(value.replace("_", ""))
            else:
                raise ValueError(f'{value!r} has no unit; write it like "500 h"')
        except ValueError as error:
            raise described.error(key, str(error)) from None
    restart = {name: fields.pop(name) for name in Restart.__slots__ if name in fields}
    sources = {key: str(value) for key, value in described.sources.items()}
    try:
        return replace(NO_FAILURES, name=path.stem, sources=sources, **fields), Restart(**restart)
    except ValueError as error:
        raise CatalogError(file, "", str(error)) from None
