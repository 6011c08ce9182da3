"""A Workload from a trace that stepcast wrote: nodes folded back into the layers of its plan."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from stepcast.inputs.chakra.nodes import NONE, Column, Nodes, Trace
from stepcast.inputs.chakra.plan import (
    AFTER,
    BLOCKING,
    BODY,
    DURATION_S,
    EARLY,
    EPILOGUE,
    LAYER,
    MESSAGE,
    MICRO_BATCH,
    OP,
    PHASE,
    PHASES,
    PLAN,
    PLAN_VERSION,
    PROLOGUE,
    RANK,
    SECTION,
    STAGE,
    STAGES,
    WORK,
    StagePlan,
    WorkloadPlan,
    work_from,
)
from stepcast.inputs.chakra.protobuf import Value, row_hashes
from stepcast.inputs.errors import FormatError
from stepcast.ir.arrays import IntArray
from stepcast.ir.work import Recorded
from stepcast.ir.workload import Block, Layer, Op, Stage, Variation, Workload

SECTIONS = frozenset({PROLOGUE, BODY, EPILOGUE})
SLOT_ATTRIBUTES = (STAGE, SECTION, LAYER, PHASE, OP, BLOCKING, AFTER, EARLY, DURATION_S, WORK)

Ops = tuple[tuple[Op, ...], tuple[Op, ...], tuple[Op, ...]]
NO_OPS: Ops = ((), (), ())
NOWHERE: IntArray = np.zeros(0, dtype=np.int64)
# Where a layer stands: stage, section, position.
Place = tuple[int, str, int]
# What a node's attributes say: place, phase, op.
Slot = tuple[Place, int, Op]
# What a layer runs, and the micro-batches (0 outside the body) that run it.
Variant = tuple[Ops, IntArray]


def own_workload(traces: Sequence[Trace], paths: Sequence[str]) -> Workload:
    """The workload that stepcast wrote, one trace for each rank (or, as it once did, one for all)."""
    path = paths[0]
    try:
        text = str(traces[0].metadata[PLAN])
        plan = msgspec.json.decode(text, type=WorkloadPlan)
        if plan.version != PLAN_VERSION:
            raise ValueError(f"{PLAN} is of version {plan.version}; expected {PLAN_VERSION}")
        found: dict[int, dict[Place, list[Variant]]] = {}
        first_of: dict[int, str] = {}
        per_stage = plan.layout.gpus // plan.layout.pp
        known: dict[tuple[bytes, ...], dict[Place, list[Variant]]] = {}
        for trace, path in zip(traces, paths, strict=True):
            if str(trace.metadata.get(PLAN)) != text:
                raise ValueError(f"is of another set than {paths[0]}")
            coordinate = _rank(trace, plan) // per_stage
            reader = _SlotReader(trace.nodes)
            key = reader.content()
            written = known[key] if key in known else known.setdefault(key, _written(reader))
            if found.setdefault(coordinate, written) is written:
                first_of[coordinate] = path
            elif not _alike(found[coordinate], written):
                raise ValueError(f"does not run what {first_of[coordinate]} runs, a rank of the same stage")
        path = paths[0]
        merged = _merged(plan, found, [trace.metadata.get(STAGES) for trace in traces])
        stages = tuple(
            _Folding(plan, index, stage, merged).stage() for index, stage in enumerate(plan.stages)
        )
        if merged:
            raise ValueError(f"nodes stand at {next(iter(merged))}, which {PLAN} does not have")
        return Workload(
            stages=_shared(stages),
            layout=plan.layout,
            micro_batches=plan.micro_batches,
            boundary_bytes=plan.boundary_bytes,
            name=plan.name,
            source=plan.source,
            notes=plan.notes,
            warnings=_missing(plan, len(traces), STAGES in traces[0].metadata),
            manner=plan.manner,
            shares=plan.shares,
        )
    except (ValueError, msgspec.DecodeError) as error:
        raise FormatError(f"{error}; expected traces as stepcast writes them", path) from None


def _rank(trace: Trace, plan: WorkloadPlan) -> int:
    rank = trace.metadata.get(RANK, 0)
    if type(rank) is not int or not 0 <= rank < plan.layout.gpus:
        raise ValueError(f"is of rank {rank!r}, and {PLAN} has {plan.layout.gpus}")
    return rank


def _alike(one: Mapping[Place, list[Variant]], other: Mapping[Place, list[Variant]]) -> bool:
    """Whether two ranks run the same ops in the same micro-batches."""
    if one.keys() != other.keys():
        return False
    for place, variants in one.items():
        if len(variants) != len(other[place]):
            return False
        runs = dict(other[place])
        for ops, micro_batches in variants:
            same = runs.get(ops)
            if same is None or not np.array_equal(np.sort(same), np.sort(micro_batches)):
                return False
    return True


def _merged(
    plan: WorkloadPlan, found: Mapping[int, dict[Place, list[Variant]]], held: Sequence[Value]
) -> dict[Place, list[Variant]]:
    """What all stages run. Where every one runs the same, the first says it."""
    if len(plan.stages) == 1:
        if 0 not in found:
            raise ValueError("the file of rank 0 is missing; name all files of the set, or their folder")
        return found[0]
    everywhere = set(range(len(plan.stages)))
    here: set[object] = set()
    for stages in held:
        here |= everywhere if stages is None else set(stages) if isinstance(stages, tuple) else set()
    # Pipelines that run both ways have a stage on two ranks, each with half of the micro-batches.
    if missing := sorted(everywhere - here):
        raise ValueError(f"no file holds stage {missing[0]} of {len(plan.stages)}; name all files of the set")
    merged: dict[Place, list[Variant]] = {}
    for written in found.values():
        for place, variants in written.items():
            merged.setdefault(place, []).extend(variants)
    return merged


def _shared(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Equal stages as one object, which is priced once."""
    known: dict[Stage, Stage] = {}
    return tuple(known.setdefault(stage, stage) for stage in stages)


