"""How far a run gets in a given time."""

from dataclasses import replace

from stepcast.goodput.closed import expected
from stepcast.goodput.operation import Operation
from stepcast.goodput.plan import Phase, process_of


def steps_within(phase: Phase, operation: Operation, available_s: float) -> int:
    """Steps that end within *available_s* on average."""
    low, high = 0, int(available_s / phase.step_s)

    def takes_s(steps: int) -> float:
        return expected(process_of(replace(phase, steps=steps), operation)).total_s

    while low < high:
        middle = (low + high + 1) // 2
        if takes_s(middle) <= available_s:
            low = middle
        else:
            high = middle - 1
    if not low:
        raise ValueError("not one step ends by then")
    return low
