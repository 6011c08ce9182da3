"""The ring: every rank sends to the next, all links at once."""

from stepcast.cost.collectives.curve import Curve
from stepcast.cost.collectives.protocol import (
    BYTES_PER_CHANNEL,
    inter_hop_s,
    intra_hop_s,
    opening_channels,
    rate_of,
    start_s,
)
from stepcast.cost.collectives.route import Route
from stepcast.cost.collectives.tuning import Protocol
from stepcast.ir.work import CollectiveKind

# Times round the ring: a reduce-scatter takes one, an all-gather one, an all-reduce is both.
ROUNDS = {CollectiveKind.ALL_REDUCE: 2, CollectiveKind.ALL_GATHER: 1, CollectiveKind.REDUCE_SCATTER: 1}


def ring(kind: CollectiveKind, route: Route, protocol: Protocol) -> Curve:
    """All-reduce, all-gather and reduce-scatter of n ranks in rounds of n-1 steps, each of 1/n of the buffer.

    Latency: every step waits for the one before, so all hops add up: (n-1) per round, of which nodes-1
    leave a node. Bandwidth: each rank sends (n-1)/n of the buffer per round, S (n-1)/n / B, the least
    that is possible without reduction in the switches (Patarasuk and Yuan, 2009). The last step of all
    has nothing to send on: it copies its 1/n from the receive buffer, which reads and writes memory, 2
    S/n / M.
    """
    n, rounds = route.ranks, ROUNDS[kind]
    latency_s = route.tuning.start_s[protocol] + rounds * _once_round_s(route, protocol)
    per_byte = rounds * (n - 1) / n / rate_of(route, protocol) + 2 / n / route.memory_bytes_per_s
    return Curve(start_s(route, latency_s), per_byte, opening_channels(route, _bytes_per_channel(route)))


def chain(route: Route, protocol: Protocol) -> Curve:
    """Broadcast and reduce: the whole buffer runs down (or up) the ring in chunks, each rank passing it on.

    S/B for the last rank's last byte after the first arrived, which has made every hop. Chunks are so small
    that a hop is latency: 8 A100 reduce 8 MiB in the time of their start and 8 MiB / B.
    """
    latency_s = route.tuning.start_s[protocol] + _once_round_s(route, protocol)
    ramps = opening_channels(route, _bytes_per_channel(route))
    return Curve(start_s(route, latency_s), 1 / rate_of(route, protocol), ramps)


def _once_round_s(route: Route, protocol: Protocol) -> float:
    leaving = route.nodes - 1
    staying = route.ranks - 1 - leaving
    return staying * intra_hop_s(route, protocol) + leaving * inter_hop_s(route, protocol)


def _bytes_per_channel(route: Route) -> float:
    """Between nodes a channel opens as early as in a tree, since each has its own NIC to fill."""
    return BYTES_PER_CHANNEL * (route.ranks if route.nodes == 1 else 1)
