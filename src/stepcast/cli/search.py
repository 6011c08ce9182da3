"""``stepcast search --model M --cluster C --gpus N --global-batch B ...``"""

import argparse
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType

import msgspec

from stepcast.cli.interrupts import INTERRUPTED
from stepcast.cli.output import moving_text, show_alternatives, show_emitted, show_view, write_file
from stepcast.cli.streams import show_status
from stepcast.ir.facts import CandidateFacts, FactDict
from stepcast.ir.step import StepReport
from stepcast.outputs.plain import check_parquet, table_bytes
from stepcast.questions.changes import explain_choices
from stepcast.questions.choices import build_question, option_of, several_of
from stepcast.questions.emitting import emit_config
from stepcast.questions.question import PredictQuestion
from stepcast.questions.runs import predict_choices, strategy_facts, training_facts
from stepcast.questions.search import SettledSearch, settle_search
from stepcast.questions.settle import settle
from stepcast.searching.mixed import describe_gpu_kinds
from stepcast.searching.result import (
    SearchCounts,
    SearchResult,
    SimulatedCandidate,
    breakdown_differences,
    cause_shares,
    find_bottleneck,
)
from stepcast.searching.search import measure_sensitivity
from stepcast.units import format_seconds
from stepcast.version import __version__
from stepcast.views.search import search_view, strategy_words
from stepcast.views.view import View

WRITTEN = (".csv", ".parquet", ".json")
EVERY_S = 0.1
MOST_VARIANTS = 5  # of a row, with the same degrees of parallelism
# If nothing fits, these multiples of the GPUs are tried.
MORE_GPUS = (2, 4, 8, 16)


def run(args: argparse.Namespace) -> int:
    if args.captured:
        from stepcast.cli.captured import run_captured_search

        return run_captured_search(args)
    if args.output and not args.output.endswith(WRITTEN):
        raise ValueError(f"{args.output}: use a file name that ends in {', '.join(WRITTEN[:-1])} or {WRITTEN[-1]}")
    if args.output and args.output.endswith(".parquet"):
        check_parquet()
    question = args.question
    if args.name is not None:
        if question.model is not None:
            raise ValueError(f"{args.name}: --model names the model already; leave one of them out")
        question = question.change({"model": args.name})
    if args.stream and (args.html or args.json or several_of(question)):
        raise ValueError("--stream prints JSON lines of one search: leave --html, --json and other clusters out")
    if several_of(question):
        return show_alternatives(args, question, _Watching)
    settled = settle_search(question)
    try:
        result = settled.answer(watching=lambda: _Watching(settled if args.stream else None))
    finally:
        show_status("")
    facts = {**search_facts(settled, result), "command": args.command, "version": __version__}
    if args.output:
        write_file(args.output, _build_document(args.output, facts))
    emitted = None
    if args.emit and result.best:
        best = result.best[0]
        values = settled.model, settled.cluster, best.strategy, best.framework
        emitted = emit_config(args.emit, settled.question, *values, best.step_s)
        facts["emitted"] = emitted.facts()
    if args.stream:
        _print_line({"event": "answer", **facts})
    else:
        show_view(args, result_view(facts, result))
        show_emitted(args, emitted)
    if not result.counts.complete and not result.counts.out_of_time:
        return INTERRUPTED
    return 0 if result.best else 1


def describe_candidate(candidate: SimulatedCandidate) -> str:
    """Return the strategy of a candidate in words."""
    return strategy_words(strategy_facts(candidate.strategy))


def result_view(facts: FactDict, result: SearchResult) -> View:
    """Return the view of a search with all the candidates that it simulated."""
    simulated = [
        CandidateFacts(
            words=describe_candidate(candidate),
            step_s=candidate.step_s,
            memory_bytes=candidate.memory_bytes,
            gpus=candidate.gpus,
        )
        for candidate in result.simulated
    ]
    return search_view(facts, simulated)


def _build_document(name: str, facts: FactDict) -> bytes:
    if name.endswith(".json"):
        return msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n"
    return table_bytes(name, [{key: value for key, value in row.items() if key != "variants"} for row in facts["rows"]])


def _print_line(facts: FactDict) -> None:
    print(msgspec.json.encode(facts).decode(), flush=True)


