"""Programs put together call by call, for what is not a plain pipeline."""

from collections.abc import Sequence

import numpy as np

from stepcast.simulation.arrays import Calls, Program
from stepcast.simulation.pieces import ProgramError, Segment

Signal = tuple[int, int]
"""A call, as ``ProgramBuilder.call`` numbered it, and which of its outputs."""


class ProgramBuilder:
    """Collects the calls of every rank in the order in which the rank makes them."""

    def __init__(self, lanes: tuple[str, ...], ranks: int) -> None:
        self._lanes = lanes
        self._segments: dict[int, tuple[int, Segment]] = {}
        self._calls: list[list[int]] = [[] for _ in range(ranks)]
        self._segment: list[int] = []
        self._sources: list[dict[int, Signal]] = []

    def call(self, rank: int, segment: Segment, sources: Sequence[Signal | None] = ()) -> int:
        """*rank* calls *segment* next, its inputs bound to *sources*; the number of the call."""
        number, _ = self._segments.setdefault(id(segment), (len(self._segments), segment))
        call = len(self._segment)
        self._segment.append(number)
        self._sources.append({})
        self._calls[rank].append(call)
        for port, source in enumerate(sources):
            if source is not None:
                self.bind(call, port, source)
        return call

    def bind(self, call: int, port: int, source: Signal) -> None:
        """Bind an input of a call that is there already, to a call that may have come later."""
        self._sources[call][port] = source

    def program(self) -> Program:
        segments = tuple(segment for _, segment in self._segments.values())
        order = [call for calls in self._calls for call in calls]
        place = {call: index for index, call in enumerate(order)}
        inputs = max((segment.inputs for segment in segments), default=0)
        source_call, source_port = np.full((2, len(order), inputs), -1, np.int64)
        for call, sources in enumerate(self._sources):
            for port, (source, output) in sources.items():
                if not 0 <= port < segments[self._segment[call]].inputs or source not in place:
                    raise ProgramError(
                        f"call {call} binds input {port} to call {source}: one of them is not there"
                    )
                source_call[place[call], port] = place[source]
                source_port[place[call], port] = output
        start = np.cumsum([0, *(len(calls) for calls in self._calls)]).astype(np.int64)
        segment = np.array([self._segment[call] for call in order], np.int64)
        return Program(self._lanes, segments, Calls(start, segment, source_call, source_port))
