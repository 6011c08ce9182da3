"""Run one rank's part of a step, op by op, in a process of this machine or as a rank that torchrun started."""

import os
import queue
import socket
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import field
from itertools import chain
from types import ModuleType
from typing import Any, NamedTuple

from stepcast.ir.children import follow_parent
from stepcast.ir.layout import Group, Layout
from stepcast.ir.types import dataclass, require
from stepcast.ir.work import Collective, CollectiveKind, GroupedMatmul, HostCopy, HostUpdate, Matmul, Transfer
from stepcast.ir.workload import Layer, Op, Phase, Stage
from stepcast.pytorch.load import load_torch
from stepcast.pytorch.run.operators import Call, Operators

C = CollectiveKind
WAIT_S = 120
WARM_UP = 2
PHASES = {
    "forward": (Phase.FORWARD,),
    "backward": (Phase.INPUT_GRADIENT, Phase.WEIGHT_GRADIENT),
    "input-gradient": (Phase.INPUT_GRADIENT,),
    "weight-gradient": (Phase.WEIGHT_GRADIENT,),
}


class ScheduleTurn(NamedTuple):
    """One slot of a stage's order; its kind is a key of ``PHASES``."""

    kind: str
    micro_batch: int
    chunk: int


@dataclass(frozen=True)
class RunPlan:
    """A workload with the order in which each stage runs it, as plain values that pass to other processes."""

    stages: tuple[Stage, ...]
    layout: Layout
    orders: tuple[tuple[ScheduleTurn, ...], ...]
    boundary_bytes: int = 0
    steps: int = 3

    def stage_of(self, stage: int, chunk: int) -> Stage:
        return self.stages[0] if len(self.stages) == 1 else self.stages[chunk * self.layout.pp + stage]

    def stage_of_rank(self, rank: int) -> int:
        return rank // (self.layout.gpus // self.layout.pp)

    def weight_sizes(self, stage: int) -> list[int]:
        """Return the elements of each weight of *stage*: the results of its weight gradients."""
        sizes: list[int] = []
        for chunk in range(self.layout.vpp):
            own = self.stage_of(stage, chunk)
            for op in [op for layer in (*own.prologue, *own.body_layers()) for op in layer.weight_gradient]:
                if isinstance(op.work, Matmul):
                    sizes.append(op.work.m * op.work.n * op.work.batch)
                elif isinstance(op.work, GroupedMatmul):
                    sizes += [op.work.n * op.work.k] * op.work.groups
        return sizes

    def neighbour(self, stage: int, chunk: int, step: int) -> int | None:
        """Return the stage of a micro-batch before (-1) or after (+1) this place; None at the ends of the model."""
        place = chunk * self.layout.pp + stage + step
        return place % self.layout.pp if 0 <= place < self.layout.pp * self.layout.vpp else None


class OpRecord(NamedTuple):
    """One op as it ran, in seconds from the step's start."""

    rank: int
    lane: str
    name: str
    start_s: float
    duration_s: float
    micro_batch: int
    step: int
    work: object = None


