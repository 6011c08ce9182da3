"""The order in which a trace's nodes can run."""

import heapq

import numpy as np

from stepcast.inputs.chakra.nodes import Nodes, Offsets
from stepcast.inputs.errors import FormatError


def dependency_indices(nodes: Nodes, path: str) -> Offsets:
    """The nodes that ``nodes.dependencies`` names, as indices; each id must be there, and once."""
    order = np.argsort(nodes.ids, kind="stable")
    ids = nodes.ids[order]
    twice = np.flatnonzero(ids[1:] == ids[:-1])
    if len(twice):
        first, second = sorted(order[twice[0] : twice[0] + 2].tolist())
        raise FormatError(
            f"node {second + 1} has the id {ids[twice[0]]} of node {first + 1}; expected each id once", path
        )
    places = np.searchsorted(ids, nodes.dependencies)
    missing = np.flatnonzero(ids[np.minimum(places, len(ids) - 1)] != nodes.dependencies)
    if len(missing):
        owner = int(np.searchsorted(nodes.dependency_ends, missing[0], side="right"))
        raise FormatError(
            f"node {nodes.ids[owner]} depends on node {nodes.dependencies[missing[0]]}, which is not there",
            path,
        )
    return order[places]


def owners(nodes: Nodes) -> Offsets:
    """The node that each dependency belongs to, as an index."""
    return np.repeat(np.arange(len(nodes)), np.diff(nodes.dependency_ends, prepend=0))


def execution_order(nodes: Nodes, dependencies: Offsets, path: str) -> Offsets:
    """Indices of the nodes, each after those it depends on; file order where that does."""
    if bool((dependencies < owners(nodes)).all()):
        return np.arange(len(nodes))
    return np.array(_sorted(nodes, dependencies, path), dtype=np.int64)


def _sorted(nodes: Nodes, dependencies: Offsets, path: str) -> list[int]:
    """Kahn's algorithm; of the nodes that may run, the first in the file runs first."""
    waiting = np.diff(nodes.dependency_ends, prepend=0).tolist()
    dependents: list[list[int]] = [[] for _ in waiting]
    for dependency, owner in zip(dependencies.tolist(), owners(nodes).tolist(), strict=True):
        dependents[dependency].append(owner)
    ready = [index for index, count in enumerate(waiting) if not count]
    order = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for dependent in dependents[index]:
            waiting[dependent] -= 1
            if not waiting[dependent]:
                heapq.heappush(ready, dependent)
    if len(order) < len(nodes):
        stuck = next(index for index, count in enumerate(waiting) if count)
        raise FormatError(
            f"node {nodes.ids[stuck]} depends on itself by way of others; expected no cycle", path
        )
    return order
