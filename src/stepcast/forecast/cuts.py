"""Where a captured program is cut into pipeline stages: equal times, and little to send."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from stepcast.ir.captured import Captured


class CutError(ValueError):
    """A program that cannot be cut so often."""


def places(captured: Captured) -> list[int]:
    """Where a cut may be: within a block that repeats only where no other place of it would send less.

    Elsewhere, where neither neighbour would send less.
    """
    sent = [part.sent_bytes for part in captured.parts]
    found: list[int] = []
    start = 0
    for block in captured.stage.body:
        length = len(block.layers)
        for first in range(start, start + length * block.repeat, length):
            inside = range(max(first, 1), first + length)
            least = min((sent[at] for at in inside if sent[at]), default=0)
            for at in inside:
                # A block of one layer has no inside; its neighbours say whether it is a good place.
                beside = sent[at - 1 : at + 2] if length == 1 else [least]
                if sent[at] and sent[at] <= min(each for each in beside if each):
                    found.append(at)
        start += length * block.repeat
    return found


def cuts(captured: Captured, seconds: Sequence[float], stages: int) -> list[int]:
    """The layers at which stages 1, 2, ... begin: the slowest stage is as fast as can be, then the bytes
    sent are least. *seconds* are those of each layer, forward and backward.
    """
    if stages == 1:
        return []
    borders = [0, *places(captured), len(captured.parts)]
    borders = sorted(set(borders))
    if len(borders) <= stages:
        raise CutError(f"{captured.name}: can be cut into {len(borders) - 1} stages at most, not {stages}")
    total = [0.0, *accumulate(seconds)]
    sent = [captured.parts[at].sent_bytes if 0 < at < len(captured.parts) else 0 for at in borders]
    count = len(borders)
    # best[i]: (slowest stage, bytes sent, the cut before) of the layers up to border i.
    best: list[tuple[float, int, list[int]] | None] = [None] * count
    best[0] = (0.0, 0, [])
    for stage in range(stages):
        following: list[tuple[float, int, list[int]] | None] = [None] * count
        last = stage == stages - 1
        for end in range(stage + 1, count):
            if last and end != count - 1:
                continue
            for begin in range(stage, end):
                before = best[begin]
                if before is None:
                    continue
                slowest = max(before[0], total[borders[end]] - total[borders[begin]])
                known = following[end]
                # To a thousandth: what is told apart by less is told apart by what it sends.
                moved = before[1] + (0 if last else sent[end])
                if known is None or (round(slowest, 12), moved) < (round(known[0], 12), known[1]):
                    following[end] = (slowest, moved, [*before[2], borders[end]])
        best = following
    found = best[count - 1]
    assert found is not None
    return found[2][:-1]


def pieces(total: int, begins: Sequence[int]) -> list[range]:
    """The layers of each stage."""
    return [range(first, last) for first, last in pairwise([0, *begins, total])]
