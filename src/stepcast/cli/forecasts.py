"""Forecasts: ``stepcast predict`` a step, ``search`` the best strategies, ``plan`` a run, ``generate`` text and ``rl``.

A verb loads what it needs beyond the forecast of a step when it runs.
"""

import argparse
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import msgspec

from stepcast.cli import output
from stepcast.cli.interrupts import INTERRUPTED
from stepcast.cli.options import check_applicable
from stepcast.cli.output import origin, print_notes, show_prediction, show_view, write_file
from stepcast.cli.streams import show_status
from stepcast.forecast.predict import compute_pricer, manner_of
from stepcast.forecast.simulate import simulate
from stepcast.generate.workload import generate
from stepcast.ir.framework import Execution
from stepcast.ir.strategy import NO_OFFLOAD, StrategyError
from stepcast.ir.types import ChangeFacts, FactDict, pick, require
from stepcast.ir.work import Work
from stepcast.questions.choices import refuse_options, several_of
from stepcast.questions.runs import EmittedConfig, answer_facts, emit_config, save_run, strategy_facts
from stepcast.questions.settle import SettledRun, settle
from stepcast.units import format_change, format_seconds
from stepcast.views.text import visible
from stepcast.views.view import View

if TYPE_CHECKING:
    from stepcast.questions.choices import Question
    from stepcast.questions.search import SettledSearch, Watching
    from stepcast.searching.result import SearchCounts, SearchResult, SimulatedCandidate

DOES_NOT_FIT = 1  # exit status
SAME_STEP = 0.01  # of a step: an exported workload that differs by more is reported
# Output of one answer, which several have none of.
SINGLE = ("output", "trace", "save", "to_workload", "gantt", "critical_path", "jitter", "explain_memory", "emit")
WRITTEN = (".csv", ".parquet", ".json")
EVERY_S = 0.1


def run_predict(args: argparse.Namespace) -> int:
    if args.captured:
        return _run_captured(args)
    if several_of(args.question):
        return show_alternatives(args, args.question)
    check_applicable(args)
    settled = settle(args.question)
    print_notes(settled.notes)
    warnings = args.run_file.warnings if args.run_file else []
    if args.to_workload:
        warnings += _write_workload(Path(args.to_workload), settled)
        if settled.framework.execution is not Execution.GRAPHS:
            warnings += [f"{args.to_workload} has no CPU launch overhead: read back, it runs as CUDA graphs do"]
    if args.save:
        require(args.save.endswith(".toml"), f"--save {args.save}: use a file name that ends in .toml")
        write_file(args.save, save_run(settled))
    prediction = settled.prediction.noting(settled.assumptions, warnings)
    values = settled.model, settled.cluster, settled.strategy, settled.framework
    emitted = emit_config(args.emit, settled.question, *values, prediction.step_s) if args.emit else None

    def changes() -> list[ChangeFacts]:
        from stepcast.questions.changes import find_neighbours

        return find_neighbours(settled, args.command)

    facts = answer_facts(prediction, settled, args.run_file)
    show_prediction(prediction, args, {**facts, "emitted": emitted.facts()} if emitted else facts, changes)
    show_emitted(args, emitted)
    return DOES_NOT_FIT if args.require_fit and not prediction.fits else 0


def _run_captured(args: argparse.Namespace) -> int:
    """Predict the step of a captured program."""
    from stepcast.cli.capture import ACTING, predict_program, read_captured

    why = "the captured program fixes what it computes and which software runs it; leave it out"
    refuse_options(sorted(args.given - ACTING), f"has no effect with --captured: {why}")
    prediction, asked = predict_program(read_captured(args.captured), args.question)
    show_prediction(prediction, args, asked)
    return DOES_NOT_FIT if args.require_fit and not prediction.fits else 0


