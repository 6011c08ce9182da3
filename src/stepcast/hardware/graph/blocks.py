"""Links in blocks: as many as an array of some shape has places, so that a link's number is arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod

import numpy as np

from stepcast.ir.flows import Floats, Ints, Links

Told = Callable[..., str]


@dataclass(frozen=True)
class Block:
    """Links of one tier; *told* names one by its place."""

    tier: str
    start: int
    shape: tuple[int, ...]
    told: Told = field(repr=False)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def at(self, *place: Ints | int) -> Ints:
        """The numbers of the links at *place*, a column for each dimension."""
        number: Ints = np.zeros(1, np.int64)
        for size, index in zip(self.shape, place, strict=True):
            number = number * size + index
        return number + self.start

    def name(self, link: int) -> str:
        return self.told(*(int(place) for place in np.unravel_index(link - self.start, self.shape)))


@dataclass
class Blocks:
    """Blocks that follow each other."""

    tiers: list[str] = field(default_factory=list)
    blocks: dict[str, Block] = field(default_factory=dict)
    rates: list[float] = field(default_factory=list)
    links: int = 0

    def add(self, key: str, tier: str, shape: Sequence[int], bytes_per_s: float, told: Told) -> None:
        if tier not in self.tiers:
            self.tiers.append(tier)
        block = self.blocks[key] = Block(tier, self.links, tuple(shape), told)
        self.rates.append(bytes_per_s)
        self.links += block.size

    def build(self) -> Links:
        blocks = list(self.blocks.values())
        sizes = [block.size for block in blocks]
        starts = np.array([block.start for block in blocks])

        def name(link: int) -> str:
            return blocks[int(np.searchsorted(starts, link, side="right")) - 1].name(link)

        tiers: Ints = np.array([self.tiers.index(block.tier) for block in blocks], np.int64)
        rates: Floats = np.array(self.rates, np.float64)
        return Links(tuple(self.tiers), np.repeat(tiers, sizes), np.repeat(rates, sizes), name)
