"""Two accounts of a step compared, and a run gated by those before it: is it slower than noise explains, since when.

Both are results of ``analyze``, ``replay``, ``simulate``, ``predict``, ``search`` or ``plan`` as plain values.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from stepcast.analyze.result import AnalysisResult, load_rules
from stepcast.ir.types import FactDict, Facts, find_doubts, pick, sum_by_key
from stepcast.units import format_bytes, format_change, format_percent, format_seconds
from stepcast.views.step import split_launch_overhead

PREDICTED, REPLAYED, MEASURED = "predicted", "replayed", "measured"

# A part that only one side has is counted as this part of the other side.
COUNTED_AS = {"embedding": "dp", "expert-dp": "dp", "wait": "other", "host": "other"}
# Parts of an OptimusPrime step.
COUNTED_AS |= {"tensor": "tp", "data": "dp", "messages": "pp", "unhooked": "compute", "accumulation": "compute"}
COUNTED_AS |= {"fixed": "other", "unexplained": "other"}

# The parts of a prediction that a profiler's trace separates, other parts are communication; and its own figures.
TRACED_AS = {"compute": "computation", "optimizer": "computation", "bubble": "idle", "other": "idle"}
TRACED_PARTS = {"computation": "compute_s", "exposed communication": "exposed_comm_s", "idle": "bubble_s"}
SAME_KERNEL = 0.02  # kernels that differ by less are the same
FIGURES: Mapping[str, Sequence[Sequence[str]]] = load_rules()["figures"]  # the keys that lead to each
# Facts that identify a run.
SHAPE = ("model", "parameters", "layers", "hidden")
BATCH = ("seq", "micro_batch", "micro_batches", "global_batch", "precision")
IDENTITY = (*SHAPE, *BATCH, "tp", "cp", "ep", "dp", "pp", "vpp", "gpus", "cluster")


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
    # 'analyze' names the format it read; 'run' states how far its predictions were off; 'gate' has measures.
    keys = ("format", "mean_abs_error", "measures")
    if any(key in account for key in keys) or str(account.get("kind", "")).endswith(" run"):
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
    warnings = [*result.warnings, *warnings, *find_doubts(result.facts())]
    return msgspec.structs.replace(result, sides=sides, warnings=warnings)


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
        sides = (key in predicted) + (key in measured)
        if key == "breakdown_s" and sides == 1:
            left, right = map(_traced_parts, (predicted, measured))
            if common := [row(name, left[name], right[name]) for name in left if name in right]:
                return common
        if sides < 2:
            if sides or key == "breakdown_s":  # forecasts list no operations
                warnings.append(f"{'one side has' if sides else 'both sides have'} no {what} are not compared")
            return []
        left, right = predicted[key], measured[key]
        if key == "breakdown_s":
            if "host" not in {*left, *right}:
                left, right = map(split_launch_overhead, (predicted, measured))
            left, right = _fold_parts(left, right), _fold_parts(right, left)
        pairs = [(name, float(left.get(name, 0.0)), float(right.get(name, 0.0))) for name in {**left, **right}]
        return [row(*pair) for pair in pairs if pair[1] or pair[2]]

    parts = rows("breakdown_s", "breakdown of the step: parts")
    left_stages, right_stages = (
        {stage["stage"]: _stage_seconds(stage) for stage in account.get("stages") or ()}
        for account in (predicted, measured)
    )
    if left_stages and right_stages and set(left_stages) != set(right_stages):
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
        **pick(step, "step_s=predicted_s measured_step_s=measured_s error"),
        kinds=[kind_of(predicted), kind_of(measured)],
        same_run=same_run,
        differences=differences,
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
            stated = ((name, place.get(name)) for name in (*IDENTITY, "dtype"))
            known |= {name: value for name, value in stated if isinstance(value, str | int | float) and value != ""}
    if "dtype" in known:
        known.setdefault("precision", known.pop("dtype"))
    if known.get("precision") == "tf32":  # Megatron's fp32 is tf32 in tensor cores
        known["precision"] = "fp32"
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


def _traced_parts(account: Facts) -> dict[str, float]:
    """Return the parts of a step that a profiler's trace separates too."""
    if "breakdown_s" not in account:
        return {name: float(account[key]) for name, key in TRACED_PARTS.items() if key in account}
    parts = account["breakdown_s"].items()
    return sum_by_key((TRACED_AS.get(name, "exposed communication"), float(seconds)) for name, seconds in parts)


def _stage_seconds(stage: Facts) -> dict[str, float]:
    """Return the plain seconds of a stage, their names without the unit."""
    return {
        name.removesuffix("_s"): float(value)
        for name, value in stage.items()
        if name.endswith("_s") and isinstance(value, int | float)
    }


