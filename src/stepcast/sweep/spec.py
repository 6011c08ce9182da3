"""What a sweep asks: axes whose values multiply, settings that vary together, and a filter.

A spec is TOML. ``[fixed]`` holds for every point; each ``[[axis]]`` has lists of equal length whose values
vary together, or ``rows``, a list of tables; axes multiply. The words are those of the command line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from random import Random
from typing import Any

from stepcast.inputs.source import FormatError, parse_toml
from stepcast.ir.limits import POINTS
from stepcast.sweep.where import Filter

Words = dict[str, Any]
"""One point: options of the command line and their values."""

# Characters of the filter times points, to count those it lets through: some seconds.
LOOKED_AT = 10_000_000
QUESTIONS = ("predict", "search", "plan")
# Points that differ in these share the least: such axes turn slowest, so that neighbours share most.
SLOWEST = ("model", "cluster", "set", "framework", "calibration", "gpus")
DOUBLING = re.compile(r"(\d{1,18})\.\.(\d{1,18})")


@dataclass(frozen=True, slots=True)
class SweepAxis:
    """Settings that vary together, one row after the other."""

    rows: tuple[Words, ...]

    @property
    def rank(self) -> int:
        """How slowly this axis turns: the smaller, the slower."""
        places = [SLOWEST.index(name) for name in self.rows[0] if name in SLOWEST]
        return min(places, default=len(SLOWEST))


@dataclass(frozen=True, slots=True)
class Spec:
    """All points of a sweep, by position, without writing them out."""

    ask: str
    fixed: Words
    axes: tuple[SweepAxis, ...]
    filter: Filter | None = None

    @property
    def size(self) -> int:
        """Points before the filter."""
        return prod(len(axis.rows) for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Every word that some point has, the fixed ones last."""
        varying = [name for axis in self.axes for row in axis.rows for name in row]
        return tuple(dict.fromkeys([*varying, *self.fixed]))

    @property
    def varying(self) -> tuple[str, ...]:
        """Words that tell points apart."""
        return tuple(dict.fromkeys(name for axis in self.axes for row in axis.rows for name in row))

    def at(self, position: int) -> Words:
        """The point at *position*; the last axis turns fastest."""
        words = dict(self.fixed)
        for axis in reversed(self.axes):
            position, row = divmod(position, len(axis.rows))
            words.update(axis.rows[row])
        return words

    def points(self, most: int | None = None) -> Iterator[tuple[int, Words]]:
        """Positions and points that the filter lets through; of *most* at most, spread evenly over all."""
        some = self.size if most is None else min(most, self.size)
        for turn in range(some):
            position = turn * self.size // some
            words = self.at(position)
            if self.filter is None or self.filter(words):
                yield position, words

    def counted(self) -> tuple[int, bool]:
        """Points that the filter lets through, and whether all were looked at: of very many, some are."""
        if self.filter is None:
            return self.size, True
        most = LOOKED_AT // len(self.filter.text)
        if self.size <= most:
            return sum(1 for _ in self.points()), True
        drawn = Random(0).sample(range(self.size), most)
        return round(sum(map(self.filter, map(self.at, drawn))) / most * self.size), False


def read_spec(text: str, path: str | None = None) -> Spec:
    """The spec that *text* is; a FormatError where it is none."""
    found = parse_toml(text, path)
    if unknown := sorted(set(found) - {"ask", "fixed", "axis", "where"}):
        raise FormatError(f"{unknown[0]!r} is no part of a sweep; expected ask, where, [fixed], [[axis]]", path)
    ask = found.get("ask", "predict")
    if ask not in QUESTIONS:
        raise FormatError(f"ask = {ask!r}; expected one of {', '.join(QUESTIONS)}", path)
    fixed = found.get("fixed", {})
    if not isinstance(fixed, dict):
        raise FormatError("fixed is no table; write [fixed] and a line for each option", path)
    given = found.get("axis", [])
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise FormatError("axis is no list of tables; write [[axis]]", path)
    axes = [_axis(each, number, path) for number, each in enumerate(given, 1)]
    _check_apart(axes, path)
    spec = Spec(ask, _words(fixed, "[fixed]", path), tuple(sorted(axes, key=lambda axis: axis.rank)))
    if spec.size > POINTS.most:
        raise FormatError(POINTS.said, path)
    where = found.get("where")
    if where is None:
        return spec
    if not isinstance(where, str):
        raise FormatError('where is no text; write it in quotes, as where = "tp * pp <= gpus"', path)
    return Spec(spec.ask, spec.fixed, spec.axes, Filter(where, spec.names))


def _axis(given: Mapping[str, Any], number: int, path: str | None) -> SweepAxis:
    where = f"axis {number}"
    if "rows" in given:
        rows = given["rows"]
        if len(given) > 1 or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise FormatError(f"{where}: rows stand alone and are a list of tables, as [{{tp = 8, pp = 2}}]", path)
        if not rows:
            raise FormatError(f"{where}: has no values", path)
        return SweepAxis(tuple(_words(row, where, path) for row in rows))
    columns = {name: _values(value) for name, value in given.items()}
    lengths = {len(values) for values in columns.values()}
    if not columns or 0 in lengths:
        raise FormatError(f"{where}: has no values", path)
    if len(lengths) > 1:
        told = ", ".join(f"{len(values)} of {name}" for name, values in columns.items())
        raise FormatError(f"{where}: its lists vary together and differ in length: {told}", path)
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return SweepAxis(tuple(_words(row, where, path) for row in rows))


def _values(value: Any) -> Sequence[Any]:
    """A list as it is; ``"8..64"`` doubles from 8 to 64; one value alone."""
    if isinstance(value, list):
        return value
    if isinstance(value, str) and (match := DOUBLING.fullmatch(value)):
        first, last = int(match[1]), int(match[2])
        return [first << turn for turn in range((last // first).bit_length())] if 0 < first <= last else []
    return [value]


def _words(given: Mapping[str, Any], where: str, path: str | None) -> Words:
    for name, value in given.items():
        if not isinstance(value, str | int | float | bool) and not (
            isinstance(value, list) and all(isinstance(each, str) for each in value)
        ):
            raise FormatError(f"{where}: {name} = {value!r} is no text, number or truth", path)
    return {name.replace("-", "_"): value for name, value in given.items()}


def _check_apart(axes: Sequence[SweepAxis], path: str | None) -> None:
    """A word that two axes set would have two values."""
    seen: set[str] = set()
    for axis in axes:
        names = {name for row in axis.rows for name in row}
        if both := sorted(seen & names):
            raise FormatError(f"two axes set {both[0]!r}; a point has one value of it", path)
        seen |= names
