"""``stepcast search --model M --cluster C --gpus N --global-batch B ...``"""

import argparse
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

import msgspec

from stepcast.cli.interrupts import INTERRUPTED
from stepcast.cli.output import moving_text, origin, show_alternatives, show_emitted, show_view, write_file
from stepcast.cli.streams import show_status
from stepcast.ir.types import FactDict, pick
from stepcast.outputs.plain import check_parquet, table_bytes
from stepcast.questions.choices import several_of
from stepcast.questions.runs import emit_config, strategy_facts
from stepcast.questions.search import SettledSearch, search_facts, settle_search
from stepcast.searching.result import SearchCounts, SearchResult, SimulatedCandidate
from stepcast.units import format_seconds
from stepcast.views.search import search_view, strategy_words
from stepcast.views.view import View

WRITTEN = (".csv", ".parquet", ".json")
EVERY_S = 0.1


def run(args: argparse.Namespace) -> int:
    if args.captured:
        from stepcast.cli.capture import run_captured_search

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


def describe_candidate(candidate: SimulatedCandidate) -> str:
    """Return the strategy of a candidate in words."""
    return strategy_words(strategy_facts(candidate.strategy))


def result_view(facts: FactDict, result: SearchResult) -> View:
    """Return the view of a search with all the candidates that it simulated."""
    names = "step_s memory_bytes gpus"
    rows = [{"words": describe_candidate(candidate), **pick(candidate, names)} for candidate in result.simulated]
    return search_view(facts, rows)


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
            show_status(moving_text("search", round((now - self.began) / EVERY_S), text))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        signal.signal(signal.SIGINT, self.before)
