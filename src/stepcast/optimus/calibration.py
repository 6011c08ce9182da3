"""The constants of OptimusPrime runs: fitted to logs, written by ``stepcast calibrate``, and shipped.

The efficiency of the forward matmuls is that of the timed output projection: it is never launch-bound and not sharded
by tensor parallelism. The other four explain the wall time: damped least squares on the logarithm of predicted over
measured time, each constant held loosely to a starting guess, so that what the runs cannot determine stays there and
is reported.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import combinations
from statistics import fmean, median, pstdev

import numpy as np

from stepcast.hardware.catalog import load_fit
from stepcast.inputs.optimus_log import read_step_lengths
from stepcast.inputs.source import FormatError, parse_toml
from stepcast.ir.arrays import FloatArray
from stepcast.ir.measured import RunLog
from stepcast.ir.model import Model
from stepcast.ir.types import Facts, dataclass, require
from stepcast.models.catalog import load_model, model_names
from stepcast.optimus.step import Constants, Machine, OptimusPlan, batch_s, efficiency_of, plan_of_log, step_s
from stepcast.views.declared import phrase, phrases
from stepcast.views.view import NAMES


def shuffled_length(lengths: Sequence[float], in_order: int, rows_per_text: float, rows: int) -> float:
    """Return the expected padded length of *rows* shuffled rows.

    *lengths* are the longest of *in_order* consecutive rows, of which *rows_per_text* share a text. Maxima follow
    Gumbel's law: among k times as many they are ln(k) times its scale higher (Gumbel 1958, Statistics of Extremes),
    and the scale is sqrt(6) / pi of their standard deviation.
    """
    texts = 1 + (in_order - 1) / rows_per_text
    scale = math.sqrt(6) / math.pi * pstdev(lengths)
    return max(1.0, float(round(fmean(lengths) + scale * math.log(rows / texts))))


HEAD = "lm_head"
FITTED = ("backward_factor", "message_s", "host_op_s", "fixed_s")
TITLES = NAMES["optimus_constants"]
# Round numbers: twice the FLOPs in the backward; a few launches and copies per message; an eager operator;
# allocating and reading data.
GUESS = Constants(matmul_efficiency=0.5, backward_factor=2.0, message_s=1e-4, host_op_s=5e-6, fixed_s=0.1)
RUN_SCATTER = 0.03  # relative scatter of a run's median between repetitions
GUESS_SPREAD = 1.0  # spread of the guesses in logarithms: within a factor of e
UNKNOWN_ABOVE = 0.5  # spread in logarithms above which a constant counts as not identified
CORRELATED_ABOVE = 0.85  # correlation above which two constants cannot be separated
STEPS, NUDGE = 40, 1e-3


@dataclass(frozen=True, slots=True)
class Observation:
    """A run to fit to: its plan, its median batch time, and its matmul efficiency if the head was timed."""

    plan: OptimusPlan
    measured_s: float
    efficiency: float | None
    source: str = ""

    def __post_init__(self) -> None:
        require(self.measured_s > 0, f"{self.source}: the batch time must be above zero")

    @property
    def name(self) -> str:
        """The name of the run, the same for copies of one log."""
        plan, layout = self.plan, self.plan.layout
        return (
            f"tp{layout.tp} dp{layout.dp} pp{layout.pp} micro-batch {plan.micro_batch} x "
            f"{plan.micro_batches}: {1e3 * self.measured_s:.2f} ms"
        )


@dataclass(frozen=True, slots=True)
class ConstantsFit:
    """Fitted constants; *spread* is the standard deviation of each constant's logarithm."""

    constants: Constants
    errors: tuple[float, ...]  # of the fitted runs, signed shares
    spread: dict[str, float]
    warnings: tuple[str, ...]

    @property
    def mean_abs_error(self) -> float:
        return sum(map(abs, self.errors)) / len(self.errors)


def fit(observations: Sequence[Observation], machine: Machine) -> ConstantsFit:
    """Return the constants that explain *observations* best."""
    require(bool(observations), "no runs to calibrate on")
    known = [run.efficiency for run in observations if run.efficiency is not None]
    efficiency = median(known) if known else GUESS.matmul_efficiency

    def constants_of(logs: FloatArray) -> Constants:
        """Return the constants whose logarithms relative to their guesses are *logs*."""
        values = {name: getattr(GUESS, name) * math.exp(log) for name, log in zip(FITTED, logs, strict=True)}
        return Constants(matmul_efficiency=efficiency, **values)

    def ratios(constants: Constants) -> list[float]:
        return [step_s(run.plan, machine, constants) / run.measured_s for run in observations]

    def residuals(logs: FloatArray) -> FloatArray:
        errors = [math.log(ratio) / RUN_SCATTER for ratio in ratios(constants_of(logs))]
        return np.concatenate([errors, logs / GUESS_SPREAD])

    logs, jacobian = _least_squares(residuals)
    covariance = np.linalg.inv(jacobian.T @ jacobian)
    deviations = np.sqrt(np.diag(covariance))
    spread = dict(zip(FITTED, deviations.tolist(), strict=True))
    correlated = [
        (FITTED[a], FITTED[b])
        for a, b in combinations(range(len(FITTED)), 2)
        if abs(covariance[a, b]) > CORRELATED_ABOVE * deviations[a] * deviations[b]
        and max(deviations[a], deviations[b]) > 0.2
    ]
    warnings = [] if known else ["no run times its output projection: the matmul efficiency is a guess"]
    warnings += _warnings(spread, correlated, len(observations))
    constants = constants_of(logs)
    return ConstantsFit(constants, tuple(ratio - 1 for ratio in ratios(constants)), spread, tuple(warnings))