# ---- a run against the runs before it -----------------------------------------------------------------------

# The level of a series is the median of its baseline, its noise the median absolute deviation. Single runs are often
# outliers (a cold node, a shared link), so one slow run is only suspected: a regression needs two slow runs in
# succession, or three whose clipped deviations together are unlikely. ``tests/analyze/test_gate.py`` measures both
# error rates on histories with the noise of published MLPerf runs and of two traced jobs.
PASSED, SUSPECTED, REGRESSION, IMPROVED, NEW = "passed", "suspected", "regression", "improved", "new"
ACCEPTED = "accepted"  # a regression with which the user has a new baseline begin

STEP, MEMORY = "step", "peak memory"
GATED = (STEP, MEMORY)  # the other measures explain
RECENT = 3
SETTLED = 5  # faster runs in succession that begin a new baseline
FEWEST = 4  # runs of a baseline from which noise is learnt
WINDOW = 50  # most runs of a baseline: older ones saw other drivers and nodes
MAD_TO_SIGMA = 1.4826
LEAST_NOISE = 0.001
ASSUMED_NOISE = 0.01  # without repeats and without steps in the log
ASSUMED_RUNS = 2
FEW_RUNS = 3
PAIR_SIGMA = 1.5  # two runs in succession
TRIPLE_SIGMA = 1.9  # three runs together
MIDDLE_SIGMA, LAST_SIGMA, CLIP_SIGMA = 0.8, 0.5, 3.0  # of three runs: their middle, the last, the most one counts
SHORT, SLOW_SHARE = 15, 0.1  # of a shorter baseline, three runs have to be slower than all but this share
SINGLE_SIGMA = 3.0  # a run without a history
MIN_CHANGE = 0.01
NOTED_SHARE = 0.002  # of the step, from which the change of a part explains anything


class GateRun(msgspec.Struct, frozen=True):
    """One run of a history: its measures (seconds, and bytes of memory) and the verdict on it."""

    measures: dict[str, float]
    identity: FactDict = {}
    label: str = ""
    status: str = NEW
    since: int | None = None  # the run with which a regression began
    baseline_from: int = 1
    spread: float | None = None  # of the steps within the run, as a share
    warnings: list[str] = []  # of the files it was read from


class GatedMeasure(msgspec.Struct, frozen=True):
    """One measure of the run against its baseline; changes and noise are shares of the baseline."""

    name: str
    value: float
    baseline: float
    change: float
    noise: float
    status: str
    since: int | None = None

    @property
    def difference(self) -> float:
        return self.value - self.baseline

    @property
    def texts(self) -> tuple[str, str, str, str]:
        """Value, baseline, change and noise for people."""
        show = format_bytes if self.name == MEMORY else format_seconds
        return show(self.value), show(self.baseline), format_change(self.change), format_percent(self.noise)


class ForecastCheck(msgspec.Struct, frozen=True):
    """The step against a forecast and its interval."""

    step_s: float
    low_s: float | None
    high_s: float | None
    error: float  # of the forecast, as a share of the measured step
    slower: bool


class GateResult(AnalysisResult, frozen=True, kw_only=True):
    """The verdict on one run; ``.facts()`` is its JSON."""

    view, title = "compare.gate_view", "gate"
    name: str
    status: str
    verdict: str
    run: int
    label: str
    step_s: float
    baseline_runs: int
    baseline_from: int  # the first run of the baseline
    min_change: float
    since: int | None
    measures: list[GatedMeasure]
    trend: list[FactDict]  # run, label, step_s and status of each run of the history
    forecast: ForecastCheck | None = None
    warnings: list[str] = msgspec.field(default_factory=list)

    @property
    def failed(self) -> bool:
        return self.status == REGRESSION or bool(self.forecast and self.forecast.slower)

    def facts(self) -> FactDict:
        return {**AnalysisResult.facts(self), "failed": self.failed}


def measures_of(facts: Facts) -> dict[str, float]:
    """Return the measures of an account of a step: the step, its parts, its kinds of work, its peak memory."""
    step_s = facts.get("step_s")
    if not isinstance(step_s, int | float) or step_s <= 0:
        raise ValueError("does not say how long a step takes; gate needs measured steps")
    measures = {STEP: float(step_s)}
    for name, seconds in {**facts.get("operations_s", {}), **facts.get("breakdown_s", {})}.items():
        if not name.startswith("communication: ") and seconds:
            measures[name] = float(seconds)
    ranks = facts.get("ranks") or []
    if ranks and isinstance(ranks[0], Mapping):  # Kineto
        steps = sum(max(rank["steps"], 1) for rank in ranks)
        rows = ((" ".join(filter(None, (row["group"], row["kind"]))), row) for row in facts.get("collectives", ()))
        totals_s = [pair for rank in ranks for pair in rank["breakdown_s"].items() if pair[0] != "compute"]
        totals_s += [(name, row["total_s"]) for name, row in rows]
        measures = sum_by_key([*measures.items(), *((name, total_s / steps) for name, total_s in totals_s)])
    elif "bubble" not in measures and facts.get("bubble_s"):
        measures["bubble"] = float(facts["bubble_s"])
    if peak := facts.get("peak_memory_bytes"):
        measures[MEMORY] = float(peak)
    return measures


