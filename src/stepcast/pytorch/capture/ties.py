"""Parameters that several layers read: where stages of a pipeline part those, each has a copy."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from stepcast.ir.captured import Tie
from stepcast.pytorch.capture.events import StepTrace
from stepcast.pytorch.capture.splits import Splits


def ties_of(
    readers: Mapping[int, Sequence[int]], numbers: Mapping[int, int], trace: StepTrace, splits: Splits
) -> tuple[Tie, ...]:
    """*readers* are the segments that read each parameter; *numbers* those of the layers among them."""
    found: dict[tuple[int, ...], list[int]] = defaultdict(lambda: [0, 0])
    for storage, places in readers.items():
        parts = tuple(sorted({numbers[place] for place in places if place in numbers}))
        if len(parts) > 1:
            size = trace.storages[storage].size_bytes
            found[parts][0] += size
            found[parts][1] += size if storage in splits.shared else 0
    return tuple(Tie(parts, size, split) for parts, (size, split) in sorted(found.items()))
