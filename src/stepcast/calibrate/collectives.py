"""The named constants of a cluster's collectives, fitted to its nccl-tests logs.

Least squares of log(predicted / measured), reweighted so that far points count by their distance and not by
its square, and pulled to the description's own values where the logs show little. The effect of a constant on the
predictions decides whether the logs identify it: no rule here depends on a cluster or a collective.
"""

from collections.abc import Mapping, Sequence
from itertools import product

import numpy as np

from stepcast.analyze.sweeps import MeasuredSweep, change_field
from stepcast.hardware import Cluster
from stepcast.hardware.catalog import load_fit
from stepcast.ir.arrays import BoolArray, FloatArray
from stepcast.ir.types import dataclass
from stepcast.units import US

NEAR = 0.05  # log error from which on the loss is linear (Huber's)
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
    """A constant to fit: a key of a cluster's description that is a time or a share."""

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
        """Return the value of the constant in *cluster*; None where the cluster has no such part."""
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


@dataclass(frozen=True, slots=True)
class FittedConstants:
    """The constants that fit the logs of a cluster.

    *unidentified* has the constants that the logs cannot show, with the reason. Errors are means of
    |predicted / measured - 1|.
    """

    cluster: Cluster
    values: Mapping[str, float]
    spread: Mapping[str, float]  # standard error, in the constant's unit
    unidentified: Mapping[str, str]
    points: int
    before: float
    after: float
    left_out: float


def fit_collectives(logs: Sequence[MeasuredSweep]) -> FittedConstants:
    """Fit the constants that *logs*, all of one cluster, identify; the others remain as described."""
    described = logs[0].cluster
    before = _log_errors(logs, described)
    every = np.ones(before.size, dtype=bool)
    chosen = [constant for constant in CONSTANTS if constant.of(described) is not None]
    unidentified: dict[str, str] = {}
    cluster, loss = _fit(logs, described, chosen, every)
    # Constants that the logs cannot show are dropped one at a time, the least certain first: without it, the logs may
    # determine others.
    while True:
        errors = _standard_errors(logs, cluster, chosen)
        judged = [constant for constant in chosen if constant.key not in unidentified]
        shares = [errors[constant.key] / (constant.of(cluster) or constant.scale) for constant in judged]
        if not shares or max(shares) < UNSURE:
            break
        constant = judged[shares.index(max(shares))]
        reason = _explain_unidentified(constant, logs, errors[constant.key])
        fewer = [candidate for candidate in chosen if candidate is not constant]
        without, loss_without = _fit(logs, described, fewer, every)
        if loss_without > loss + WORSE * before.size:
            reason = ""  # the fit needs it at its value, where its slope happens to be zero
        else:
            chosen, cluster, loss = fewer, without, loss_without
        unidentified[constant.key] = reason
    return FittedConstants(
        cluster=cluster,
        values={constant.key: constant.of(cluster) or 0.0 for constant in chosen},
        spread=errors,
        unidentified={key: reason for key, reason in unidentified.items() if reason},
        points=before.size,
        before=_mean_error(before),
        after=_mean_error(_log_errors(logs, cluster)),
        left_out=_mean_error(_predict_left_out(logs, described, chosen)),
    )


def _log_errors(logs: Sequence[MeasuredSweep], cluster: Cluster) -> FloatArray:
    """Return log(predicted / measured) of every size of every log that was not disturbed."""
    used = ((log.seconds_on(cluster)[~log.spikes], log.measured_s[~log.spikes]) for log in logs)
    return np.concatenate([np.log(predicted_s / measured_s) for predicted_s, measured_s in used])


def _mean_error(log_errors: FloatArray) -> float:
    return float(np.abs(np.exp(log_errors) - 1).mean())


def _predict_left_out(logs: Sequence[MeasuredSweep], described: Cluster, chosen: Sequence[Constant]) -> FloatArray:
    """Return the log errors of the points, each predicted by a fit to the other folds."""
    # Neighbouring sizes of a log are in different folds.
    folds = np.concatenate([np.arange(int((~log.spikes).sum())) % FOLDS for log in logs])
    errors = np.zeros(folds.size)
    for unseen in (folds == fold for fold in np.unique(folds)):
        cluster = described if unseen.all() else _fit(logs, described, chosen, ~unseen)[0]
        errors[unseen] = _log_errors(logs, cluster)[unseen]
    return errors


