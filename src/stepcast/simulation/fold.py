"""Pieces and segments as max-plus matrices.

Each end time in a piece is a maximum over its entry times (those of its lanes, registers and inputs), each plus a
constant. So a piece is a small matrix: columns for lanes, registers and inputs, rows for lanes, registers and outputs;
a piece that repeats is a power of its matrix, a chain of pieces a product. All pieces of one or many programs are
computed together op by op, then all powers, then all chains. Which matrices are combined follows from the shapes alone
and is cached for them; only the lanes and registers that a piece touches take part.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray, distinct
from stepcast.simulation.segments import Shape

Chain = tuple[tuple[int, int], ...]
"""Pieces by their number, each with its repeats."""


class _Level(NamedTuple):
    """Ops that wait only for ops of earlier levels."""

    start: int
    stop: int
    waits: tuple[IntArray, ...]
    """The k-th node that each op waits for; ops with the most waits come first."""


class _Squaring(NamedTuple):
    """One bit of the repeats: the results that begin with a power, those multiplied by it, and those squared after."""

    begin: IntArray
    multiply: IntArray
    square: IntArray


class _Link(NamedTuple):
    """The pieces at one place of all chains that reach it."""

    chains: IntArray
    pieces: IntArray  # among the pieces, then the powers
    entries: IntArray  # entries of a piece x chains: the row of the state of each
    outputs: tuple[IntArray, IntArray, IntArray]
    """For each output its index in the chain, its index in the piece, and the index of its chain here."""


class Fold:
    """The way from the durations of ops to the matrices of pieces and chains."""

    def __init__(self, lanes: int, shapes: Sequence[Shape], chains: Sequence[Chain], reads: Sequence[IntArray]) -> None:
        """*reads*: for each chain the lanes and registers that some chain of its program reads."""
        self.lanes = lanes
        self.read = max(map(len, reads), default=0)
        self.shapes = shapes
        # The pieces of many programs have few distinct shapes.
        self._distinct = list(dict.fromkeys(shapes))
        number = {shape: index for index, shape in enumerate(self._distinct)}
        self._which = np.fromiter(map(number.__getitem__, shapes), np.int64, len(shapes))
        sizes = [(shape.ops, len(shape.touched), *shape.ports) for shape in self._distinct]
        self._sizes = np.array(sizes, np.int64).reshape(-1, 4).T
        self.touched = int(self._sizes[1].max(initial=1))
        self.inputs = int(self._sizes[2].max(initial=0))
        self.outputs = int(self._sizes[3].max(initial=0))
        self.entries = self.touched + self.inputs
        self._order_ops()
        self._plan_chains(chains, reads)

    def _order_ops(self) -> None:
        """Sort the ops of all pieces by level. Nodes are the entries of a piece, then the ops, then one for nothing."""
        ops, touched, inputs, _ = self._sizes[:, self._which]
        base = self.entries + np.cumsum(ops) - ops
        count = int(ops.sum())

        def renumber(node: IntArray, sizes: IntArray) -> IntArray:
            """Turn nodes of each shape into nodes of all."""
            owner = np.repeat(np.arange(len(sizes)), sizes)
            first_input, first_op = touched[owner], (touched + inputs)[owner]
            port = node - first_input + self.touched
            return np.where(node < first_input, node, np.where(node < first_op, port, node - first_op + base[owner]))

        level, _ = self._spread([shape.level for shape in self._distinct])
        waits, _ = self._spread([shape.wait_counts for shape in self._distinct])
        before = renumber(*self._spread([shape.compact_before for shape in self._distinct]))
        first = np.cumsum(waits) - waits
        # By level, and within it the ops with the most waits first. Small integers are sorted faster.
        most = waits.max(initial=0)
        key = level * (most + 1) + most - waits
        self.order = np.argsort(key.astype(np.int16 if key.max(initial=0) < 2**15 else np.int64), kind="stable")
        place = np.arange(self.entries + count + 1)
        place[self.entries + self.order] = self.entries + np.arange(count)
        before, waits, first = place[before], waits[self.order], first[self.order]
        bounds = np.searchsorted(level[self.order], np.arange(level.max(initial=-1) + 2)).tolist()
        self.levels = []
        for start, stop in pairwise(bounds):
            waiting = np.searchsorted(-waits[start:stop], -np.arange(waits[start])).tolist()
            parts = (before[first[start : start + several] + k] for k, several in enumerate(waiting))
            self.levels.append(_Level(start, stop, tuple(parts)))
        exits, sizes = self._spread([shape.exits for shape in self._distinct])
        owner, index = _places(sizes)
        index = np.where(index < touched[owner], index, index - touched[owner] + self.touched)
        self.exits = np.full((len(sizes), self.touched + self.outputs), self.entries + count, np.int64)
        self.exits[owner, index] = place[renumber(exits, sizes)]

    def _spread(self, parts: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
        """Return an array of each distinct shape for all pieces in turn, and its length for each."""
        size = np.array([len(part) for part in parts], np.int64)
        sizes, start = size[self._which], np.cumsum(size) - size
        owner, index = _places(sizes)
        return np.concatenate([np.zeros(0, np.int64), *parts])[start[self._which][owner] + index], sizes

    def _plan_powers(self, pieces: IntArray, repeats: IntArray) -> IntArray:
        """Return for each piece with its repeats its place among the pieces, then the powers."""
        _, first, which = distinct(pieces * (repeats.max(initial=0) + 1) + repeats)
        powers = first[repeats[first] > 1]
        place = pieces[first]
        place[repeats[first] > 1] = len(self.shapes) + np.arange(len(powers))
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

    def _plan_chains(self, chains: Sequence[Chain], reads: Sequence[IntArray]) -> None:
        """Plan the products. A chain's state has a row for each lane and input, and one for nothing."""
        inputs = max((self.shapes[chain[0][0]].inputs for chain in chains), default=0)
        self.state, self.count = self.lanes + inputs, len(chains)
        # columns x chains: the row of the state that each column begins in, or the row for nothing.
        self.begins = np.full((self.read + inputs, len(chains)), self.state, np.int64)
        self.begins[self.read :] = self.lanes + np.arange(inputs)[:, None]
        for number, read in enumerate(reads):
            self.begins[: len(read), number] = read
        entries = np.full((self.entries, len(self._distinct)), self.state, np.int64)
        for number, shape in enumerate(self._distinct):
            entries[: len(shape.touched), number] = shape.touched
            entries[self.touched : self.touched + shape.inputs, number] = self.lanes + np.arange(shape.inputs)
        sizes = np.array([len(chain) for chain in chains], np.int64)
        numbers, repeats = np.array([part for chain in chains for part in chain], np.int64).reshape(-1, 2).T
        items = self._plan_powers(numbers, repeats)
        chain_of, index = _places(sizes)
        own = self._which[numbers]
        ports = self._sizes[3][own]
        before = np.cumsum(ports) - ports
        # The outputs that each chain gives before each of its pieces.
        earlier = before - before[(np.cumsum(sizes) - sizes)[chain_of]] if len(numbers) else before
        self.chain_outputs = int((earlier + ports).max(initial=0))
        self.links = []
        for place in range(sizes.max(initial=0)):
            here = np.flatnonzero(index == place)
            outputs, port = _places(ports[here])
            ends = (earlier[here][outputs] + port, port, outputs)
            self.links.append(_Link(chain_of[here], items[here], entries[:, own[here]], ends))

    def pieces(self, durations_s: FloatArray) -> FloatArray:
        """Return (touched + outputs) x (touched + inputs) x pieces: the matrix of each piece.

        *durations_s* are those of the ops of all pieces, piece by piece.
        """
        values = np.full((self.entries + len(self.order) + 1, self.entries), -np.inf)
        values[np.arange(self.entries), np.arange(self.entries)] = 0.0
        lengths, ops = durations_s[self.order, None], values[self.entries :]
        for start, stop, waits in self.levels:
            latest = values.take(waits[0], 0)
            for nodes in waits[1:]:
                part = latest[: len(nodes)]
                np.maximum(part, values.take(nodes, 0), out=part)
            np.add(latest, lengths[start:stop], out=ops[start:stop])
        return np.ascontiguousarray(values.take(self.exits, 0).transpose(1, 2, 0))

    def _powers(self, pieces: FloatArray) -> FloatArray:
        power = pieces[: self.touched, : self.touched, self.repeated]
        result = np.empty_like(power)
        for begin, multiply, square in self.squarings:
            result[:, :, begin] = power[:, :, begin]
            if multiply.size:
                result[:, :, multiply] = product(power[:, :, multiply], result[:, :, multiply])
            if square.size:
                part = power[:, :, square]
                power[:, :, square] = product(part, part)
        return result

    def maps(self, durations_s: FloatArray) -> FloatArray:
        """Return (read + outputs) x (read + inputs) x chains: the matrix of every chain."""
        pieces = self.pieces(durations_s)
        if self.repeated.size:
            raised = np.full((*pieces.shape[:2], len(self.repeated)), -np.inf)
            raised[: self.touched, : self.touched] = self._powers(pieces)
            pieces = np.concatenate([pieces, raised], axis=2)
        columns, every_chain = np.arange(len(self.begins)), np.arange(self.count)
        state = np.full((self.state + 1, len(columns), self.count), -np.inf)
        state[self.begins, columns[:, None], every_chain] = 0.0
        state[-1] = -np.inf
        outputs = np.full((self.chain_outputs, len(columns), self.count), -np.inf)
        for chains, numbers, entries, (rows, ports, places) in self.links:
            after = product(pieces[:, :, numbers], state[entries[:, None], columns[:, None], chains])
            state[entries[: self.touched, None], columns[:, None], chains] = after[: self.touched]
            outputs[rows, :, chains[places]] = after[self.touched + ports, :, places]
        rows = self.begins[: self.read, None]
        return np.concatenate([state[rows, columns[:, None], every_chain], outputs])

    def dense(self, pieces: FloatArray, number: int) -> FloatArray:
        """Return (lanes + outputs) x (lanes + inputs): the matrix of one of the *pieces*, with all lanes."""
        shape, compact = self.shapes[number], pieces[:, :, number]
        lanes, touched = self.lanes, shape.touched
        inputs, outputs = shape.ports
        matrix = np.full((lanes + outputs, lanes + inputs), -np.inf)
        matrix[np.arange(lanes), np.arange(lanes)] = 0.0
        rows, columns = (np.concatenate([touched, lanes + np.arange(ports)]) for ports in (outputs, inputs))
        own_rows, own_columns = (
            np.concatenate([np.arange(len(touched)), self.touched + np.arange(ports)]) for ports in (outputs, inputs)
        )
        matrix[rows[:, None], columns] = compact[own_rows[:, None], own_columns]
        return matrix


