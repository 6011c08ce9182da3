"""A Workload from a trace that stepcast wrote: nodes folded back into the layers of its plan."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np

from stepcast.inputs.byte_view import row_hashes
from stepcast.inputs.chakra_nodes import NONE, Column, Nodes, Trace
from stepcast.inputs.chakra_plan import (
    BLOCKING,
    BODY,
    DURATION_S,
    EPILOGUE,
    LAYER,
    MICRO_BATCH,
    OP,
    PHASE,
    PHASES,
    PLAN,
    PLAN_VERSION,
    PROLOGUE,
    SECTION,
    STAGE,
    WORK,
    StagePlan,
    WorkloadPlan,
    work_from,
)
from stepcast.inputs.errors import FormatError
from stepcast.ir.work import Recorded
from stepcast.ir.workload import Block, Layer, Op, Stage, Variation, Workload

SECTIONS = frozenset({PROLOGUE, BODY, EPILOGUE})
SLOT_ATTRIBUTES = (STAGE, SECTION, LAYER, PHASE, OP, BLOCKING, DURATION_S, WORK)

Ops = tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]
NO_OPS: Ops = ((), (), ())
# Where a layer runs: stage, section, micro-batch (0 outside the body), position.
Place = tuple[int, str, int, int]
# What a node's attributes say: stage, section, position, phase, op.
Slot = tuple[int, str, int, int, Op]


def own_workload(trace: Trace, path: str) -> Workload:
    """The workload that stepcast wrote."""
    try:
        plan = msgspec.json.decode(str(trace.metadata[PLAN]), type=WorkloadPlan)
        if plan.version != PLAN_VERSION:
            raise ValueError(f"{PLAN} is of version {plan.version}; expected {PLAN_VERSION}")
        written = _written(trace)
        stages = tuple(
            _Folding(plan, index, stage, written).stage() for index, stage in enumerate(plan.stages)
        )
        if written:
            raise ValueError(f"nodes stand at {next(iter(written))}, which {PLAN} does not have")
        return Workload(
            stages=stages,
            layout=plan.layout,
            micro_batches=plan.micro_batches,
            boundary_bytes=plan.boundary_bytes,
            name=plan.name,
            source=plan.source,
            notes=plan.notes,
        )
    except (ValueError, msgspec.DecodeError) as error:
        raise FormatError(f"{error}; expected a trace as stepcast writes it", path) from None


def _written(trace: Trace) -> dict[Place, Ops]:
    """The ops of each layer of each micro-batch, as the nodes have them."""
    phases: dict[tuple[Place, int], list[Op]] = {}
    reader = _SlotReader(trace.nodes)
    for (stage, section, position, phase, op), micro_batch in zip(
        reader.slots(), reader.micro_batches(), strict=True
    ):
        place = ((stage, section, micro_batch if section == BODY else 0, position), phase)
        ops = phases.get(place)
        if ops is None:
            phases[place] = [op]
        else:
            ops.append(op)
    # Layers of other micro-batches mostly have the same ops: one tuple for all.
    known: dict[tuple[int, ...], tuple[Op, ...]] = {}
    written: dict[Place, list[tuple[Op, ...]]] = {}
    for (at, phase), listed in phases.items():
        ops_of_phase = known.setdefault(tuple(map(id, listed)), tuple(listed))
        written.setdefault(at, [(), (), ()])[phase] = ops_of_phase
    return {at: (first, second, third) for at, (first, second, third) in written.items()}


class _SlotReader:
    """What nodes' attributes say; nodes with equal attributes share one slot."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        absent = Column(np.full(len(nodes), NONE, dtype=np.int32), [])
        self._columns = {name: nodes.attributes.get(name, absent) for name in SLOT_ATTRIBUTES}
        self._micro_batch = nodes.attributes.get(MICRO_BATCH, absent)

    def slots(self) -> Iterator[Slot]:
        """Of every node."""
        hashes = row_hashes([column.of for column in self._columns.values()])
        _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        table = [self.slot(index) for index in firsts.tolist()]
        return (table[index] for index in inverse.tolist())

    def micro_batches(self) -> list[int]:
        """Of every node; -1 where it has none."""
        for value in self._micro_batch.values:
            if type(value) is not int or not 0 <= value < 2**63:
                raise ValueError(f"{MICRO_BATCH} is {value!r}; expected a whole number")
        numbers: list[int] = np.array([*self._micro_batch.values, NONE])[self._micro_batch.of].tolist()
        return numbers

    def slot(self, node: int) -> Slot:
        section, phase, name = (self._text(key, node) for key in (SECTION, PHASE, OP))
        if section not in SECTIONS or phase not in PHASES:
            raise ValueError(f"node {self._id(node)} is of section {section!r} and phase {phase!r}")
        duration_s = self._columns[DURATION_S].value(node)
        work = Recorded(duration_s) if isinstance(duration_s, float) else work_from(self._text(WORK, node))
        op = Op(name, work, self._columns[BLOCKING].value(node) is not False)
        return self._count(STAGE, node), section, self._count(LAYER, node), PHASES[phase], op

    def _id(self, node: int) -> int:
        return int(self._nodes.ids[node])

    def _text(self, key: str, node: int) -> str:
        value = self._columns[key].value(node)
        if not isinstance(value, str):
            raise ValueError(f"node {self._id(node)} has no {key}")
        return value

    def _count(self, key: str, node: int) -> int:
        value = self._columns[key].value(node)
        if type(value) is not int or value < 0:
            raise ValueError(f"node {self._id(node)} has no {key}")
        return value


