"""An OptimusPrime step as a Program for the engine, and the time of each stage by part.

Each stage has a host lane and a device lane. Its order is that of opt_prime/schedule.py (1F1B): the gradient of a
micro-batch is sent only after the next activations have been received. A message begins when both sides have reached
it with their GPUs idle, because sizes and shapes are read back to the host. Data-parallel gradients are reduced only
during the backward of the last micro-batch: the earlier ones run under DistributedDataParallel's no_sync.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from stepcast.analyze.intervals import union_of
from stepcast.ir.dataclass import dataclass
from stepcast.optimus.cost import BUCKET_PASSES, FP32_BYTES, Constants, Machine, PassWork, StageWork, stage_work
from stepcast.optimus.plan import OptimusPlan
from stepcast.simulation.engine import simulate, task_times
from stepcast.simulation.program import CallTable, Program, ProgramBuilder, Times
from stepcast.simulation.segments import Segment, TimedOp

HOST, DEVICE, NETWORK = 0, 1, 2
LANES = ("host", "device", "network")
# Work of the device or a message; "host" and "bubble" are the rest.
WORKING = ("compute", "unhooked", "accumulation", "tensor", "data", "messages", "optimizer", "fixed")
PARTS = (*WORKING, "host", "bubble")
STAGE_SEGMENTS = 5  # of each stage: forward; first, middle and last backward; the end
# A side has come to a message when its host and its device are idle.
POST = Segment.of("post", [TimedOp("", 0.0, HOST, lanes=(DEVICE,))], lanes=3, outputs=(0,))
LABEL_MESSAGES = 5  # of one micro-batch's labels, from the first stage to the last


class StagePass(NamedTuple):
    """One entry of a stage's order: forward, backward, or a message with another stage."""

    kind: str
    micro_batch: int
    peer: int = -1


@dataclass(frozen=True, slots=True)
class OptimusStageTime:
    """Seconds of one stage by part; they sum to the step."""

    stage: int
    parts_s: dict[str, float]

    @property
    def busy_s(self) -> float:
        return sum(seconds for part, seconds in self.parts_s.items() if part != "bubble")


@dataclass(frozen=True, slots=True)
class PredictedStep:
    step_s: float
    stages: tuple[OptimusStageTime, ...]

    @property
    def busiest(self) -> OptimusStageTime:
        """The stage that waits least, which sets the pace."""
        return max(self.stages, key=lambda stage: stage.busy_s)


def predict_step(plan: OptimusPlan, machine: Machine, constants: Constants) -> PredictedStep:
    """Predict the step and its time by part."""
    program = build_program(plan, _segments(plan, machine, constants))
    run = simulate(program)
    times = task_times(run)
    stages = tuple(
        OptimusStageTime(stage, _parts(program, times, stage, run.makespan_s)) for stage in range(plan.layout.pp)
    )
    return PredictedStep(run.makespan_s, stages)


def step_s(plan: OptimusPlan, machine: Machine, constants: Constants) -> float:
    """Return the time of the step alone, as a fit needs it."""
    return simulate(build_program(plan, _segments(plan, machine, constants))).makespan_s


def _segments(plan: OptimusPlan, machine: Machine, constants: Constants) -> list[Segment]:
    """Return the segments of each stage; then the start, posting and the messages."""
    segments: list[Segment] = []
    for stage in plan.stages:
        segments += _stage_segments(plan, machine, stage_work(plan, stage, machine, constants))
    start = [TimedOp("fixed", constants.fixed_s, HOST), TimedOp("", 0.0, DEVICE, after=(0,))]
    segments += [Segment.of("start", start, lanes=3), POST]
    for hop in range(plan.layout.pp - 1):
        ranks = plan.layout.tp * plan.layout.dp
        tensors_s = FP32_BYTES * plan.boundary_elements() / machine.hop_bytes_per_s(hop * ranks, (hop + 1) * ranks)
        count = plan.forward_messages(hop)
        # From the second hop on, stage 0's tensors are sent too.
        segments.append(_message(count * constants.message_s + (2 if hop else 1) * tensors_s))
        segments.append(_message(plan.backward_messages() * constants.message_s + tensors_s))
    if plan.layout.pp > 1:
        segments.append(_message(LABEL_MESSAGES * plan.micro_batches * constants.message_s))
    return segments


def _stage_segments(plan: OptimusPlan, machine: Machine, work: StageWork) -> list[Segment]:
    last = work.backward if plan.micro_batches > 1 else work.first_backward
    passes = {"F": work.forward, "B first": work.first_backward, "B": work.backward, "B last": last}
    passes["end"] = work.optimizer
    assert len(passes) == STAGE_SEGMENTS
    return [
        Segment.of(name, _ops(plan, machine, works, name == "B last" and plan.layout.dp > 1), lanes=3)
        for name, works in passes.items()
    ]


def _ops(plan: OptimusPlan, machine: Machine, works: Sequence[PassWork], reduces: bool = False) -> list[TimedOp]:
    """Return the ops of pieces that are launched, then run; the last backward *reduces* gradients between replicas.

    The gradients of a piece are copied to a bucket that is reduced during the next pieces; all are copied back after
    the last one.
    """
    ops: list[TimedOp] = []
    for work in works:
        ops.append(TimedOp("host", work.host_s, HOST))
        launched = len(ops) - 1
        parts = [part for part in WORKING if part in work.device_s]
        ops += [TimedOp(part, work.device_s[part], DEVICE, after=(launched,)) for part in parts]
        if reduces:
            ranks = range(0, plan.layout.tp * plan.layout.dp, plan.layout.tp)
            ops.append(TimedOp("data", machine.move_s(BUCKET_PASSES * work.gradients), DEVICE))
            seconds = machine.all_reduce_s(ranks, work.gradients * FP32_BYTES)
            ops.append(TimedOp("data", seconds, NETWORK, lanes=(DEVICE,)))
    if reduces:
        back_s = machine.move_s(BUCKET_PASSES * sum(work.gradients for work in works))
        ops.append(TimedOp("data", back_s, DEVICE, lanes=(NETWORK,)))
    return ops