def _places(sizes: IntArray) -> tuple[IntArray, IntArray]:
    """Return for each of so many items of some owners its owner and its index there."""
    owner = np.repeat(np.arange(len(sizes)), sizes)
    return owner, np.arange(len(owner)) - (np.cumsum(sizes) - sizes)[owner]


FEW_MATRICES = 64
"""All products of so many matrices fit into the caches of a processor."""


def product(two: FloatArray, one: FloatArray) -> FloatArray:
    """Return the matrices of *one* followed by *two*: rows x columns x members."""
    if two.shape[2] < FEW_MATRICES:
        result: FloatArray = np.maximum.reduce(two.swapaxes(0, 1)[:, :, None] + one[:, None], 0)
        return result
    result = two[:, 0, None] + one[0]
    for row in range(1, two.shape[1]):
        np.maximum(result, two[:, row, None] + one[row], out=result)
    return result


@lru_cache(maxsize=512)
def fold_of(lanes: int, shapes: tuple[Shape, ...], chains: tuple[Chain, ...], all_lanes: bool) -> Fold:
    """Return the fold of one program; *all_lanes*: with all lanes and registers, not only those that are read."""
    return Fold(lanes, shapes, chains, (lanes_read(lanes, shapes, chains, all_lanes),) * len(chains))


@lru_cache(maxsize=1024)
def lanes_read(lanes: int, shapes: tuple[Shape, ...], chains: tuple[Chain, ...], all_lanes: bool) -> IntArray:
    """Return the lanes and registers that some chain reads before it writes them; always the first lane."""
    if all_lanes:
        return np.arange(lanes)
    read = {0}
    for chain in chains:
        written: set[int] = set()
        for piece, _ in chain:
            read |= shapes[piece].reads - written
            written |= shapes[piece].writes
    return np.array(sorted(read), np.int64)