def _least_squares(residuals: Callable[[FloatArray], FloatArray]) -> tuple[FloatArray, FloatArray]:
    """Minimise by Levenberg and Marquardt's method; the step time is only piecewise smooth, so moves are short."""

    def differentiate(logs: FloatArray, here: FloatArray) -> FloatArray:
        return np.stack([(residuals(row) - here) / NUDGE for row in logs + NUDGE * np.eye(len(FITTED))], axis=1)

    logs = np.zeros(len(FITTED))
    here = residuals(logs)
    jacobian = differentiate(logs, here)
    damping = 0.1
    for _ in range(STEPS):
        normal = jacobian.T @ jacobian
        move = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -jacobian.T @ here)
        tried = logs + np.clip(move, -0.5, 0.5)
        there = residuals(tried)
        if there @ there < here @ here:
            gain = 1 - (there @ there) / (here @ here)
            logs, here, damping = tried, there, damping / 5
            jacobian = differentiate(logs, here)
            if gain < 1e-5:
                break
        else:
            damping *= 5
            if damping > 1e6:
                break
    return logs, jacobian


def _warnings(spread: dict[str, float], correlated: list[tuple[str, str]], runs: int) -> list[str]:
    count = f"{runs} run{'s' if runs > 1 else ''}"
    unknown = [name for name in FITTED if spread[name] > UNKNOWN_ABOVE]
    inseparable = {"message_s", "fixed_s"} <= {*unknown}
    warnings = phrases("latency-or-overhead", {"count": count, "inseparable": inseparable})
    for name in unknown:
        warnings.append(
            phrase("not-identified", {"name": TITLES[name], "count": count, "factor": math.exp(spread[name])})
        )
    for first, second in correlated:
        if {first, second} != {"message_s", "fixed_s"} or first not in unknown:
            warnings.append(f"{TITLES[first]} and {TITLES[second]} can hardly be separated by {count}")
    return warnings


FIT = "optimus"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Constants with the padded lengths of the steps they were fitted to, and the runs.

    Each length is that of *in_order* consecutive rows (0: not known), *rows_per_text* of which share a text.
    """

    constants: Constants
    sequences: tuple[float, ...]
    runs: tuple[str, ...]
    in_order: int = 0
    rows_per_text: float = 1.0

    def lengths_of(self, log: RunLog) -> tuple[float, ...]:
        """Return the lengths of the steps of *log*.

        With data parallelism each rank draws its own rows (DistributedSampler in prepare_dataloader of
        opt_prime/opti_pri.py), and the longest delays all.
        """
        if log.layout.dp == 1 or not self.in_order:
            return self.sequences
        length = shuffled_length(self.sequences, self.in_order, self.rows_per_text, log.global_batch)
        return (length,) * len(self.sequences)


def read_calibrated(text: str, where: str) -> Calibrated:
    """Read what ``stepcast calibrate`` writes."""
    return _read_table(parse_toml(text, where), where)


def _read_table(table: Facts, where: str) -> Calibrated:
    try:
        constants = Constants(**{name: float(value) for name, value in table["constants"].items()})
        sequences = tuple(float(value) for value in table["sequences"])
        runs = tuple(str(run) for run in table.get("runs", ()))
        samples = table.get("samples", {})
        in_order, rows_per_text = int(samples.get("in_order", 0)), float(samples.get("rows_per_text", 1))
        require(in_order >= 0 and rows_per_text >= 1, "a text has at least one row")
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise FormatError(
            f"holds no OptimusPrime constants ({error}); expected [constants] and sequences", where
        ) from None
    return Calibrated(constants, sequences, runs, in_order, rows_per_text)


@lru_cache(maxsize=1)
def load_shipped() -> Calibrated:
    """Return the constants of the package."""
    return _read_table(load_fit(FIT), f"{FIT}.toml")


CLUSTER = "a40-pcie"  # the shipped constants were fitted on it


@lru_cache(maxsize=8)
def model_with(parameters: int) -> Model:
    """Return the Llama of the catalogue with this many parameters; a log names only the class."""
    for name in model_names():
        if name.startswith("llama") and load_model(name).parameters == parameters:
            return load_model(name)
    raise ValueError(f"no Llama of the catalogue has {parameters:,} parameters; name the model")


def lengths_of(log: RunLog) -> tuple[float, ...]:
    """Return the padded lengths of the steps from the file next to a log, or the shipped ones."""
    return read_step_lengths(log.source) or load_shipped().lengths_of(log)


def plan_run(log: RunLog, lengths: Sequence[float] = (), model: Model | None = None) -> OptimusPlan:
    """Return the plan of *log*, by default with `lengths_of` it and the model with as many parameters."""
    return plan_of_log(log, model or model_with(log.parameters), lengths or lengths_of(log))


def observe_run(
    log: RunLog, machine: Machine, lengths: Sequence[float] = (), model: Model | None = None
) -> Observation:
    """Return the measurements of *log* with its plan."""
    plan, efficiency = plan_run(log, lengths, model), None
    if HEAD in log.layer_times.layers:
        seconds = median(head.seconds for head in log.layer_forward(HEAD).values())
        efficiency = efficiency_of(seconds, plan.head_weights, plan.tokens, machine)
    return Observation(plan, batch_s(log), efficiency, log.source)
