"""Workload: the work of one training step.

    Workload            one step, for all pipeline stages
      Stage             what one stage (or model chunk) runs
        prologue        layers that run once per step, before the micro-batches
        body            blocks that run once per micro-batch (varied: those of micro-batches that differ)
        epilogue        layers that run once per step, after the micro-batches
          Block         layers that follow one another, repeated
            Layer       one named row: forward, input-gradient and weight-gradient ops
              Op        work on this rank, or communication of a group

The forward walks blocks and layers in order, the backward in reverse. Repeated micro-batches and
repeated layers are stored once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from enum import StrEnum
from functools import lru_cache
from itertools import chain
from typing import Any, Generic, NamedTuple, TypeVar

from stepcast.ir.layout import Group, Layout
from stepcast.ir.model_parts import Routing
from stepcast.ir.types import ByIdentity, Key, Size, cached_property, dataclass, require, require_counts
from stepcast.ir.work import GATHERS, Collective, Recorded, Work


class Role(StrEnum):
    """A layer of a generated model; its value is the layer's name."""

    EMBEDDING = "embedding"
    ATTENTION_NORM = "attention norm"
    QKV = "attention qkv"
    LATENT_DOWN = "attention down"
    LATENT_UP = "attention up"
    CORE = "attention core"
    ATTENTION_GATE = "attention gate"
    ATTENTION_OUTPUT = "attention output"
    ATTENTION_POST_NORM = "attention post norm"
    MAMBA_NORM = "mamba norm"
    MAMBA_IN = "mamba in"
    MAMBA_STEPS = "mamba steps"
    MAMBA_SCAN = "mamba scan"
    MAMBA_GROUP_NORM = "mamba group norm"
    MAMBA_OUT = "mamba out"
    MAMBA_POST_NORM = "mamba post norm"
    DELTA_NORM = "delta norm"
    DELTA_IN = "delta in"
    DELTA_RULE = "delta rule"
    DELTA_GATE_NORM = "delta gate norm"
    DELTA_OUT = "delta out"
    DELTA_POST_NORM = "delta post norm"
    MLP_NORM = "mlp norm"
    MLP_UP = "mlp up"
    MLP_DOWN = "mlp down"
    MLP_POST_NORM = "mlp post norm"
    EXPERTS_NORM = "experts norm"
    ROUTER = "experts router"
    DISPATCH = "experts dispatch"
    EXPERTS_UP = "experts up"
    EXPERTS_DOWN = "experts down"
    COMBINE = "experts combine"
    SHARED_UP = "shared experts up"
    SHARED_DOWN = "shared experts down"
    EXPERTS_SUM = "experts sum"
    EXPERTS_POST_NORM = "experts post norm"
    MTP_EMBEDDING_NORM = "mtp embedding norm"
    MTP_NORM = "mtp norm"
    MTP_PROJECTION = "mtp projection"
    FINAL_NORM = "final norm"
    HEAD_PROJECTION = "head projection"
    HEAD = "head"
    LOSS = "loss"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameters"


class OpPart(StrEnum):
    """The part that an op plays in its layer."""

    PRODUCT = "product"  # with the layer's own weights, no adapter's
    ACTIVATION = "activation"  # with its gate
    RESIDUAL = "residual"  # the branch added to the stream
    SUM = "sum"  # of two branches


SINGLE_GPU = Layout()
Value = TypeVar("Value")


class Phase(StrEnum):
    FORWARD = "forward"
    INPUT_GRADIENT = "input-gradient"
    WEIGHT_GRADIENT = "weight-gradient"


