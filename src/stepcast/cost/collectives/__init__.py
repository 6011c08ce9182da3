"""The cost of collectives: algorithms as curves of time over size, and the choice between them."""

from stepcast.cost.collectives.algorithms import Curve, Ramp, imbalance_of
from stepcast.cost.collectives.choose import (
    Algorithm,
    AlgorithmError,
    CollectivePrice,
    bus_factor,
    candidates,
    collective_s,
    host_s,
    price,
    send_receive_price,
)
from stepcast.cost.collectives.route import Protocol, Route, lost_share, route_of, uneven_warning

__all__ = [
    "Algorithm",
    "AlgorithmError",
    "CollectivePrice",
    "Curve",
    "Protocol",
    "Ramp",
    "Route",
    "bus_factor",
    "candidates",
    "collective_s",
    "host_s",
    "imbalance_of",
    "lost_share",
    "price",
    "route_of",
    "send_receive_price",
    "uneven_warning",
]
