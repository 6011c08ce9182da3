"""Rows of an operator table as columns: a table of a million rows is a few arrays, not millions of objects.

Layers are made when one is asked for, all of them, so that each stays the object that it is.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any, TypeVar, overload

from stepcast.inputs.layers import layer_of, recorded_op
from stepcast.ir.workload import Layer, LayerTable, Op, Phase
from stepcast.units import MS

Key = TypeVar("Key")
Value = TypeVar("Value")
MOST_KNOWN = 10_000
PHASES = tuple(Phase)
SILENT = 0  # the code of a phase that ends with no message

Messages = Sequence[Callable[[int], Op] | None]  # of so many elements


def _three(kind: str) -> "list[array[Any]]":
    return [array(kind) for _ in PHASES]


@dataclass
class Columns:
    """Rows so far, or some to be added; a column of *times*, *words* and *elements* for each phase."""

    names: list[str] = field(default_factory=list)  # many at once, joined by line feeds
    times_ms: "list[array[float]]" = field(default_factory=lambda: _three("d"))
    words: "list[array[int]]" = field(default_factory=lambda: _three("H"))
    elements: "list[array[int]]" = field(default_factory=lambda: _three("q"))
    process_ms: "array[float]" = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.process_ms)

    def add(self, more: "Columns") -> None:
        self.names += more.names
        self.process_ms.extend(more.process_ms)
        for phase in range(len(PHASES)):
            self.times_ms[phase].extend(more.times_ms[phase])
            self.words[phase].extend(more.words[phase])
            self.elements[phase].extend(more.elements[phase])

    def names_from(self, start: int, stop: int | None = None) -> Iterator[str]:
        return islice(chain.from_iterable(slab.split("\n") for slab in self.names), start, stop)


class OperatorLayers(LayerTable):
    """The rows from *start* to *stop* as layers; *messages* makes the op of a word, by its code."""

    def __init__(self, columns: Columns, messages: Messages, start: int, stop: int) -> None:
        self._columns, self._messages, self._start, self._stop = columns, messages, start, stop
        self._made: tuple[Layer, ...] | None = None

    def __len__(self) -> int:
        return self._stop - self._start

    @overload
    def __getitem__(self, at: int) -> Layer: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Layer, ...]: ...
    def __getitem__(self, at: int | slice) -> Layer | tuple[Layer, ...]:
        return self._layers[at]

    def __iter__(self) -> Iterator[Layer]:
        return iter(self._layers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and self._layers == tuple(other)

    def __hash__(self) -> int:
        return hash(self._layers)

    def names(self) -> Iterator[str]:
        return self._columns.names_from(self._start, self._stop)

    def recorded_s(self, phase: Phase) -> float:
        return math.fsum(self._part(self._columns.times_ms[PHASES.index(phase)])) * MS

    def messages(self) -> Iterator[tuple[Phase, Op, int]]:
        """In the order of the rows in which they are first seen."""
        firsts = []
        for number, phase in enumerate(PHASES):
            words = self._part(self._columns.words[number])
            if any(words):
                found = Counter(zip(words, self._part(self._columns.elements[number]), strict=True))
                order = {code: words.index(code) for code in set(words)}
                firsts += [((order[key[0]], number), phase, key, count) for key, count in found.items()]
        for _, phase, (code, elements), count in sorted(firsts, key=lambda each: each[0]):
            if (message := self._messages[code]) is not None:
                yield phase, message(elements), count

    def _part(self, column: Sequence[Value]) -> Sequence[Value]:
        return column if len(self) == len(column) else column[self._start : self._stop]

    @property
    def _layers(self) -> tuple[Layer, ...]:
        if self._made is None:
            self._made = tuple(self._each())
        return self._made

    def _each(self) -> Iterator[Layer]:
        """Rows that are alike share their ops: operators of a kind take equal times."""
        columns = self._columns
        phases = [self._ops(number) for number in range(len(PHASES))]
        process_s = (time_ms * MS for time_ms in self._part(columns.process_ms))
        return map(layer_of, self.names(), *phases, process_s)

    def _ops(self, number: int) -> Iterator[tuple[Op, ...]]:
        columns, known = self._columns, dict[tuple[float, int, int], tuple[Op, ...]]()
        times_ms = self._part(columns.times_ms[number])
        words, elements_of = self._part(columns.words[number]), self._part(columns.elements[number])
        for key in zip(times_ms, words, elements_of, strict=True):
            ops = known.get(key)
            if ops is None:
                time_ms, code, elements = key
                message = self._messages[code]
                more = () if message is None else (message(elements),)
                ops = _remember(known, key, (recorded_op(time_ms * MS), *more))
            yield ops


def _remember(known: dict[Key, Value], key: Key, value: Value) -> Value:
    """*value*, kept for the next time; a table of measured times, which all differ, is not kept whole."""
    if len(known) == MOST_KNOWN:
        known.clear()
    known[key] = value
    return value
