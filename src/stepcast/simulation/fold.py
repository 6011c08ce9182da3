"""Pieces and segments as max-plus matrices.

Each end time in a piece is a maximum over its entry times (those of its lanes, registers and inputs), each plus a
constant. So a piece is a small matrix: columns for lanes, registers and inputs, rows for lanes, registers and outputs;
a piece that repeats is a power of its matrix, a chain of pieces a product. Only the lanes and registers that a piece
touches take part. ``kernels.fold_chains`` does the same, compiled.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.simulation.segments import Shape

Chain = tuple[tuple[int, int], ...]
"""Pieces by their number, each with its repeats."""


def fold_piece(shape: Shape, durations_s: Sequence[float]) -> FloatArray:
    """Return (touched + outputs) x (touched + inputs): the matrix of a piece whose ops take *durations_s*."""
    entries = np.full((len(shape.touched) + shape.inputs,) * 2, -np.inf)
    np.fill_diagonal(entries, 0.0)
    values: list[list[float]] = entries.tolist()
    for nodes, duration_s in zip(shape.compact_waits, durations_s, strict=True):
        latest = values[nodes[0]]
        for node in nodes[1:]:
            latest = list(map(max, latest, values[node]))
        values.append([value + duration_s for value in latest])
    return np.array([values[node] for node in shape.exits.tolist()]).reshape(len(shape.exits), len(entries))


def fold_chains(
    lanes: int,
    shapes: Sequence[Shape],
    chains: Sequence[Chain],
    read: IntArray,
    ports: tuple[int, int],
    pieces: Sequence[FloatArray],
) -> FloatArray:
    """Return (read + outputs) x (read + inputs) x chains: the matrix of every chain of *pieces*.

    *read*: the lanes and registers that chains read; *ports*: the most inputs and outputs of a chain.
    """
    begins = np.concatenate([read, lanes + np.arange(ports[0])])
    maps = np.full((len(chains), len(read) + ports[1], len(begins)), -np.inf)
    powers: dict[tuple[int, int], FloatArray] = {}
    for chain, matrix in zip(chains, maps, strict=True):
        state, given = np.full((lanes + ports[0], len(begins)), -np.inf), len(read)
        state[begins, np.arange(len(begins))] = 0.0
        for part in chain:
            if part not in powers:
                powers[part] = _raise_matrix(pieces[part[0]], part[1])
            shape = shapes[part[0]]
            after = product(powers[part], state[shape.entries])
            count = len(shape.touched)
            state[shape.touched] = after[:count]
            matrix[given : given + len(after) - count] = after[count:]
            given += len(after) - count
        matrix[: len(read)] = state[read]
    return maps.transpose(1, 2, 0)


def _raise_matrix(matrix: FloatArray, repeat: int) -> FloatArray:
    """Return *matrix* to the power *repeat*, by repeated squaring."""
    factors = []
    while repeat:
        factors += [matrix] * (repeat & 1)
        repeat >>= 1
        matrix = product(matrix, matrix) if repeat else matrix
    return reduce(lambda one, two: product(two, one), factors)


def product(two: FloatArray, one: FloatArray) -> FloatArray:
    """Return the matrix of *one* followed by *two*."""
    result: FloatArray = np.maximum.reduce(two[:, :, None] + one, 1, initial=-np.inf)
    return result


def widen(matrix: FloatArray, shape: Shape) -> FloatArray:
    """Return (lanes + outputs) x (lanes + inputs): the *matrix* of a piece with all lanes."""
    inputs, outputs = shape.ports
    wide = np.full((shape.lanes + outputs, shape.lanes + inputs), -np.inf)
    np.fill_diagonal(wide[:, : shape.lanes], 0.0)
    rows = np.concatenate([shape.touched, shape.lanes + np.arange(outputs)])
    wide[rows[:, None], shape.entries] = matrix
    return wide


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
