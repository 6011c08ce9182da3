"""Two accounts of a step side by side: predicted against measured, or measured against measured.

Both are facts as ``analyze``, ``replay``, ``simulate`` and ``predict`` give them, so any two can be compared.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepcast.ir.facts import ComparisonFacts, DifferenceFacts, RowFacts
from stepcast.units import format_seconds

Facts = Mapping[str, Any]

PREDICTED, REPLAYED, MEASURED = "predicted", "replayed", "measured"

# A part that only one side tells apart is counted where the other side has it.
COUNTED_AS = {"embedding": "dp", "expert-dp": "dp", "wait": "other", "host": "other"}


# What makes two accounts ones of the same run, as far as both say it.
SHAPE = ("model", "parameters", "layers", "hidden")
IDENTITY = (
    *SHAPE,
    *("seq", "micro_batch", "micro_batches", "global_batch", "precision"),
    *("tp", "cp", "ep", "dp", "pp", "vpp", "gpus", "cluster"),
)
SAME_WORD = {"dtype": "precision"}
# Megatron calls fp32 what tensor cores multiply as tf32.
SAME_PRECISION = {"tf32": "fp32"}


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One quantity in both."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        return self.predicted_s - self.measured_s

    @property
    def error(self) -> float | None:
        """Signed, as a share of the measured; None where nothing was measured."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None

    def facts(self, same_run: bool) -> RowFacts:
        """A difference between two runs is no error of either."""
        return {
            "name": self.name,
            "predicted_s": self.predicted_s,
            "measured_s": self.measured_s,
            "difference_s": self.difference_s,
            "error": self.error if same_run else None,
        }


@dataclass(frozen=True, slots=True)
class Difference:
    """Something both sides say of what ran, each in another way."""

    name: str
    predicted: Any
    measured: Any

    def facts(self) -> DifferenceFacts:
        return {"name": self.name, "predicted": self.predicted, "measured": self.measured}


@dataclass(frozen=True, slots=True)
class Comparison:
    step: ComparedRow
    parts: tuple[ComparedRow, ...]
    stages: Mapping[int, tuple[ComparedRow, ...]]
    operations: tuple[ComparedRow, ...]
    differences: tuple[Difference, ...]  # of what ran; none: the same run, as far as both say
    warnings: tuple[str, ...]
    kinds: tuple[str, str] = (PREDICTED, MEASURED)  # how each side came about

    def __repr__(self) -> str:
        first, second = format_seconds(self.step.predicted_s), format_seconds(self.step.measured_s)
        return f"Comparison({first} vs {second} per step)"

    def _repr_html_(self) -> str:
        from stepcast.views.compare import compare_view
        from stepcast.views.html import render_notebook

        return render_notebook(compare_view(self.facts()), "comparison")

    @property
    def same_run(self) -> bool:
        return not self.differences

    def facts(self) -> ComparisonFacts:
        same = self.same_run
        return {
            "step_s": self.step.predicted_s,
            "measured_step_s": self.step.measured_s,
            "kinds": list(self.kinds),
            "same_run": same,
            "differences": [one.facts() for one in self.differences],
            "error": self.step.error if same else None,
            "parts": [row.facts(same) for row in self.parts],
            "stages": [
                {"stage": stage, "parts": [row.facts(same) for row in rows]} for stage, rows in self.stages.items()
            ],
            "operations": [row.facts(same) for row in self.operations],
            "warnings": list(self.warnings),
        }


def kind_of(account: Facts) -> str:
    """Return whether the step of an account was predicted, replayed from a recording, or measured."""
    if "replayed_step_s" in account:
        return REPLAYED
    # 'analyze' names the format it read; 'run' states how far its predictions were off.
    if "format" in account or "mean_abs_error" in account or str(account.get("kind", "")).endswith(" run"):
        return MEASURED
    return PREDICTED


def is_measured(account: Facts) -> bool:
    return kind_of(account) == MEASURED


