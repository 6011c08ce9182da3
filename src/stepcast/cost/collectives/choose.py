"""The choice of an algorithm for a collective, and its price.

NCCL predicts the time of every algorithm and protocol it could use and takes the least; so do we, with
our own predictions. An algorithm may also be forced, as NCCL_ALGO does. No collective ends before its host
has started every kernel, and a caller may add its own time.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING

from stepcast.cost.collectives import algorithms as curves
from stepcast.cost.collectives.algorithms import PASSES, ROUNDS, ZERO, Curve, pair_protocols, protocols
from stepcast.cost.collectives.route import Protocol, Route
from stepcast.ir.types import dataclass, require
from stepcast.ir.work import CollectiveKind, bus_factor

if TYPE_CHECKING:
    from stepcast.ir.arrays import FloatArray


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


@dataclass(frozen=True, slots=True)
class CollectivePrice:
    """Time of one collective; the algorithm is None where there is nothing to do."""

    seconds: float
    algorithm: Algorithm | None
    protocol: Protocol | None
    size_bytes: float
    bus_factor: float
    start_s: float = 0.0  # that does not depend on the size: latency, and what the host takes longer

    @property
    def start_share(self) -> float:
        return self.start_s / self.seconds if self.seconds > 0 else 0.0

    @property
    def algbw_bytes_per_s(self) -> float:
        """Size over time, as nccl-tests defines it."""
        return self.size_bytes / self.seconds if self.seconds > 0 else 0.0

    @property
    def busbw_bytes_per_s(self) -> float:
        """The rate that the links of a ring would need; comparable between numbers of ranks."""
        return self.algbw_bytes_per_s * self.bus_factor


def price(
    kind: CollectiveKind,
    size_bytes: float,
    route: Route,
    algorithm: Algorithm | None = None,
    imbalance: float = 1.0,
    in_place: bool = True,
) -> CollectivePrice:
    """Return the price of one collective; *algorithm* forces one, *imbalance* is for an uneven all-to-all.

    Out of place, ranks that gather or exchange also copy their own part (nccl-tests prints both).
    """
    size = BARRIER_BYTES if kind is CollectiveKind.BARRIER else size_bytes
    nothing = CollectivePrice(0.0, None, None, size_bytes, bus_factor(kind, route.ranks))
    if _is_free(size_bytes, size, route):
        return nothing
    chosen = _choose(candidates(kind, route, algorithm, imbalance), size, route, host_s(kind, route), nothing)
    copy_s = 0.0 if in_place else size * _own_copy_s_per_byte(kind, route)
    return replace(chosen, seconds=chosen.seconds + copy_s) if copy_s else chosen


def send_receive_price(size_bytes: float, route: Route) -> CollectivePrice:
    """Return the price of one message between two ranks."""
    nothing = CollectivePrice(0.0, None, None, size_bytes, 1.0)
    if _is_free(size_bytes, size_bytes, route):
        return nothing
    return _choose(_messages(route), size_bytes, route, route.launch_overhead_s * route.ranks_per_thread, nothing)


def _is_free(size_bytes: float, moved_bytes: float, route: Route) -> bool:
    if not size_bytes >= 0:
        raise ValueError(f"size must not be negative, not {size_bytes!r}")
    return route.ranks == 1 or moved_bytes == 0


def _choose(
    choices: Sequence[AlgorithmChoice], size: float, route: Route, least_s: float, nothing: CollectivePrice
) -> CollectivePrice:
    """Return *nothing* with the time of the fastest choice, at least *least_s*, and the caller's overhead."""
    best = min(choices, key=lambda choice: choice.curve.seconds(size))
    curve_s = best.curve.seconds(size)
    seconds = max(curve_s, least_s) + route.call_overhead_s
    start_s = seconds - (curve_s - best.curve.start_s)
    return CollectivePrice(seconds, best.algorithm, best.protocol, nothing.size_bytes, nothing.bus_factor, start_s)


def collective_s(kind: CollectiveKind, sizes_bytes: "FloatArray", route: Route, in_place: bool = True) -> "FloatArray":
    """Return the seconds of many sizes at once."""
    import numpy

    sizes = numpy.asarray(sizes_bytes, dtype=numpy.float64)
    require(bool((sizes >= 0).all()), "sizes must not be negative")
    if kind is CollectiveKind.BARRIER:
        return numpy.full(sizes.shape, price(kind, 0, route).seconds)
    if route.ranks == 1:
        return numpy.zeros(sizes.shape)
    choices = candidates(kind, route)
    seconds = numpy.empty(sizes.shape)
    flat_sizes, flat_seconds = sizes.ravel(), seconds.ravel()
    for start in range(0, sizes.size, BLOCK):
        part, least = flat_sizes[start : start + BLOCK], flat_seconds[start : start + BLOCK]
        least[:] = choices[0].curve.seconds(part)
        for choice in choices[1:]:
            numpy.minimum(least, choice.curve.seconds(part), out=least)
    numpy.maximum(seconds, host_s(kind, route), out=seconds)
    if not in_place:
        seconds += sizes * _own_copy_s_per_byte(kind, route)
    seconds += route.call_overhead_s
    seconds[sizes == 0] = 0.0
    return seconds


