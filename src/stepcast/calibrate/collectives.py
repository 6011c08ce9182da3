"""The named constants of a cluster's collectives, fitted to its nccl-tests logs.

Least squares of log(predicted / measured), reweighted so that far points count by their distance and not by
its square, and pulled to the description's own values where the logs show little. The effect of a constant on the
predictions decides whether the logs identify it: no rule here depends on a cluster or a collective.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from stepcast.analyze.sweeps import MeasuredSweep, change_field
from stepcast.hardware import Cluster
from stepcast.hardware.catalog import load_fit
from stepcast.ir.arrays import BoolArray, FloatArray
from stepcast.ir.types import dataclass
from stepcast.units import US

NEAR = 0.05  # an error beyond this counts by its size alone
HELD = 0.02  # error that weighs as much as a change of a constant by its scale from the description's value
COARSE_STEPS = (-0.6, -0.3, -0.1, 0.1, 0.4, 1.0)
COARSE_ROUNDS, ROUNDS = 2, 12
STEP = 1e-3  # of a scale, for derivatives
FOLDS = 4
# A constant is identified where a change by a tenth of its scale moves some predictions by MOVES, and its standard
# error, given the others, is below UNSURE of its value, or the fit gets worse by a mean error of WORSE without it.
MOVES, UNSURE, WORSE = 0.01, 0.5, 0.005
REDUCTION, EXCHANGE = "node.fabric.reduction_share", "communication.exchange_share"


@dataclass(frozen=True, slots=True)
class Constant:
    """A key of a cluster's description, a time or a share, whose field is its name with the unit."""

    key: str
    means: str
    is_time: bool = False

    @property
    def path(self) -> str:
        return f"{self.key}_s" if self.is_time else self.key

    @property
    def scale(self) -> float:
        return 5 * US if self.is_time else 0.5

    def of(self, cluster: Cluster) -> float | None:
        """Return its value; None where the cluster has no such part."""
        if self.key == REDUCTION and not cluster.node.fabric.in_switch_reduction:
            return None
        value: object = cluster
        for name in self.path.split("."):
            value = getattr(value, name)
            if value is None:
                return None
        assert isinstance(value, int | float)
        return float(value)

    def text(self, value: float) -> str:
        """Return *value* as a description writes it."""
        return f'"{value / US:.4g} us"' if self.is_time else f"{value:.4g}"


CONSTANTS = tuple(Constant(key, means, unit == "time") for key, (unit, means) in load_fit("calibrated").items())


@dataclass(frozen=True)
class SweepPoints:
    """Every size of every log that was not disturbed."""

    logs: tuple[MeasuredSweep, ...]
    used: tuple[BoolArray, ...]

    def __len__(self) -> int:
        return int(sum(used.sum() for used in self.used))

    def log_errors(self, cluster: Cluster) -> FloatArray:
        """Return log(predicted / measured) of each."""
        parts = [
            np.log(log.seconds_on(cluster)[used] / log.measured_s[used])
            for log, used in zip(self.logs, self.used, strict=True)
        ]
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class Fitted:
    """*unidentified*: by key, why the logs do not show it. Errors are means of |predicted / measured - 1|."""

    cluster: Cluster
    values: Mapping[str, float]
    spread: Mapping[str, float]  # standard error, in the constant's unit
    unidentified: Mapping[str, str]
    points: int
    before: float
    after: float
    left_out: float


def fit_collectives(logs: Sequence[MeasuredSweep]) -> Fitted:
    """Fit the constants that *logs*, all of one cluster, identify; the others remain as described."""
    points, described = SweepPoints(tuple(logs), tuple(~log.spikes for log in logs)), logs[0].cluster
    every = np.ones(len(points), dtype=bool)
    chosen = [constant for constant in CONSTANTS if constant.of(described) is not None]
    unidentified: dict[str, str] = {}
    cluster, loss = _fit(points, described, chosen, every)
    # Without one that the logs do not show, others may become certain: so one at a time, the least certain first.
    while True:
        errors = _standard_errors(points, cluster, chosen)
        judged = [constant for constant in chosen if constant.key not in unidentified]
        shares = [errors[constant.key] / (constant.of(cluster) or constant.scale) for constant in judged]
        if not shares or max(shares) < UNSURE:
            break
        constant = judged[shares.index(max(shares))]
        reason = _reason(constant, points, errors[constant.key])
        fewer = [candidate for candidate in chosen if candidate is not constant]
        without, loss_without = _fit(points, described, fewer, every)
        if loss_without > loss + WORSE * len(points):
            reason = ""  # it has no slope at its value, and the fit needs it there
        else:
            chosen, cluster, loss = fewer, without, loss_without
        unidentified[constant.key] = reason
    return Fitted(
        cluster=cluster,
        values={constant.key: constant.of(cluster) or 0.0 for constant in chosen},
        spread=errors,
        unidentified={key: reason for key, reason in unidentified.items() if reason},
        points=len(points),
        before=_mean_error(points.log_errors(described)),
        after=_mean_error(points.log_errors(cluster)),
        left_out=_mean_error(_left_out(points, described, chosen)),
    )


def _mean_error(log_errors: FloatArray) -> float:
    return float(np.abs(np.exp(log_errors) - 1).mean())


