"""One rank's part of a step, op by op."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from stepcast.ir.group import Group
from stepcast.ir.layout import Layout
from stepcast.ir.ranks import grid_of
from stepcast.ir.work import Collective, CollectiveKind, GroupedMatmul, HostCopy, HostUpdate, Matmul, Transfer
from stepcast.ir.workload import Layer, Op, Phase, Stage
from stepcast.pytorch.run.operators import CannotRunError, Operators

# What is to be run, as plain values that pass to other processes.


class Turn(NamedTuple):
    """One slot of a stage's order: forward, backward, or one half of a backward."""

    kind: str
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class RunPlan:
    """A workload with the order in which each stage runs it."""

    stages: tuple[Stage, ...]
    layout: Layout
    orders: tuple[tuple[Turn, ...], ...]
    boundary_bytes: int = 0
    steps: int = 3

    def stage_of(self, stage: int, chunk: int) -> Stage:
        return self.stages[0] if len(self.stages) == 1 else self.stages[chunk * self.layout.pp + stage]

    def stage_of_rank(self, rank: int) -> int:
        return rank // (self.layout.gpus // self.layout.pp)

    def weight_sizes(self, stage: int) -> list[int]:
        """Elements of each weight of *stage*: the results of its weight gradients."""
        found: list[int] = []
        for chunk in range(self.layout.vpp):
            for layer, count in self.stage_of(stage, chunk).counted_layers(1):
                works = [op.work for op in layer.ops(Phase.WEIGHT_GRADIENT)]
                found += count * [
                    size
                    for work in works
                    if isinstance(work, Matmul | GroupedMatmul)
                    for size in ([work.m * work.n * work.batch] if isinstance(work, Matmul)
                                 else [work.n * work.k] * work.groups)
                ]  # fmt: skip
        return found

    def neighbour(self, stage: int, chunk: int, step: int) -> tuple[int, int] | None:
        """Where a micro-batch is before (-1) or after (+1) this place; None at the ends of the model."""
        place = chunk * self.layout.pp + stage + step
        if not 0 <= place < self.layout.pp * self.layout.vpp:
            return None
        return place % self.layout.pp, place // self.layout.pp


class Record(NamedTuple):
    """One op as it ran, in seconds from the step's start."""

    rank: int
    lane: str
    name: str
    start_s: float
    duration_s: float
    micro_batch: int
    step: int
    work: object = None


# When ops ran: on the host's clock for a CPU, on the GPU's own for a GPU.


class HostClock:
    """Calls end when they return."""

    quiet = False

    def start(self) -> None:
        self._zero = time.perf_counter()

    def begin(self) -> float:
        return time.perf_counter()

    def end(self) -> float:
        return time.perf_counter()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._zero

    def read(self, marks: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(begin - self._zero, end - self._zero) for begin, end in marks]


