"""Which algorithm a collective takes, and its price.

NCCL predicts the time of every algorithm and protocol it could use and takes the least; so do we, with
our own predictions. An algorithm may also be forced, as NCCL_ALGO does. No collective ends before its host
has started every kernel, and a caller may add its own time.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from stepcast.cost.collectives.curve import ZERO, Curve
from stepcast.cost.collectives.exchange import hierarchical_all_to_all, pairwise_all_to_all, root_exchange, send_receive
from stepcast.cost.collectives.hierarchical import hierarchical
from stepcast.cost.collectives.in_switch import in_network, nvls, nvls_tree
from stepcast.cost.collectives.protocol import protocols
from stepcast.cost.collectives.ring import ROUNDS, chain, ring
from stepcast.cost.collectives.route import Route
from stepcast.cost.collectives.tree import PASSES, tree
from stepcast.cost.collectives.tuning import Protocol
from stepcast.ir.identity import ByIdentity
from stepcast.ir.work import CollectiveKind

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray


class Algorithm(StrEnum):
    RING = "ring"
    TREE = "tree"
    NVLS = "nvls"
    NVLS_TREE = "nvls-tree"
    IN_NETWORK = "in-network"
    HIERARCHICAL = "hierarchical"
    PAIRWISE = "pairwise"
    DIRECT = "direct"  # one message, or all to or from one rank


ALL_REDUCE, ALL_TO_ALL = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL
BARRIER_BYTES = 4.0  # a barrier is an all-reduce of one word
BLOCK = 8192  # sizes that are priced together: as many as stay in a core's cache


class AlgorithmError(ValueError):
    """The collective cannot be done that way on this route."""


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    algorithm: Algorithm
    protocol: Protocol
    curve: Curve

    def moving_s(self, size_bytes: float) -> float:
        """The part of its time that grows with the size."""
        return self.curve.seconds(size_bytes) - self.curve.start_s


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """Time of one collective; None for the algorithm where there is nothing to do."""

    seconds: float
    algorithm: Algorithm | None
    protocol: Protocol | None
    size_bytes: float
    bus_factor: float
    start_s: float = 0.0
    """The part of the time that does not depend on the size: latency, and what the host takes longer."""

    @property
    def start_share(self) -> float:
        return self.start_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def algbw_bytes_per_s(self) -> float:
        """Size over time, as nccl-tests defines it."""
        return self.size_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        """The rate a ring's links would need; comparable between numbers of ranks."""
        return self.algbw_bytes_per_s * self.bus_factor


def bus_factor(kind: CollectiveKind, ranks: int) -> float:
    """NVIDIA/nccl-tests, doc/PERFORMANCE.md."""
    if kind is ALL_REDUCE:
        return 2 * (ranks - 1) / ranks
    if kind in (CollectiveKind.BROADCAST, CollectiveKind.REDUCE, CollectiveKind.BARRIER):
        return 1.0
    return (ranks - 1) / ranks


def price(
    kind: CollectiveKind,
    size_bytes: float,
    route: Route,
    algorithm: Algorithm | None = None,
    imbalance: float = 1.0,
    in_place: bool = True,
) -> CollectivePrice:
    """The price of one collective; *algorithm* forces one, *imbalance* is for an uneven all-to-all.

    Out of place, ranks that gather or exchange also copy their own part (nccl-tests prints both).
    """
    if not size_bytes >= 0:
        raise ValueError(f"size must not be negative, not {size_bytes!r}")
    factor = bus_factor(kind, route.ranks)
    size = BARRIER_BYTES if kind is CollectiveKind.BARRIER else size_bytes
    if route.ranks == 1 or size == 0:
        return CollectivePrice(0.0, None, None, size_bytes, factor)
    best = min(candidates(kind, route, algorithm, imbalance), key=lambda candidate: candidate.curve.seconds(size))
    seconds = max(best.curve.seconds(size), host_s(kind, route)) + route.call_overhead_s
    start_s = seconds - best.moving_s(size)
    if not in_place:
        seconds += size * _own_copy_s_per_byte(kind, route)
    return CollectivePrice(seconds, best.algorithm, best.protocol, size_bytes, factor, start_s)


