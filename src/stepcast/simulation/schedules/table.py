"""The schedules by name."""

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


def make_schedule(name: str, stages: int, micro_batches: int, chunks: int) -> Schedule:
    """The schedule called *name*."""
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; known: {', '.join(SCHEDULES)}")
    if min(stages, micro_batches, chunks) < 1:
        raise ScheduleError(f"a schedule needs at least 1 of {stages=}, {micro_batches=}, {chunks=}")
    return SCHEDULES[name](stages, micro_batches, chunks)
