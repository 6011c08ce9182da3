"""How stepcast marks its own Chakra traces, so that a Workload comes back whole.

GlobalMetadata carries `stepcast.workload`, a JSON plan of stages, blocks and layers without their ops; each
node carries its place in that plan. What an op does is in Chakra's own fields where they can hold it.
"""

from dataclasses import fields
from typing import Any, cast

import msgspec

from stepcast.ir.layout import Layout
from stepcast.ir.recurrent import DeltaRule, SelectiveScan
from stepcast.ir.role import Role
from stepcast.ir.scan import Scan
from stepcast.ir.work import (
    Attention,
    Collective,
    CollectiveKind,
    Elementwise,
    GroupedMatmul,
    Matmul,
    Recorded,
    Transfer,
    Work,
)
from stepcast.ir.workload import UNSTATED, Manner, Phase

SCHEMA_VERSION = "0.0.4"
PLAN_VERSION = 1
PLAN = "stepcast.workload"
STAGE, SECTION, LAYER, PHASE = "stepcast.stage", "stepcast.section", "stepcast.layer", "stepcast.phase"
MICRO_BATCH, OP = "stepcast.micro_batch", "stepcast.op"
BLOCKING, AFTER, EARLY = "stepcast.blocking", "stepcast.after", "stepcast.early"
DURATION_S, WORK = "stepcast.duration_s", "stepcast.work"
PROLOGUE, BODY, EPILOGUE = "prologue", "body", "epilogue"
# Messages between stages: they follow from the plan.
MESSAGE = "message"
# Of a file: its rank, and the stages of the plan that it holds (all, where it is not one of a set).
RANK, STAGES = "stepcast.rank", "stepcast.stages"
PHASES = {str(phase): index for index, phase in enumerate(Phase)}

COLLECTIVE_OF_TYPE = {
    0: CollectiveKind.ALL_REDUCE,
    1: CollectiveKind.REDUCE,
    2: CollectiveKind.ALL_GATHER,
    3: CollectiveKind.GATHER,
    4: CollectiveKind.SCATTER,
    5: CollectiveKind.BROADCAST,
    6: CollectiveKind.ALL_TO_ALL,
    7: CollectiveKind.REDUCE_SCATTER,
    8: CollectiveKind.REDUCE_SCATTER,  # MPI's Reduce_scatter_block
    9: CollectiveKind.BARRIER,
}
TYPE_OF_COLLECTIVE = {kind: number for number, kind in reversed(COLLECTIVE_OF_TYPE.items())}

Notes = tuple[tuple[str, str], ...]


class LayerPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    name: str
    process_s: float = 0.0
    notes: Notes = ()
    role: Role | None = None


class BlockPlan(msgspec.Struct, frozen=True):
    """Layers by their index in the workload's table."""

    layers: tuple[int, ...]
    repeat: int = 1


class StagePlan(msgspec.Struct, frozen=True, omit_defaults=True):
    body: tuple[BlockPlan, ...] = ()
    prologue: tuple[int, ...] = ()
    epilogue: tuple[int, ...] = ()
    # Micro-batch, position, layer.
    variations: tuple[tuple[int, int, int], ...] = ()
    in_turn: bool = False


class WorkloadPlan(msgspec.Struct, frozen=True, omit_defaults=True):
    version: int
    layers: tuple[LayerPlan, ...]
    stages: tuple[StagePlan, ...]
    layout: Layout
    micro_batches: int
    boundary_bytes: int | None = None
    name: str = ""
    source: str = ""
    notes: Notes = ()
    manner: Manner = UNSTATED
    shares: bool = False


WORK_TYPES = {
    kind.__name__: kind
    for kind in (
        *(Matmul, GroupedMatmul, Attention, Scan, DeltaRule, SelectiveScan),
        *(Elementwise, Collective, Transfer, Recorded),
    )
}


def work_text(work: Work) -> str:
    """A Work as JSON: its type's name and its fields."""
    values: dict[str, Any] = {"type": type(work).__name__}
    values |= {field.name: getattr(work, field.name) for field in fields(work)}
    return msgspec.json.encode(values).decode()


def work_from(text: str) -> Work:
    """The Work that *text* describes; ValueError where it describes none."""
    values = msgspec.json.decode(text)
    if not isinstance(values, dict) or values.get("type") not in WORK_TYPES:
        raise ValueError(f"{WORK} {text[:60]!r} is not the work of an op")
    kind = WORK_TYPES[values.pop("type")]
    # Strict about names, so that a misspelt one is not a default; earlier versions did not write how often.
    names = {field.name for field in fields(kind)}
    if not names - {"times"} <= values.keys() <= names:
        raise ValueError(f"{WORK} {text[:60]!r} lacks fields or has unknown ones")
    return cast(Work, msgspec.convert(values, kind))
