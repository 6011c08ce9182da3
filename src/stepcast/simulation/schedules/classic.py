"""GPipe, 1F1B and interleaved 1F1B."""

from stepcast.ir.schedules import PiecePlacement
from stepcast.simulation.schedule import Schedule, ScheduleError, Slot, SlotAction

F, B = SlotAction.FORWARD, SlotAction.BACKWARD


def gpipe(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """All forwards, then all backwards in the opposite order.

    Source: Huang et al., GPipe (2019), figure 2c. With several chunks this is the breadth-first loop of
    Lamy-Poirier, Breadth-First Pipeline Parallelism (2023): a chunk takes all micro-batches before the next.
    """
    forward = [Slot(F, batch, chunk) for chunk in range(chunks) for batch in range(micro_batches)]
    order = (*forward, *(Slot(B, slot.micro_batch, slot.chunk) for slot in reversed(forward)))
    return Schedule("gpipe", stages, micro_batches, chunks, PiecePlacement.LOOP, (order,) * stages)


def one_f_one_b(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Enough forwards to reach the last stage and come back, then one forward and one backward in turn.

    Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters (2021), section
    2.2.
    """
    forward, backward = ([Slot(kind, batch) for batch in range(micro_batches)] for kind in (F, B))
    orders = (_alternate(forward, backward, stages - stage - 1) for stage in range(stages))
    return Schedule("1f1b", stages, micro_batches, chunks, PiecePlacement.LOOP, tuple(orders))


def interleaved(stages: int, micro_batches: int, chunks: int, group: int | None = None) -> Schedule:
    """1F1B over several chunks per stage: *group* micro-batches through a chunk before the next one.

    Source: Narayanan et al. (2021), section 2.3; Megatron-LM core/pipeline_parallel/schedules.py for the
    number of warm-up slots and for a last group that is short. Without *group* the smallest one that Megatron
    accepts is taken: the number of stages when it divides the micro-batches.
    """
    size = group_size(stages, micro_batches, group)
    forward = _in_groups(F, micro_batches, range(chunks), size)
    backward = _in_groups(B, micro_batches, range(chunks - 1, -1, -1), size)
    orders = (_alternate(forward, backward, 2 * (stages - stage - 1) + (chunks - 1) * size) for stage in range(stages))
    return Schedule("interleaved", stages, micro_batches, chunks, PiecePlacement.LOOP, tuple(orders))


def group_size(stages: int, micro_batches: int, group: int | None = None) -> int:
    """Micro-batches that pass through a chunk together: asked for and legal, or the fewest that are legal."""

    def legal(size: int) -> bool:
        rest = micro_batches % size
        return rest == 0 or rest >= stages

    if group is None:
        return next(size for size in range(stages, micro_batches + 1) if legal(size))
    if not stages <= group <= micro_batches:
        raise ScheduleError(
            f"the group must lie between {stages} stages and {micro_batches} micro-batches, not {group}"
        )
    if not legal(group):
        raise ScheduleError(
            f"{micro_batches} micro-batches in groups of {group} leave {micro_batches % group}, "
            f"fewer than the {stages} stages"
        )
    return group


def _in_groups(kind: SlotAction, micro_batches: int, chunks: range, group: int) -> list[Slot]:
    """Slots with each group of micro-batches passing through every chunk before the next group starts."""
    return [
        Slot(kind, batch, chunk)
        for first in range(0, micro_batches, group)
        for chunk in chunks
        for batch in range(first, min(first + group, micro_batches))
    ]


def _alternate(forwards: list[Slot], backwards: list[Slot], warm_up: int) -> tuple[Slot, ...]:
    """*warm_up* forwards, then forward and backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    steady = [slot for pair in zip(forwards[warm_up:], backwards, strict=False) for slot in pair]
    return (*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :])
