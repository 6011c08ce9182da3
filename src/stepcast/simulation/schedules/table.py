"""The schedules by name."""

from functools import lru_cache

from stepcast.ir.layout import Layout
from stepcast.simulation.schedule import MakeSchedule, Schedule, ScheduleError
from stepcast.simulation.schedules.classic import gpipe, interleaved, one_f_one_b
from stepcast.simulation.schedules.dualpipe import dualpipe
from stepcast.simulation.schedules.zero_bubble import zb_h1, zb_h2, zb_v

SCHEDULES: dict[str, MakeSchedule] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
    "zb-v": zb_v,
    "dualpipe": dualpipe,
}

ONLY_CHUNKS: dict[str, int] = {"1f1b": 1, "zb-h1": 1, "zb-h2": 1, "zb-v": 2, "dualpipe": 2}
"""The schedules that run with one number of chunks only."""


@lru_cache(maxsize=256)
def make_schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """The schedule called *name*."""
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    if min(stages, micro_batches, chunks) < 1:
        raise ScheduleError(f"a schedule needs at least 1 of {stages=}, {micro_batches=}, {chunks=}")
    return SCHEDULES[name](stages, micro_batches, chunks)


def usual_schedule(layout: Layout, micro_batches: int, name: str | None = None) -> str:
    """The schedule of a pipeline that is called *name*, or of which nothing is said."""
    if layout.pp == 1 and name not in ("gpipe", "1f1b"):
        return "1f1b"
    if name or layout.vpp == 1:
        return name or "1f1b"
    # Interleaving needs as many micro-batches as stages.
    return "interleaved" if micro_batches >= layout.pp else "gpipe"


def schedule_for(layout: Layout, micro_batches: int, name: str | None = None) -> Schedule:
    """The schedule of *layout*'s pipeline, by name or as is usual."""
    name = usual_schedule(layout, micro_batches, name)
    chunks = ONLY_CHUNKS.get(name, layout.vpp)
    return make_schedule(name, layout.pp, micro_batches, chunks if layout.pp > 1 else 1)