def _message(seconds: float) -> Segment:
    ops = [TimedOp("messages", seconds, HOST, inputs=(0,)), TimedOp("", 0.0, DEVICE, after=(0,))]
    return Segment.of("message", ops, lanes=3, inputs=1)


def build_program(plan: OptimusPlan, parts: Sequence[Segment]) -> Program:
    """Return the program of a step from the segments of its stages and messages."""
    table, places = _call_table(plan.layout.pp, plan.micro_batches)
    return Program(LANES, tuple(parts[place] for place in places), table)


@lru_cache(maxsize=16)
def _call_table(stages: int, micro_batches: int) -> tuple[CallTable, tuple[int, ...]]:
    """Return the calls of a step, and which segment of ``_segments`` each number of a segment in them is."""
    names = [*("F", "B first", "B", "B last", "end") * stages, "start", *["message"] * (2 * stages - 1)]
    parts = [Segment.of(name, [], lanes=3, inputs=int(name == "message")) for name in names]
    parts.insert(STAGE_SEGMENTS * stages + 1, POST)
    start = STAGE_SEGMENTS * stages
    post, messages = start + 1, start + 2
    builder = ProgramBuilder(LANES, stages)
    waiting: dict[tuple[str, int, int], tuple[int, int]] = {}
    places: dict[int, None] = {}  # in the order of their first calls, by which the builder numbers segments

    def call(stage: int, place: int) -> int:
        places.setdefault(place)
        return builder.call(stage, parts[place])

    for stage in range(stages):
        call(stage, start)
        for entry in _order(stage, stages, micro_batches):
            if entry.peer < 0:
                backward = 3 if entry.micro_batch == micro_batches - 1 else 2 if entry.micro_batch else 1
                place = {"F": 0, "B": backward, "E": STAGE_SEGMENTS - 1}[entry.kind]
                call(stage, STAGE_SEGMENTS * stage + place)
                continue
            posted = call(stage, post)
            hop = min(stage, entry.peer)
            message = call(
                stage, len(parts) - 1 if entry.kind == "labels" else messages + 2 * hop + (entry.kind == "b")
            )
            key = (entry.kind, hop, entry.micro_batch)
            if key in waiting:
                other_posted, other_message = waiting.pop(key)
                builder.bind(message, 0, (other_posted, 0))
                builder.bind(other_message, 0, (posted, 0))
            else:
                waiting[key] = posted, message
    assert not waiting, waiting
    return builder.program().table, tuple(places)


def _order(stage: int, stages: int, micro_batches: int) -> Iterator[StagePass]:
    """Yield the passes of a stage in a step and its messages "f" and "b" with the stage before and after it.

    Source: Schedule1F1B of opt_prime/schedule.py, aicomp.
    """
    last = stages - 1
    if stages > 1 and stage in (0, last):
        yield StagePass("labels", 0, last - stage)
    warm_up = min(last - stage, micro_batches)
    steady = micro_batches - warm_up

    def before(kind: str, batch: int) -> list[StagePass]:
        return [StagePass(kind, batch, stage - 1)] if stage else []

    def after(kind: str, batch: int) -> list[StagePass]:
        return [StagePass(kind, batch, stage + 1)] if stage < last else []

    for batch in range(warm_up):
        yield from (*before("f", batch), StagePass("F", batch), *after("f", batch))
    held: list[StagePass] = []
    for batch in range(steady):
        yield from (*before("f", batch + warm_up), *held, StagePass("F", batch + warm_up))
        yield from (*after("f", batch + warm_up), *after("b", batch), StagePass("B", batch))
        held = before("b", batch)
    yield from held
    for batch in range(steady, micro_batches):
        yield from (*after("b", batch), StagePass("B", batch), *before("b", batch))
    yield StagePass("E", 0)


def _parts(program: Program, times: Times, stage: int, step: float) -> dict[str, float]:
    """Return device time and messages by name, the host if only it is busy, and the rest as bubble."""
    calls = slice(program.table.rank_start[stage], program.table.rank_start[stage + 1])
    tasks = slice(program.task_start[calls.start], program.task_start[calls.stop])
    start, end = times.start_s[tasks], times.end_s[tasks]
    names: list[str] = []
    for segment in program.segment[calls].tolist():
        names += program.segments[segment].names
    named = np.array(names)
    lane = program.task_lanes()[tasks]
    seconds = dict.fromkeys(PARTS, 0.0)
    shown = (lane == DEVICE) | np.isin(named, ("messages", "fixed"))
    for part in WORKING:
        seconds[part] = float((end - start)[shown & (named == part)].sum())
    working = union_of(start[shown], end[shown])
    # Overlapped reductions cost nothing; the rest delays the stage.
    reducing = union_of(start[lane == NETWORK], end[lane == NETWORK])
    seconds["data"] += reducing.without(working).length_s
    launching = union_of(start[named == "host"], end[named == "host"])
    seconds["host"] = launching.without(working.union(reducing)).length_s
    seconds["bubble"] = max(0.0, step - sum(seconds.values()))
    return seconds
