"""What a collective costs: algorithms as curves of time over size, and the choice between them."""

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
    send_receive_s,
)
from stepcast.cost.collectives.curve import Curve, Ramp
from stepcast.cost.collectives.exchange import imbalance_of
from stepcast.cost.collectives.route import Route, lost_share, route_of, uneven_warning
from stepcast.cost.collectives.tuning import Protocol

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
    "send_receive_s",
    "uneven_warning",
]
