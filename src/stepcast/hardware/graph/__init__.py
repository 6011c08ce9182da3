"""A cluster as a graph of directed links, and the routes of messages over it."""

from stepcast.hardware.graph.network import Network, network_of
from stepcast.hardware.graph.routes import routes, seats_of, seats_on

__all__ = ["Network", "network_of", "routes", "seats_of", "seats_on"]
