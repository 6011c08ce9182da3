"""Two accounts of a step compared: predicted with measured, or measured with measured.

Both are results of ``analyze``, ``replay``, ``simulate``, ``predict``, ``search`` or ``plan`` as plain values.
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from stepcast.analyze.result import AnalysisResult
from stepcast.ir.types import Facts, find_doubts, sum_by_key

PREDICTED, REPLAYED, MEASURED = "predicted", "replayed", "measured"

# A part that only one side has is counted as this part of the other side.
COUNTED_AS = {"embedding": "dp", "expert-dp": "dp", "wait": "other", "host": "other"}

SAME_KERNEL = 0.02  # kernels that differ by less are the same
# Facts that identify a run.
SHAPE = ("model", "parameters", "layers", "hidden")
BATCH = ("seq", "micro_batch", "micro_batches", "global_batch", "precision")
IDENTITY = (*SHAPE, *BATCH, "tp", "cp", "ep", "dp", "pp", "vpp", "gpus", "cluster")
SAME_WORD = {"dtype": "precision"}
# Megatron's fp32 is tf32 in tensor cores.
SAME_PRECISION = {"tf32": "fp32"}


class ComparedRow(msgspec.Struct, frozen=True):
    """One quantity in both accounts."""

    name: str
    predicted_s: float
    measured_s: float
    difference_s: float
    error: float | None  # signed share of the measured; None if nothing was measured, or for two different runs


class ComparedStage(msgspec.Struct, frozen=True):
    stage: int
    parts: list[ComparedRow]


class RunDifference(msgspec.Struct, frozen=True):
    """A fact about the run on which both accounts disagree."""

    name: str
    predicted: object
    measured: object


class ComparedFigure(msgspec.Struct, frozen=True):
    """A figure that both accounts state, in the unit of its name."""

    name: str
    predicted: float
    measured: float
    difference: float  # first minus second
    ratio: float | None  # first over second


# Figure -> the keys that lead to it, in the answers of several verbs.
FIGURES: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "mfu": (("mfu",), ("throughput", "mfu")),
    "tokens_per_s": (("tokens_per_s",), ("throughput", "tokens_per_s")),
    "memory_bytes": (("memory_bytes", "total"), ("memory_bytes",)),
    "days": (("days", "median"), ("days",), ("training", "days")),
    "gpu_hours": (("gpu_hours",), ("training", "gpu_hours")),
    "cost": (("cost",), ("training", "cost")),
    "energy_mwh": (("energy_mwh",),),
    "goodput": (("goodput",),),
}


def find_figure(account: Facts, name: str) -> float | None:
    """Return a figure of an account, None where it does not state it."""
    for path in FIGURES[name]:
        value: object = account
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def account_of(answer: Facts) -> Facts:
    """Return the step of an answer: rank 1 of a search, the last stage of a plan, or the answer itself."""
    rows, phases = answer.get("rows"), answer.get("phases")
    if "counts" in answer and isinstance(rows, list) and rows and isinstance(rows[0], Mapping):
        best, tokens = rows[0], {}
        if isinstance(best.get("gpus"), int) and isinstance(best.get("tokens_per_s_per_gpu"), float):
            tokens["tokens_per_s"] = best["gpus"] * best["tokens_per_s_per_gpu"]
        return {**answer, **best, **tokens, "kind": "search"}
    if "split_s" in answer and isinstance(phases, list) and phases and isinstance(phases[-1], Mapping):
        strategy = answer.get("strategy")
        layout = strategy if isinstance(strategy, Mapping) else {}
        return {**layout, "memory_bytes": phases[-1].get("memory_bytes"), **answer, "step_s": phases[-1].get("step_s")}
    return answer


class ComparedKernel(msgspec.Struct, frozen=True):
    """A kernel or an operator of the host in two traces; runs and seconds are per rank and step."""

    name: str
    on: str  # gpu or host
    change: str  # added, removed, slower, faster or same, from the first to the second
    first_runs: float
    second_runs: float
    first_s: float
    second_s: float
    difference_s: float


class Comparison(AnalysisResult, frozen=True, kw_only=True):
    """Two accounts of a step; without differences they are of the same run, as far as both say."""

    view, title = "compare.compare_view", "comparison"
    sides: list[dict[str, str]] | msgspec.UnsetType = msgspec.UNSET  # the file of each, and how its step came about
    step_s: float
    measured_step_s: float
    kinds: list[str]  # how each side was obtained
    same_run: bool
    differences: list[RunDifference]
    error: float | None
    figures: list[ComparedFigure]
    parts: list[ComparedRow]
    stages: list[ComparedStage]
    operations: list[ComparedRow]
    kernels: list[ComparedKernel]
    warnings: list[str]


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


def compare_files(files: Sequence[str], accounts: Sequence[Facts]) -> Comparison:
    """Compare the accounts of two files, a prediction before a measurement, with their names and warnings."""
    pairs = sorted(zip(files, accounts, strict=True), key=lambda pair: is_measured(pair[1]))
    result = compare(*(account for _, account in pairs))
    sides = []
    for file, account in pairs:
        what = ", ".join(filter(None, (kind_of(account), account.get("format"))))
        name = account.get("model") or account.get("workload")
        sides.append({"file": file, "what": f"{what}: {name}" if name else what})
    warnings = [f"{file}: {text}" for file, account in pairs for text in account.get("warnings", ())]
    result = msgspec.structs.replace(result, sides=sides, warnings=[*result.warnings, *warnings])
    return msgspec.structs.replace(result, warnings=[*result.warnings, *find_doubts(result.facts())])


def compare(predicted: Facts, measured: Facts) -> Comparison:
    """Return the signed differences of the step, its parts, each stage and each kind of operation.

    Any two accounts may be compared. A prediction and a measurement are best given in this order, since
    errors are shares of the second.
    """
    predicted, measured = account_of(predicted), account_of(measured)
    for side, account in (("first", predicted), ("second", measured)):
        if not isinstance(account.get("step_s"), int | float):
            raise ValueError(f"the {side} file does not say how long a step takes (step_s)")
    warnings: list[str] = []
    first, second = identity_of(predicted), identity_of(measured)
    differences = differing_facts(first, second)
    same_run = not differences

    def row(name: str, left: float, right: float) -> ComparedRow:
        """Return a row; a difference between two runs is not an error of either."""
        error = left / right - 1 if right and same_run else None
        return ComparedRow(name, left, right, left - right, error)

    def rows(key: str, what: str) -> list[ComparedRow]:
        """Return the rows of a table that both have; warn where one does not."""
        if key not in predicted or key not in measured:
            lacking = "one side has" if key in predicted or key in measured else "both sides have"
            warnings.append(f"{lacking} no {what} are not compared")
            return []
        left, right = predicted[key], measured[key]
        if key == "breakdown_s":
            left, right = _fold_parts(left, right), _fold_parts(right, left)
        pairs = [(name, float(left.get(name, 0.0)), float(right.get(name, 0.0))) for name in {**left, **right}]
        return [row(*pair) for pair in pairs if pair[1] or pair[2]]

    parts = rows("breakdown_s", "breakdown of the step: parts")
    left_stages, right_stages = (
        {stage["stage"]: _stage_seconds(stage) for stage in account.get("stages") or ()}
        for account in (predicted, measured)
    )
    if set(left_stages) != set(right_stages):
        counts = f"{len(left_stages)} in the first, {len(right_stages)} in the second"
        warnings.append(f"stages differ: {counts}; common ones are compared")
    stages = []
    for stage in sorted(set(left_stages) & set(right_stages)):
        left, right = left_stages[stage], right_stages[stage]
        stages.append(ComparedStage(stage, [row(name, left[name], right[name]) for name in left if name in right]))
    operations = rows("operations_s", "list of operations: operations")
    if not set(first) & set(second):
        warnings.append("no common fact shows whether both are the same run")
    step = row("step", float(predicted["step_s"]), float(measured["step_s"]))
    return Comparison(
        step_s=step.predicted_s,
        measured_step_s=step.measured_s,
        kinds=[kind_of(predicted), kind_of(measured)],
        same_run=same_run,
        differences=differences,
        error=step.error,
        figures=list(_compare_figures(predicted, measured, warnings)),
        parts=parts,
        stages=stages,
        operations=operations,
        kernels=[kernel for key in ("kernels", "operators") for kernel in _compare_kernels(predicted, measured, key)],
        warnings=warnings,
    )


def _compare_figures(first: Facts, second: Facts, warnings: list[str]) -> Iterator[ComparedFigure]:
    """Yield the figures that both sides state; costs in different currencies do not compare."""
    currencies = {side.get("currency") or (side.get("training") or {}).get("currency") for side in (first, second)}
    for name in FIGURES:
        left, right = find_figure(first, name), find_figure(second, name)
        if left is None or right is None:
            continue
        if name == "cost" and len(currencies) > 1:
            warnings.append(f"costs are not compared: they are in {' and '.join(sorted(map(str, currencies)))}")
            continue
        yield ComparedFigure(name, left, right, left - right, left / right if right else None)


def identity_of(account: Facts) -> dict[str, object]:
    """Return the facts of an account about what ran, with the names of IDENTITY."""
    known: dict[str, object] = {}
    for place in (account, *(account.get(name) for name in ("layout", "configuration", "run"))):
        if isinstance(place, Mapping):
            stated = ((name, place.get(name)) for name in (*IDENTITY, *SAME_WORD))
            known |= {name: value for name, value in stated if isinstance(value, str | int | float) and value != ""}
    for word, name in SAME_WORD.items():
        if word in known:
            known.setdefault(name, known.pop(word))
    if "precision" in known:
        known["precision"] = SAME_PRECISION.get(str(known["precision"]), known["precision"])
    return known


def differing_facts(first: Facts, second: Facts) -> list[RunDifference]:
    """Return the facts on which two identities disagree."""
    names = [name for name in IDENTITY if name in first and name in second]
    # One model may have two names.
    shape = [name for name in SHAPE if name != "model"]
    if "model" in names and set(shape) <= set(names) and all(first[name] == second[name] for name in shape):
        names.remove("model")
    return [RunDifference(name, first[name], second[name]) for name in names if first[name] != second[name]]


def _compare_kernels(first: Facts, second: Facts, key: str) -> list[ComparedKernel]:
    """Return the kernels of two Kineto traces, the largest difference first; none of other accounts."""
    sides = []
    for account in (first, second):
        ranks = account.get("ranks")
        if account.get("format") != "kineto" or key not in account or not isinstance(ranks, list):
            return []
        steps = sum(max(rank["steps"], 1) for rank in ranks)
        sides.append({row["name"]: (row["count"] / steps, row["total_s"] / steps) for row in account[key]})
    rows = []
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        (first_runs, first_s), (second_runs, second_s) = (side.get(name, (0.0, 0.0)) for side in sides)
        longer = second_s / first_s - 1 if first_s else 0.0
        change = "added" if not first_runs else "removed" if not second_runs else "same"
        if change == "same" and abs(longer) > SAME_KERNEL:
            change = "slower" if longer > 0 else "faster"
        on = "gpu" if key == "kernels" else "host"
        rows.append(ComparedKernel(name, on, change, first_runs, second_runs, first_s, second_s, second_s - first_s))
    return sorted(rows, key=lambda row: -abs(row.difference_s))


def _fold_parts(parts: Facts, other: Facts) -> dict[str, float]:
    """Return the parts of one side, those the other side lacks added to where it counts them."""
    return sum_by_key(
        (name if name in other else COUNTED_AS.get(name, name), float(seconds)) for name, seconds in parts.items()
    )


def _stage_seconds(stage: Facts) -> dict[str, float]:
    """Return the plain seconds of a stage, their names without the unit."""
    return {
        name.removesuffix("_s"): float(value)
        for name, value in stage.items()
        if name.endswith("_s") and isinstance(value, int | float)
    }
