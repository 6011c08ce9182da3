"""What a search says beside its best: what fewer GPUs and less memory cost, and what more memory gives."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from stepcast.searching.columns import Bools, Floats
from stepcast.searching.crew import Crew
from stepcast.searching.queue import Queue
from stepcast.searching.result import Found, Missed
from stepcast.searching.space import Ints
from stepcast.units import GIB

if TYPE_CHECKING:
    from stepcast.searching.best import Searching

MORE_BYTES = 16 * GIB
MOST_ROOMIER = 32
# The front: each with so much less memory than the one before, so many, and none slower than that.
LESS = 0.8
MOST_OF_FRONT = 6
SLOWEST = 2.0
FEW = 4
# Simulations for each step of the front: bounds of what recomputes or gathers are loose.
MOST_TRIED = 32


class Around:
    """Looks at more candidates of a search that has its best."""

    def __init__(self, searching: "Searching", crew: Crew) -> None:
        self.searching, self.crew, self.space = searching, crew, searching.space

    def look(self) -> None:
        """The fastest of each number of GPUs, and those that do with ever less memory, so that the front
        knows what fewer and less cost.
        """
        space, fits = self.space, slice(0, self.space.fitting)
        gpus, room = space.gpus[fits], space.memory_bytes[fits]
        numbers = np.unique(gpus).tolist()
        for number in numbers if len(numbers) > 1 else ():
            self._fastest(gpus == number, _having(number))
        best: Found | None = self.searching.kept[0]
        slowest = SLOWEST * self.searching.kept[0].step_s
        for _ in range(MOST_OF_FRONT):
            if best is None:
                break
            most = LESS * best.memory_bytes
            may = (room <= most) & (space.time_s[fits] <= slowest)
            best = self._fastest(may, _within(most), MOST_TRIED)

    def _fastest(
        self, may: Bools, suits: Callable[[Found], bool], most_tried: float = np.inf
    ) -> Found | None:
        """The fastest that *suits*, of those that *may*; of those that were tried where that takes more."""
        searching, before = self.searching, len(self.searching.simulated)
        queue = _Named(self, np.flatnonzero(may))
        while True:
            best = min(filter(suits, searching.simulated), key=lambda each: each.step_s, default=None)
            some = queue.next(FEW, best.step_s if best else np.inf)
            if not len(some) or len(searching.simulated) - before >= most_tried:
                return best
            searching.round(self.crew, queue.names(some))

    def beyond(self) -> tuple[Missed | None, Found | None]:
        """Return the fastest of what does not fit, at best, and the best that more memory would let in; both
        on as many GPUs as the best uses.
        """
        near = np.arange(self.space.fitting, len(self.space.row))
        near = near[self.space.gpus[near] == self.searching.kept[0].gpus]
        self.space.bound(near, rough=True)
        return self._missed(near), self._roomier(near)

    def _missed(self, near: Ints) -> Missed | None:
        """What memory keeps out that might be faster than the best: bound beside bound."""
        bound_s = self.searching.kept[0].bound_s
        queue = _Named(self, near)
        some = queue.next(1, bound_s)
        if not len(some) or self.space.time_s[number := queue.names(some)[0]] >= bound_s:
            return None
        part, at = self.space.place(number)
        time_s, memory_bytes = self.space.time_s[number], self.space.memory_bytes[number]
        return Missed(part.space.strategy(at), float(time_s), float(memory_bytes))

    def _roomier(self, near: Ints) -> Found | None:
        """The best of those that MORE_BYTES would let in, of the first few by their bounds."""
        searching, capacity = self.searching, self.searching.capacity + MORE_BYTES
        queue = _Named(self, near[self.space.memory_bytes[near] <= capacity])
        best: Found | None = None
        for _ in range(MOST_ROOMIER):
            worst = best.step_s if best and searching.name == "step" else np.inf
            some = queue.next(1, worst)
            if not len(some):
                break
            number = queue.names(some)[0]
            trial = searching.trial(number, np.inf, capacity)
            searching.tick()
            if trial.step_s is not None:
                found = searching.found(number, trial)
                best = found if best is None or found.rank < best.rank else best
        return best


class _Named(Queue):
    """A queue of some of the candidates, by their times, whatever the search makes least."""

    def __init__(self, around: Around, numbers: Ints) -> None:
        space, tick = around.space, around.searching.tick

        def tighten(some: Ints) -> Floats:
            tick()
            return space.bound(numbers[some]).time_s

        self.numbers = numbers
        super().__init__(space.time_s[numbers], space.ranks[numbers], space.kinds[numbers], tighten)

    def names(self, some: Ints) -> list[int]:
        named: list[int] = self.numbers[some].tolist()
        return named


def _having(gpus: int) -> Callable[[Found], bool]:
    return lambda each: each.gpus == gpus


def _within(most_bytes: float) -> Callable[[Found], bool]:
    return lambda each: each.memory_bytes <= most_bytes
