"""Robust least squares over positive parameters, in numpy alone: what the offline fits need and no more."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def minimise(
    ratios: Callable[[Vector], Vector], start: Vector, low: Vector, high: Vector, scale: float = 0.05, rounds: int = 40
) -> Vector:
    """The parameters within [low, high] that bring *ratios* (predicted / measured) closest to 1.

    The cost is the mean of sqrt(log(ratio)^2 + scale^2): squared for small errors, absolute for large ones,
    so that outliers do not pull. Parameters move in logarithms; a Gauss-Newton search with damping is
    followed by a coordinate search, since tile choice makes the cost jumpy.
    """
    x, bottom, top = np.log(start), np.log(low), np.log(high)

    def residual(point: Vector) -> Vector:
        return np.log(ratios(np.exp(point)))

    def cost(values: Vector) -> float:
        return float(np.mean(np.sqrt(values * values + scale * scale)))

    values = residual(x)
    best, damping = cost(values), 1e-2
    for _ in range(rounds):
        slopes = np.empty((values.size, x.size))
        for j in range(x.size):
            step = 1e-3 if x[j] + 1e-3 <= top[j] else -1e-3
            moved = x.copy()
            moved[j] += step
            slopes[:, j] = (residual(moved) - values) / step
        weights = 1.0 / np.sqrt(values * values + scale * scale)
        normal = (slopes * weights[:, None]).T @ slopes
        gradient = (slopes * weights[:, None]).T @ values
        improved = False
        for _ in range(8):
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            trial = np.clip(x + np.clip(change, -0.5, 0.5), bottom, top)
            trial_values = residual(trial)
            if cost(trial_values) < best - 1e-6:
                improved = True
                break
            damping *= 4.0
        if not improved:
            break
        x, values, best, damping = trial, trial_values, cost(trial_values), max(damping / 5.0, 1e-6)
    return np.exp(_coordinate_search(x, best, lambda point: cost(residual(point)), bottom, top))


def _coordinate_search(x: Vector, best: float, cost: Callable[[Vector], float], bottom: Vector, top: Vector) -> Vector:
    step = 0.1
    while step > 0.01:
        improved = False
        for j in range(x.size):
            for sign in (1.0, -1.0):
                trial = x.copy()
                trial[j] = np.clip(trial[j] + sign * step, bottom[j], top[j])
                if trial[j] != x[j] and (value := cost(trial)) < best - 1e-7:
                    x, best, improved = trial, value, True
        if not improved:
            step /= 2.0
    return x
