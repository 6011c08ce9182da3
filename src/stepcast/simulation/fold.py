"""Pieces and segments as max-plus matrices.

Each end time in a piece is a maximum over its entry times (those of its lanes, registers and inputs), each plus a
constant. So a piece is a small matrix: columns for lanes, registers and inputs, rows for lanes, registers and outputs;
a piece that repeats is a power of its matrix, a chain of pieces a product. Only the lanes and registers that a piece
touches take part. ``kernels.fold_chains`` does the same, compiled; here, where it takes longer, equal pieces and chains
are computed once.
"""

from functools import lru_cache, reduce

import numpy as np

from stepcast.ir.arrays import FloatArray, IntArray
from stepcast.simulation.segments import Shape

Chain = tuple[tuple[int, int], ...]
"""Pieces by their number, each with its repeats."""


@lru_cache(maxsize=2**12)
def fold_piece(shape: Shape, durations_s: tuple[float, ...], repeat: int = 1) -> FloatArray:
    """Return (touched + outputs) x (touched + inputs): the matrix of *repeat* pieces whose ops take *durations_s*."""
    if repeat > 1:
        return _raise_matrix(fold_piece(shape, durations_s), repeat)
    values: list[list[float]] = np.where(np.eye(len(shape.entries)), 0.0, -np.inf).tolist()
    for nodes, duration_s in zip(shape.compact_waits, durations_s, strict=True):
        latest = values[nodes[0]]
        for node in nodes[1:]:
            latest = list(map(max, latest, values[node]))
        values.append([value + duration_s for value in latest])
    return np.array([values[node] for node in shape.exits.tolist()]).reshape(len(shape.exits), len(shape.entries))


@lru_cache(maxsize=2**12)
def fold_chain(
    lanes: int, parts: tuple[tuple[Shape, tuple[float, ...], int], ...], read: tuple[int, ...], ports: tuple[int, int]
) -> FloatArray:
    """Return (read + outputs) x (read + inputs): the matrix of a chain of *parts*: shapes, seconds of ops, repeats.

    *read*: the lanes and registers that chains read; *ports*: the most inputs and outputs of a chain.
    """
    begins = np.array([*read, *range(lanes, lanes + ports[0])])
    state = np.where(np.arange(lanes + ports[0])[:, None] == begins, 0.0, -np.inf)
    matrix, given = np.full((len(read) + ports[1], len(begins)), -np.inf), len(read)
    for shape, durations_s, repeat in parts:
        after = product(fold_piece(shape, durations_s, repeat), state[shape.entries])
        count = len(shape.touched)
        state[shape.touched] = after[:count]
        matrix[given : given + len(after) - count] = after[count:]
        given += len(after) - count
    matrix[: len(read)] = state[begins[: len(read)]]
    return matrix


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
