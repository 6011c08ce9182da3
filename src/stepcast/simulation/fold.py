"""Pieces and segments as max-plus matrices.

Each end time in a piece is the maximum, over what the piece begins with (where its lanes and registers stand
and its inputs arrive), of that time plus a constant. So a piece is a small matrix: columns for lanes,
registers and inputs, rows for lanes, registers and outputs; a piece that repeats is a power of its matrix, a
chain of pieces a product. All pieces of a program are worked out together, op by op, then all powers, then
all chains, of one program or of many. What is combined with what follows from the shapes alone and is
remembered for them; only the lanes and registers that a piece touches take part.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepcast.simulation.segments import Floats, Form, Ints

# Distinct values of an array. numpy's own function for it loads its masked arrays, which takes longer than
# a whole simulated step.


class Distinct(NamedTuple):
    values: Ints
    """Each value once, rising."""
    first: Ints
    """Where it stands first."""
    inverse: Ints
    """For each element the index of its value."""


def distinct(elements: Ints) -> Distinct:
    count = len(elements)
    if count and elements.min() >= 0 and (most := int(elements.max())) < FEW_VALUES * count:
        return _counted(elements, most)
    order = np.argsort(elements, kind="stable")
    ordered = elements[order]
    starts = np.ones(count, bool)
    starts[1:] = ordered[1:] != ordered[:-1]
    inverse = np.empty(count, np.int64)
    inverse[order] = np.cumsum(starts) - 1
    return Distinct(ordered[starts], order[starts], inverse)


FEW_VALUES = 8
"""So many possible values for each element: to look at all of them takes less than to sort."""


def _counted(elements: Ints, most: int) -> Distinct:
    """Of numbers from 0 to *most*."""
    place = np.full(most + 1, -1, np.int64)
    place[elements[::-1]] = np.arange(len(elements) - 1, -1, -1)
    values = np.flatnonzero(place >= 0)
    first = place[values]
    place[values] = np.arange(len(values))
    return Distinct(values, first, place[elements])


def distinct_rows(rows: Ints) -> Distinct:
    """The same for the rows of a table; *values* numbers them."""
    known: dict[bytes, int] = {}
    packed = np.ascontiguousarray(rows)
    width = packed.itemsize * packed.shape[1]
    data = packed.tobytes()
    inverse = np.empty(len(rows), np.int64)
    first: list[int] = []
    for at in range(len(rows)):
        number = known.setdefault(data[at * width : (at + 1) * width], len(known))
        if number == len(first):
            first.append(at)
        inverse[at] = number
    return Distinct(np.arange(len(known)), np.array(first, np.int64), inverse)


Chain = tuple[tuple[int, int], ...]
"""Pieces by their number, each with its repeats."""


class _Level(NamedTuple):
    """Ops that wait for ops of earlier levels alone."""

    start: int
    stop: int
    waits: tuple[Ints, ...]
    """The k-th thing that each op waits for; those with the most waits come first."""


class _Squaring(NamedTuple):
    """One bit of the repeats: whose power takes part in whose result, and whose square is needed after."""

    first: Ints
    further: Ints
    squared: Ints


class _Link(NamedTuple):
    """The pieces at one place of all chains that reach it."""

    chains: Ints
    pieces: Ints
    """Among the pieces, then the powers."""
    entries: Ints
    """entries of a piece x chains: the row of the state that each is."""
    outputs: tuple[Ints, Ints, Ints]
    """For each output which it is of its chain and of its piece, and the place of its chain here."""


class Fold:
    """How the matrices of pieces and chains follow from the durations of the pieces' ops."""

    def __init__(self, lanes: int, forms: Sequence[Form], chains: Sequence[Chain], reads: Sequence[Ints]) -> None:
        """*reads*: for each chain the lanes and registers that some chain of its program reads."""
        self.lanes = lanes
        self.read = max(map(len, reads), default=0)
        self.forms = forms
        # Most pieces of many programs have few forms.
        self._own = list(dict(zip(map(id, forms), forms, strict=True)).values())
        number = {id(form): at for at, form in enumerate(self._own)}
        self._which = np.fromiter(map(number.__getitem__, map(id, forms)), np.int64, len(forms))
        sizes = [(len(form.level), len(form.touched), form.inputs) for form in self._own]
        self._sizes = np.array(sizes, np.int64).reshape(-1, 3).T
        self._outputs = np.array([form.outputs for form in self._own], np.int64)
        self.touched = int(self._sizes[1].max(initial=1))
        self.inputs = int(self._sizes[2].max(initial=0))
        self.outputs = int(self._outputs.max(initial=0))
        self.entries = self.touched + self.inputs
        self._order_ops()
        self._plan_chains(chains, reads)

    def _order_ops(self) -> None:
        """Ops of all pieces by their level; nodes are the entries of a piece, then the ops, then nothing."""
        ops, touched, inputs = self._sizes[:, self._which]
        base = self.entries + np.cumsum(ops) - ops
        count = int(ops.sum())

        def nodes(node: Ints, sizes: Ints) -> Ints:
            """The nodes that each form names, as nodes of all."""
            of_form = np.repeat(np.arange(len(sizes)), sizes)
            first_input, first_op = touched[of_form], (touched + inputs)[of_form]
            given = node - first_input + self.touched
            return np.where(node < first_input, node, np.where(node < first_op, given, node - first_op + base[of_form]))

        level, _ = self._named([form.level for form in self._own])
        waits, _ = self._named([form.waits for form in self._own])
        before, first = nodes(*self._named([form.before for form in self._own])), np.cumsum(waits) - waits
        # By level, and those with the most waits first; small numbers are sorted faster.
        most = waits.max(initial=0)
        key = level * (most + 1) + most - waits
        kind = np.int16 if key.max(initial=0) < 2**15 else np.int64
        self.order = np.argsort(key.astype(kind), kind="stable")
        place = np.arange(self.entries + count + 1)
        place[self.entries + self.order] = self.entries + np.arange(count)
        before, waits, first = place[before], waits[self.order], first[self.order]
        bounds = np.searchsorted(level[self.order], np.arange(level.max(initial=-1) + 2)).tolist()
        self.levels = []
        for start, stop in pairwise(bounds):
            further = np.searchsorted(-waits[start:stop], -np.arange(waits[start])).tolist()
            parts = (before[first[start : start + several] + k] for k, several in enumerate(further))
            self.levels.append(_Level(start, stop, tuple(parts)))
        exits, sizes = self._named([form.exits for form in self._own])
        of_form, at = _places(sizes)
        at = np.where(at < touched[of_form], at, at - touched[of_form] + self.touched)
        self.exits = np.full((len(sizes), self.touched + self.outputs), self.entries + count, np.int64)
        self.exits[of_form, at] = place[nodes(exits, sizes)]

    def _named(self, parts: Sequence[Ints]) -> tuple[Ints, Ints]:
        """What each of the distinct forms says of itself, for all of them in turn, and how long that is."""
        size = np.array([len(part) for part in parts], np.int64)
        sizes, start = size[self._which], np.cumsum(size) - size
        of_form, at = _places(sizes)
        return np.concatenate([np.zeros(0, np.int64), *parts])[start[self._which][of_form] + at], sizes

    def _plan_powers(self, pieces: Ints, repeats: Ints) -> Ints:
        """For each piece that repeats so often its place among the pieces, then the powers."""
        numbers = pieces * (repeats.max(initial=0) + 1) + repeats
        _, first, which = distinct(numbers)
        powers = first[repeats[first] > 1]
        place = pieces[first]
        place[repeats[first] > 1] = len(self.forms) + np.arange(len(powers))
        self.repeated, repeats = pieces[powers], repeats[powers]
        begun = np.zeros(len(powers), bool)
        self.squarings = []
        while repeats.any():
            odd = repeats & 1 > 0
            repeats = repeats >> 1
            parts = (odd & ~begun, odd & begun, repeats > 0)
            self.squarings.append(_Squaring(*(np.flatnonzero(part) for part in parts)))
            begun |= odd
        return place[which]

    def _plan_chains(self, chains: Sequence[Chain], reads: Sequence[Ints]) -> None:
        """A chain's state has a row for each lane and input, and one that is nothing."""
        forms = self.forms
        inputs = max((forms[chain[0][0]].inputs for chain in chains), default=0)
        self.state, self.count = self.lanes + inputs, len(chains)
        # columns x chains: the row of the state that each column begins in, for columns without one nothing.
        self.begins = np.full((self.read + inputs, len(chains)), self.state, np.int64)
        self.begins[self.read :] = self.lanes + np.arange(inputs)[:, None]
        for number, read in enumerate(reads):
            self.begins[: len(read), number] = read
        entries = np.full((self.entries, len(self._own)), self.state, np.int64)
        for number, form in enumerate(self._own):
            entries[: len(form.touched), number] = form.touched
            entries[self.touched : self.touched + form.inputs, number] = self.lanes + np.arange(form.inputs)
        sizes = np.array([len(chain) for chain in chains], np.int64)
        numbers, repeats = np.array([part for chain in chains for part in chain], np.int64).reshape(-1, 2).T
        items = self._plan_powers(numbers, repeats)
        chain_of = np.repeat(np.arange(len(chains)), sizes)
        first = np.cumsum(sizes) - sizes
        at = np.arange(len(numbers)) - first[chain_of]
        own = self._which[numbers]
        ports = self._outputs[own]
        before = np.cumsum(ports) - ports
        # Outputs that each chain gave before each of its pieces.
        given = before - before[first[chain_of]] if len(numbers) else before
        self.given = int((given + ports).max(initial=0))
        self.links = []
        for place in range(sizes.max(initial=0)):
            here = np.flatnonzero(at == place)
            outputs = np.repeat(np.arange(len(here)), ports[here])
            port = np.arange(len(outputs)) - (np.cumsum(ports[here]) - ports[here])[outputs]
            ends = (given[here][outputs] + port, port, outputs)
            self.links.append(_Link(chain_of[here], items[here], entries[:, own[here]], ends))

    def pieces(self, durations_s: Floats) -> Floats:
        """(touched + outputs) x (touched + inputs) x pieces: the matrix of each piece.

        *durations_s* are those of the ops of all pieces, one after the other.
        """
        values = np.full((self.entries + len(self.order) + 1, self.entries), -np.inf)
        values[np.arange(self.entries), np.arange(self.entries)] = 0.0
        lengths, ops = durations_s[self.order, None], values[self.entries :]
        for start, stop, waits in self.levels:
            latest = values.take(waits[0], 0)
            for further in waits[1:]:
                part = latest[: len(further)]
                np.maximum(part, values.take(further, 0), out=part)
            np.add(latest, lengths[start:stop], out=ops[start:stop])
        return np.ascontiguousarray(values.take(self.exits, 0).transpose(1, 2, 0))

    def _powers(self, pieces: Floats) -> Floats:
        square = pieces[: self.touched, : self.touched, self.repeated]
        result = np.empty_like(square)
        for first, further, squared in self.squarings:
            result[:, :, first] = square[:, :, first]
            if further.size:
                result[:, :, further] = product(square[:, :, further], result[:, :, further])
            if squared.size:
                part = square[:, :, squared]
                square[:, :, squared] = product(part, part)
        return result

    def maps(self, durations_s: Floats) -> Floats:
        """(read + outputs) x (read + inputs) x chains: the matrix of every chain."""
        pieces = self.pieces(durations_s)
        if self.repeated.size:
            raised = np.full((*pieces.shape[:2], len(self.repeated)), -np.inf)
            raised[: self.touched, : self.touched] = self._powers(pieces)
            pieces = np.concatenate([pieces, raised], axis=2)
        columns, each = np.arange(len(self.begins)), np.arange(self.count)
        state = np.full((self.state + 1, len(columns), self.count), -np.inf)
        state[self.begins, columns[:, None], each] = 0.0
        state[-1] = -np.inf
        given = np.full((self.given, len(columns), self.count), -np.inf)
        for chains, numbers, entries, (rows, ports, places) in self.links:
            after = product(pieces[:, :, numbers], state[entries[:, None], columns[:, None], chains])
            state[entries[: self.touched, None], columns[:, None], chains] = after[: self.touched]
            given[rows, :, chains[places]] = after[self.touched + ports, :, places]
        rows = self.begins[: self.read, None]
        return np.concatenate([state[rows, columns[:, None], each], given])

    def dense(self, pieces: Floats, number: int) -> Floats:
        """(lanes + outputs) x (lanes + inputs): the matrix of one of the *pieces*, with all lanes."""
        form, compact = self.forms[number], pieces[:, :, number]
        lanes, inputs, outputs = self.lanes, form.inputs, form.outputs
        found = np.full((lanes + outputs, lanes + inputs), -np.inf)
        found[np.arange(lanes), np.arange(lanes)] = 0.0
        rows = np.concatenate([form.touched, lanes + np.arange(outputs)])
        columns = np.concatenate([form.touched, lanes + np.arange(inputs)])
        kept = [
            np.concatenate([np.arange(len(form.touched)), self.touched + np.arange(ports)])
            for ports in (outputs, inputs)
        ]
        found[rows[:, None], columns] = compact[kept[0][:, None], kept[1]]
        return found


