"""What carries messages between nodes, and what it usually reaches."""

from collections.abc import Mapping
from dataclasses import dataclass

USUAL_TRANSPORT = "infiniband"


@dataclass(frozen=True, slots=True)
class Transport:
    """The time of one empty message, and the share of the line rate that data get."""

    latency_s: float
    efficiency: float
    source: str


Transports = Mapping[str, Transport]
