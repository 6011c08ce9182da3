"""Pipelines in which every stage takes the same time: what the published formulas are about."""

from collections.abc import Callable

import numpy as np

from stepcast.ir.arrays import FloatArray
from stepcast.simulation.engine import simulate, task_times
from stepcast.simulation.messages import FREE, Messages, SlotKind
from stepcast.simulation.pipeline import pipeline_program
from stepcast.simulation.program import Program
from stepcast.simulation.schedule import Schedule, SlotAction
from stepcast.simulation.segments import Segment, TimedOp

LANES = ("compute", "send activations", "send gradients", "receive activations", "receive gradients")


def uniform_segments(
    forward_s: float, input_s: float, weight_s: float, overlapped_s: float | None = None
) -> Callable[[int, tuple[SlotKind, ...]], Segment]:
    """One op per slot; two interleaved slots are one op of *overlapped_s*, or their two ops in turn."""
    seconds = {
        SlotAction.FORWARD: forward_s,
        SlotAction.BACKWARD: input_s + weight_s,
        SlotAction.INPUT: input_s,
        SlotAction.WEIGHT: weight_s,
    }

    def segment_of(stage: int, phases: tuple[SlotKind, ...]) -> Segment:
        name = "+".join(phase.kind.letter for phase in phases)
        if len(phases) == 2 and overlapped_s is not None:
            both = TimedOp(name, overlapped_s, inputs=(0, 1))
            return Segment.of(name, (both,), lanes=len(LANES), inputs=2, outputs=(0, 0))
        ops = [TimedOp(phase.kind.letter, seconds[phase.kind], inputs=(number,)) for number, phase in enumerate(phases)]
        return Segment.of(name, ops, lanes=len(LANES), inputs=len(ops), outputs=range(len(ops)))

    return segment_of


def uniform_program(
    schedule: Schedule,
    forward_s: float,
    input_s: float,
    weight_s: float,
    overlapped_s: float | None = None,
    messages: Messages = FREE,
) -> Program:
    segments = uniform_segments(forward_s, input_s, weight_s, overlapped_s)
    return pipeline_program(schedule, LANES, segments, messages)


def spans_s(program: Program) -> FloatArray:
    """For each rank the time from the start of its first compute op to the end of its last."""
    times = task_times(simulate(program))
    lane = np.concatenate([program.segments[segment].shape.lane for segment in program.segment])
    found = []
    for rank in range(program.ranks):
        tasks = slice(*program.task_start[program.table.rank_start[rank : rank + 2]])
        mine = lane[tasks] == 0
        found.append(times.end_s[tasks][mine].max() - times.start_s[tasks][mine].min())
    return np.array(found)