class _Folding:
    """One stage: takes its places out of *written* and checks that repeats are alike."""

    def __init__(self, plan: WorkloadPlan, index: int, stage: StagePlan, written: dict[Place, Ops]) -> None:
        self._plan = plan
        self._index = index
        self._stage = stage
        self._written = written
        self._starts = [0]
        for block in stage.body:
            if block.repeat < 1 or not block.layers:
                raise ValueError(f"{PLAN} has a block without layers or repeats")
            self._starts.append(self._starts[-1] + len(block.layers) * block.repeat)

    def stage(self) -> Stage:
        varied = {(micro_batch, position) for micro_batch, position, _ in self._stage.variations}
        usual, variant = self._body(varied)
        blocks = tuple(
            Block(
                tuple(
                    self._layer(number, usual.get((which, place), NO_OPS))
                    for place, number in enumerate(block.layers)
                ),
                block.repeat,
            )
            for which, block in enumerate(self._stage.body)
        )
        variations = tuple(
            Variation(
                micro_batch, position, self._layer(number, variant.get((micro_batch, position), NO_OPS))
            )
            for micro_batch, position, number in self._stage.variations
        )
        if any(position >= self._starts[-1] for _, position in varied):
            raise ValueError(f"{PLAN} has a variation past the end of its stage")
        return Stage(blocks, self._once(PROLOGUE), self._once(EPILOGUE), variations)

    def _once(self, section: str) -> tuple[Layer, ...]:
        numbers = self._stage.prologue if section == PROLOGUE else self._stage.epilogue
        return tuple(
            self._layer(number, self._written.pop((self._index, section, 0, position), NO_OPS))
            for position, number in enumerate(numbers)
        )

    def _layer(self, number: int, ops: Ops) -> Layer:
        if not 0 <= number < len(self._plan.layers):
            raise ValueError(f"{PLAN} has no layer {number}")
        head = self._plan.layers[number]
        return Layer(head.name, *ops, head.process_s, head.notes)

    def _body(
        self, varied: set[tuple[int, int]]
    ) -> tuple[Mapping[tuple[int, int], Ops], Mapping[tuple[int, int], Ops]]:
        """Ops by block and place in it, and those of varied layers by micro-batch and position."""
        usual: dict[tuple[int, int], Ops] = {}
        counts: dict[tuple[int, int], int] = {}
        variant: dict[tuple[int, int], Ops] = {}
        for place in [key for key in self._written if key[0] == self._index and key[1] == BODY]:
            _, _, micro_batch, position = place
            if micro_batch >= self._plan.micro_batches or position >= self._starts[-1]:
                continue
            ops = self._written.pop(place)
            if (micro_batch, position) in varied:
                variant[micro_batch, position] = ops
                continue
            at = self._at(position)
            if usual.setdefault(at, ops) != ops:
                raise ValueError(
                    f"layer {position} of micro-batch {micro_batch} is not like its other repeats"
                )
            counts[at] = counts.get(at, 0) + 1
        for micro_batch, position in varied:
            if micro_batch < self._plan.micro_batches and position < self._starts[-1]:
                at = self._at(position)
                counts[at] = counts.get(at, 0) + 1
        for at, count in counts.items():
            expected = self._plan.micro_batches * self._stage.body[at[0]].repeat
            if count != expected and at in usual:
                raise ValueError(f"a layer of block {at[0] + 1} runs {count} times; expected {expected}")
        return usual, variant

    def _at(self, position: int) -> tuple[int, int]:
        block = bisect_right(self._starts, position) - 1
        return block, (position - self._starts[block]) % len(self._stage.body[block].layers)