def _places(sizes: Ints) -> tuple[Ints, Ints]:
    """For each of so many things of some owners whose it is, and which of its owner's."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return owner, np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner]


def product(two: Floats, one: Floats) -> Floats:
    """The matrices of *one* followed by *two*: rows x columns x members."""
    if two.shape[2] < FEW_MATRICES:
        result: Floats = np.maximum.reduce(two.swapaxes(0, 1)[:, :, None] + one[:, None], 0)
        return result
    result = two[:, 0, None] + one[0]
    for at in range(1, two.shape[1]):
        np.maximum(result, two[:, at, None] + one[at], out=result)
    return result


FEW_MATRICES = 64
"""Of so many matrices all products take less space than a processor keeps at hand."""


@lru_cache(maxsize=512)
def fold_of(lanes: int, forms: tuple[Form, ...], chains: tuple[Chain, ...], every: bool) -> Fold:
    """*every*: with all lanes and registers, not those alone that some chain reads."""
    return Fold(lanes, forms, chains, (read_by(lanes, forms, chains, every),) * len(chains))


@lru_cache(maxsize=1024)
def read_by(lanes: int, forms: tuple[Form, ...], chains: tuple[Chain, ...], every: bool) -> Ints:
    """The lanes and registers that some chain reads as it finds them; the first lane in any case."""
    if every:
        return np.arange(lanes)
    found = {0}
    for chain in chains:
        written: set[int] = set()
        for piece, _ in chain:
            found |= forms[piece].reads - written
            written |= forms[piece].writes
    return np.array(sorted(found), np.int64)
