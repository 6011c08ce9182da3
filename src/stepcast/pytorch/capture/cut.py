"""The cheapest cut between what is there and what is needed: a maximum flow (Dinic 1970)."""

from collections import deque
from collections.abc import Hashable

INFINITE = float("inf")


class FlowNetwork:
    """Places joined by edges of limited capacity."""

    def __init__(self) -> None:
        self._place: dict[Hashable, int] = {}
        self._edges: list[list[int]] = []  # of each place, numbers into what follows
        self._to: list[int] = []
        self._left: list[float] = []

    def _number(self, name: Hashable) -> int:
        found = self._place.get(name)
        if found is None:
            found = self._place[name] = len(self._edges)
            self._edges.append([])
        return found

    def join(self, begin: Hashable, end: Hashable, capacity: float) -> None:
        first, second = self._number(begin), self._number(end)
        for place, other, left in ((first, second, capacity), (second, first, 0.0)):
            self._edges[place].append(len(self._to))
            self._to.append(other)
            self._left.append(left)

    def reachable(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """What *source* still reaches when as much as can flows to *sink*: the near side of the cut."""
        begin, end = self._number(source), self._number(sink)
        while True:
            depth = self._depths(begin)
            if depth[end] < 0:
                return {name for name, place in self._place.items() if depth[place] >= 0}
            following = [0] * len(self._edges)
            while self._send(begin, end, depth, following):
                pass

    def _depths(self, begin: int) -> list[int]:
        depth = [-1] * len(self._edges)
        depth[begin] = 0
        waiting = deque([begin])
        while waiting:
            place = waiting.popleft()
            for edge in self._edges[place]:
                other = self._to[edge]
                if self._left[edge] > 0 and depth[other] < 0:
                    depth[other] = depth[place] + 1
                    waiting.append(other)
        return depth

    def _send(self, begin: int, end: int, depth: list[int], following: list[int]) -> bool:
        """Along one more path of the shortest; places without a way on are left for good."""
        path: list[int] = []
        place = begin
        while place != end:
            edges = self._edges[place]
            while following[place] < len(edges):
                edge = edges[following[place]]
                if self._left[edge] > 0 and depth[self._to[edge]] == depth[place] + 1:
                    break
                following[place] += 1
            else:
                if not path:
                    return False
                edge = path.pop()
                place = self._to[edge ^ 1]
                following[place] += 1
                continue
            path.append(edge)
            place = self._to[edge]
        least = min(self._left[edge] for edge in path)
        if least == INFINITE:
            raise ValueError("nothing limits the flow")
        for edge in path:
            self._left[edge] -= least
            self._left[edge ^ 1] += least
        return True
