"""Rates that hold for a while, summed over bins of time."""

import numpy as np

from stepcast.ir.flows import Floats, Ints


def binned(row: Ints, from_s: Floats, to_s: Floats, rate: Floats, rows: int, edges_s: Floats) -> Floats:
    """rows x bins: the time integral of the *rate* of each span in the bins that it touches."""
    bins = len(edges_s) - 1
    width_s = edges_s[-1] / bins if bins and edges_s[-1] > 0 else 0.0
    if not len(row) or width_s == 0:
        return np.zeros((rows, bins))
    from_s, to_s = np.minimum(from_s, edges_s[-1]), np.minimum(to_s, edges_s[-1])
    first = np.minimum((from_s / width_s).astype(np.int64), bins - 1)
    last = np.minimum((to_s / width_s).astype(np.int64), bins - 1)
    # What a span fills of its first and its last bin, and how many whole bins lie between.
    inside = first == last
    head = np.where(inside, to_s - from_s, (first + 1) * width_s - from_s)
    tail = np.where(inside, 0.0, to_s - last * width_s)
    size = rows * bins
    total = np.bincount(row * bins + first, rate * head, size) + np.bincount(
        row * bins + last, rate * tail, size
    )
    change = np.zeros(rows * (bins + 1))
    long = ~inside
    np.add.at(change, row[long] * (bins + 1) + first[long] + 1, rate[long] * width_s)
    np.add.at(change, row[long] * (bins + 1) + last[long], -rate[long] * width_s)
    whole = np.cumsum(change.reshape(rows, bins + 1), axis=1)[:, :bins]
    return np.asarray(total.reshape(rows, bins) + whole, np.float64)
