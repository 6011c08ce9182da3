"""The schedules by name, and what writes the order of each."""

from functools import lru_cache

from stepcast.ir.layout import Layout
from stepcast.ir.schedules import SCHEDULES, ScheduleKind, misfit, usual_kind
from stepcast.simulation.schedule import MakeSchedule, Schedule, ScheduleError
from stepcast.simulation.schedules.classic import gpipe, interleaved, one_f_one_b
from stepcast.simulation.schedules.dualpipe import dualpipe
from stepcast.simulation.schedules.zero_bubble import zb_h1, zb_h2, zb_v

ORDERS: dict[ScheduleKind, MakeSchedule] = {
    ScheduleKind.GPIPE: gpipe,
    ScheduleKind.ONE_F_ONE_B: one_f_one_b,
    ScheduleKind.INTERLEAVED: interleaved,
    ScheduleKind.ZB_H1: zb_h1,
    ScheduleKind.ZB_H2: zb_h2,
    ScheduleKind.ZB_V: zb_v,
    ScheduleKind.DUALPIPE: dualpipe,
}


def kind_named(name: str) -> ScheduleKind:
    if name not in set(ScheduleKind):
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(ScheduleKind)}")
    return ScheduleKind(name)


@lru_cache(maxsize=256)
def make_schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """The schedule called *name*; *chunks* are all pieces on a stage, of each copy of the model."""
    kind = kind_named(name)
    facts = SCHEDULES[kind]
    if min(stages, micro_batches, chunks) < 1:
        raise ScheduleError(f"a schedule needs at least 1 of {stages=}, {micro_batches=}, {chunks=}")
    if chunks < facts.fewest_chunks and facts.most_chunks is None:
        fewest = facts.fewest_chunks
        raise ScheduleError(f"{name} needs at least {fewest} chunks per stage, not {chunks}; use 1f1b")
    if (wanted := facts.pieces(chunks)) != chunks:
        raise ScheduleError(f"{name} runs {wanted} chunk(s) per stage, not {chunks}")
    if problem := misfit(kind, stages, micro_batches):
        raise ScheduleError(problem)
    return ORDERS[kind](stages, micro_batches, chunks)


def usual_schedule(layout: Layout, micro_batches: int, name: str | None = None) -> str:
    """The schedule of a pipeline that is called *name*, or of which nothing is said."""
    if layout.pp == 1 and not (name and SCHEDULES[kind_named(name)].alone):
        return ScheduleKind.ONE_F_ONE_B
    if name:
        return name
    usual = usual_kind(layout.vpp)
    return ScheduleKind.GPIPE if misfit(usual, layout.pp, micro_batches) else usual


def schedule_for(layout: Layout, micro_batches: int, name: str | None = None) -> Schedule:
    """The schedule of *layout*'s pipeline, by name or as is usual."""
    name = usual_schedule(layout, micro_batches, name)
    return make_schedule(name, layout.pp, micro_batches, chunks_for(layout, name))


def chunks_for(layout: Layout, name: str) -> int:
    """The pieces on a stage of *layout* under the schedule called *name*."""
    return SCHEDULES[kind_named(name)].pieces(layout.vpp) if layout.pp > 1 else 1