def compare(predicted: Facts, measured: Facts) -> Comparison:
    """Return the signed differences of the step, its parts, each stage and each kind of operation.

    Any two accounts may be compared. A prediction and a measurement are best given in this order, since
    errors are shares of the second.
    """
    for side, found in (("first", predicted), ("second", measured)):
        if not isinstance(found.get("step_s"), int | float):
            raise ValueError(f"the {side} file does not say how long a step takes (step_s)")
    warnings = []
    parts: tuple[ComparedRow, ...] = ()
    if "breakdown_s" in predicted and "breakdown_s" in measured:
        parts = _rows(predicted["breakdown_s"], measured["breakdown_s"])
    else:
        warnings.append("one side has no breakdown of the step: parts are not compared")
    stages, missing = _stages(predicted.get("stages") or (), measured.get("stages") or ())
    warnings += missing
    operations: tuple[ComparedRow, ...] = ()
    if "operations_s" in predicted and "operations_s" in measured:
        operations = _rows(predicted["operations_s"], measured["operations_s"], fold=False)
    else:
        warnings.append("one side does not tell its operations apart: operations are not compared")
    step = ComparedRow("step", float(predicted["step_s"]), float(measured["step_s"]))
    first, second = _identity(predicted), _identity(measured)
    if not set(first) & set(second):
        warnings.append("nothing that both say tells whether they are the same run")
    differences, kinds = _differences(first, second), (kind_of(predicted), kind_of(measured))
    return Comparison(step, parts, stages, operations, differences, tuple(warnings), kinds)


def _identity(found: Facts) -> dict[str, Any]:
    """What *found* says of what ran, in the words of IDENTITY."""
    said: dict[str, Any] = {}
    for place in (found, *(found.get(name) for name in ("layout", "configuration", "run"))):
        if isinstance(place, Mapping):
            said |= {name: place[name] for name in (*IDENTITY, *SAME_WORD) if _is_said(place.get(name))}
    for word, name in SAME_WORD.items():
        if word in said:
            said.setdefault(name, said.pop(word))
    if "precision" in said:
        said["precision"] = SAME_PRECISION.get(said["precision"], said["precision"])
    return said


def _is_said(value: object) -> bool:
    return isinstance(value, str | int | float) and value != ""


def _differences(first: Facts, second: Facts) -> tuple[Difference, ...]:
    names = [name for name in IDENTITY if name in first and name in second]
    # One model may go by two names.
    shape = [name for name in SHAPE if name != "model"]
    if "model" in names and set(shape) <= set(names) and all(first[name] == second[name] for name in shape):
        names.remove("model")
    return tuple(Difference(name, first[name], second[name]) for name in names if first[name] != second[name])


def _rows(predicted: Facts, measured: Facts, fold: bool = True) -> tuple[ComparedRow, ...]:
    left, right = (_folded(predicted, measured), _folded(measured, predicted)) if fold else (predicted, measured)
    names = list(dict.fromkeys([*left, *right]))
    rows = [ComparedRow(name, float(left.get(name, 0.0)), float(right.get(name, 0.0))) for name in names]
    return tuple(row for row in rows if row.predicted_s or row.measured_s)


def _folded(parts: Facts, other: Facts) -> dict[str, float]:
    folded: dict[str, float] = {}
    for name, seconds in parts.items():
        target = name if name in other else COUNTED_AS.get(name, name)
        folded[target] = folded.get(target, 0.0) + float(seconds)
    return folded


def _stages(predicted: Any, measured: Any) -> tuple[dict[int, tuple[ComparedRow, ...]], list[str]]:
    left = {row["stage"]: _seconds(row) for row in predicted}
    right = {row["stage"]: _seconds(row) for row in measured}
    both = sorted(set(left) & set(right))
    texts = []
    if set(left) != set(right):
        texts.append(f"stages differ: {len(left)} in the first, {len(right)} in the second; common ones are compared")
    found = {}
    for stage in both:
        names = [name for name in left[stage] if name in right[stage]]
        found[stage] = tuple(ComparedRow(name, left[stage][name], right[stage][name]) for name in names)
    return found, texts


def _seconds(row: Facts) -> dict[str, float]:
    """The plain seconds of a stage, their names without the unit."""
    return {
        name.removesuffix("_s"): float(value)
        for name, value in row.items()
        if name.endswith("_s") and isinstance(value, int | float)
    }
