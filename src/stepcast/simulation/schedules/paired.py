"""Forwards beside backwards of other micro-batches, so that what one exchanges the other computes beside."""

from dataclasses import replace

from stepcast.simulation.schedule import Kind, Schedule, Slot


def paired(schedule: Schedule) -> Schedule:
    """*schedule* with every forward after its stage's warm-up interleaved with the backward after it.

    One forward more runs before the first backward, so that the two of a pair never need each other; the
    forwards of the warm-up and the backwards that are left at the end have nothing beside them. Source:
    Megatron-Core's combined_1f1b.py and, for the warm-up, schedules.py (overlap_moe_expert_parallel_comm).
    """
    return replace(schedule, orders=tuple(_paired(order) for order in schedule.orders))


def _paired(order: tuple[Slot, ...]) -> tuple[Slot, ...]:
    forwards = [slot for slot in order if slot.kind is Kind.FORWARD]
    backwards = [slot for slot in order if slot.kind is Kind.BACKWARD]
    if len(backwards) < len(forwards) or any(slot.with_next for slot in order):
        return order
    # As many forwards as precede the first backward: in 1F1B that is the warm-up and one more.
    ahead = order.index(backwards[0])
    pairs = zip(forwards[ahead:], backwards, strict=False)
    steady = [slot for one, two in pairs for slot in (one._replace(with_next=True), two)]
    return (*forwards[:ahead], *steady, *backwards[len(forwards) - ahead :])