def host_s(kind: CollectiveKind, route: Route) -> float:
    """Return the seconds of a host thread to start one collective on all of its ranks, one after another.

    An all-to-all is a message to and one from each rank, which the host prepares singly.
    """
    messages = 2 * route.ranks if kind is ALL_TO_ALL else 0
    return route.ranks_per_thread * (route.launch_overhead_s + messages * route.tuning.message_s)


def _own_copy_s_per_byte(kind: CollectiveKind, route: Route) -> float:
    """Return the time to copy a rank's 1/n of the buffer; a reduction reads its own part in any case."""
    copies = kind in (CollectiveKind.ALL_GATHER, ALL_TO_ALL)
    return 2 / route.ranks / route.memory_bytes_per_s if copies else 0.0


@lru_cache(maxsize=4096)
def candidates(
    kind: CollectiveKind, route: Route, algorithm: Algorithm | None = None, imbalance: float = 1.0
) -> tuple[AlgorithmChoice, ...]:
    """Return what NCCL would choose between on *route*, or the protocols of a forced *algorithm*."""
    if imbalance < 1:
        raise ValueError(f"imbalance is the busiest rank over the mean, so at least 1, not {imbalance!r}")
    if route.ranks == 1:
        return (AlgorithmChoice(algorithm or Algorithm.DIRECT, Protocol.LL, ZERO),)
    possible = tuple(_possible(ALL_REDUCE if kind is CollectiveKind.BARRIER else kind, route, imbalance))
    if algorithm is None:
        automatic = (choice for choice in possible if _is_automatic(choice, kind, route))
        return tuple(_from_size(choice, possible, kind, route) for choice in automatic)
    forced = tuple(choice for choice in possible if choice.algorithm is algorithm)
    if not forced:
        names = ", ".join(dict.fromkeys(choice.algorithm for choice in possible))
        raise AlgorithmError(
            f"{kind} over {route.ranks} ranks on {route.nodes} nodes cannot use {algorithm}, only {names}"
        )
    return forced


@lru_cache(maxsize=1024)
def _messages(route: Route) -> tuple[AlgorithmChoice, ...]:
    return tuple(
        AlgorithmChoice(Algorithm.DIRECT, protocol, curves.message_curve(route, protocol))
        for protocol in pair_protocols(route)
    )


def _possible(kind: CollectiveKind, route: Route, imbalance: float) -> Iterator[AlgorithmChoice]:
    """Yield every algorithm that *kind* can use on *route*: a new one is added here."""
    if kind is ALL_TO_ALL:
        for protocol in pair_protocols(route):
            yield AlgorithmChoice(Algorithm.PAIRWISE, protocol, curves.pairwise_curve(route, protocol, imbalance))
            yield AlgorithmChoice(Algorithm.HIERARCHICAL, protocol, curves.staged_curve(route, protocol, imbalance))
        return
    if kind in (CollectiveKind.GATHER, CollectiveKind.SCATTER):
        for protocol in pair_protocols(route):
            yield AlgorithmChoice(Algorithm.DIRECT, protocol, curves.rooted_curve(route, protocol))
        return
    for protocol in protocols(route):
        if kind in ROUNDS:
            yield AlgorithmChoice(Algorithm.RING, protocol, curves.ring_curve(kind, route, protocol))
            yield AlgorithmChoice(Algorithm.HIERARCHICAL, protocol, curves.hierarchical_curve(kind, route, protocol))
        else:
            yield AlgorithmChoice(Algorithm.RING, protocol, curves.chain_curve(route, protocol))
        if kind in PASSES:
            yield AlgorithmChoice(Algorithm.TREE, protocol, curves.tree_curve(kind, route, protocol))
    within = route.nodes == 1
    if route.in_switch_reduction and (kind in ROUNDS if within else kind is ALL_REDUCE and route.ranks_per_node > 1):
        for curve in curves.nvls_curves(kind, route):
            yield AlgorithmChoice(Algorithm.NVLS if within else Algorithm.NVLS_TREE, Protocol.SIMPLE, curve)
    if kind is ALL_REDUCE and not within and route.in_network_reduction:
        yield AlgorithmChoice(Algorithm.IN_NETWORK, Protocol.SIMPLE, curves.in_network_curve(route))


def _from_size(
    choice: AlgorithmChoice, possible: Sequence[AlgorithmChoice], kind: CollectiveKind, route: Route
) -> AlgorithmChoice:
    """Return *choice* without the sizes at which RCCL takes the tree; the ring is not faster than that."""
    size = route.tuning.ring_from_bytes
    if not (size and choice.algorithm is Algorithm.RING and kind is ALL_REDUCE and route.nodes > 1):
        return choice
    tree_s = min(candidate.curve.seconds(size) for candidate in possible if candidate.algorithm is Algorithm.TREE)
    return replace(choice, curve=replace(choice.curve, from_bytes=size, least_s=tree_s))


def _is_automatic(choice: AlgorithmChoice, kind: CollectiveKind, route: Route) -> bool:
    """Return whether NCCL would consider *choice*.

    It has no hierarchical algorithms and keeps trees for all-reduce, where they pay between nodes only. It lets the
    switch add from so many ranks on that its own estimate of that passes the ring's.
    """
    reduces = kind in (ALL_REDUCE, CollectiveKind.BARRIER)
    limits = {
        Algorithm.HIERARCHICAL: False,
        Algorithm.TREE: reduces and route.nodes > 1,
        Algorithm.NVLS: route.ranks >= route.tuning.nvls_least_ranks,
    }
    return limits.get(choice.algorithm, True)