def _missing(plan: WorkloadPlan, files: int, is_set: bool) -> tuple[str, ...]:
    if not is_set or files == plan.layout.gpus:
        return ()
    return (f"{files} of {plan.layout.gpus} ranks' files were given: the others are taken to run the same",)


def _written(reader: "_SlotReader") -> dict[Place, list[Variant]]:
    """What each layer runs as the nodes have it, and in which micro-batches it runs that."""
    kept = reader.kept()
    if not len(kept):
        return {}
    slots, slot_of = reader.slots(kept)
    places: dict[Place, int] = {}
    place_of_slot = [places.setdefault(slot[0], len(places)) for slot in slots]
    # Equal ops have one number, whatever layer they stand in.
    ops: dict[Op, int] = {}
    code_of_slot = [ops.setdefault(slot[2], len(ops)) * len(PHASES) + slot[1] for slot in slots]
    outside = np.array([slot[0][1] != BODY for slot in slots])[slot_of]
    micro_batches = np.where(outside, 0, reader.micro_batches()[kept])
    place_of, code_of = np.array(place_of_slot)[slot_of], np.array(code_of_slot)[slot_of]
    # Runs of nodes: one layer in one micro-batch, in file order within each phase.
    order = np.lexsort((code_of % len(PHASES), micro_batches, place_of))
    place_of, micro_batches, code_of = place_of[order], micro_batches[order], code_of[order]
    new = np.ones(len(order), dtype=bool)
    new[1:] = (place_of[1:] != place_of[:-1]) | (micro_batches[1:] != micro_batches[:-1])
    starts = np.flatnonzero(new)
    ranks = np.arange(len(order)) - starts[np.cumsum(new) - 1]
    runs = np.add.reduceat(row_hashes([code_of, ranks]), starts)
    _, firsts, inverse = np.unique(
        row_hashes([place_of[starts], runs]), return_index=True, return_inverse=True
    )
    ends = np.append(starts[1:], len(order))
    place_list, op_list = list(places), list(ops)
    written: dict[Place, list[Variant]] = {}
    by_variant = np.argsort(inverse, kind="stable")
    bounds = np.cumsum(np.bincount(inverse, minlength=len(firsts)))
    for index, first in enumerate(firsts.tolist()):
        phases: list[list[Op]] = [[] for _ in PHASES]
        for code in code_of[starts[first] : ends[first]].tolist():
            phases[code % len(PHASES)].append(op_list[code // len(PHASES)])
        chosen = by_variant[bounds[index - 1] if index else 0 : bounds[index]]
        forward, input_gradient, weight_gradient = map(tuple, phases)
        variant = (forward, input_gradient, weight_gradient), micro_batches[starts[chosen]]
        written.setdefault(place_list[int(place_of[starts[first]])], []).append(variant)
    return written


class _SlotReader:
    """What nodes' attributes say; nodes with equal attributes share one slot."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        absent = Column(np.full(len(nodes), NONE, dtype=np.int32), [])
        self._columns = {name: nodes.attributes.get(name, absent) for name in SLOT_ATTRIBUTES}
        self._micro_batch = nodes.attributes.get(MICRO_BATCH, absent)

    def content(self) -> tuple[bytes, ...]:
        """The same for ranks that write the same, of those that were decoded together."""
        columns = [*self._columns.values(), self._micro_batch]
        values = np.array([id(column.values) for column in columns if column.values])
        return values.tobytes(), *(column.of.tobytes() for column in columns)

    def kept(self) -> IntArray:
        """The nodes that are ops of the plan; messages between stages follow from it."""
        section = self._columns[SECTION]
        message = np.array([value == MESSAGE for value in section.values] + [False])
        return np.flatnonzero(~message[section.of])

    def slots(self, kept: IntArray) -> tuple[list[Slot], IntArray]:
        """The distinct slots, and which is every node's."""
        hashes = row_hashes([column.of[kept] for column in self._columns.values()])
        _, firsts, inverse = np.unique(hashes, return_index=True, return_inverse=True)
        return [self.slot(index) for index in kept[firsts].tolist()], inverse

    def micro_batches(self) -> IntArray:
        """Of every node; -1 where it has none."""
        for value in self._micro_batch.values:
            if type(value) is not int or not 0 <= value < 2**63:
                raise ValueError(f"{MICRO_BATCH} is {value!r}; expected a whole number")
        return np.array([*self._micro_batch.values, NONE], dtype=np.int64)[self._micro_batch.of]

    def slot(self, node: int) -> Slot:
        section, phase, name = (self._text(key, node) for key in (SECTION, PHASE, OP))
        if section not in SECTIONS or phase not in PHASES:
            raise ValueError(f"node {self._id(node)} is of section {section!r} and phase {phase!r}")
        duration_s = self._columns[DURATION_S].value(node)
        work = Recorded(duration_s) if isinstance(duration_s, float) else work_from(self._text(WORK, node))
        after = self._columns[AFTER].value(node)
        names = tuple(word for word in after if isinstance(word, str)) if isinstance(after, tuple) else ()
        blocking, early = (self._columns[key].value(node) for key in (BLOCKING, EARLY))
        op = Op(name, work, blocking is not False, names, early=early is True)
        return (self._count(STAGE, node), section, self._count(LAYER, node)), PHASES[phase], op

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

    def __init__(
        self, plan: WorkloadPlan, index: int, stage: StagePlan, written: dict[Place, list[Variant]]
    ) -> None:
        self._plan = plan
        self._known: dict[Layer, Layer] = {}
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
        return Stage(blocks, self._once(PROLOGUE), self._once(EPILOGUE), variations, self._stage.in_turn)

    def _once(self, section: str) -> tuple[Layer, ...]:
        numbers = self._stage.prologue if section == PROLOGUE else self._stage.epilogue
        return tuple(
            self._layer(
                number, self._written.pop((self._index, section, position), [(NO_OPS, NOWHERE)])[0][0]
            )
            for position, number in enumerate(numbers)
        )

    def _layer(self, number: int, ops: Ops) -> Layer:
        if not 0 <= number < len(self._plan.layers):
            raise ValueError(f"{PLAN} has no layer {number}")
        head = self._plan.layers[number]
        layer = Layer(head.name, *ops, head.process_s, head.notes, role=head.role)
        # Equal layers are one object, as they were when they were written: a simulation folds those.
        return self._known.setdefault(layer, layer)

    def _body(
        self, varied: set[tuple[int, int]]
    ) -> tuple[Mapping[tuple[int, int], Ops], Mapping[tuple[int, int], Ops]]:
        """Ops by block and place in it, and those of varied layers by micro-batch and position."""
        usual: dict[tuple[int, int], Ops] = {}
        counts: dict[tuple[int, int], int] = {}
        variant: dict[tuple[int, int], Ops] = {}
        varied_at: dict[int, set[int]] = {}
        for micro_batch, position in varied:
            varied_at.setdefault(position, set()).add(micro_batch)
        for place in [key for key in self._written if key[0] == self._index and key[1] == BODY]:
            position = place[2]
            if position >= self._starts[-1]:
                continue
            at, differing = self._at(position), varied_at.get(position, set())
            for ops, micro_batches in self._written.pop(place):
                if not 0 <= int(micro_batches.min()) <= int(micro_batches.max()) < self._plan.micro_batches:
                    raise ValueError(f"layer {position} runs in a micro-batch that {PLAN} does not have")
                apart = differing.intersection(micro_batches.tolist()) if differing else differing
                variant |= {(micro_batch, position): ops for micro_batch in apart}
                if len(micro_batches) == len(apart):
                    continue
                if usual.setdefault(at, ops) != ops:
                    raise ValueError(f"layer {position} of some micro-batch is not like its other repeats")
                counts[at] = counts.get(at, 0) + len(micro_batches) - len(apart)
        self._check(usual, counts, varied)
        return usual, variant

    def _check(
        self,
        usual: Mapping[tuple[int, int], Ops],
        counts: Mapping[tuple[int, int], int],
        varied: set[tuple[int, int]],
    ) -> None:
        """Each layer that runs does so in every repeat and micro-batch, but for the varied ones."""
        missing = {at: self._plan.micro_batches * self._stage.body[at[0]].repeat for at in usual}
        for at, count in counts.items():
            missing[at] -= count
        for micro_batch, position in varied:
            if position < self._starts[-1] and micro_batch < self._plan.micro_batches:
                at = self._at(position)
                if at in missing:
                    missing[at] -= 1
        for (block, _), count in missing.items():
            if count:
                raise ValueError(f"a layer of block {block + 1} runs {count} times too few")

    def _at(self, position: int) -> tuple[int, int]:
        block = bisect_right(self._starts, position) - 1
        return block, (position - self._starts[block]) % len(self._stage.body[block].layers)
