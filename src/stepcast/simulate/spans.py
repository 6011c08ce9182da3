"""The tasks of a simulated step as a Timeline."""

import numpy as np

from stepcast.ir.timeline import NONE, Lane, SpanKind, Timeline
from stepcast.simulate.arrays import NO_LANE, Times
from stepcast.simulate.segments import COMPUTE
from stepcast.simulate.step import Step


def timeline_of(step: Step, times: Times, source: str = "") -> Timeline:
    """Every task that takes time, on the lanes of its stage. Details say which slot it belongs to."""
    program = step.program
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
    used, lane_of = np.unique(program.rank[calls] * len(program.lanes) + lanes, return_inverse=True)
    ranks_and_lanes = [divmod(key, len(program.lanes)) for key in used.tolist()]
    micro_batches = program.micro_batches
    batch = np.full(len(kept), NONE) if micro_batches is None else micro_batches[calls, 0]
    stages = range(step.schedule.stages)
    return Timeline(
        names=tuple(names),
        lanes=tuple(Lane(rank, program.lanes[lane]) for rank, lane in ranks_and_lanes),
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
        source=source,
        stage_of_rank={stage: stage for stage in stages},
    )
