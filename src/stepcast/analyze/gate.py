"""A run against the runs before it: is it slower than noise explains, since when, and in which part of the step.

The level of a series is the median of its baseline, its noise the median absolute deviation. Single runs are often
outliers (a cold node, a shared link), so one slow run is only suspected: a regression needs two slow runs in
succession, or three whose clipped deviations together are unlikely. ``tests/analyze/test_gate.py`` measures both error
rates on histories with the noise of published MLPerf runs and of two traced jobs.
"""

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec
import numpy as np

from stepcast.analyze.compare import differing_facts, identity_of
from stepcast.analyze.result import AnalysisResult
from stepcast.ir.types import FactDict, Facts, find_doubts
from stepcast.units import format_bytes, format_change, format_percent, format_seconds

PASSED, SUSPECTED, REGRESSION, IMPROVED, NEW = "passed", "suspected", "regression", "improved", "new"

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
        for rank in ranks:
            for name, seconds in rank["breakdown_s"].items():
                if name != "compute":
                    measures[name] = measures.get(name, 0.0) + seconds / steps
        for row in facts.get("collectives", ()):
            name = " ".join(filter(None, (row["group"], row["kind"])))
            measures[name] = measures.get(name, 0.0) + row["total_s"] / steps
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
    number = len(history) + 1
    earlier = history[-1] if history else None
    if earlier and (words := _list_differences(earlier.identity, run.identity)):
        raise ValueError(f"is not the run that {name!r} has a history of: {words}; use --name for another history")
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
    gated = [row for row in measures if row.name in GATED]
    order = (REGRESSION, SUSPECTED, IMPROVED, PASSED, NEW)
    worst = min(gated, key=lambda row: order.index(row.status))
    step = next(row for row in measures if row.name == STEP)
    trend = [
        {"run": index, "label": past.label, "step_s": past.measures[STEP], "status": past.status}
        for index, past in enumerate([*history, msgspec.structs.replace(run, status=worst.status)], 1)
    ]
    result = GateResult(
        name=name,
        status=worst.status,
        verdict="",
        run=number,
        label=run.label,
        step_s=step.value,
        baseline_runs=sum(usable),
        baseline_from=start,
        min_change=min_change,
        since=worst.since,
        measures=measures,
        trend=trend,
    )
    return msgspec.structs.replace(result, verdict=_verdict(result, worst), warnings=find_doubts(result.facts()))


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
