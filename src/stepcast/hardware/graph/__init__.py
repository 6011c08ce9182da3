"""A cluster as a graph of directed links, and the ways of messages over it."""

from stepcast.hardware.graph.network import Network, network_of
from stepcast.hardware.graph.routes import Ways, routes, seats_of, seats_on

__all__ = ["Network", "Ways", "network_of", "routes", "seats_of", "seats_on"]