@dataclass(frozen=True, slots=True)
class Op:
    """One thing to do. A non-blocking op overlaps the ops that follow it.

    *name* identifies it within its layer; the layer's only computation needs none. *after* names
    non-blocking ops, of this layer or one that ran before, that must have finished first: for each name
    the latest op so called. An *early* op was issued when the step began: it waits for nothing but those of
    its group before it. *kernels* is how many an eager host issues for it; *host_reads* says that such a host
    needs the result before it can issue what follows.
    """

    name: str
    work: Work
    blocking: bool = True
    after: tuple[str, ...] = ()
    kernels: float = 1
    host_reads: bool = False
    early: bool = False
    # Of a generated op; its name says as much, so that equal ops stay equal with and without.
    part: OpPart | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Layer:
    """A named row of ops: a SimAI line, an operator-table row, or part of a generated layer."""

    name: str
    forward: tuple[Op, ...] = ()
    input_gradient: tuple[Op, ...] = ()
    weight_gradient: tuple[Op, ...] = ()
    # Delay after a communication of this layer, before its result may be used.
    process_s: float = 0.0
    # Statements of a format about the layer that stepcast does not interpret, to be written back.
    notes: tuple[tuple[str, str], ...] = ()
    # Part of a captured graph, which costs an otherwise eager host nothing.
    captured: bool = False
    # Of a generated layer.
    role: Role | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        # Spelled out, not through a helper: files hold millions of layers.
        if not 0 <= self.process_s < math.inf:
            raise ValueError(f"process_s must be a finite number, zero or more, not {self.process_s!r}")

    def op_name(self, op: Op) -> str:
        """Return the op's name in timelines and reports."""
        return label_op(self.name, op.name)

    @property
    def all_ops(self) -> tuple[Op, ...]:
        """The ops of all phases."""
        return self.forward + self.input_gradient + self.weight_gradient

    def ops(self, phase: Phase) -> tuple[Op, ...]:
        if phase is Phase.FORWARD:
            return self.forward
        return self.input_gradient if phase is Phase.INPUT_GRADIENT else self.weight_gradient


def label_op(layer: str, op: str) -> str:
    """Join the names of a layer and of its op into one that says no word twice."""
    if not op or layer.endswith(op):
        return layer
    if op.startswith(layer):
        return op
    first, _, rest = op.partition(" ")
    return f"{layer} {rest}" if layer.endswith(f" {first}") else f"{layer} {op}"


@dataclass(frozen=True, slots=True)
class Block:
    """Layers that follow one another, *repeat* times."""

    layers: Sequence[Layer]
    repeat: int = 1

    def __post_init__(self) -> None:
        if type(self.repeat) is not int or self.repeat < 1 or not self.layers:  # in detail to name the mistake alone
            require_counts(self, 1, "repeat")
            require(len(self.layers) > 0, "a block needs at least one layer")


Numbers = tuple[tuple[int, int], ...]
"""Runs of values that are numbered in the order in which they first come, and how often each follows itself."""
Patterns = list[tuple[tuple[int, ...], int]]
"""Blocks of numbered units, and their repeats."""
FIRST, LAST = -2, -3
"""In place of the number of a micro-batch: the one whose forward runs first, which differs in its forward alone, and
the one whose backward runs last, which differs in its weight gradients alone, whichever numbers a schedule gives them
(GPipe turns its backward around, DualPipe begins at both ends)."""


class NumberedRuns(NamedTuple, Generic[Value]):
    """Values that follow one another, and runs of them by the place of the first that is the same object."""

    values: list[Value]
    numbers: Numbers

    @classmethod
    def of(cls, runs: Sequence[tuple[Value, int]]) -> "NumberedRuns[Value]":
        first: dict[int, int] = {}
        numbers = [(first.setdefault(id(value), place), count) for place, (value, count) in enumerate(runs)]
        return cls([value for value, _ in runs], tuple(numbers))


class ChangedUnit(NamedTuple):
    """Layers of a unit whose backward ends with more ops, or whose forward begins with another layer."""

    layers: tuple[Layer, ...]
    ending: tuple[Op, ...] = ()
    beginning: Layer | None = None  # in place of the layer at *place*, the first with a forward
    place: int = 0

    def written_out(self) -> tuple[Layer, ...]:
        layers, ending, changed, place = self
        if ending:
            gradient = layers[0].weight_gradient + ending
            changed = _ENDINGS.get((layers[0], ending), lambda: replace(layers[0], weight_gradient=gradient))
        return layers if changed is None else (*layers[:place], changed, *layers[place + 1 :])


_ENDINGS: ByIdentity[Layer] = ByIdentity(4 * 4096)


@dataclass(frozen=True, eq=False)
class ChangedBlocks:
    """The blocks of *usual* units to which *change* adds something; they are written out only when they are read."""

    usual: NumberedRuns[tuple[Layer, ...]]
    added: NumberedRuns[Any]
    change: Callable[[tuple[Layer, ...], Any], ChangedUnit]

    @cached_property
    def folded(self) -> tuple[list[ChangedUnit], Patterns]:
        """The units that differ, and the blocks of them."""
        units, added, change = self.usual.values, self.added.values, self.change
        pairs, patterns = _fold_changed(self.usual.numbers, self.added.numbers)
        return [change(units[unit], added[place]) for unit, place in pairs], patterns

    @cached_property
    def blocks(self) -> tuple[Block, ...]:
        units, patterns = self.folded
        return tuple(_join_units([intern_layers(unit.written_out()) for unit in units], patterns))

    def __iter__(self) -> Iterator[Block]:
        return iter(self.blocks)

    def __eq__(self, other: object) -> bool:
        return self.blocks == (other.blocks if isinstance(other, ChangedBlocks) else other)

    def __hash__(self) -> int:
        return hash(self.blocks)