class OpClock:
    """The clock that marks when ops begin and end: events of the GPU, or the host's clock for a CPU.

    On a GPU an op begins where the one before it ended, and events are read when all have run. While it is *quiet*
    there are none between ops; the difference shows how long the events take.
    """

    def __init__(self, torch: ModuleType, device: str) -> None:
        self._torch, self._on_gpu = torch, device == "cuda"
        self.quiet = False

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._zero = self._last = self._mark()

    def begin(self) -> Any:
        return None if self.quiet else self._last if self._on_gpu else self._mark()

    def end(self) -> Any:
        if not self.quiet:
            self._last = self._mark()
        return self._last

    def elapsed_s(self) -> float:
        """Wait until all has run, and return the seconds since the start."""
        return self.read([(self._zero, self._mark())])[0][1]

    def read(self, marks: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        """Return the beginnings and ends of ops in seconds since the start."""

        def since_start_s(mark: Any) -> float:
            return float(self._zero.elapsed_time(mark)) * 1e-3 if self._on_gpu else mark - self._zero

        if self._on_gpu:
            self._torch.cuda.synchronize()
        return [(since_start_s(begin), since_start_s(end)) for begin, end in marks if begin is not None]


class Exchange:
    """Messages over torch.distributed (NCCL between GPUs, gloo between CPUs), with buffers of the stated sizes."""

    def __init__(self, torch: ModuleType, plan: RunPlan, rank: int, device: str) -> None:
        self._torch, self._layout, self._rank, self._device = torch, plan.layout, rank, device
        self._dist = torch.distributed
        works = [op.work for stage in plan.stages for layer, _ in stage.counted_layers(1) for op in layer.all_ops]
        groups = {work.group for work in works if isinstance(work, Collective)}
        self._groups = {family: self._make_group(family) for family in sorted(groups)}
        # A pair of stages talks in both directions at once, each with a communicator of its own.
        self._directions = [self._make_group(Group.PP)[0] for _ in range(2)] if plan.layout.pp > 1 else []
        self._buffers: dict[tuple[str, int], Any] = {}
        self._sent: list[Any] = []

    def _make_group(self, family: Group) -> tuple[Any, tuple[int, ...]]:
        """Make all groups of a family, which every rank does in the same order, and return that of this rank."""
        members = sorted({self._layout.group(str(family), rank) for rank in range(self._layout.gpus)})
        groups = {ranks: self._dist.new_group(list(ranks)) for ranks in members}
        return next(((group, ranks) for ranks, group in groups.items() if self._rank in ranks), (None, (self._rank,)))

    def _buffer(self, name: str, size_bytes: int) -> Any:
        key = (name, size_bytes)
        if key not in self._buffers:
            count = max(1, size_bytes // 4)
            self._buffers[key] = self._torch.zeros(count, dtype=self._torch.float32, device=self._device)
        return self._buffers[key]

    def collective(self, work: Collective) -> Any:
        """Start *work*, and return the handle of its last call."""
        group, members = self._groups[work.group]
        dist, ranks, handle = self._dist, len(members), None
        if ranks == 1:
            return None
        full = self._buffer("full", -(-work.size_bytes // (4 * ranks)) * 4 * ranks)
        share = self._buffer("share", max(4, full.numel() * 4 // ranks))
        options = {"group": group, "async_op": True}
        parts = list(full.chunk(ranks)) if self._rank == members[0] else None  # of a gather or scatter
        calls: dict[CollectiveKind, Callable[[], Any]] = {
            C.ALL_REDUCE: lambda: dist.all_reduce(full, **options),
            C.ALL_GATHER: lambda: dist.all_gather_into_tensor(full, share, **options),
            C.REDUCE_SCATTER: lambda: dist.reduce_scatter_tensor(share, full, **options),
            C.ALL_TO_ALL: lambda: dist.all_to_all_single(self._buffer("exchanged", 4 * full.numel()), full, **options),
            C.BROADCAST: lambda: dist.broadcast(full, members[0], **options),
            C.REDUCE: lambda: dist.reduce(full, members[0], **options),
            C.GATHER: lambda: dist.gather(share, parts, dst=members[0], **options),
            C.SCATTER: lambda: dist.scatter(share, parts, src=members[0], **options),
            C.BARRIER: lambda: dist.barrier(**options),
        }
        for _ in range(work.times):
            handle = calls[work.kind]()
        return handle

    def message(self, action: str, stage: int, size_bytes: int, backward: bool) -> None:
        """Receive from the rank at our place of *stage*, or begin to send to it."""
        per_stage = self._layout.gpus // self._layout.pp
        peer = stage * per_stage + self._rank % per_stage
        buffer, group = self._buffer(f"{action} {backward}", size_bytes), self._directions[backward]
        if action == "receive":
            self._dist.recv(buffer, peer, group=group)
        else:
            self._sent.append(self._dist.isend(buffer, peer, group=group))

    def finish(self) -> None:
        for handle in self._sent:
            handle.wait()
        self._sent.clear()


@dataclass
class Executor:
    """Runs the plan of one rank and records when each op ran."""

    plan: RunPlan
    rank: int
    operators: Operators
    exchange: Exchange | None  # None: the rank runs by itself, and times of messages are estimated instead
    clock: OpClock
    _waiting: dict[str, Any] = field(default_factory=dict)
    _records: list[OpRecord] = field(default_factory=list)  # without times
    _marks: list[tuple[Any, Any]] = field(default_factory=list)  # the beginning and end of each

    @property
    def stage(self) -> int:
        return self.plan.stage_of_rank(self.rank)

    def prepare(self) -> None:
        """Make the operands of every op before the first step."""
        stages = (self.plan.stage_of(self.stage, chunk) for chunk in range(self.plan.layout.vpp))
        for op in (op for stage in stages for layer, _ in stage.counted_layers(1) for op in layer.all_ops):
            if not isinstance(op.work, Collective | Transfer):
                self._call_of(op)

    def _call_of(self, op: Op) -> Call:
        if isinstance(op.work, HostCopy | HostUpdate):
            raise ValueError(f"{op.name}: what is offloaded to the host cannot be run")
        return self.operators.call(op.work)  # type: ignore[arg-type]

    def step(self, number: int) -> list[OpRecord]:
        """Run one step and return when each of its ops ran."""
        self.run_once()
        return [
            record._replace(start_s=begin, duration_s=end - begin, step=number)
            for record, (begin, end) in zip(self._records, self.clock.read(self._marks), strict=True)
        ]

    def elapsed_s(self) -> float:
        """Return the seconds of one step without events between its ops."""
        self.clock.quiet = True
        self.run_once()
        self.clock.quiet = False
        return self.clock.elapsed_s()

    def run_once(self) -> None:
        """Run all ops of one step."""
        plan, stage = self.plan, self.stage
        self._records.clear()
        self._marks.clear()
        self.clock.start()
        self._run_layers(plan.stage_of(stage, 0).prologue, (Phase.FORWARD,), -1)
        for turn in plan.orders[stage]:
            backward, layers = turn.kind != "forward", plan.stage_of(stage, turn.chunk).body_layers(turn.micro_batch)
            self._message("receive", turn, 1 if backward else -1)
            self._run_layers(reversed(layers) if backward else layers, PHASES[turn.kind], turn.micro_batch)
            self._message("send", turn, -1 if backward else 1)
        for chunk in range(plan.layout.vpp):
            self._run_layers(plan.stage_of(stage, chunk).epilogue, tuple(Phase), -1)
        for handle in self._waiting.values():
            handle.wait()
        self._waiting.clear()
        if self.exchange is not None:
            self.exchange.finish()

    def _note(self, lane: str, name: str, begin: Any, micro_batch: int, work: object = None) -> None:
        """Note an op that began at the mark *begin* and ends now."""
        self._records.append(OpRecord(self.rank, lane, name, 0.0, 0.0, micro_batch, 0, work))
        self._marks.append((begin, self.clock.end()))

    def _message(self, action: str, turn: ScheduleTurn, step: int) -> None:
        """Receive from or send to the neighbour at *step*, if there is one."""
        backward, stage = turn.kind != "forward", self.plan.neighbour(self.stage, turn.chunk, step)
        if stage is None or turn.kind == "weight-gradient" or self.plan.layout.pp == 1:
            return
        begin = self.clock.begin()
        if self.exchange is not None:
            self.exchange.message(action, stage, self.plan.boundary_bytes, backward)
        self._note("pp", f"{'backward' if backward else 'forward'} {action}", begin, turn.micro_batch)

    def _run_layers(self, layers: Iterable[Layer], phases: Iterable[Phase], micro_batch: int) -> None:
        for op, layer in ((op, owner) for owner in layers for phase in phases for op in owner.ops(phase)):
            if isinstance(op.work, Transfer):  # the schedule determines when stages send
                continue
            for name in op.after:
                if name in self._waiting:
                    self._waiting.pop(name).wait()
            begin, lane, handle = self.clock.begin(), "compute", None
            if not isinstance(op.work, Collective):
                self._call_of(op)()
            else:
                lane = str(op.work.group)
                handle = self.exchange.collective(op.work) if self.exchange is not None else None
            if handle is not None and op.blocking:
                handle.wait()
            elif handle is not None:
                self._waiting[op.name] = handle
            self._note(lane, layer.op_name(op), begin, micro_batch, op.work)


def call_on_ranks(
    torch: ModuleType, function: Callable[..., Any], ranks: int, *args: object, wait_s: float = WAIT_S
) -> list[Any]:
    """Return the results of ``function(rank, *args)``, each called in a process of its own."""
    context = torch.multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    answers = context.Queue()
    workers, results = [], []
    for rank in range(ranks):
        words = (os.getpid(), function, rank, ranks, port, answers, args)
        workers.append(context.Process(target=_call_as_rank, args=words, daemon=True))
        workers[-1].start()
    try:
        for _ in workers:
            rank, result, error = answers.get(timeout=wait_s)
            require(not error, f"rank {rank}: {error}")
            results.append(result)
    except queue.Empty:
        raise ValueError(f"the ranks did not finish within {wait_s} s") from None
    finally:
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.terminate()
    return results


def _call_as_rank(
    parent: int, function: Callable[..., Any], rank: int, ranks: int, port: int, answers: Any, args: tuple[object, ...]
) -> None:
    import torch

    follow_parent(parent)
    warnings.simplefilter("ignore")  # torch.distributed is about to change some names
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    try:
        answers.put((rank, function(rank, *args), ""))
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    except Exception as error:  # reported to the process that started this one
        answers.put((rank, None, f"{type(error).__name__}: {error}"))


def run_alone(plan: RunPlan, rank: int, device: str) -> list[OpRecord]:
    """Run one rank of *plan* on this machine, without its messages."""
    return _run_steps(load_torch("run"), plan, rank, device)


def run_here(plan: RunPlan, device: str) -> list[OpRecord]:
    """Run all ranks of *plan* as processes of this machine."""
    if plan.layout.gpus == 1:
        return run_alone(plan, 0, device)
    return [*chain.from_iterable(call_on_ranks(load_torch("run"), _run_distributed, plan.layout.gpus, plan, device))]


def run_as_rank(plan: RunPlan, device: str) -> list[OpRecord] | None:
    """Run this process as the rank that torchrun set; return the records of all ranks on rank 0, else None."""
    torch = load_torch("run")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    require(world == plan.layout.gpus, f"torchrun started {world} ranks, and the workload has {plan.layout.gpus}")
    records = _run_distributed(rank, plan, device, int(os.environ.get("LOCAL_RANK", rank)))
    gathered: list[list[OpRecord]] | None = [[]] * world if rank == 0 else None
    torch.distributed.gather_object(records, gathered)
    torch.distributed.destroy_process_group()
    return [*chain.from_iterable(gathered)] if gathered is not None else None


def _run_distributed(rank: int, plan: RunPlan, device: str, local: int | None = None) -> list[OpRecord]:
    """Run a rank in this process, on the GPU *local*; a process of our own has the GPU of its rank, or one core."""
    import torch

    if device == "cuda":
        torch.cuda.set_device(rank if local is None else local)
    elif local is None:
        torch.set_num_threads(1)
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=plan.layout.gpus)
    return _run_steps(torch, plan, rank, device, Exchange(torch, plan, rank, device))


def _run_steps(
    torch: ModuleType, plan: RunPlan, rank: int, device: str, exchange: Exchange | None = None
) -> list[OpRecord]:
    """Return every op of every step after the warm-up."""
    operators = Operators(torch, device, plan.weight_sizes(plan.stage_of_rank(rank)))
    executor = Executor(plan, rank, operators, exchange, OpClock(torch, device))
    executor.prepare()
    records: list[OpRecord] = []
    unmarked_s: list[float] = []
    for number in range(-WARM_UP, plan.steps):
        if exchange is not None:
            torch.distributed.barrier()
        own = executor.step(number)
        if number >= 0:
            records += own
            if device == "cuda" and exchange is None:
                unmarked_s.append(executor.elapsed_s())
    if not unmarked_s:
        return records
    # Less the time of an event between ops, so that they sum to steps without events.
    ops = len(records) // plan.steps
    ends_s = [record.start_s + record.duration_s for record in records]
    marked_s = statistics.median(max(ends_s[step * ops : (step + 1) * ops]) for step in range(plan.steps))
    mark_s = max(0.0, marked_s - statistics.median(unmarked_s)) / max(1, ops)
    return [record._replace(duration_s=max(0.0, record.duration_s - mark_s)) for record in records]


def medians(records: list[OpRecord], steps: int) -> list[OpRecord]:
    """Return one step: each op has the median duration of all steps and begins as in the last."""
    by_step: dict[int, list[list[OpRecord]]] = defaultdict(lambda: [[] for _ in range(steps)])
    for record in records:
        by_step[record.rank][record.step].append(record)
    return [
        same_op[-1]._replace(duration_s=statistics.median(record.duration_s for record in same_op))
        for own_steps in by_step.values()
        for same_op in zip(*own_steps, strict=True)
    ]
