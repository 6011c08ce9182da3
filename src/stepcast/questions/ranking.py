"""The answer of a search in the words of the JSON contract: ranked rows, why they rank so, and what would change it."""

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

from stepcast.ir.step import StepReport
from stepcast.ir.types import FactDict, pick
from stepcast.questions.changes import explain_choices
from stepcast.questions.choices import build_question, option_of
from stepcast.questions.question import PredictQuestion
from stepcast.questions.runs import predict_choices, strategy_facts, training_facts
from stepcast.questions.search import SettledSearch, Watching
from stepcast.questions.settle import settle
from stepcast.searching import result as results
from stepcast.searching.mixed import describe_gpu_kinds
from stepcast.searching.result import SearchCounts, SearchResult, SimulatedCandidate
from stepcast.searching.search import measure_sensitivity

MOST_VARIANTS = 5  # of a row, with the same degrees of parallelism
# If nothing fits, these multiples of the GPUs are tried.
MORE_GPUS = (2, 4, 8, 16)


def search_facts(asked: SettledSearch, result: SearchResult, watching: Watching = nullcontext) -> FactDict:
    """Return the ranked rows, why they rank so, and what would change it; *watching* is for searches that follow."""
    reports = [asked.predict(candidate) for candidate in result.best]
    rows = []
    for rank, (candidate, report) in enumerate(zip(result.best, reports, strict=True), 1):
        is_equal = _is_tie(asked, result.best[0], reports[0], candidate)
        family = [each for each in result.simulated if each.family == candidate.family and each.rank > candidate.rank]
        next_best = sorted(family, key=lambda each: each.rank)[:MOST_VARIANTS]
        variants = [_candidate(asked, each) for each in next_best]
        rows.append({**_row(asked, rank, candidate, report, is_equal), "variants": variants})
    second = next((index for index, row in enumerate(rows) if index and row["gpus"] == rows[0]["gpus"]), None)
    missed, binds, runner_up = result.missed, None, None
    if rows:
        bottleneck = results.find_bottleneck(reports[0], missed is not None)
        binds = {"what": bottleneck, "shares": results.cause_shares(reports[0])}
    if second is not None:
        slower_s = reports[second].step_s - reports[0].step_s
        parts_s = results.breakdown_differences(reports[second], reports[0])
        runner_up = {"rank": rows[second]["rank"], "slower_s": slower_s, "parts_s": parts_s}
    return {
        **pick(asked, "model=model.name parameters=model.parameters cluster=cluster.name"),
        "gpus": list(asked.gpus),
        "framework": asked.profile.name,
        "precision": rows[0]["precision"] if rows else None,
        **pick(asked, "objective=question.objective global_batch seq capacity_bytes"),
        "gpu_bytes": asked.cluster.gpu.memory_bytes,
        "counts": result.counts.facts(),
        "least_s": result.least_s,
        "rows": rows,
        "binds": binds,
        "missed": missed and {**strategy_facts(missed.strategy), **pick(missed, "bound_s memory_bytes")},
        "runner_up": runner_up,
        "sensitivity": _sensitivity(asked, result),
        "front": [_candidate(asked, point) for point in result.front],
        "smallest_bytes": result.smallest_bytes,
        "change": None if rows or not result.counts.complete else _find_change(asked, result.deadline, watching),
        **({"explained": _explain(asked, result.best[0])} if asked.question.explain and rows else {}),
        "assumptions": list(asked.assumptions),
    }


def _candidate(asked: SettledSearch, candidate: SimulatedCandidate) -> FactDict:
    return {**asked.facts(candidate), **pick(candidate, "step_s memory_bytes")}


def _explain(asked: SettledSearch, best: SimulatedCandidate) -> list[FactDict]:
    values = asked.profile, asked.model, asked.cluster.gpu.name, best.strategy, best.framework
    place = {"model": asked.model, "cluster": asked.joined_cluster, "place": str(best.options.place)}
    run = settle(build_question(PredictQuestion, {**place, **predict_choices(*values)}))
    return explain_choices(run, asked.capacity_bytes)


