"""Schedules that split the backward and fill the bubble with weight gradients.

Sources: Qi et al., Zero Bubble Pipeline Parallelism (2023), arXiv 2401.10241, sections 2 (ZB-H1, ZB-H2) and
6 (ZB-V); Qi et al., Pipeline Parallelism with Controllable Memory (2024), arXiv 2405.15362.
"""

from stepcast.ir.schedules import PiecePlacement
from stepcast.simulation.schedule import Schedule, Slot, SlotAction

F, I, W = SlotAction.FORWARD, SlotAction.INPUT, SlotAction.WEIGHT  # noqa: E741 (the papers' letters)


def zb_h1(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """As many forwards ahead as 1F1B; stage s holds s weight gradients back, so memory is that of 1F1B."""
    orders = (_one_chunk(micro_batches, stages - stage, stage) for stage in range(stages))
    return Schedule("zb-h1", stages, micro_batches, chunks, PiecePlacement.LOOP, tuple(orders))


def zb_h2(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Twice as far ahead, which leaves no bubble when F = I = W; a stage holds up to 2 * stages - 1.

    That takes 2 * stages - 1 micro-batches. With fewer, running further ahead only delays the backwards: the
    surplus over ZB-H1 is then what the micro-batches beyond one per stage allow.
    """
    spare = max(0, micro_batches - stages)
    orders = (
        _one_chunk(micro_batches, stages - stage + min(stages - stage - 1, spare), stage + min(stage, spare))
        for stage in range(stages)
    )
    return Schedule("zb-h2", stages, micro_batches, chunks, PiecePlacement.LOOP, tuple(orders))


def _one_chunk(micro_batches: int, ahead: int, held: int) -> tuple[Slot, ...]:
    """*ahead* forwards before the first backward; a weight gradient runs *held* backwards after its own."""
    ahead = min(ahead, micro_batches)
    slots = [Slot(F, batch) for batch in range(ahead)]
    for batch in range(micro_batches):
        slots.append(Slot(I, batch))
        if batch >= held:
            slots.append(Slot(W, batch - held))
        if batch + ahead < micro_batches:
            slots.append(Slot(F, batch + ahead))
    slots.extend(Slot(W, batch) for batch in range(max(0, micro_batches - held), micro_batches))
    return tuple(slots)


def zb_v(stages: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """Two chunks in a V: no bubble when F = I = W, with the memory of 1F1B on every stage.

    The phases are those of the paper's figure, as torch.distributed.pipelining's ZBV schedule counts them.
    Fewer than 2 * stages - 1 micro-batches: the order of that many, without the slots that do not exist.
    """
    full = max(micro_batches, 2 * stages - 1)
    orders = (
        tuple(slot for slot in _vee(stages, full, stage) if slot.micro_batch < micro_batches) for stage in range(stages)
    )
    return Schedule("zb-v", stages, micro_batches, chunks, PiecePlacement.V, tuple(orders))


def _vee(stages: int, micro_batches: int, stage: int) -> list[Slot]:
    slots: list[Slot] = []
    done: dict[tuple[SlotAction, int], int] = {}

    def run(kind: SlotAction, chunk: int) -> None:
        batch = done.get((kind, chunk), 0)
        slots.append(Slot(kind, batch, chunk))
        done[kind, chunk] = batch + 1

    for _ in range(2 * (stages - stage) - 1):
        run(F, 0)
    for _ in range(stage):
        run(F, 1)
        run(F, 0)
    for _ in range(stages - stage):
        run(F, 1)
        run(I, 1)
        run(W, 1)
    while done[F, 1] < micro_batches:
        if done[F, 0] < micro_batches:
            run(F, 0)
        run(I, 0)
        run(W, 0)
        run(F, 1)
        run(I, 1)
        run(W, 1)
    for _ in range(stage):
        run(I, 0)
        run(I, 1)
    for _ in range(stages - stage):
        run(I, 0)
        run(W, 0)
    for chunk in (1, 0):
        while done.get((W, chunk), 0) < micro_batches:
            run(W, chunk)
    return slots
