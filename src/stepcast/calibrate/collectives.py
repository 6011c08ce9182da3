"""The named constants of a cluster's collectives, fitted to its nccl-tests logs.

Least squares of log(predicted / measured), reweighted so that far points count by their distance and not by
its square, and held to the description's own values where the logs say little. What a constant changes in the
predictions decides whether the logs identify it: no rule here knows a cluster or a collective.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from stepcast.analyze.sweeps import MeasuredSweep
from stepcast.hardware import Cluster
from stepcast.units import US

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

# A point further off than this counts by its distance alone.
NEAR = 0.05
# The description's own values weigh as much as this error would, for a change of one scale.
HELD = 0.02
COARSE_STEPS = (-0.6, -0.3, -0.1, 0.1, 0.4, 1.0)
COARSE_ROUNDS, ROUNDS = 2, 12
STEP = 1e-3  # of a scale, for derivatives
FOLDS = 4
# A constant is identified where a change by a tenth of its scale moves some predictions by this much ...
MOVES = 0.01
# ... and its standard error, beside the others, stays below this share of its value,
UNSURE = 0.5
# or the fit gets worse by this mean error when it keeps its described value.
WORSE = 0.005


@dataclass(frozen=True, slots=True)
class Constant:
    """A key of a cluster's description, the attribute that holds it, and the size of a usual change."""

    key: str
    path: tuple[str, ...]
    scale: float
    most: float
    means: str

    def of(self, cluster: Cluster) -> float | None:
        """Its value; None where the cluster has no such part."""
        if self.key == REDUCTION and not cluster.node.fabric.in_switch_reduction:
            return None
        value: Any = cluster
        for name in self.path:
            value = getattr(value, name)
            if value is None:
                return None
        return float(value)

    def text(self, value: float) -> str:
        """As a description writes it."""
        return f'"{value / US:.4g} us"' if self.path[-1].endswith("_s") else f"{value:.4g}"


def _time(key: str, path: str, means: str) -> Constant:
    return Constant(key, tuple(path.split(".")), 5 * US, 1.0, means)


def _share(key: str, path: str, means: str) -> Constant:
    return Constant(key, tuple(path.split(".")), 0.5, 1.0, means)


REDUCTION = "node.fabric.reduction_share"
CONSTANTS = (
    _time("communication.launch_overhead", "communication.launch_overhead_s", "to start a rank's kernel"),
    _time("communication.channel_overhead", "communication.channel_overhead_s", "for each channel that opens"),
    _time("node.fabric.link.latency", "node.fabric.link.latency_s", "of a hop within a node"),
    _share("node.fabric.link.efficiency", "node.fabric.link.efficiency", "of the rate of a link within a node"),
    _share(REDUCTION, REDUCTION, "that a port keeps while the switch adds"),
    _time("node.nic.latency", "node.nic.latency_s", "of a hop between nodes"),
    _share("node.nic.efficiency", "node.nic.efficiency", "of the rate of a NIC"),
    _share("communication.exchange_share", "communication.exchange_share", "that an all-to-all reaches in a node"),
)
TRAFFIC_BETWEEN = "node.nic."
TRAFFIC_WITHIN = "node.fabric."
EXCHANGE = "communication.exchange_share"


@dataclass(frozen=True)
class Points:
    """Every size of every log that was not disturbed."""

    logs: tuple[MeasuredSweep, ...]
    kept: "tuple[NDArray[np.bool_], ...]"

    @classmethod
    def of(cls, logs: Sequence[MeasuredSweep]) -> "Points":
        return cls(tuple(logs), tuple(~log.spikes for log in logs))

    def __len__(self) -> int:
        return int(sum(kept.sum() for kept in self.kept))

    def log_errors(self, cluster: Cluster) -> "Vector":
        """log(predicted / measured) of each."""
        parts = [
            np.log(log.seconds_on(cluster)[kept] / log.measured_s[kept])
            for log, kept in zip(self.logs, self.kept, strict=True)
        ]
        return np.concatenate(parts)

    def folds(self) -> "Vector":
        """Which fold each belongs to: neighbouring sizes of a log in different ones."""
        return np.concatenate([np.arange(int(kept.sum())) % FOLDS for kept in self.kept])


