"""The tasks of a simulated step as a Timeline."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stepcast.ir.layout import Layout
from stepcast.ir.timeline import NONE, Lane, SpanKind, Timeline
from stepcast.simulation.arrays import Program, Times
from stepcast.simulation.distinct import distinct
from stepcast.simulation.lanes import COMPUTE
from stepcast.simulation.pieces import NO_LANE, Ints
from stepcast.simulation.step import Step


def timeline_of(step: Step, times: Times, layout: Layout, place: int = 0) -> Timeline:
    """Every task that takes time, on the lanes of the rank at *place* of its stage, which was simulated for
    all.

    Details say which slot a task belongs to.
    """
    program = step.program.written_out
    names = list(dict.fromkeys(name for segment in program.segments for name in segment.shape.names))
    number = {name: at for at, name in enumerate(names)}
    slots = [segment.name or "once" for segment in program.segments]
    details = list(dict.fromkeys(slots))
    calls, lanes = program.task_calls(), program.task_lanes()
    durations_s = times.end_s - times.start_s
    kept = np.flatnonzero((durations_s > 0) & (lanes != NO_LANE))
    calls, lanes = calls[kept], lanes[kept]
    name_of = program.per_task(
        [np.array([number[name] for name in segment.shape.names], np.int64) for segment in program.segments]
    )[kept]
    slot_of = np.array([details.index(slot) for slot in slots], np.int64)
    used, _, lane_of = distinct(program.rank[calls] * len(program.lanes) + lanes)
    stages = range(step.schedule.stages)
    ranks = [layout.rank_of_stage(stage, place) for stage in stages]
    micro_batches = program.micro_batches
    batch = np.full(len(kept), NONE) if micro_batches is None else micro_batches[calls, 0]
    return Timeline(
        names=tuple(names),
        lanes=tuple(_lane(program, ranks, *divmod(key, len(program.lanes))) for key in used.tolist()),
        works=(),
        details=tuple({"slot": slot} for slot in details),
        name_of=name_of.astype(np.int32),
        lane_of=lane_of.astype(np.int32),
        kind_of=np.where(lanes == COMPUTE, SpanKind.COMPUTE, SpanKind.COMMUNICATION).astype(np.int32),
        work_of=np.full(len(kept), NONE, np.int32),
        detail_of=slot_of[program.segment[calls]].astype(np.int32),
        micro_batch_of=batch.astype(np.int32),
        parent_of=np.full(len(kept), NONE, np.int32),
        start_s=times.start_s[kept],
        duration_s=durations_s[kept],
        measured=False,
        layout=layout,
        stage_of_rank=dict(zip(ranks, stages, strict=True)),
        flows=_flows(step.program, kept, lanes),
    )


def _lane(program: Program, ranks: Sequence[int], number: int, lane: int) -> Lane:
    """A lane of a stage; messages that wait for their receiver lie apart, on the rank that sends them."""
    if number < len(ranks):
        return Lane(ranks[number], program.lanes[lane])
    sender = program.rank[program.source_call[program.rank_start[number], 0]]
    return Lane(ranks[sender], program.rank_names[number])


def _flows(whole: Program, kept: Ints, lanes: Ints) -> npt.NDArray[np.int32]:
    """Messages between ranks: the row that sends, and the first row that computes once it has arrived."""
    program = whole.written_out
    row = np.full(program.tasks, -1, np.int64)
    row[kept] = np.arange(len(kept))
    most = max((len(segment.shape.outputs) for segment in program.segments), default=0)
    output_op = np.full((len(program.segments), max(most, 1)), -1, np.int64)
    for number, segment in enumerate(program.segments):
        output_op[number, : len(segment.shape.outputs)] = segment.shape.outputs
    # Inputs are those of a slot's first piece; what it computes may stand in a later one.
    first = whole.flat_start[:-1]
    begins, ends = program.task_start[first], program.task_start[whole.flat_start[1:]]
    computing = np.flatnonzero(lanes == COMPUTE)
    at = np.searchsorted(kept[computing], begins)
    found = np.append(kept[computing], program.tasks)[at] < ends
    waits = np.where(found, np.append(computing, -1)[at], -1)
    pairs = []
    for port in range(program.inputs):
        sources = program.source_call[first, port]
        calls = np.flatnonzero((sources >= 0) & (waits >= 0))
        sources = sources[calls]
        between = program.rank[first[calls]] != program.rank[sources]
        calls, sources = calls[between], sources[between]
        sent = output_op[program.segment[sources], program.source_port[first[calls], port]]
        rows = np.stack([row[program.task_start[sources] + sent], waits[calls]], axis=1)
        pairs.append(rows[(rows >= 0).all(axis=1)])
    return np.concatenate([np.zeros((0, 2), np.int64), *pairs]).astype(np.int32)
