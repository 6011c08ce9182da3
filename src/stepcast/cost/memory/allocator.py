"""PyTorch's caching allocator, block by block, for a sequence of tensors.

The rules are those of c10/cuda/CUDACachingAllocator.cpp with its default settings, for one stream: sizes are
rounded up to 512 bytes; requests up to 1 MiB come out of segments of 2 MiB, larger ones below 10 MiB out of
segments of 20 MiB, and the rest get segments of their own in steps of 2 MiB; the smallest free block that is
large enough is used, and split if enough is left; neighbours that are free become one; a segment goes back to
the driver only when the cache is emptied and all of it is free.
"""

from bisect import bisect_left, insort

from stepcast.units import MIB

ROUNDING = 512
SMALL_BYTES = MIB  # largest request that comes out of a small segment
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
OWN_SEGMENT_BYTES = 10 * MIB  # smallest request with a segment of its own
SEGMENT_STEP = 2 * MIB


class _Block:
    """A block, named by its address: of free blocks of one size the one with the lowest is used."""

    __slots__ = ("after", "before", "free", "name", "pool", "size")

    def __init__(self, name: int, size: int, pool: int) -> None:
        self.name, self.size, self.pool = name, size, pool
        self.free = False
        self.before: _Block | None = None
        self.after: _Block | None = None


class CachingAllocator:
    """Bytes in use and bytes held; the peaks may be set back to look at a part of a run."""

    def __init__(self) -> None:
        self.allocated = 0
        self.reserved = 0
        self.peak_allocated = 0
        self.peak_reserved = 0
        self._blocks: dict[int, _Block] = {}
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
        self._start = 1 << 60  # the driver places most segments below the one before

    def allocate(self, size_bytes: float) -> int:
        """Return the name of a new block, to free it by."""
        size = -(-int(size_bytes) // ROUNDING) * ROUNDING or ROUNDING
        pool = int(size > SMALL_BYTES)
        free = self._free[pool]
        place = bisect_left(free, (size, 0))
        if place < len(free):
            block = self._blocks[free.pop(place)[1]]
        else:
            segment = _segment(size)
            self._start -= segment
            block = self._new(self._start, segment, pool)
            self.reserved += block.size
            if self.reserved > self.peak_reserved:
                self.peak_reserved = self.reserved
        left = block.size - size
        if left > SMALL_BYTES or (not pool and left):
            self._split(block, size)
        block.free = False
        self.allocated += block.size
        if self.allocated > self.peak_allocated:  # not max: a run has millions of these
            self.peak_allocated = self.allocated
        return block.name

    def free(self, name: int) -> None:
        block = self._blocks[name]
        if block.free:
            raise ValueError(f"block {name} is free already")
        self.allocated -= block.size
        if block.before is not None and block.before.free:
            self._forget(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            self._forget(block.after)
            block = self._join(block, block.after)
        block.free = True
        insort(self._free[block.pool], (block.size, block.name))

    def empty_cache(self) -> None:
        """Give back every segment of which nothing is in use."""
        for free in self._free:
            remaining = []
            for size, name in free:
                block = self._blocks[name]
                if block.before is None and block.after is None:
                    self.reserved -= size
                    del self._blocks[name]
                else:
                    remaining.append((size, name))
            free[:] = remaining

    def _new(self, name: int, size: int, pool: int) -> _Block:
        block = self._blocks[name] = _Block(name, size, pool)
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = self._new(block.name + size, block.size - size, block.pool)
        rest.free, rest.before, rest.after = True, block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        insort(self._free[block.pool], (rest.size, rest.name))

    def _forget(self, block: _Block) -> None:
        """Remove a free block that a neighbour absorbs."""
        free = self._free[block.pool]
        free.pop(bisect_left(free, (block.size, block.name)))

    def _join(self, first: _Block, second: _Block) -> _Block:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        del self._blocks[second.name]
        return first


def _segment(size: int) -> int:
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT
    return -(-size // SEGMENT_STEP) * SEGMENT_STEP