@dataclass(frozen=True, slots=True)
class Fitted:
    """*unidentified*: by key, why the logs do not tell it. Errors are means of |predicted / measured - 1|."""

    cluster: Cluster
    values: Mapping[str, float]
    spread: Mapping[str, float]  # standard error, in the constant's unit
    unidentified: Mapping[str, str]
    points: int
    before: float
    after: float
    left_out: float


def fit_collectives(logs: Sequence[MeasuredSweep]) -> Fitted:
    """The constants that *logs*, all of one cluster, identify; each other one stays as described."""
    points, described = Points.of(logs), logs[0].cluster
    every = np.ones(len(points), dtype=bool)
    chosen = [constant for constant in CONSTANTS if constant.of(described) is not None]
    unidentified: dict[str, str] = {}
    cluster, loss = _fit(points, described, chosen, every)
    # Without one that the logs do not tell, others may become sure: so one at a time, the least sure first.
    while unsure := _unsure(points, cluster, chosen, unidentified):
        constant, reason = unsure
        fewer = [one for one in chosen if one is not constant]
        without, loss_without = _fit(points, described, fewer, every)
        if loss_without > loss + WORSE * len(points):
            reason = ""  # it has no slope where it stands, and the fit needs it there
        else:
            chosen, cluster, loss = fewer, without, loss_without
        unidentified[constant.key] = reason
    spread = _spread(points, cluster, chosen)
    return Fitted(
        cluster=cluster,
        values={constant.key: constant.of(cluster) or 0.0 for constant in chosen},
        spread=spread,
        unidentified={key: reason for key, reason in unidentified.items() if reason},
        points=len(points),
        before=_mean_error(points.log_errors(described)),
        after=_mean_error(points.log_errors(cluster)),
        left_out=_mean_error(_left_out(points, described, chosen)),
    )


def _unsure(
    points: Points, cluster: Cluster, chosen: Sequence[Constant], judged: Mapping[str, str]
) -> tuple[Constant, str] | None:
    """The least sure of *chosen* that the logs do not tell, and why; None where they tell all."""
    spread = _spread(points, cluster, chosen)
    shares = {one: spread[one.key] / (one.of(cluster) or one.scale) for one in chosen if one.key not in judged}
    worst = max(shares, key=lambda one: shares[one], default=None)
    if worst is None or shares[worst] < UNSURE:
        return None
    return worst, _reason(worst, points, spread[worst.key])


def _mean_error(log_errors: "Vector") -> float:
    return float(np.abs(np.exp(log_errors) - 1).mean())


def _left_out(points: Points, described: Cluster, chosen: Sequence[Constant]) -> "Vector":
    """Errors of each point by a fit that has not seen it."""
    folds, errors = points.folds(), np.zeros(len(points))
    for fold in range(FOLDS):
        unseen = folds == fold
        if unseen.any() and not unseen.all():
            errors[unseen] = points.log_errors(_fit(points, described, chosen, ~unseen)[0])[unseen]
        elif unseen.any():
            errors[unseen] = points.log_errors(described)[unseen]
    return errors


def _fit(
    points: Points, described: Cluster, chosen: Sequence[Constant], seen: "NDArray[np.bool_]"
) -> tuple[Cluster, float]:
    """The cluster with the least loss: coarse steps of one constant at a time, then Gauss and Newton's.

    A price is the least of many curves and a start the latest of several things: where one of them hides a
    constant it has no slope, so the coarse steps come first.
    """
    start = np.array([constant.of(described) for constant in chosen], dtype=np.float64)
    scales = np.array([constant.scale for constant in chosen])

    def loss_of(values: "Vector") -> float:
        errors = points.log_errors(with_constants(described, chosen, values))[seen]
        return _loss(errors, values, start, scales)

    values, loss = start, loss_of(start)
    for _ in range(COARSE_ROUNDS):
        for at in range(len(chosen)):
            for step in COARSE_STEPS:
                trial = values.copy()
                trial[at] += step * max(values[at], 0.2 * scales[at])
                trial = _bounded(trial, chosen)
                trial_loss = loss_of(trial)
                if trial_loss < loss:
                    values, loss = trial, trial_loss
    for _ in range(ROUNDS):
        cluster = with_constants(described, chosen, values)
        errors = points.log_errors(cluster)[seen]
        slopes = _slopes(points, cluster, chosen)[seen]
        weights = 1 / np.maximum(np.abs(errors), NEAR)
        held = HELD**2 / NEAR * len(errors)
        moves = (slopes * weights[:, None]).T @ slopes + np.eye(len(chosen)) * held
        pull = (slopes * weights[:, None]).T @ errors + held * (values - start) / scales
        step = -np.linalg.solve(moves, pull) * scales
        trials = [_bounded(values + step / 2**halved, chosen) for halved in range(6)]
        better = next((trial for trial in trials if loss_of(trial) < loss * (1 - 1e-6)), None)
        if better is None:
            break
        values, loss = better, loss_of(better)
    return with_constants(described, chosen, values), loss