class GpuClock:
    """Events between kernels, read when all have run: an op begins where the one before it ended."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._last: Any = None
        self.quiet = False  # no events between ops: what they take themselves is seen by the difference

    def _event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._zero = self._last = self._event()

    def begin(self) -> Any:
        return None if self.quiet else self._last

    def end(self) -> Any:
        if not self.quiet:
            self._last = self._event()
        return self._last

    def elapsed_s(self) -> float:
        """Since the start, when all has run."""
        end = self._event()
        self._torch.cuda.synchronize()
        return float(self._zero.elapsed_time(end)) * 1e-3

    def read(self, marks: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        self._torch.cuda.synchronize()
        since = self._zero.elapsed_time
        return [(since(begin) * 1e-3, since(end) * 1e-3) for begin, end in marks if begin is not None]


# Messages over torch.distributed: NCCL between GPUs, gloo between CPUs.

C = CollectiveKind


class NoExchange:
    """One rank of a larger job by itself: its messages go nowhere and are priced instead."""

    def collective(self, work: Collective) -> Any:
        return None

    def receive(self, stage: int, size_bytes: int, backward: bool) -> None:
        return None

    def send(self, stage: int, size_bytes: int, backward: bool) -> None:
        return None

    def finish(self) -> None:
        return None


class Distributed:
    """Groups as the layout has them, buffers of the stated sizes."""

    def __init__(self, torch: Any, layout: Layout, rank: int, device: str, groups: frozenset[Group]) -> None:
        self._torch, self._layout, self._rank, self._device = torch, layout, rank, device
        self._dist = torch.distributed
        self._groups = {family: self._made(family) for family in sorted(groups)}
        # A pair of stages talks both ways at once: each way has a communicator of its own.
        self._ways = [self._made(Group.PP) for _ in range(2)] if layout.pp > 1 else []
        self._buffers: dict[tuple[str, int], Any] = {}
        self._sent: list[Any] = []

    def _made(self, family: Group) -> tuple[Any, tuple[int, ...]]:
        """Every rank makes all groups of a family, in the same order, and keeps its own."""
        grid, mine = grid_of(self._layout), None
        members: tuple[int, ...] = (self._rank,)
        for ranks in sorted({grid.group(str(family), rank) for rank in range(self._layout.gpus)}):
            made = self._dist.new_group(list(ranks))
            if self._rank in ranks:
                mine, members = made, ranks
        return mine, members

    def _buffer(self, name: str, size_bytes: int) -> Any:
        key = (name, size_bytes)
        if key not in self._buffers:
            count = max(1, size_bytes // 4)
            self._buffers[key] = self._torch.zeros(count, dtype=self._torch.float32, device=self._device)
        return self._buffers[key]

    def collective(self, work: Collective) -> Any:
        group, members = self._groups[work.group]
        if len(members) == 1:
            return None
        handle = None
        for _ in range(work.times):
            handle = self._one(work.kind, work.size_bytes, group, members)
        return handle

    def _one(self, kind: CollectiveKind, size_bytes: int, group: Any, members: tuple[int, ...]) -> Any:
        dist, ways = self._dist, len(members)
        whole = self._buffer("whole", -(-size_bytes // (4 * ways)) * 4 * ways)
        share = self._buffer("share", max(4, whole.numel() * 4 // ways))
        options = {"group": group, "async_op": True}
        match kind:
            case C.ALL_REDUCE:
                return dist.all_reduce(whole, **options)
            case C.ALL_GATHER:
                return dist.all_gather_into_tensor(whole, share, **options)
            case C.REDUCE_SCATTER:
                return dist.reduce_scatter_tensor(share, whole, **options)
            case C.ALL_TO_ALL:
                return dist.all_to_all_single(self._buffer("exchanged", whole.numel() * 4), whole, **options)
            case C.BROADCAST:
                return dist.broadcast(whole, members[0], **options)
            case C.REDUCE:
                return dist.reduce(whole, members[0], **options)
            case C.GATHER:
                parts = list(whole.chunk(ways)) if self._rank == members[0] else None
                return dist.gather(share, parts, dst=members[0], **options)
            case C.SCATTER:
                parts = list(whole.chunk(ways)) if self._rank == members[0] else None
                return dist.scatter(share, parts, src=members[0], **options)
            case C.BARRIER:
                return dist.barrier(**options)

    def _peer(self, stage: int) -> int:
        per_stage = self._layout.gpus // self._layout.pp
        return stage * per_stage + self._rank % per_stage

    def receive(self, stage: int, size_bytes: int, backward: bool) -> None:
        buffer = self._buffer(f"received {backward}", size_bytes)
        self._dist.recv(buffer, self._peer(stage), group=self._ways[backward][0])

    def send(self, stage: int, size_bytes: int, backward: bool) -> None:
        buffer = self._buffer(f"sent {backward}", size_bytes)
        self._sent.append(self._dist.isend(buffer, self._peer(stage), group=self._ways[backward][0]))

    def finish(self) -> None:
        for handle in self._sent:
            handle.wait()
        self._sent.clear()


BACKWARD = {
    "forward": (Phase.FORWARD,),
    "backward": (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT),
    "input-gradient": (Phase.INPUT_GRADIENT,),
    "weight-gradient": (Phase.WEIGHT_GRADIENT,),
}


class Exchange(Protocol):
    """How messages reach other ranks; one that does nothing where there are none."""

    def collective(self, work: Collective) -> Any: ...

    def receive(self, stage: int, size_bytes: int, backward: bool) -> None: ...

    def send(self, stage: int, size_bytes: int, backward: bool) -> None: ...

    def finish(self) -> None: ...


@dataclass
class Executor:
    """Runs the plan of one rank and writes down when each op ran."""

    plan: RunPlan
    rank: int
    operators: Operators
    exchange: Exchange
    clock: Any
    _waiting: dict[str, Any] = field(default_factory=dict)
    _rows: list[tuple[str, str, Any, Any, int, object]] = field(default_factory=list)

    @property
    def stage(self) -> int:
        return self.plan.stage_of_rank(self.rank)

    def prepare(self) -> None:
        """Operands of every op are made before the first step."""
        for chunk in range(self.plan.layout.vpp):
            for layer, _ in self.plan.stage_of(self.stage, chunk).counted_layers(1):
                for op in layer.all_ops:
                    if not isinstance(op.work, Collective | Transfer):
                        self._checked(op)

    def _checked(self, op: Op) -> Any:
        if isinstance(op.work, HostCopy | HostUpdate):
            raise CannotRunError(f"{op.name}: what is offloaded to the host cannot be run")
        return self.operators.call(op.work)  # type: ignore[arg-type]

    def step(self, number: int) -> list[Record]:
        """One whole step; when each of its ops ran."""
        self._walk()
        times = self.clock.read([(begin, end) for _, _, begin, end, _, _ in self._rows])
        return [
            Record(self.rank, lane, name, begin, end - begin, micro_batch, number, work)
            for (lane, name, _, _, micro_batch, work), (begin, end) in zip(self._rows, times, strict=True)
        ]

    def elapsed_s(self) -> float:
        """Seconds of one step in which ops are not marked."""
        self.clock.quiet = True
        self._walk()
        self.clock.quiet = False
        return float(self.clock.elapsed_s())

    def _walk(self) -> None:
        self._rows.clear()
        self.clock.start()
        first = self.plan.stage_of(self.stage, 0)
        self._run(first.prologue, (Phase.FORWARD,), -1)
        for turn in self.plan.orders[self.stage]:
            self._turn(turn)
        for chunk in range(self.plan.layout.vpp):
            self._run(self.plan.stage_of(self.stage, chunk).epilogue, tuple(Phase), -1)
        for handle in self._waiting.values():
            handle.wait()
        self._waiting.clear()
        self.exchange.finish()

    def _turn(self, turn: Turn) -> None:
        plan, backward = self.plan, turn.kind != "forward"
        before = plan.neighbour(self.stage, turn.chunk, 1 if backward else -1)
        after = plan.neighbour(self.stage, turn.chunk, -1 if backward else 1)
        moves = turn.kind != "weight-gradient" and plan.layout.pp > 1
        if before is not None and moves:
            self._message("receive", before[0], backward, turn.micro_batch)
        layers: Sequence[Layer] = plan.stage_of(self.stage, turn.chunk).body_layers(turn.micro_batch)
        self._run(reversed(layers) if backward else layers, BACKWARD[turn.kind], turn.micro_batch)
        if after is not None and moves:
            self._message("send", after[0], backward, turn.micro_batch)

    def _message(self, way: str, stage: int, backward: bool, micro_batch: int) -> None:
        begin = self.clock.begin()
        act = self.exchange.receive if way == "receive" else self.exchange.send
        act(stage, self.plan.boundary_bytes, backward)
        direction = "backward" if backward else "forward"
        self._rows.append(("pp", f"{direction} {way}", begin, self.clock.end(), micro_batch, None))

    def _run(self, layers: Sequence[Layer] | Iterator[Layer], phases: Sequence[Phase], micro_batch: int) -> None:
        for layer in layers:
            for phase in phases:
                for op in layer.ops(phase):
                    self._op(layer, op, micro_batch)

    def _op(self, layer: Layer, op: Op, micro_batch: int) -> None:
        for name in op.after:
            if name in self._waiting:
                self._waiting.pop(name).wait()
        begin = self.clock.begin()
        if isinstance(op.work, Collective):
            handle = self.exchange.collective(op.work)
            if handle is not None and op.blocking:
                handle.wait()
            elif handle is not None:
                self._waiting[op.name] = handle
            lane = str(op.work.group)
        elif isinstance(op.work, Transfer):
            return  # the schedule says when stages send
        else:
            self._checked(op)()
            lane = "compute"
        name = layer.op_name(op)
        self._rows.append((lane, name, begin, self.clock.end(), micro_batch, op.work))
