"""Replay the memory of a traced step in PyTorch's caching allocator, to find the bytes that it reserves.

Optimizer states are allocated at the end of the first step, in blocks that its activations left; the activations of
the second step then need blocks elsewhere. A GPT on an H200 still reserved more in its fourth step, none after it.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable

from stepcast.cost.memory.allocator import CachingAllocator
from stepcast.pytorch.capture.tracer import PRODUCTS, Moment, StepTrace
from stepcast.units import MIB

STEPS = 5
# cuBLAS on Hopper keeps a buffer for each thread that multiplies: that of the program and that of its backward
# (aten/src/ATen/cuda/CUDABlas.cpp, CublasHandlePool.cpp).
PRODUCT_BUFFER = 32 * MIB


def reserve_bytes(trace: StepTrace) -> int:
    """Return the bytes that the allocator reserves for *trace*, without the buffers of cuBLAS."""
    replay = _Replay(trace)
    for number in range(STEPS):
        replay.run_step(is_first=number == 0)
    return replay.memory.peak_reserved - replay.buffers


class _Replay:
    """The storages of a step by when they are made and freed, and the blocks that hold them."""

    def __init__(self, trace: StepTrace) -> None:
        self.memory, self.buffers = CachingAllocator(), 0
        self._storages = trace.storages
        moments = [event.moment for event in trace.events]
        self._ticks = len(moments) + 2
        backwards = [tick for tick, moment in enumerate(moments) if moment is Moment.BACKWARD]
        # A program lets go of the results of its last step when it has those of the next.
        self._released = {tick for tick in backwards if moments[tick - 1] is not Moment.BACKWARD} | {self._ticks - 1}
        updates = (tick for tick in range(max(backwards, default=0), len(moments)) if moments[tick] == Moment.OPTIMIZER)
        self._update = next(updates, self._ticks - 1)
        # The first product of each thread.
        products = [tick for tick, event in enumerate(trace.events) if event.name in PRODUCTS]
        threads = {moments[tick] is Moment.BACKWARD: tick for tick in reversed(products)}
        self._products = set(threads.values())
        self._made, self._freed = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        # Sizes of what the last step left and this one frees: gradients, and graphs that a later backward uses.
        self._stale = defaultdict[int, list[int]](list)
        self._states = list[int]()
        self._blocks = dict[int, int]()
        self._left, self._old = defaultdict[int, list[int]](list), list[int]()
        written = {tensor.storage for event in trace.events for tensor in event.writes}
        for number, storage in enumerate(trace.storages):
            if not storage.size_bytes:
                continue
            role, freed, is_carried = storage.role, storage.freed, storage.is_carried
            is_input = freed is None and (is_carried or number not in written)
            if role in ("parameters", "buffers") or (role == "activations" and is_input):
                self._make(number)
            elif role == "optimizer":
                self._states.append(number)
            elif freed is not None and (is_carried or (role == "gradients" and not storage.made)):
                self._stale[freed].append(storage.size_bytes)
            elif freed != 0:
                self._made[min(storage.made, self._ticks - 1)].append(number)
                if freed is not None:
                    self._freed[min(freed, self._ticks - 1)].append(number)

    def _make(self, number: int) -> None:
        if number in self._blocks:
            self._old.append(self._blocks[number])
        self._blocks[number] = self.memory.allocate(self._storages[number].size_bytes)

    def _free(self, numbers: Iterable[int]) -> None:
        for number in filter(self._blocks.__contains__, numbers):
            self.memory.free(self._blocks.pop(number))

    def run_step(self, is_first: bool) -> None:
        """Allocate and free the storages of one step; the first also makes what stays."""
        for tick in range(self._ticks):
            self._free(number for number in self._freed[tick] if self._storages[number].made < tick)
            for size in self._stale[tick]:
                if self._left[size]:
                    self.memory.free(self._left[size].pop(0))
            if tick in self._released:
                for block in self._old:
                    self.memory.free(block)
                self._old.clear()
            if is_first and tick == self._update:
                for number in self._states:
                    self._make(number)
            for number in self._made[tick]:
                if not (self._storages[number].role == "gradients" and not tick and number in self._blocks):
                    self._make(number)
                    if self._storages[number].freed == tick:  # by the operator itself, before it makes the next
                        self._free((number,))
            if is_first and tick in self._products:
                self.memory.allocate(PRODUCT_BUFFER)
                self.buffers += PRODUCT_BUFFER
            self._free(number for number in self._freed[tick] if self._storages[number].made >= tick)
        expected = Counter(size for sizes in self._stale.values() for size in sizes)
        for number, storage in enumerate(self._storages):
            is_left = storage.role in ("gradients", "activations") and storage.freed is None and storage.made
            left = self._left[storage.size_bytes]
            if is_left and number in self._blocks and len(left) < expected[storage.size_bytes]:
                left.append(self._blocks.pop(number))