def collective_s(
    kind: CollectiveKind,
    sizes_bytes: "NDArray[float64]",
    route: Route,
    algorithm: Algorithm | None = None,
    imbalance: float = 1.0,
    in_place: bool = True,
) -> "NDArray[float64]":
    """Times of many sizes at once."""
    import numpy

    sizes = numpy.asarray(sizes_bytes, dtype=numpy.float64)
    if not (sizes >= 0).all():
        raise ValueError("sizes must not be negative")
    if kind is CollectiveKind.BARRIER:
        return numpy.full(sizes.shape, price(kind, 0, route, algorithm).seconds)
    if route.ranks == 1:
        return numpy.zeros(sizes.shape)
    listed = candidates(kind, route, algorithm, imbalance)
    least = numpy.empty(sizes.shape)
    flat, flat_least = sizes.ravel(), least.ravel()
    for start in range(0, sizes.size, BLOCK):
        part, found = flat[start : start + BLOCK], flat_least[start : start + BLOCK]
        found[:] = listed[0].curve.seconds(part)
        for candidate in listed[1:]:
            numpy.minimum(found, candidate.curve.seconds(part), out=found)
    numpy.maximum(least, host_s(kind, route), out=least)
    if not in_place:
        least += sizes * _own_copy_s_per_byte(kind, route)
    least += route.call_overhead_s
    least[sizes == 0] = 0.0
    return least


def host_s(kind: CollectiveKind, route: Route) -> float:
    """Time of a host thread to start one collective on all of the ranks that it drives, one after another.

    An all-to-all is a message to and one from each rank, which the host prepares singly.
    """
    messages = 2 * route.ranks if kind is ALL_TO_ALL else 0
    return route.ranks_per_thread * (route.launch_overhead_s + messages * route.tuning.message_s)


def _own_copy_s_per_byte(kind: CollectiveKind, route: Route) -> float:
    """1/n of the buffer, read and written in memory; a reduction's own part is read in any case."""
    copies = kind in (CollectiveKind.ALL_GATHER, ALL_TO_ALL)
    return 2 / route.ranks / route.memory_bytes_per_s if copies else 0.0


def send_receive_s(size_bytes: float, route: Route) -> float:
    """Time of one message between two ranks."""
    return send_receive_price(size_bytes, route).seconds


def send_receive_price(size_bytes: float, route: Route) -> CollectivePrice:
    """The price of one message between two ranks."""
    if not size_bytes >= 0:
        raise ValueError(f"size must not be negative, not {size_bytes!r}")
    if route.ranks == 1 or size_bytes == 0:
        return CollectivePrice(0.0, None, None, size_bytes, 1.0)
    best = min(_messages(route), key=lambda candidate: candidate.curve.seconds(size_bytes))
    launch_s = route.launch_overhead_s * route.ranks_per_thread
    seconds = max(best.curve.seconds(size_bytes), launch_s) + route.call_overhead_s
    start_s = seconds - best.moving_s(size_bytes)
    return CollectivePrice(seconds, best.algorithm, best.protocol, size_bytes, 1.0, start_s)


def candidates(
    kind: CollectiveKind, route: Route, algorithm: Algorithm | None = None, imbalance: float = 1.0
) -> tuple[AlgorithmChoice, ...]:
    """What NCCL would choose between on *route*, or the protocols of a forced *algorithm*."""
    make = partial(_candidates, kind, route, algorithm, imbalance)
    return _CANDIDATES.get((route,), make, kind, algorithm, imbalance)


_CANDIDATES: ByIdentity[tuple[AlgorithmChoice, ...]] = ByIdentity(4096)


