"""Specifications of sweeps: axes whose values multiply, settings that vary together, and a filter.

A specification is TOML. ``[fixed]`` holds for every point; each ``[[axis]]`` has lists of equal length whose
values vary together, or ``rows``, a list of tables; axes multiply. Names are those of the command line.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from random import Random

from stepcast.inputs.expression import Expression
from stepcast.inputs.source import FormatError, expect, parse_toml
from stepcast.ir.limits import POINTS
from stepcast.ir.types import FactDict, dataclass, replace

Words = FactDict
"""One point: options of the command line and their values."""
SweepAxis = tuple[Words, ...]
"""Settings that vary together, row by row."""

# The most characters of the filter times points with which all points are counted: a few seconds.
LOOKED_AT = 10_000_000
QUESTIONS = ("predict", "search", "plan")
# Axes whose values change slowest: points that differ in them share the least work, so neighbours share the most.
SLOWEST = ("model", "cluster", "set", "framework", "calibration", "gpus")
GOLDEN_RATIO = 0.6180339887498949
DOUBLING = re.compile(r"(\d{1,18})\.\.(\d{1,18})")


# ---- the points ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spec:
    """All points of a sweep, by position, without writing them out."""

    ask: str
    fixed: Words
    axes: tuple[SweepAxis, ...]
    filter: Expression | None = None

    @property
    def size(self) -> int:
        """The number of points before the filter."""
        return prod(map(len, self.axes))

    @property
    def names(self) -> tuple[str, ...]:
        """All names of points, the fixed ones last."""
        varying = [name for axis in self.axes for row in axis for name in row]
        return tuple(dict.fromkeys([*varying, *self.fixed]))

    def point(self, position: int) -> Words:
        """Return the point at *position*; the last axis changes fastest."""
        words = dict(self.fixed)
        for axis in reversed(self.axes):
            position, row = divmod(position, len(axis))
            words.update(axis[row])
        return words

    def points(self, most: int | None = None) -> Iterator[tuple[int, Words]]:
        """Yield the positions and points that pass the filter, *most* at most, spread evenly over the specification.

        Steps of about the golden ratio visit all values of an axis equally often; a larger *most* adds to these points.
        """
        step = max(1, round(self.size * GOLDEN_RATIO))
        while gcd(step, self.size) > 1:
            step += 1
        some = range(self.size)
        chosen = some if most is None or most >= self.size else sorted(turn * step % self.size for turn in some[:most])
        for position in chosen:
            words = self.point(position)
            if self.filter is None or self.filter(words):
                yield position, words

    def count_points(self) -> tuple[int, bool]:
        """Return the number of points that pass the filter, and whether it is exact: very many are sampled."""
        if self.filter is None:
            return self.size, True
        sample_size = LOOKED_AT // len(self.filter.text)
        if self.size <= sample_size:
            return sum(1 for _ in self.points()), True
        sample = Random(0).sample(range(self.size), sample_size)
        return round(sum(map(self.filter, map(self.point, sample))) / sample_size * self.size), False


def read_spec(text: str, path: str | None = None) -> Spec:
    """Read a specification; raise a FormatError if *text* is none."""
    table = parse_toml(text, path)
    if unknown := sorted(set(table) - {"ask", "fixed", "axis", "where"}):
        raise FormatError(f"{unknown[0]!r} is not part of a sweep; expected ask, where, [fixed], [[axis]]", path)
    ask = table.get("ask", "predict")
    expect(ask in QUESTIONS, f"ask = {ask!r}; expected one of {', '.join(QUESTIONS)}", path)
    fixed = table.get("fixed", {})
    if not isinstance(fixed, dict):
        raise FormatError("fixed is not a table; write [fixed] and a line for each option", path)
    tables = table.get("axis", [])
    if not isinstance(tables, list) or not all(isinstance(item, dict) for item in tables):
        raise FormatError("axis is not a list of tables; write [[axis]]", path)
    axes = [_axis(item, number, path) for number, item in enumerate(tables, 1)]
    seen: set[str] = set()
    for axis in axes:
        names = {name for row in axis for name in row}
        if both := sorted(seen & names):
            raise FormatError(f"two axes set {both[0]!r}; a point has one value of it", path)
        seen |= names
    spec = Spec(ask, _words(fixed, "[fixed]", path), tuple(sorted(axes, key=_rank_axis)))
    expect(spec.size <= POINTS.most, POINTS.message, path)
    where = table.get("where")
    if where is None:
        return spec
    if not isinstance(where, str):
        raise FormatError('where is not text; write it in quotes, such as where = "tp * pp <= gpus"', path)
    try:
        return replace(spec, filter=Expression(where, spec.names))
    except FormatError as error:
        raise FormatError(str(error), path) from None


def _rank_axis(axis: SweepAxis) -> int:
    """Return the place of an axis among all; the smaller, the slower its values change."""
    return min((SLOWEST.index(name) for name in axis[0] if name in SLOWEST), default=len(SLOWEST))


def _axis(table: Mapping[str, object], number: int, path: str | None) -> SweepAxis:
    where = f"axis {number}"
    if "rows" in table:
        rows = table["rows"]
        if len(table) > 1 or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise FormatError(
                f"{where}: rows is a list of tables without other keys, such as [{{tp = 8, pp = 2}}]", path
            )
    else:
        columns = {name: _values(value) for name, value in table.items()}
        if len(set(map(len, columns.values()))) > 1 and all(columns.values()):
            lengths = ", ".join(f"{len(values)} of {name}" for name, values in columns.items())
            raise FormatError(f"{where}: its lists vary together and differ in length: {lengths}", path)
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]
    expect(rows, f"{where}: has no values", path)
    return tuple(_words(row, where, path) for row in rows)


def _values(value: object) -> Sequence[object]:
    """Return a list as it is, the doublings of ``"8..64"``, or a single value as a list."""
    if isinstance(value, list):
        return value
    if isinstance(value, str) and (match := DOUBLING.fullmatch(value)):
        first, last = int(match[1]), int(match[2])
        return [first << turn for turn in range((last // first).bit_length())] if 0 < first <= last else []
    return [value]


def _words(values: Mapping[str, object], where: str, path: str | None) -> Words:
    for name, value in values.items():
        if not isinstance(value, str | int | float | bool) and not (
            isinstance(value, list) and all(isinstance(item, str) for item in value)
        ):
            raise FormatError(f"{where}: {name} = {value!r} is not text, a number, true or false", path)
    return {name.replace("-", "_"): value for name, value in values.items()}