def _fit(
    logs: Sequence[MeasuredSweep], described: Cluster, chosen: Sequence[Constant], is_used: BoolArray
) -> tuple[Cluster, float]:
    """Return the cluster with the least loss, and that loss: coarse steps in one constant at a time, then Gauss-Newton.

    A price is the minimum of several curves, and a start is the maximum of several times. Where another curve or time
    hides a constant, its slope is zero; coarse steps get past such places.
    """
    start = np.array([constant.of(described) for constant in chosen], dtype=np.float64)
    scales = np.array([constant.scale for constant in chosen])

    def loss_of(values: FloatArray) -> float:
        """Return the Huber loss of the errors plus a penalty for leaving the values of the description."""
        size = np.abs(_log_errors(logs, with_constants(described, chosen, values))[is_used])
        far = np.where(size <= NEAR, size**2 / (2 * NEAR), size - NEAR / 2)
        pull = HELD**2 / NEAR * len(size) * (((values - start) / scales) ** 2).sum() / 2
        return float(far.sum() + pull)

    values, loss = start, loss_of(start)
    for _, index, step in product(range(COARSE_ROUNDS), range(len(chosen)), COARSE_STEPS):
        trial = values.copy()
        trial[index] += step * max(values[index], 0.2 * scales[index])
        trial = _clip_values(trial, chosen)
        trial_loss = loss_of(trial)
        if trial_loss < loss:
            values, loss = trial, trial_loss
    for _ in range(ROUNDS):
        cluster = with_constants(described, chosen, values)
        errors = _log_errors(logs, cluster)[is_used]
        slopes = _slopes(logs, cluster, chosen)[is_used]
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


def _slopes(logs: Sequence[MeasuredSweep], cluster: Cluster, chosen: Sequence[Constant]) -> FloatArray:
    """Return the change of each point's log(predicted) for a change of each constant by its scale."""
    columns = []
    for constant in chosen:
        value = constant.of(cluster)
        assert value is not None, "only constants that the cluster has are fitted"
        step = constant.scale * STEP
        ends = [min(1.0, value + step), max(0.0 if constant.is_time else 1e-3, value - step)]
        high, low = (_log_errors(logs, with_constants(cluster, [constant], [end])) for end in ends)
        columns.append((high - low) / (ends[0] - ends[1]) * constant.scale)
    return np.array(columns).T.reshape(sum(int((~log.spikes).sum()) for log in logs), len(chosen))


def _standard_errors(logs: Sequence[MeasuredSweep], cluster: Cluster, chosen: Sequence[Constant]) -> dict[str, float]:
    """Return the standard error of each constant: large where the others can replace it, infinite without effect."""
    slopes = _slopes(logs, cluster, chosen)
    error = max(NEAR, float(np.median(np.abs(_log_errors(logs, cluster)))))
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


def _explain_unidentified(constant: Constant, logs: Sequence[MeasuredSweep], spread: float) -> str:
    """Return why the logs do not show *constant*."""
    sweeps = [log.sweep for log in logs]
    if constant.key.startswith("node.nic.") and all(sweep.nodes == 1 for sweep in sweeps):
        return "no log crosses nodes; add one of at least two"
    if constant.key.startswith("node.fabric.") and all(sweep.ranks <= sweep.nodes for sweep in sweeps):
        return "every node holds one rank; add a log of several GPUs of a node"
    if constant.key == EXCHANGE and not any(str(sweep.kind) == "all-to-all" for sweep in sweeps):
        return "no log times an all-to-all"
    if np.isinf(spread):
        return "these logs do not depend on it; other sizes or ranks would"
    return "not separated from the others; more sizes, ranks or collectives would do so"


def with_constants(cluster: Cluster, chosen: Sequence[Constant], values: Sequence[float] | FloatArray) -> Cluster:
    """Return *cluster* with other values of the *chosen* constants."""
    for constant, value in zip(chosen, values, strict=True):
        cluster = change_field(cluster, constant.path, float(value))
    return cluster