def spread_of(facts: Facts) -> float | None:
    """Return the noise of the steps within a run as a share of the step, where its log has several."""
    low, high, step_s = (facts.get(name) for name in ("p10_s", "p90_s", "step_s"))
    return (high - low) / 2.563 / step_s if low and high and step_s and facts.get("steps", 0) > FEWEST else None


def judge(
    history: Sequence[GateRun],
    run: GateRun,
    name: str = "default",
    min_change: float = MIN_CHANGE,
    strict: bool = False,
) -> GateResult:
    """Return the verdict on *run* after *history*; *strict* judges it alone, without waiting for a second slow run."""
    earlier = history[-1] if history else None
    if earlier and (words := _list_differences(earlier.identity, run.identity)):
        raise ValueError(f"is another run than those before it: {words}; with --history, --name keeps another series")
    start = earlier.baseline_from if earlier else 1
    regressed_since = earlier.since if earlier and earlier.status == REGRESSION else None
    past_runs = history[start - 1 :]
    # The baseline: no runs of a regression, nor the last two, which the rules look at.
    end = max(len(past_runs) - (RECENT - 1), min(len(past_runs), FEWEST))
    end = regressed_since - start if regressed_since else end
    usable = [index < end and past.status != REGRESSION for index, past in enumerate(past_runs)]
    measures = []
    for measure, value in run.measures.items():
        series = [*(past.measures.get(measure) for past in past_runs), value]
        row = _judge_measure(measure, series, usable, run.spread, min_change, strict)
        if row.status in (REGRESSION, IMPROVED):
            row = msgspec.structs.replace(row, since=regressed_since or start + _change_point(series))
        measures.append(row)
    order = (REGRESSION, SUSPECTED, IMPROVED, PASSED, NEW)
    worst = min((row for row in measures if row.name in GATED), key=lambda row: order.index(row.status))
    step = next(row for row in measures if row.name == STEP)
    trend = [
        {"run": index, "label": past.label, "step_s": past.measures[STEP], "status": past.status}
        for index, past in enumerate([*history, msgspec.structs.replace(run, status=worst.status)], 1)
    ]
    result = GateResult(
        name=name,
        **pick(worst, "status since"),
        verdict="",
        run=len(history) + 1,
        label=run.label,
        step_s=step.value,
        baseline_runs=sum(usable),
        baseline_from=start,
        min_change=min_change,
        measures=measures,
        trend=trend,
    )
    warnings = find_doubts(result.facts())
    if earlier and earlier.identity.keys().isdisjoint(run.identity) and (earlier.identity or run.identity):
        warnings.append("no common fact shows whether this is the same run as those before it")
    return msgspec.structs.replace(result, verdict=_verdict(result, worst), warnings=warnings)


def _judge_measure(
    name: str,
    series: Sequence[float | None],
    usable: Sequence[bool],
    spread: float | None,
    min_change: float,
    strict: bool,
) -> GatedMeasure:
    """Judge the last value of *series*; of those before it the *usable* ones are its baseline."""
    value = series[-1] or 0.0
    known = np.array([past for past, use in zip(series, usable, strict=False) if use and past is not None][-WINDOW:])
    level = float(np.median(known)) if len(known) else 0.0
    if level <= 0:
        return GatedMeasure(name, value, value, 0.0, spread or ASSUMED_NOISE, NEW)
    # Few runs may agree by chance, so the noise of the steps within the run counts as two more.
    count, assumed = len(known), spread or ASSUMED_NOISE
    sigma = MAD_TO_SIGMA * float(np.median(np.abs(known / level - 1))) * (1 + 1.5 / count)
    noise = max(((count * sigma**2 + ASSUMED_RUNS * assumed**2) / (count + ASSUMED_RUNS)) ** 0.5, LEAST_NOISE)
    limit = max(min_change, SINGLE_SIGMA * noise)
    after = 1 + max(index for index, use in enumerate(usable) if use)
    recent = [later / level - 1 for later in series[after:] if later is not None][-RECENT:]
    # Few runs know neither their level nor their noise well.
    scores = [change / noise / (1 + FEW_RUNS / max(count - 2, 1)) for change in recent]
    slow = float(np.sort(known)[-1 - int(SLOW_SHARE * count)] / level - 1) if count < SHORT else -1.0
    pair = triple = False
    if len(recent) >= 2 and min(recent[-2:]) > slow:
        pair = min(scores[-2:]) > PAIR_SIGMA and sum(recent[-2:]) / 2 > min_change
    if len(recent) == RECENT and median(recent) > min_change and min(recent) > slow:
        clipped = sum(max(-CLIP_SIGMA, min(score, CLIP_SIGMA)) for score in scores) / RECENT**0.5
        triple = clipped > TRIPLE_SIGMA and scores[-1] > LAST_SIGMA and median(scores) > MIDDLE_SIGMA

    status = SUSPECTED if recent[-1] > limit else PASSED
    if strict:
        status = REGRESSION if recent[-1] > limit else IMPROVED if recent[-1] < -limit else PASSED
    elif count >= FEWEST and (pair or triple):
        status = REGRESSION
    settled = [later / level - 1 for later in series[-SETTLED:] if later is not None]
    if len(settled) == SETTLED and all(change < -max(min_change, noise) for change in settled):
        status = IMPROVED
    return GatedMeasure(name, value, level, value / level - 1, noise, status)


