"""How many micro-batches a stage holds at once when it is fullest, by schedule.

What a schedule really holds is best counted from its order; these are the numbers its authors give.
"""

from stepcast.ir.strategy import ScheduleKind, Strategy


def default_in_flight(strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    """For each stage, the micro-batches that each of its pieces holds."""
    layout, batches = strategy.layout, strategy.micro_batches
    stages = range(layout.pp)
    # A forward beside the backward of another micro-batch: one more is begun before the first ends.
    further = 1 if strategy.pairs_micro_batches else 0
    if layout.pp == 1:  # forward and backward of each micro-batch in turn, unless all forwards come first
        held = batches if strategy.schedule is ScheduleKind.GPIPE else min(batches, 1 + further)
        return ((held,) * layout.vpp,)
    match strategy.schedule:
        case ScheduleKind.GPIPE:
            counts = [(batches,) * layout.vpp for _ in stages]
        case ScheduleKind.ONE_F_ONE_B:
            counts = [(layout.pp - stage,) for stage in stages]
        case ScheduleKind.INTERLEAVED:
            counts = [_interleaved(layout.pp, layout.vpp, stage, further) for stage in stages]
        case ScheduleKind.ZB_H1:  # forwards ahead and weight gradients held back make up for each other
            counts = [(layout.pp,) for _ in stages]
        case ScheduleKind.ZB_H2:
            counts = [(2 * layout.pp - 1,) for _ in stages]
        case ScheduleKind.ZB_V:  # as much as 1F1B's first stage, spread over both chunks
            counts = [(2 * layout.pp - 1 - stage, stage + 1) for stage in stages]
        case ScheduleKind.DUALPIPE:  # pp + 1 in all (DeepSeek-V3, 2024, table 2)
            counts = [_two_way(layout.pp, stage) for stage in stages]
    return tuple(tuple(min(batches, number) for number in each) for each in counts)


def _interleaved(pp: int, chunks: int, stage: int, further: int) -> tuple[int, ...]:
    """Warm-up runs pp micro-batches through a chunk before the next (Narayanan et al. 2021, section 2.3)."""
    ahead = 2 * (pp - stage - 1) + (chunks - 1) * pp + 1 + further
    counts = [0] * chunks
    for slot in range(ahead):
        counts[slot // pp % chunks] += 1
    return tuple(counts)


def _two_way(pp: int, stage: int) -> tuple[int, int]:
    from_edge = min(stage, pp - 1 - stage)
    near, far = pp - from_edge, from_edge + 1
    return (near, far) if stage < pp // 2 else (far, near)