Blocks = tuple[Block, ...] | ChangedBlocks
VariedBodies = tuple[tuple[int, Blocks], ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """The work of one pipeline stage."""

    body: tuple[Block, ...]
    prologue: tuple[Layer, ...] = ()
    epilogue: tuple[Layer, ...] = ()
    varied: VariedBodies = ()  # micro-batches that differ from the usual one, with their bodies

    def body_layers(self, micro_batch: int | None = None) -> tuple[Layer, ...]:
        """Return every layer of one micro-batch, repeats written out; None means the usual one."""
        return unfold_blocks(next((blocks for which, blocks in self.varied if which == micro_batch), self.body))

    def numbered_bodies(self, micro_batches: int) -> dict[int, tuple[Layer, ...]]:
        """Return the layers of every micro-batch that differs from the usual one, where they run in their order."""
        bodies = {which: unfold_blocks(blocks) for which, blocks in self.varied}
        first, last = bodies.pop(FIRST, ()), bodies.pop(LAST, ())
        if first and last and micro_batches == 1:
            pairs = zip(first, last, strict=True)
            first = tuple(
                replace(first_layer, weight_gradient=last_layer.weight_gradient) for first_layer, last_layer in pairs
            )
        return bodies | ({micro_batches - 1: last} if last else {}) | ({0: first} if first else {})

    @property
    def body_layer_count(self) -> int:
        return count_layers(self.body)

    def counted_layers(self, micro_batches: int) -> Iterator[tuple[Layer, int]]:
        """Yield each stored layer with how often it runs in a step."""
        for layers, count in self.counted_blocks(micro_batches):
            for layer in layers:
                yield layer, count

    def counted_blocks(self, micro_batches: int) -> Iterator[tuple[Sequence[Layer], int]]:
        """Yield runs of stored layers with how often they run in a step."""
        yield self.prologue, 1
        for block in self.body:
            yield block.layers, block.repeat * (micro_batches - len(self.varied))
        for block in [block for _, blocks in self.varied for block in blocks]:
            yield block.layers, block.repeat
        yield self.epilogue, 1


def count_layers(blocks: Iterable[Block]) -> int:
    return sum(len(block.layers) * block.repeat for block in blocks)


def unfold_blocks(blocks: Iterable[Block]) -> tuple[Layer, ...]:
    """Return every layer of *blocks*, repeats written out."""
    return tuple(layer for block in blocks for _ in range(block.repeat) for layer in block.layers)


def vary_blocks(body: tuple[Block, ...], changed: Mapping[int, Layer]) -> tuple[Block, ...]:
    """Return *body* with the *changed* layers at their positions, repeats written out as far as they differ."""
    blocks: list[Block] = []
    start = 0
    for block in body:
        stop = start + len(block.layers) * block.repeat
        if any(start <= index < stop for index in changed):
            every = enumerate(unfold_blocks((block,)), start)
            layers, length = tuple([changed.get(index, layer) for index, layer in every]), len(block.layers)
            blocks += fold_units([layers[first : first + length] for first in range(0, len(layers), length)])
        else:
            blocks.append(block)
        start = stop
    return tuple(blocks)


# The longest run of units looked for as one repeating pattern: Gemma 3 has six, Jamba-like models eight.
LONGEST_PATTERN = 12


def fold_units(units: Iterable[tuple[Layer, ...]]) -> list[Block]:
    """Fold units into blocks; units of the same layer objects are equal."""
    return fold_runs(NumberedRuns.of([(intern_layers(unit), 1) for unit in units]))


def fold_runs(runs: NumberedRuns[tuple[Layer, ...]]) -> list[Block]:
    """Fold units into blocks: at each place the repeating pattern that covers most."""
    return _join_units(runs.values, _fold_numbers(runs.numbers))


def _join_units(units: Sequence[tuple[Layer, ...]], patterns: Patterns) -> list[Block]:
    """Return the blocks of *units* that follow one another in *patterns* of their numbers."""
    blocks = []
    for pattern, times in patterns:
        several = chain.from_iterable([units[number] for number in pattern])
        blocks.append(Block(units[pattern[0]] if len(pattern) == 1 else intern_layers(tuple(several)), times))
    return blocks


def intern_layers(layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """Return one object for the same *layers*."""
    return _RUNS.intern(layers, tuple(map(id, layers)))


@lru_cache(maxsize=4096)
def _fold_numbers(runs: Numbers) -> Patterns:
    """Return the repeating patterns that follow one another in *runs*, with their times."""
    keys = tuple([number for number, count in runs for _ in range(count)])
    return [(keys[start:end], times) for start, end, times in find_patterns(keys, LONGEST_PATTERN)]


@lru_cache(maxsize=4096)
def _fold_changed(usual: Numbers, added: Numbers) -> tuple[list[tuple[int, int]], Patterns]:
    """Return the pairs of *usual* units and what is *added* to them, and their patterns within those of the units."""
    pairs: dict[tuple[int, int], int] = {}
    every = [[number for number, count in runs for _ in range(count)] for runs in (usual, added)]
    numbers = [pairs.setdefault(pair, len(pairs)) for pair in zip(*every, strict=True)]
    folded, start = Patterns(), 0
    for pattern, times in _fold_numbers(usual):
        length = len(pattern)
        units = [tuple(numbers[first : first + length]) for first in range(start, start + length * times, length)]
        for first, last, repeat in find_patterns(units, LONGEST_PATTERN):
            folded.append((tuple(chain.from_iterable(units[first:last])), repeat))
        start += length * times
    return list(pairs), folded


def find_patterns(keys: Sequence[Key], longest: int, *, shortest: bool = False) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and times of the patterns that follow one another in *keys*.

    At each place the one of at most *longest* keys that covers most; of equal ones, and with *shortest* of all that
    repeat, the shortest.
    """
    following, last = [len(keys)] * len(keys), dict[Key, int]()  # for each place the next one with the same key
    for place in range(len(keys) - 1, -1, -1):
        following[place] = last.get(keys[place], len(keys))
        last[keys[place]] = place
    start = 0
    while start < len(keys):
        run = start + 1  # patterns within a run of one key cover no more than it does
        while run < len(keys) and following[run - 1] == run:
            run += 1
        best, best_times, end = 1, run - start, following[run - 1]
        limit = 0 if shortest and best_times > 1 else start + min(longest, (len(keys) - start) // 2)
        while end <= limit:
            length, times, pattern = end - start, 1, keys[start:end]
            while keys[start + times * length : end + times * length] == pattern:
                times += 1
            if times > 1 and times * length > best * best_times:
                best, best_times = length, times
                if shortest:
                    break
            end = following[end]
        yield start, start + best, best_times
        start += best * best_times


_RUNS: ByIdentity[tuple[Layer, ...]] = ByIdentity(8192)


@dataclass(frozen=True, slots=True)
class Manner:
    """The manner in which a workload runs, as far as its source says; a user's choices win over it."""

    schedule: str = ""
    messages: str = ""
    # Recorded times are those of computing by itself: overlapping work slows it down.
    alone: bool = False
    # Forwards are interleaved with backwards of other micro-batches.
    pairs: bool = False
    # The choice of experts by tokens (old files: how many each has) where they cross the network once for each
    # node; 0: once for each expert.
    once_per_node: Routing | int = 0

    @property
    def routing(self) -> Routing | None:
        stated = self.once_per_node
        if isinstance(stated, int):
            return Routing(stated) if stated else None
        return stated


UNSTATED = Manner()


@dataclass(frozen=True, slots=True)
class Workload:
    """One training step. One Stage means that every stage runs the same; else one per stage and chunk.

    With chunks (vpp > 1) the order is model order: chunk c of stage i is at index c * pp + i.
    """

    stages: tuple[Stage, ...]
    layout: Layout = SINGLE_GPU
    micro_batches: Size = 1
    # Bytes that one micro-batch sends to the next stage; None where the source does not say.
    boundary_bytes: int | None = None
    name: str = ""
    source: str = ""
    notes: tuple[tuple[str, str], ...] = ()
    warnings: tuple[str, ...] = ()
    manner: Manner = UNSTATED
    # Gathers state what each rank brings, not the complete buffer, which grows with the ranks.
    shares: bool = False

    def __post_init__(self) -> None:
        stages, expected = len(self.stages), self.layout.pp * self.layout.vpp
        require(stages in (1, expected), f"a workload needs one stage or pp x vpp = {expected}, not {stages}")

    def __repr__(self) -> str:
        name, layout = self.name or "unnamed", self.layout
        counted = f"{layout.gpus:,} GPUs, {len(self.stages)} stage(s), {self.micro_batches:,} micro-batch(es)"
        return f"Workload({name}: {counted})"

    @property
    def uniform(self) -> bool:
        """Every pipeline stage runs the one stage given."""
        return len(self.stages) == 1

    @property
    def largest_activation_bytes(self) -> int:
        """The largest buffer that a forward exchanges between tensor-parallel ranks."""
        works = (
            op.work for stage in self.stages for block in stage.body for layer in block.layers for op in layer.forward
        )
        sizes = (work.size_bytes for work in works if isinstance(work, Collective) and work.group is Group.TP)
        return max(sizes, default=0)

    def note(self, key: str) -> str | None:
        return dict(self.notes).get(key)


# Changed copies of a Workload: what a user states that the file leaves out.

# Note of a workload whose file holds one layer of several: index of that block in the body.
LAYER_BLOCK = "layer_block"


def with_ops(workload: Workload, change: Callable[[Op], Op]) -> Workload:
    """Return the workload with every op changed."""

    def change_layer(layer: Layer) -> Layer:
        forward, inputs, weights = (tuple(map(change, layer.ops(phase))) for phase in Phase)
        return replace(layer, forward=forward, input_gradient=inputs, weight_gradient=weights)

    return _with_layers(workload, change_layer)


def _with_layers(workload: Workload, change: Callable[[Layer], Layer], ends: bool = True) -> Workload:
    """Return the workload with every layer changed, with *ends* those that run once per step too; layers and stages
    that were one object stay one.
    """
    layers: dict[int, Layer] = {}
    bodies: dict[int, tuple[Block, ...]] = {}
    stages: dict[int, Stage] = {}

    def change_layer(original: Layer) -> Layer:
        if id(original) not in layers:
            layers[id(original)] = change(original)
        return layers[id(original)]

    def change_body(blocks: Blocks) -> tuple[Block, ...]:
        if id(blocks) not in bodies:
            bodies[id(blocks)] = tuple(Block(tuple(map(change_layer, block.layers)), block.repeat) for block in blocks)
        return bodies[id(blocks)]

    def change_stage(original: Stage) -> Stage:
        if id(original) not in stages:
            stages[id(original)] = replace(
                original,
                body=change_body(original.body),
                prologue=tuple(map(change_layer, original.prologue)) if ends else original.prologue,
                epilogue=tuple(map(change_layer, original.epilogue)) if ends else original.epilogue,
                varied=tuple((which, change_body(blocks)) for which, blocks in original.varied),
            )
        return stages[id(original)]

    return replace(workload, stages=tuple(map(change_stage, workload.stages)))


def with_layout(workload: Workload, layout: Layout) -> Workload:
    """Return the workload on other ranks; where it states shares, each rank brings what it brought before."""
    moved = replace(workload, layout=layout)
    if not workload.shares:
        return moved

    def grow_gather(op: Op) -> Op:
        work = op.work
        if not isinstance(work, Collective) or work.kind not in GATHERS:
            return op
        share = work.size_bytes // workload.layout.size(work.group)
        return replace(op, work=replace(work, size_bytes=share * layout.size(work.group)))

    return with_ops(moved, grow_gather)


def repeat_layers(workload: Workload, count: int) -> Workload:
    """Return the workload with its one model layer run *count* times."""
    note = workload.note(LAYER_BLOCK)
    require(note is not None, "this workload does not mark which rows are one model layer")
    require(count >= 1, f"a model has at least one layer, not {count}")
    repeated = int(note or 0)
    stage = workload.stages[0]
    body = tuple(Block(block.layers, count) if index == repeated else block for index, block in enumerate(stage.body))
    return replace(workload, stages=(replace(stage, body=body), *workload.stages[1:]))


def scale_backward(workload: Workload, factor: float) -> Workload:
    """Set backward compute times to *factor* x forward, halved between input and weight gradient."""
    require(0 <= factor <= 1e6, f"a backward factor is zero or more, and below a million, not {factor}")

    def scale_layer(layer: Layer) -> Layer:
        forward_s = sum(op.work.duration_s for op in layer.forward if isinstance(op.work, Recorded))
        half, gradients = Op("", Recorded(forward_s * factor / 2)), (layer.input_gradient, layer.weight_gradient)
        inputs, weights = ((half, *(op for op in ops if not isinstance(op.work, Recorded))) for ops in gradients)
        return replace(layer, input_gradient=inputs, weight_gradient=weights)

    return _with_layers(workload, scale_layer, ends=False)