def best_row(asked: SettledSearch) -> tuple[FactDict | None, SearchCounts]:
    """Return the best as a row of the table, or None if there is none, and the counts of candidates."""
    result = asked.answer(top=1)
    if not result.best:
        return None, result.counts
    best = result.best[0]
    return _row(asked, 1, best, asked.predict(best), True), result.counts


def _is_tie(asked: SettledSearch, best: SimulatedCandidate, report: StepReport, candidate: SimulatedCandidate) -> bool:
    """Return True if *candidate* is as good as the best within our error of its step, on as many GPUs."""
    if candidate.gpus != best.gpus:
        return False
    if asked.question.objective == "memory":
        return candidate.memory_bytes == best.memory_bytes
    return report.low_s <= report.step_s * (candidate.score / best.score) <= report.high_s


def _sensitivity(asked: SettledSearch, result: SearchResult) -> list[FactDict]:
    best, rows = result.best[0].strategy if result.best else None, []
    for change in measure_sensitivity(result, asked.model, asked.joined_cluster):
        other = best is not None and replace(change.strategy, global_batch=best.global_batch) != best
        times = pick(change, "step_s speed=speed_ratio")
        rows.append({"change": change.words, **strategy_facts(change.strategy), **times, "other": other})
    return rows


def _row(
    asked: SettledSearch, rank: int, candidate: SimulatedCandidate, report: StepReport, is_equal: bool
) -> FactDict:
    assert report.throughput is not None
    training = training_facts(asked.question, candidate.strategy, candidate.step_s) or {}
    return {
        "rank": rank,
        **asked.facts(candidate),
        "place": str(candidate.options.place),
        "kinds": ", ".join(f"{stages} on {kind}" for kind, stages in describe_gpu_kinds(candidate.kinds).items()),
        "step_s": candidate.step_s,
        **pick(report, "low_s high_s"),
        "equal": is_equal,
        "tokens_per_s_per_gpu": report.throughput.tokens_per_s / candidate.gpus,
        "mfu": report.throughput.mfu,
        "memory_bytes": candidate.memory_bytes,
        "free_bytes": asked.cluster.gpu.memory_bytes - candidate.memory_bytes,
        "breakdown_s": dict(report.breakdown_s),
        **{name: training.get(name) for name in ("days", "gpu_hours", "cost", "currency")},
        "command": asked.command(candidate),
    }


def _changes(asked: SettledSearch) -> Iterator[tuple[str, SettledSearch]]:
    """Yield changes of a search, the smallest first: more memory, a choice left open, or more GPUs."""
    if asked.max_bytes is not None:
        yield "all memory of a GPU: leave --max-memory out", replace(asked, max_bytes=None)
    if asked.reserve != 0 and asked.max_bytes is None:
        yield "no reserve of memory: --memory-reserve 0", replace(asked, reserve=0.0)
    for name in asked.axes:
        rest = {axis: values for axis, values in asked.axes.items() if axis != name}
        yield f"leave {option_of(name)} out", replace(asked, axes=rest)
    most = asked.joined_cluster.gpus
    for times in MORE_GPUS:
        more = tuple(number * times for number in asked.gpus)
        if most is None or max(more) <= most:
            counts = ", ".join(f"{number:,}" for number in more)
            yield f"{times} times the GPUs: --gpus {counts}", replace(asked, gpus=more)


def _find_change(asked: SettledSearch, deadline: float, watching: Watching) -> FactDict | None:
    """Return the smallest change that lets something fit, of those that can be searched until *deadline*."""
    for words, changed in _changes(asked):
        result = changed.answer(top=1, watching=watching, most_s=deadline - time.monotonic())
        if not result.counts.complete:
            return None
        if result.best:
            best = result.best[0]
            return {"words": words, **_candidate(changed, best), "command": changed.command(best)}
    return None