@lru_cache(maxsize=4096)
def _candidates(
    kind: CollectiveKind, route: Route, algorithm: Algorithm | None, imbalance: float
) -> tuple[AlgorithmChoice, ...]:
    if imbalance < 1:
        raise ValueError(f"imbalance is the busiest rank over the mean, so at least 1, not {imbalance!r}")
    if route.ranks == 1:
        return (AlgorithmChoice(algorithm or Algorithm.DIRECT, Protocol.LL, ZERO),)
    known = tuple(_known(ALL_REDUCE if kind is CollectiveKind.BARRIER else kind, route, imbalance))
    if algorithm is None:
        return tuple(candidate for candidate in known if _automatic(candidate, kind, route))
    forced = tuple(candidate for candidate in known if candidate.algorithm is algorithm)
    if not forced:
        names = ", ".join(dict.fromkeys(candidate.algorithm for candidate in known))
        raise AlgorithmError(
            f"{kind} over {route.ranks} ranks on {route.nodes} nodes cannot use {algorithm}, only {names}"
        )
    return forced


@lru_cache(maxsize=1024)
def _messages(route: Route) -> tuple[AlgorithmChoice, ...]:
    return tuple(
        AlgorithmChoice(Algorithm.DIRECT, protocol, send_receive(route, protocol))
        for protocol in _pair_protocols(route)
    )


def _pair_protocols(route: Route) -> tuple[Protocol, ...]:
    """Transfers between pairs use LL within a node only."""
    return (Protocol.LL, Protocol.SIMPLE) if route.nodes == 1 else (Protocol.SIMPLE,)


def _known(kind: CollectiveKind, route: Route, imbalance: float) -> Iterator[AlgorithmChoice]:
    """Every algorithm that *kind* can use on *route*."""
    if kind in (ALL_TO_ALL, CollectiveKind.GATHER, CollectiveKind.SCATTER):
        yield from _known_exchanges(kind, route, imbalance)
        return
    for protocol in protocols(route):
        if kind in ROUNDS:
            yield AlgorithmChoice(Algorithm.RING, protocol, ring(kind, route, protocol))
            yield AlgorithmChoice(Algorithm.HIERARCHICAL, protocol, hierarchical(kind, route, protocol))
        else:
            yield AlgorithmChoice(Algorithm.RING, protocol, chain(route, protocol))
        if kind in PASSES:
            yield AlgorithmChoice(Algorithm.TREE, protocol, tree(kind, route, protocol))
    if kind in ROUNDS and route.in_switch_reduction and route.nodes == 1:
        for curve in nvls(kind, route):
            yield AlgorithmChoice(Algorithm.NVLS, Protocol.SIMPLE, curve)
    if kind is ALL_REDUCE and route.nodes > 1:
        if route.in_switch_reduction and route.ranks_per_node > 1:
            for curve in nvls_tree(route):
                yield AlgorithmChoice(Algorithm.NVLS_TREE, Protocol.SIMPLE, curve)
        if route.in_network_reduction:
            yield AlgorithmChoice(Algorithm.IN_NETWORK, Protocol.SIMPLE, in_network(route))


def _known_exchanges(kind: CollectiveKind, route: Route, imbalance: float) -> Iterator[AlgorithmChoice]:
    for protocol in _pair_protocols(route):
        if kind is ALL_TO_ALL:
            yield AlgorithmChoice(Algorithm.PAIRWISE, protocol, pairwise_all_to_all(route, protocol, imbalance))
            staged = hierarchical_all_to_all(route, protocol, imbalance)
            yield AlgorithmChoice(Algorithm.HIERARCHICAL, protocol, staged)
        else:
            yield AlgorithmChoice(Algorithm.DIRECT, protocol, root_exchange(route, protocol))


def _automatic(candidate: AlgorithmChoice, kind: CollectiveKind, route: Route) -> bool:
    """Whether NCCL would consider *candidate*.

    It has no hierarchical ones, keeps trees for all-reduce, where they pay between nodes only, and there
    sends small messages up the tree, which has fewer hops than the ring. It lets the switch add from so many
    ranks on that its own estimate of that passes the ring's.
    """
    reduces = kind in (ALL_REDUCE, CollectiveKind.BARRIER)
    match candidate.algorithm:
        case Algorithm.HIERARCHICAL:
            return False
        case Algorithm.TREE:
            return reduces and route.nodes > 1
        case Algorithm.NVLS:
            return route.ranks >= route.tuning.nvls_least_ranks
        case Algorithm.RING:
            return not (reduces and route.nodes > 1 and candidate.protocol is Protocol.LL)
        case _:
            return True
