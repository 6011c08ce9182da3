"""Candidates in the order of their tight bounds, which are worked out as the rough ones come near.

Rough bounds never exceed tight ones. So what is left cannot come before the first rough bound that is left,
and whatever lies below that is in its final order.
"""

from collections.abc import Callable

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray

# Kinds whose bounds are made tight in one go.
KINDS_AT_ONCE = 128


class Queue:
    """Hands out the numbers 0, 1, ... of candidates.

    *rough* bounds them; those of one of *kinds* take little once the first is tight; *tighten* gives the
    bounds of some of them. Of equal bounds those with the lower of *ranks* come first.
    """

    def __init__(
        self, rough: FloatArray, ranks: IntArray, kinds: IntArray, tighten: Callable[[IntArray], FloatArray]
    ) -> None:
        self.tighten, self.ranks = tighten, ranks
        self.order = np.lexsort((ranks, rough))
        self.rough = rough[self.order]
        begins = np.sort(np.unique(kinds[self.order], return_index=True)[1])
        self.cuts = [*begins[KINDS_AT_ONCE::KINDS_AT_ONCE].tolist(), len(self.order)]
        self.seen = 0  # of the order, those that are tight
        self.ready: IntArray = np.zeros(0, dtype=np.int64)  # of them, those not handed out, the least first
        self.tight: FloatArray = np.zeros(0)

    @property
    def frontier(self) -> float:
        """What those whose bounds are rough cannot be below."""
        return float(self.rough[self.seen]) if self.seen < len(self.order) else np.inf

    @property
    def least(self) -> float:
        """What all that is left cannot be below."""
        return min(self.frontier, float(self.tight[0]) if len(self.tight) else np.inf)

    def __len__(self) -> int:
        return len(self.order) - self.seen + len(self.ready)

    def below(self, worst: float) -> int:
        """How many are left whose bounds, as far as they are known, do not exceed *worst*."""
        rough = int(np.searchsorted(self.rough[self.seen :], worst, "right"))
        return rough + int(np.searchsorted(self.tight, worst, "right"))

    def next(self, most: int, worst: float) -> IntArray:
        """The next *most*, as far as their bounds do not exceed *worst*."""
        while self.seen < len(self.order) and self.frontier <= worst:
            if len(self.tight) >= most and self.tight[most - 1] < self.frontier:
                break
            self._see()
        count = min(most, int(np.searchsorted(self.tight, worst, "right")))
        taken, self.ready, self.tight = self.ready[:count], self.ready[count:], self.tight[count:]
        return taken

    def _see(self) -> None:
        some = self.order[self.seen : self.cuts[0]]
        tight = self.tighten(some)
        self.seen = self.cuts.pop(0)
        ready, tight = np.concatenate([self.ready, some]), np.concatenate([self.tight, tight])
        order = np.lexsort((self.ranks[ready], tight))
        self.ready, self.tight = ready[order], tight[order]