def _change_point(values: Sequence[float | None]) -> int:
    """Return the index from which on the values are best explained by another level (least absolute deviations)."""
    series = np.array([value for value in values if value is not None])
    missing = len(values) - len(series)
    splits = [(series[:split], series[split:]) for split in range(1, len(series))]
    costs = [sum(float(np.abs(part - np.median(part)).sum()) for part in split) for split in splits]
    return missing + 1 + int(np.argmin(costs))


def _verdict(result: GateResult, worst: GatedMeasure) -> str:
    if worst.status == NEW:
        return f"first run of {result.name!r}: step {format_seconds(result.step_s)}"
    _, baseline, change, noise = worst.texts
    words = f"{worst.name} {change} vs {baseline} (noise {noise})"
    if worst.status == PASSED and worst.change < -max(result.min_change, SINGLE_SIGMA * worst.noise):
        return f"{words}: faster; {SETTLED} such runs in succession begin a new baseline"
    if worst.status == PASSED:
        return f"{words}: within noise or below the smallest change of {format_percent(result.min_change)}"
    # The parts that changed in the same direction beyond their noise, the largest difference first.
    sign = 1 if worst.change > 0 else -1
    known = [row for row in result.measures if row.name not in GATED and row.status != NEW]
    large = [row for row in known if sign * row.difference > NOTED_SHARE * result.step_s]
    causes = sorted((row for row in large if abs(row.change) > 2 * row.noise), key=lambda row: -sign * row.difference)
    if causes and worst.name == STEP:
        words += ": " + ", ".join(f"{row.name} {row.texts[2]}" for row in causes[:2])
    if worst.status == SUSPECTED:
        return f"{words}; one slow run is no proof: run again"
    return f"{words}, started with run {worst.since}" if result.baseline_runs > 1 else words


def _list_differences(first: Facts, second: Facts) -> str:
    return "; ".join(f"{row.name} {row.predicted} vs {row.measured}" for row in differing_facts(first, second))


def check_forecast(result: GateResult, forecast: Facts, identity: Facts) -> GateResult:
    """Return the result with the step compared to a forecast: slower than its interval fails. A forecast whose
    settings differ from the *identity* of the run gives a warning.
    """
    step_s = float(forecast["step_s"])
    interval = forecast.get("uncertainty") or {}
    low_s, high_s = interval.get("low_s"), interval.get("high_s")
    slower = result.step_s > (high_s if high_s is not None else step_s * (1 + result.min_change))
    check = ForecastCheck(step_s, low_s, high_s, step_s / result.step_s - 1, slower)
    limits = f" (90 % interval {format_seconds(low_s)} to {format_seconds(high_s)})" if low_s and high_s else ""
    words = "slower than" if slower else "within" if low_s and result.step_s >= low_s else "no slower than"
    verdict = f"{result.verdict}; {words} the forecast of {format_seconds(step_s)}{limits}"
    differing = _list_differences(identity_of(forecast), identity)
    warnings = [*result.warnings, *([f"the forecast is of another run: {differing}"] if differing else [])]
    return msgspec.structs.replace(result, forecast=check, verdict=verdict, warnings=warnings)


def advance(run: GateRun, result: GateResult, accept: bool = False) -> GateRun:
    """Return *run* as the history keeps it; an improvement, or a regression that is accepted, begins a new baseline."""
    if result.since and (result.status == IMPROVED or accept):
        return msgspec.structs.replace(run, status=PASSED if accept else IMPROVED, baseline_from=result.since)
    since = result.since if result.status == REGRESSION else None
    return msgspec.structs.replace(run, status=result.status, since=since, baseline_from=result.baseline_from)