class _Watching:
    """Shows the progress of a search; the first Ctrl-C ends it with the best so far, another one ends all.

    Each best of the search *streamed* is printed as a JSON line.
    """

    def __init__(self, streamed: SettledSearch | None = None) -> None:
        self.stopped, self.last, self.began = False, 0.0, time.monotonic()
        self.streamed = streamed
        self.best: SimulatedCandidate | None = None
        self.before: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> "_Watching":
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def __call__(self, counts: SearchCounts, best: SimulatedCandidate | None) -> None:
        if self.before is None and threading.current_thread() is threading.main_thread():
            self.before = signal.getsignal(signal.SIGINT)
            if self.before is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._stop)
        if self.stopped:
            raise KeyboardInterrupt
        now = time.monotonic()
        if self.streamed is not None and best is not None and best is not self.best:
            self.best = best
            found = {"simulated": counts.simulated, "unseen": counts.unseen, "seconds": now - self.began}
            figures = {"step_s": best.step_s, "memory_bytes": best.memory_bytes, "command": self.streamed.command(best)}
            _print_line({"event": "best", **found, **self.streamed.facts(best), **figures})
        if now - self.last >= EVERY_S:
            self.last = now
            if best is None:
                text = f"bounding {counts.considered:,} candidates, {counts.priced:,} kinds of layers estimated"
            else:
                text = (
                    f"simulated {counts.simulated:,}, {counts.unseen:,} of {counts.considered:,} left; "
                    f"best {format_seconds(best.step_s)}: {describe_candidate(best)}"
                )
            show_status(moving_text("search", round((now - self.began) / EVERY_S), text))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        signal.signal(signal.SIGINT, self.before)


# ---- the answer in the words of the JSON contract ---------------------------------------------------------


def search_facts(asked: SettledSearch, result: SearchResult) -> FactDict:
    """Return the ranked rows, why they rank so, and what would change it."""
    reports = [asked.predict(candidate) for candidate in result.best]
    rows = [
        {
            **_row(asked, rank, candidate, report, _is_tie(asked, result.best[0], reports[0], candidate)),
            "variants": _find_variants(asked, candidate, result),
        }
        for rank, (candidate, report) in enumerate(zip(result.best, reports, strict=True), 1)
    ]
    second = next((index for index, row in enumerate(rows) if index and row["gpus"] == rows[0]["gpus"]), None)
    missed = result.missed
    return {
        "model": asked.model.name,
        "parameters": asked.model.parameters,
        "cluster": asked.cluster.name,
        "gpus": list(asked.gpus),
        "framework": asked.profile.name,
        "precision": rows[0]["precision"] if rows else None,
        "objective": asked.question.objective,
        "global_batch": asked.global_batch,
        "seq": asked.seq,
        "capacity_bytes": asked.capacity_bytes,
        "gpu_bytes": asked.cluster.gpu.memory_bytes,
        "counts": result.counts.facts(),
        "least_s": result.least_s,
        "rows": rows,
        "binds": {"what": find_bottleneck(reports[0], missed is not None), "shares": cause_shares(reports[0])}
        if rows
        else None,
        "missed": missed
        and {**strategy_facts(missed.strategy), "bound_s": missed.bound_s, "memory_bytes": missed.memory_bytes},
        "runner_up": {
            "rank": rows[second]["rank"],
            "slower_s": reports[second].step_s - reports[0].step_s,
            "parts_s": breakdown_differences(reports[second], reports[0]),
        }
        if second is not None
        else None,
        "sensitivity": _sensitivity(asked, result),
        "front": [
            {**asked.facts(point), "step_s": point.step_s, "memory_bytes": point.memory_bytes} for point in result.front
        ],
        "smallest_bytes": result.smallest_bytes,
        "change": None if rows or not result.counts.complete else _find_change(asked, result.deadline),
        **({"explained": _explain(asked, result.best[0])} if asked.question.explain and rows else {}),
        "assumptions": list(asked.assumptions),
    }


def _explain(asked: SettledSearch, best: SimulatedCandidate) -> list[FactDict]:
    values = asked.profile, asked.model, asked.cluster.gpu.name, best.strategy, best.framework
    place = {"model": asked.model, "cluster": asked.joined_cluster, "place": str(best.options.place)}
    run = settle(build_question(PredictQuestion, {**place, **predict_choices(*values)}))
    return explain_choices(run, asked.capacity_bytes)


def _find_variants(asked: SettledSearch, best: SimulatedCandidate, result: SearchResult) -> list[FactDict]:
    """Return the next best of a row's family that were simulated: the same degrees, other details."""
    others = [each for each in result.simulated if each.family == best.family and each.rank > best.rank]
    return [
        {**asked.facts(each), "step_s": each.step_s, "memory_bytes": each.memory_bytes}
        for each in sorted(others, key=lambda each: each.rank)[:MOST_VARIANTS]
    ]


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
    best = result.best[0].strategy if result.best else None
    return [
        {
            "change": change.words,
            **strategy_facts(change.strategy),
            "step_s": change.step_s,
            "speed": change.speed_ratio,
            "other": best is not None and replace(change.strategy, global_batch=best.global_batch) != best,
        }
        for change in measure_sensitivity(result, asked.model, asked.joined_cluster)
    ]


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
        "low_s": report.low_s,
        "high_s": report.high_s,
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


def _find_change(asked: SettledSearch, deadline: float) -> FactDict | None:
    """Return the smallest change that lets something fit, of those that can be searched until *deadline*."""
    for words, changed in _changes(asked):
        result = changed.answer(top=1, watching=_Watching, most_s=deadline - time.monotonic())
        if not result.counts.complete:
            return None
        if result.best:
            best = result.best[0]
            return {
                "words": words,
                **changed.facts(best),
                "step_s": best.step_s,
                "memory_bytes": best.memory_bytes,
                "command": changed.command(best),
            }
    return None