def _loss(errors: "Vector", values: "Vector", start: "Vector", scales: "Vector") -> float:
    """Huber's: squares near, distances far; and the pull of the description."""
    size = np.abs(errors)
    far = np.where(size <= NEAR, size**2 / (2 * NEAR), size - NEAR / 2)
    held = HELD**2 / NEAR * len(errors) * (((values - start) / scales) ** 2).sum() / 2
    return float(far.sum() + held)


def _bounded(values: "Vector", chosen: Sequence[Constant]) -> "Vector":
    least = np.array([1e-3 * constant.scale for constant in chosen])
    return np.clip(values, least, [constant.most for constant in chosen])


def _slopes(points: Points, cluster: Cluster, chosen: Sequence[Constant]) -> "Vector":
    """Change of each point's log(predicted) for a change of each constant by its scale."""
    columns = []
    for constant in chosen:
        value = constant.of(cluster)
        assert value is not None, "only constants that the cluster has are fitted"
        step = constant.scale * STEP
        ends = [min(constant.most, value + step), max(0.0, value - step)]
        if not constant.path[-1].endswith("_s"):
            ends[1] = max(1e-3, ends[1])
        high, low = (points.log_errors(with_constants(cluster, [constant], [end])) for end in ends)
        columns.append((high - low) / (ends[0] - ends[1]) * constant.scale)
    return np.array(columns).T.reshape(len(points), len(chosen))


def _spread(points: Points, cluster: Cluster, chosen: Sequence[Constant]) -> dict[str, float]:
    """Standard error of each constant, by how the others could stand in for it."""
    slopes = _slopes(points, cluster, chosen)
    error = max(NEAR, float(np.median(np.abs(points.log_errors(cluster)))))
    found = {}
    for at, constant in enumerate(chosen):
        others = np.delete(slopes, at, axis=1)
        own = slopes[:, at]
        if others.shape[1]:
            own = own - others @ np.linalg.lstsq(others, own, rcond=None)[0]
        size = float(np.sqrt((own**2).sum()))
        found[constant.key] = error / size * constant.scale if size > 1e-9 else np.inf
        if np.abs(slopes[:, at]).max(initial=0.0) * 0.1 < MOVES:
            found[constant.key] = np.inf
    return found


def _reason(constant: Constant, points: Points, spread: float) -> str:
    """Why the logs do not tell *constant*."""
    logs = [log.sweep for log in points.logs]
    if constant.key.startswith(TRAFFIC_BETWEEN) and all(log.nodes == 1 for log in logs):
        return "no log crosses nodes; add one of at least two"
    if constant.key.startswith(TRAFFIC_WITHIN) and all(log.ranks <= log.nodes for log in logs):
        return "every node holds one rank; add a log of several GPUs of a node"
    if constant.key == EXCHANGE and not any(str(log.kind) == "all-to-all" for log in logs):
        return "no log times an all-to-all"
    if np.isinf(spread):
        return "these logs do not depend on it; other sizes or ranks would tell"
    return "not told apart from the others; more sizes, ranks or collectives would"


def with_constants(cluster: Cluster, chosen: Sequence[Constant], values: "Sequence[float] | Vector") -> Cluster:
    """*cluster* with other values of the *chosen* constants."""
    for constant, value in zip(chosen, values, strict=True):
        cluster = _replaced(cluster, constant.path, float(value))
    return cluster


def _replaced(noun: Any, path: Sequence[str], value: float) -> Any:
    own = value if len(path) == 1 else _replaced(getattr(noun, path[0]), path[1:], value)
    return replace(noun, **{path[0]: own})