def _left_out(points: SweepPoints, described: Cluster, chosen: Sequence[Constant]) -> FloatArray:
    """Return the errors of each point by a fit that has not seen it."""
    # Neighbouring sizes of a log are in different folds.
    folds = np.concatenate([np.arange(int(used.sum())) % FOLDS for used in points.used])
    errors = np.zeros(len(points))
    for unseen in (folds == fold for fold in np.unique(folds)):
        cluster = described if unseen.all() else _fit(points, described, chosen, ~unseen)[0]
        errors[unseen] = points.log_errors(cluster)[unseen]
    return errors


def _fit(
    points: SweepPoints, described: Cluster, chosen: Sequence[Constant], is_used: BoolArray
) -> tuple[Cluster, float]:
    """Return the cluster with the least loss: coarse steps of one constant at a time, then Gauss and Newton's.

    A price is the least of many curves and a start the latest of several events: where one of them hides a
    constant it has no slope, so the coarse steps come first.
    """
    start = np.array([constant.of(described) for constant in chosen], dtype=np.float64)
    scales = np.array([constant.scale for constant in chosen])

    def loss_of(values: FloatArray) -> float:
        """Return Huber's loss, squares near and distances far, and the pull of the description."""
        size = np.abs(points.log_errors(with_constants(described, chosen, values))[is_used])
        far = np.where(size <= NEAR, size**2 / (2 * NEAR), size - NEAR / 2)
        pull = HELD**2 / NEAR * len(size) * (((values - start) / scales) ** 2).sum() / 2
        return float(far.sum() + pull)

    values, loss = start, loss_of(start)
    for _ in range(COARSE_ROUNDS):
        for index in range(len(chosen)):
            for step in COARSE_STEPS:
                trial = values.copy()
                trial[index] += step * max(values[index], 0.2 * scales[index])
                trial = _clip_values(trial, chosen)
                trial_loss = loss_of(trial)
                if trial_loss < loss:
                    values, loss = trial, trial_loss
    for _ in range(ROUNDS):
        cluster = with_constants(described, chosen, values)
        errors = points.log_errors(cluster)[is_used]
        slopes = _slopes(points, cluster, chosen)[is_used]
        weights = 1 / np.maximum(np.abs(errors), NEAR)
        stiffness = HELD**2 / NEAR * len(errors)
        moves = (slopes * weights[:, None]).T @ slopes + np.eye(len(chosen)) * stiffness
        pull = (slopes * weights[:, None]).T @ errors + stiffness * (values - start) / scales
        step = -np.linalg.solve(moves, pull) * scales
        trials = [_clip_values(values + step / 2**halved, chosen) for halved in range(6)]
        better = next((trial for trial in trials if loss_of(trial) < loss * (1 - 1e-6)), None)
        if better is None:
            break
        values, loss = better, loss_of(better)
    return with_constants(described, chosen, values), loss


def _clip_values(values: FloatArray, chosen: Sequence[Constant]) -> FloatArray:
    return np.clip(values, [1e-3 * constant.scale for constant in chosen], 1.0)


def _slopes(points: SweepPoints, cluster: Cluster, chosen: Sequence[Constant]) -> FloatArray:
    """Return the change of each point's log(predicted) for a change of each constant by its scale."""
    columns = []
    for constant in chosen:
        value = constant.of(cluster)
        assert value is not None, "only constants that the cluster has are fitted"
        step = constant.scale * STEP
        ends = [min(1.0, value + step), max(0.0 if constant.is_time else 1e-3, value - step)]
        high, low = (points.log_errors(with_constants(cluster, [constant], [end])) for end in ends)
        columns.append((high - low) / (ends[0] - ends[1]) * constant.scale)
    return np.array(columns).T.reshape(len(points), len(chosen))


def _standard_errors(points: SweepPoints, cluster: Cluster, chosen: Sequence[Constant]) -> dict[str, float]:
    """Return the standard error of each constant, by how well the others can replace it."""
    slopes = _slopes(points, cluster, chosen)
    error = max(NEAR, float(np.median(np.abs(points.log_errors(cluster)))))
    errors = {}
    for index, constant in enumerate(chosen):
        others = np.delete(slopes, index, axis=1)
        residual = slopes[:, index]
        if others.shape[1]:
            residual = residual - others @ np.linalg.lstsq(others, residual, rcond=None)[0]
        size = float(np.sqrt((residual**2).sum()))
        is_identified = size > 1e-9 and np.abs(slopes[:, index]).max(initial=0.0) * 0.1 >= MOVES
        errors[constant.key] = error / size * constant.scale if is_identified else np.inf
    return errors


def _reason(constant: Constant, points: SweepPoints, spread: float) -> str:
    """Return why the logs do not show *constant*."""
    logs = [log.sweep for log in points.logs]
    if constant.key.startswith("node.nic.") and all(log.nodes == 1 for log in logs):
        return "no log crosses nodes; add one of at least two"
    if constant.key.startswith("node.fabric.") and all(log.ranks <= log.nodes for log in logs):
        return "every node holds one rank; add a log of several GPUs of a node"
    if constant.key == EXCHANGE and not any(str(log.kind) == "all-to-all" for log in logs):
        return "no log times an all-to-all"
    if np.isinf(spread):
        return "these logs do not depend on it; other sizes or ranks would"
    return "not separated from the others; more sizes, ranks or collectives would do so"


def with_constants(cluster: Cluster, chosen: Sequence[Constant], values: Sequence[float] | FloatArray) -> Cluster:
    """Return *cluster* with other values of the *chosen* constants."""
    for constant, value in zip(chosen, values, strict=True):
        cluster = change_field(cluster, constant.path, float(value))
    return cluster
