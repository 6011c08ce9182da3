"""Links and flows: columns of bytes on directed links. Nothing here knows what the bytes are for."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cached_property

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.ir.types import dataclass, require


@dataclass(frozen=True, eq=False)
class Links:
    """Directed links, each of a tier and with a capacity."""

    tiers: tuple[str, ...]
    tier: IntArray
    capacity_bytes_per_s: FloatArray
    # The name of a link, asked for few of them.
    name: Callable[[int], str] = str

    def __post_init__(self) -> None:
        tier, capacity = self.tier, self.capacity_bytes_per_s
        require(tier.shape == capacity.shape and tier.ndim == 1, f"{len(tier)} links but {len(capacity)} capacities")
        known = not len(tier) or 0 <= tier.min() <= tier.max() < len(self.tiers)
        require(bool(known), "a link is of a tier that is not there")
        wrong = np.flatnonzero(~(np.isfinite(capacity) & (capacity > 0)))
        if len(wrong):
            raise ValueError(f"link {self.name(int(wrong[0]))} has no bandwidth above zero")

    def __len__(self) -> int:
        return len(self.tier)


@dataclass(frozen=True, eq=False)
class FlowSet:
    """Flows that begin together: flow f puts ``bytes_on[k]`` on ``link[k]``, k from ``first[f]`` to below
    ``first[f + 1]``.

    All bytes of a flow advance at one pace; what is paced together is one flow with all its links (a ring),
    what is not are several (the senders of an exchange).
    """

    first: IntArray
    link: IntArray
    bytes_on: FloatArray
    # Shares of a short link: in bytes per second, in proportion to these.
    weight: FloatArray
    # The group of equal flows that each flow belongs to.
    group: IntArray

    def __post_init__(self) -> None:
        flows = len(self.first) - 1
        rising = flows >= 0 and self.first[0] == 0 and not (np.diff(self.first) < 0).any()
        if not rising or self.first[-1] != len(self.link):
            raise ValueError("first must rise from 0 to the number of entries")
        if len(self.weight) != flows or len(self.group) != flows or len(self.bytes_on) != len(self.link):
            raise ValueError(f"{flows} flows, but columns of other lengths")
        if flows and not (np.isfinite(self.weight) & (self.weight > 0)).all():
            raise ValueError("weights must be finite and above zero")
        if not (np.isfinite(self.bytes_on) & (self.bytes_on >= 0)).all():
            raise ValueError("bytes must be finite and not below zero")

    @classmethod
    def of(
        cls,
        first: IntArray,
        link: IntArray,
        bytes_on: FloatArray,
        weight: FloatArray | None = None,
        group: IntArray | None = None,
    ) -> "FlowSet":
        """Return flows of weight 1, each its own group, unless given otherwise."""
        flows = len(first) - 1
        weight = np.ones(flows) if weight is None else weight
        return cls(first, link, bytes_on, weight, np.arange(flows) if group is None else group)

    def __len__(self) -> int:
        return len(self.weight)

    @cached_property
    def flow(self) -> IntArray:
        """Return the flow of each entry."""
        return np.repeat(np.arange(len(self)), np.diff(self.first))

    def on_links(self, links: int) -> FloatArray:
        """Return the bytes that each of *links* carries for all flows."""
        return np.bincount(self.link, self.bytes_on, links).astype(np.float64)

    def times(self, factor: float | FloatArray) -> "FlowSet":
        """Return the flows with *factor* times the bytes, one for all or one for each flow."""
        factors = factor[self.flow] if isinstance(factor, np.ndarray) else factor
        return replace(self, bytes_on=self.bytes_on * factors)

    def select(self, numbers: IntArray) -> "FlowSet":
        """Return the flows of these numbers, in their order."""
        sizes = np.diff(self.first)[numbers]
        first = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])
        positions = np.repeat(self.first[numbers] - first[:-1], sizes) + np.arange(first[-1])
        return FlowSet(first, self.link[positions], self.bytes_on[positions], self.weight[numbers], self.group[numbers])

    def longest_s(self, links: Links) -> FloatArray:
        """Return the seconds that each flow takes alone, as far as its links decide."""
        longest = np.zeros(len(self))
        np.maximum.at(longest, self.flow, self.bytes_on / links.capacity_bytes_per_s[self.link])
        return longest


def join_flows(parts: Sequence[FlowSet]) -> FlowSet:
    """Return all flows of *parts*, one part after the other; groups keep their numbers."""
    starts = np.cumsum([0, *(len(part.link) for part in parts)])
    moved = [part.first[1:] + start for part, start in zip(parts, starts, strict=False)]
    return FlowSet(
        np.concatenate([np.zeros(1, np.int64), *moved]),
        np.concatenate([np.zeros(0, np.int64), *(part.link for part in parts)]),
        np.concatenate([np.zeros(0), *(part.bytes_on for part in parts)]),
        np.concatenate([np.zeros(0), *(part.weight for part in parts)]),
        np.concatenate([np.zeros(0, np.int64), *(part.group for part in parts)]),
    )


@dataclass(frozen=True, eq=False)
class Repeating:
    """Traffic of others: *flows* that begin again every *period_s*, or once the ones before them have ended
    where that is later. Alone they take *alone_s*.
    """

    name: str
    flows: FlowSet
    alone_s: float
    period_s: float
    start_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.alone_s < np.inf and 0 < self.period_s < np.inf and 0 <= self.start_s < np.inf):
            raise ValueError(f"{self.name}: its time, period and start must be finite, the first two above zero")


# Traffic of other jobs over a cluster's network.


class FlowSpread(StrEnum):
    """The receivers of each GPU: the GPU of the same place ..."""

    RING = "ring"  # in the next of the nodes, after the last in the first
    EXCHANGE = "exchange"  # in every other, to each as much
    INCAST = "incast"  # in the first


@dataclass(frozen=True, slots=True)
class Pattern:
    """Each GPU of *nodes* sends *size_bytes* every *period_s*."""

    name: str
    nodes: tuple[int, ...]
    spread: FlowSpread
    size_bytes: float
    period_s: float
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OtherJob:
    """Another training job, which fills *nodes*; *words* are the options of ``stepcast predict``."""

    name: str
    nodes: tuple[int, ...]
    words: Mapping[str, object]
    start_s: float = 0.0


Others = tuple[Pattern | OtherJob, ...]
