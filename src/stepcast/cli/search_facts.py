"""The answer to a search in the words of the JSON contract: rows, why they rank so, what would change it."""

import shlex
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from stepcast.cli.choices import all_words
from stepcast.cli.predict import training
from stepcast.cli.search_question import Question
from stepcast.forecast.predict import predict
from stepcast.ir.step import StepReport
from stepcast.questions.spelling import predict_words
from stepcast.searching.mixed import describe_gpu_kinds
from stepcast.searching.result import (
    MissedCandidate,
    SearchCounts,
    SearchResult,
    SimulatedCandidate,
    breakdown_differences,
    cause_shares,
    find_bottleneck,
)
from stepcast.searching.search import measure_sensitivity

# Where nothing fits: so many times the GPUs.
MORE_GPUS = (2, 4, 8, 16)
FIXED = ("tp", "cp", "ep", "pp", "vpp", "micro_batch", "schedule", "recompute", "sharding", "precision")


def search_facts(asked: Question, result: SearchResult) -> dict[str, Any]:
    reports = [_report(asked, each) for each in result.best]
    rows = [
        _row(asked, rank, each, report, _is_tie(asked, result.best[0], reports[0], each))
        for rank, (each, report) in enumerate(zip(result.best, reports, strict=True), 1)
    ]
    second = next((at for at, row in enumerate(rows) if at and row["gpus"] == rows[0]["gpus"]), None)
    return {
        "model": asked.model.name,
        "parameters": asked.model.parameters,
        "cluster": asked.cluster.name,
        "framework": asked.profile.name,
        "precision": rows[0]["precision"] if rows else None,
        "objective": asked.args.objective,
        "global_batch": asked.global_batch,
        "seq": asked.seq,
        "capacity_bytes": asked.usable_memory_bytes,
        "gpu_bytes": asked.cluster.gpu.memory_bytes,
        "counts": result.counts.facts(),
        "least_s": result.least_s,
        "rows": rows,
        "binds": {"what": find_bottleneck(reports[0], result.missed is not None), "shares": cause_shares(reports[0])}
        if rows
        else None,
        "missed": _missed(result.missed) if result.missed else None,
        "runner_up": {
            "rank": rows[second]["rank"],
            "slower_s": reports[second].step_s - reports[0].step_s,
            "parts_s": breakdown_differences(reports[second], reports[0]),
        }
        if second is not None
        else None,
        "sensitivity": _sensitivity(asked, result),
        "front": [
            {**all_words(each.strategy), "step_s": each.step_s, "memory_bytes": each.memory_bytes}
            for each in result.front
        ],
        "smallest_bytes": result.smallest_bytes,
        "change": None if rows or not result.counts.complete else _change(asked, result.deadline),
        "assumptions": list(asked.assumptions),
    }


def best_row(asked: Question) -> tuple[dict[str, Any] | None, SearchCounts]:
    """Return the best as a row of the table, or None if there is none, and what became of the candidates."""
    result = asked.answer(top=1)
    if not result.best:
        return None, result.counts
    best = result.best[0]
    report = _report(asked, best)
    return _row(asked, 1, best, report, True), result.counts


def _is_tie(asked: Question, best: SimulatedCandidate, report: StepReport, found: SimulatedCandidate) -> bool:
    """Return True if *found* is as good as the best within our error of its step, on as many GPUs."""
    if found.gpus != best.gpus:
        return False
    if asked.args.objective == "memory":
        return found.memory_bytes == best.memory_bytes
    return report.low_s <= report.step_s * (found.score / best.score) <= report.high_s


def _report(asked: Question, found: SimulatedCandidate) -> StepReport:
    return predict(asked.model, asked.priced, found.strategy, found.framework, found.options).report


def _missed(missed: MissedCandidate) -> dict[str, Any]:
    return {**all_words(missed.strategy), "bound_s": missed.bound_s, "memory_bytes": missed.memory_bytes}


def _sensitivity(asked: Question, result: SearchResult) -> list[dict[str, Any]]:
    best = result.best[0].strategy if result.best else None
    return [
        {
            "change": each.words,
            **all_words(each.strategy),
            "step_s": each.step_s,
            "speed": each.speed_ratio,
            "other": best is not None and replace(each.strategy, global_batch=best.global_batch) != best,
        }
        for each in measure_sensitivity(result, asked.model, asked.priced)
    ]