def _write_workload(path: Path, settled: SettledRun) -> list[str]:
    """Write the generated workload with its estimated times, for other simulators; return warnings."""
    from stepcast.generate.aicb import aicb_times, aicb_workload, record_times
    from stepcast.outputs import chakra, simai

    model, strategy, framework = settled.model, settled.strategy, settled.framework
    require(strategy.offload == NO_OFFLOAD, f"{path}: workload files cannot describe offloading; leave --offload out")
    workload = generate(model, strategy, framework)
    given = settled.calibration, framework.attention
    price = compute_pricer(workload, settled.cluster, *given, schedule=strategy.schedule)

    def seconds(work: Work) -> float:
        return price(work).seconds  # type: ignore[arg-type]

    if (path.with_suffix("") if path.suffix == ".gz" else path).suffix == ".et":
        timed = replace(record_times(workload, seconds), manner=manner_of(model, strategy, framework))
        timed = replace(timed, notes=(*timed.notes, ("gpu", settled.cluster.gpu.name)))
        output.write_files(chakra.files(timed, str(path)))
        return []
    if strategy.mtp_layers:
        raise ValueError(f"{path}: AICB cannot describe MTP layers; a name that ends in .et writes Chakra, which can")
    times = aicb_times(workload, seconds, model.layers // (strategy.layout.pp * strategy.layout.vpp))
    try:
        written = aicb_workload(model, strategy, times)
        data = simai.write(written)
    except StrategyError as error:
        raise ValueError(f"{path}: {error}; a name that ends in .et writes Chakra, which may work") from None
    write_file(str(path), data)
    step_s, predicted_s = simulate(written, settled.cluster).step_s, settled.prediction.step_s
    if abs(step_s / predicted_s - 1) < SAME_STEP:
        return []
    return [
        f"{path} is this step in AICB's format, which overlaps no gradients and counts parameters differently: "
        f"simulated, it takes {format_seconds(step_s)}, {format_change(step_s / predicted_s - 1, 0)} against this "
        "prediction; a name that ends in .et writes Chakra, which simulates to the predicted step"
    ]


def run_search(args: argparse.Namespace) -> int:
    if args.captured:
        from stepcast.cli.capture import run_captured_search

        return run_captured_search(args)
    from stepcast.outputs.plain import check_parquet, table_bytes
    from stepcast.questions.search import search_facts, settle_search

    if args.output and not args.output.endswith(WRITTEN):
        raise ValueError(f"{args.output}: use a file name that ends in {', '.join(WRITTEN[:-1])} or {WRITTEN[-1]}")
    if args.output and args.output.endswith(".parquet"):
        check_parquet()
    question = args.question
    if args.name is not None:
        require(question.model is None, f"{args.name}: --model names the model already; leave one of them out")
        question = question.change({"model": args.name})
    if args.stream and (args.html or args.json or several_of(question)):
        raise ValueError("--stream prints JSON lines of one search: leave --html, --json and other clusters out")
    if several_of(question):
        return show_alternatives(args, question, _Watching)
    settled = settle_search(question)
    if args.emit and settled.is_mixed:
        raise ValueError("--emit: no configuration of a tool places stages on two kinds of GPUs; leave it out")
    try:
        result = settled.answer(watching=lambda: _Watching(settled if args.stream else None))
    finally:
        show_status("")
    facts = {**search_facts(settled, result, _Watching), **origin(args)}
    if args.output:
        if args.output.endswith(".json"):
            data = msgspec.json.format(msgspec.json.encode(facts), indent=2) + b"\n"
        else:
            rows = [{key: value for key, value in row.items() if key != "variants"} for row in facts["rows"]]
            data = table_bytes(args.output, rows)
        write_file(args.output, data)
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


def describe_candidate(candidate: "SimulatedCandidate") -> str:
    """Return the strategy of a candidate in words."""
    from stepcast.views.search import strategy_words

    return strategy_words(strategy_facts(candidate.strategy))


def result_view(facts: FactDict, result: "SearchResult") -> View:
    """Return the view of a search with all the candidates that it simulated."""
    from stepcast.views.search import search_view

    names = "step_s memory_bytes gpus"
    rows = [{"words": describe_candidate(candidate), **pick(candidate, names)} for candidate in result.simulated]
    return search_view(facts, rows)


def _print_line(facts: FactDict) -> None:
    print(msgspec.json.encode(facts).decode(), flush=True)


class _Watching:
    """Shows the progress of a search; the first Ctrl-C ends it with the best so far, another one ends all.

    Each best of the search *streamed* is printed as a JSON line.
    """

    def __init__(self, streamed: "SettledSearch | None" = None) -> None:
        self.stopped, self.last, self.began = False, 0.0, time.monotonic()
        self.streamed = streamed
        self.best: SimulatedCandidate | None = None
        self.before: Callable[[int, FrameType | None], object] | int | None = None

    def __enter__(self) -> "_Watching":
        return self

    def __exit__(self, *_: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)

    def __call__(self, counts: "SearchCounts", best: "SimulatedCandidate | None") -> None:
        if self.before is None and threading.current_thread() is threading.main_thread():
            self.before = signal.getsignal(signal.SIGINT)
            if self.before is not signal.SIG_IGN:
                signal.signal(signal.SIGINT, self._stop)
        if self.stopped:
            raise KeyboardInterrupt
        now = time.monotonic()
        if self.streamed is not None and best is not None and best is not self.best:
            self.best = best
            progress = {"simulated": counts.simulated, "unseen": counts.unseen, "seconds": now - self.began}
            figures = {"step_s": best.step_s, "memory_bytes": best.memory_bytes, "command": self.streamed.command(best)}
            _print_line({"event": "best", **progress, **self.streamed.facts(best), **figures})
        if now - self.last >= EVERY_S:
            self.last = now
            if best is None:
                text = f"bounding {counts.considered:,} candidates, {counts.priced:,} kinds of layers estimated"
            else:
                text = (
                    f"simulated {counts.simulated:,}, {counts.unseen:,} of {counts.considered:,} left; "
                    f"best {format_seconds(best.step_s)}: {describe_candidate(best)}"
                )
            show_status(output.moving_text("search", round((now - self.began) / EVERY_S), text))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        signal.signal(signal.SIGINT, self.before)


def show_alternatives(args: argparse.Namespace, question: "Question", watching: "Watching" = nullcontext) -> int:
    """Answer a question with several clusters, frameworks or numbers of GPUs; return the exit status."""
    from stepcast.questions.alternatives import answer_alternatives
    from stepcast.views.search import alternatives_view

    single = (name for name in SINGLE if getattr(args, name, None))
    refuse_options(single, "is for a single answer: name one cluster and framework")
    try:
        answer = answer_alternatives(question, watching)
    finally:
        show_status("")
    show_view(args, alternatives_view({**answer.facts(), **origin(args)}))
    return 0 if any(row["fits"] is not False for row in answer.rows) else 1


def show_emitted(args: argparse.Namespace, emitted: EmittedConfig | None) -> None:
    """Write the configuration to its file, or print it."""
    if emitted is None:
        return
    file = args.emit.partition("=")[2]
    if file:
        write_file(file, emitted.text.encode())
    if args.json:
        return
    print(f"\nwrote {file}" if file else f"\n{emitted.text}", end="\n" if file else "")
    print_notes(emitted.notes)


def run_plan(args: argparse.Namespace) -> int:
    from stepcast.outputs.plain import table_bytes
    from stepcast.questions.plan import settle_plan
    from stepcast.views.plan import plan_view

    if args.captured:
        raise ValueError(
            "--captured: a plan needs --model, whose checkpoints and restarts it knows; 'stepcast predict --captured "
            "FILE' and 'stepcast search --captured FILE' predict the step of a captured program"
        )
    if several_of(args.question):
        return show_alternatives(args, args.question)
    settled = settle_plan(args.question)
    print_notes(dict.fromkeys(note for step in settled.steps if step for note in step.notes))
    if args.run_file:
        settled = replace(settled, warnings=(*settled.warnings, *args.run_file.warnings))
    facts = {**settled.answer().to_dict(), **origin(args)}
    if args.output:
        write_file(args.output, table_bytes(args.output, facts["choices"]))
    show_view(args, plan_view(facts), below=[f"wrote {visible(args.output)}"] if args.output else ())
    return 0


def run_generate(args: argparse.Namespace) -> int:
    from stepcast.questions.generation import answer_generation
    from stepcast.views.generation import generation_view

    question = args.question if args.run is None else args.question.change({"model": args.run})
    show_view(args, generation_view({**answer_generation(question).facts(), **origin(args)}))
    return 0


def run_rl(args: argparse.Namespace) -> int:
    from stepcast.ir.progress import watch_progress
    from stepcast.rl.question import answer_rl, ask_rl, rl_facts, search_rl
    from stepcast.views.generation import rl_search_view, rl_view

    question, config = ask_rl(pick(args.question, " ".join(args.stated)), args.run, args.config)
    if question.search:
        with watch_progress(output.ProgressBar("rl", " candidates")):
            result = search_rl(question)
        show_view(args, rl_search_view({**result, "config": config, **origin(args)}))
    else:
        show_view(args, rl_view({**rl_facts(answer_rl(question), question, config), **origin(args)}))
    return 0