def _row(asked: Question, rank: int, found: SimulatedCandidate, report: StepReport, equal: bool) -> dict[str, Any]:
    assert report.throughput is not None
    args = asked.args
    run = training(args, found.strategy, found.step_s) or {}
    return {
        "rank": rank,
        **all_words(found.strategy),
        "place": str(found.options.place),
        "kinds": _kinds(found),
        "step_s": found.step_s,
        "low_s": report.low_s,
        "high_s": report.high_s,
        "equal": equal,
        "tokens_per_s_per_gpu": report.throughput.tokens_per_s / found.gpus,
        "mfu": report.throughput.mfu,
        "memory_bytes": found.memory_bytes,
        "free_bytes": asked.cluster.gpu.memory_bytes - found.memory_bytes,
        "breakdown_s": dict(report.breakdown_s),
        "days": run.get("days"),
        "gpu_hours": run.get("gpu_hours"),
        "cost": run.get("cost"),
        "currency": run.get("currency"),
        "command": _command(asked, found),
    }


def _kinds(found: SimulatedCandidate) -> str:
    return ", ".join(f"{stages} on {kind}" for kind, stages in describe_gpu_kinds(found.kinds).items())


def _command(asked: Question, found: SimulatedCandidate) -> str:
    """The line that predicts this row alone; of two kinds of GPUs, that searches it alone."""
    args = asked.args
    if found.kinds:
        return _fixed(asked, found)
    words = ["stepcast", "predict", "--model", args.model, "--cluster", args.cluster]
    for each in args.set:
        words += ["--set", each]
    words += predict_words(asked.profile, asked.model, asked.cluster.gpu.name, found.strategy, found.framework)
    if str(found.options.place) != "even":
        words += ["--place", str(found.options.place)]
    return shlex.join(words)


def _fixed(asked: Question, found: SimulatedCandidate) -> str:
    args, row = asked.args, all_words(found.strategy)
    words = ["stepcast", "search", "--model", args.model, "--cluster", args.cluster]
    for each in args.set:
        words += ["--set", each]
    words += ["--framework", args.framework, "--gpus", str(found.gpus), "--seq", str(asked.seq)]
    words += ["--global-batch", str(asked.global_batch), "--top", "1"]
    for name in FIXED:
        words += ["--fix", f"{name.replace('_', '-')}={row[name]}"]
    if row["tp"] > 1:
        words += ["--fix", f"sequence-parallel={'yes' if row['sequence_parallel'] else 'no'}"]
    return shlex.join(words)


def _changes(asked: Question) -> Iterator[tuple[str, Question]]:
    """What could be changed, the smallest first: a choice left open again, or more GPUs."""
    if asked.most_bytes is not None:
        yield "all of a GPU's memory: leave --max-memory out", replace(asked, most_bytes=None)
    if asked.reserve != 0 and asked.most_bytes is None:
        yield "no reserve of memory: --memory-reserve 0", replace(asked, reserve=0.0)
    for name in asked.axes:
        rest = {each: values for each, values in asked.axes.items() if each != name}
        yield f"leave {name.replace('_', '-')} open", replace(asked, axes=rest)
    for times in MORE_GPUS:
        more = tuple(each * times for each in asked.gpus)
        if asked.most_gpus is None or max(more) <= asked.most_gpus:
            told = ", ".join(f"{each:,}" for each in more)
            yield f"{times} times the GPUs: --gpus {told}", replace(asked, gpus=more)


def _change(asked: Question, deadline: float) -> dict[str, Any] | None:
    """The smallest change that lets something fit, of those that can be searched until *deadline*."""
    for words, question in _changes(asked):
        result = question.answer(top=1, most_s=deadline - time.monotonic())
        if not result.counts.complete:
            return None
        if result.best:
            best = result.best[0]
            return {
                "words": words,
                **all_words(best.strategy),
                "step_s": best.step_s,
                "memory_bytes": best.memory_bytes,
                "command": _command(question, best),
            }
    return None
