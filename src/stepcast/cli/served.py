"""The verbs as the local app asks for them."""

import argparse
import shlex
import time
from collections.abc import Sequence
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, NoReturn, cast

from stepcast.analyze.compare import compare
from stepcast.cli import search
from stepcast.cli.analyze import ANALYSES
from stepcast.cli.forecasting import run_facts
from stepcast.cli.main import Parser
from stepcast.cli.neighbours import neighbours
from stepcast.cli.remedies import remedies
from stepcast.cli.search import result_view
from stepcast.cli.search_facts import search_facts
from stepcast.cli.search_question import question_of
from stepcast.forecast.prediction import roofline
from stepcast.hardware import cluster_names
from stepcast.inputs.source import Source
from stepcast.inputs.table import read_as_one
from stepcast.ir.facts import find_doubts
from stepcast.ir.timeline import Timeline
from stepcast.questions.settle import SettledRun, settle
from stepcast.questions.spelling import build_question
from stepcast.searching.result import SearchCounts, SimulatedCandidate
from stepcast.serve.app import MISTAKES, Answer, Rest, Told
from stepcast.serve.fields import PREDICT, command_words
from stepcast.units import format_bytes, format_percent, format_seconds
from stepcast.version import __version__
from stepcast.views.compare import compare_view
from stepcast.views.document import About
from stepcast.views.html import page_of
from stepcast.views.step import layout_words, step_view, subject

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


EVERY_S = 0.1


class _Words(Parser):
    """Words that no person typed: what is wrong with them is raised, not printed."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


class Verbs:
    """The verbs as the app asks for them."""

    def warm(self) -> None:
        """Load what the first answer needs before anybody asks for it."""
        self.predict(command_words("predict", PREDICT, {each.name: each.usual for each in PREDICT}), None)

    @cached_property
    def searching(self) -> argparse.ArgumentParser:
        parser = _Words(prog="stepcast search")
        search.add_arguments(parser)
        return parser

    def predict(self, words: Sequence[str], rest: Rest | None) -> Answer:
        found, facts = self._predicted(words)
        about = About("predict", facts["command"], __version__)
        if rest is not None:
            if not found.prediction.fits:
                facts["remedies"] = remedies(found, facts["step_s"])
            changes = neighbours(found, facts["command"], rest)
            view = step_view(facts, found.prediction.drawn, roofline(found.prediction), changes)
        else:
            view = step_view(facts, None, roofline(found.prediction))
        memory = facts["memory_bytes"]
        verdict = memory["verdict"]
        said = f"MFU {format_percent(facts['mfu'])}, {format_bytes(memory['total'])}, {verdict}"
        title = f"{format_seconds(facts['step_s'])}: {subject(facts)}"
        return Answer(
            page_of(view, about),
            {"title": title, "words": f"{layout_words(facts['run'])}; {said}", "step_s": facts["step_s"]},
        )

    def _predicted(self, words: Sequence[str]) -> tuple[SettledRun, dict[str, Any]]:
        names = [option.removeprefix("--") for option in words[1::2]]
        run = settle(build_question(dict(zip(names, words[2::2], strict=True))))
        report = run.prediction.noting(run.assumptions).report
        command = shlex.join(["stepcast", *words])
        return run, {**run_facts(run), "command": command, "version": __version__, **report.facts()}

    def compare(self, first: Sequence[str], second: Sequence[str]) -> Answer:
        sides = [self._predicted(words)[1] for words in (first, second)]
        names = tuple(f"{subject(side)}, {layout_words(side['run'])}" for side in sides)
        if names[0] == names[1]:
            names = (f"{names[0]} (first)", f"{names[1]} (second)")
        found = compare(*sides).facts()
        commands = "\n".join(side["command"] for side in sides)
        view = compare_view(found, (names[0], names[1]))
        page = page_of(view, About("compare", commands, __version__))
        return Answer(page, {"title": page.title, "words": "", "step_s": found["step_s"]})

    def search(self, words: Sequence[str], told: Told) -> Answer:
        """In a process of its own, so that live answers do not wait for it, and it ends when nobody does."""
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=search_apart, args=(list(words), theirs), daemon=True)
        process.start()
        theirs.close()
        try:
            while True:
                while not ours.poll(EVERY_S):
                    told({})
                kind, value = ours.recv()
                if kind == "answer":
                    return cast("Answer", value)
                if kind == "mistake":
                    raise ValueError(value)
                told(value)
        except EOFError:
            raise ValueError("the search ended without an answer") from None
        finally:
            ours.close()
            process.terminate()

    def analyze(self, given: Sequence[tuple[str, bytes]], cluster: str | None) -> Answer:
        if cluster is not None and cluster not in cluster_names():
            raise ValueError(f"cluster {cluster[:40]!r} is not one of those known")
        entry, document = read_as_one([Source(name, data) for name, data in given], None)
        if entry.name not in ANALYSES:
            raise ValueError(f"{given[0][0]}: is {entry.name}, which does not say what happened")
        args = argparse.Namespace(cluster=cluster, set=[], calibration=None, trace=None)
        found = {"format": entry.name, **ANALYSES[entry.name][0](document, args)}
        found["warnings"] = [*found["warnings"], *find_doubts(found)]
        names = " ".join(name for name, _ in given)
        line = f"stepcast analyze {names}" + (f" --cluster {cluster}" if cluster else "")
        timeline = document if isinstance(document, Timeline) else None
        view = ANALYSES[entry.name][1](found, timeline)
        page = page_of(view, About("analyze", line, __version__))
        return Answer(page, {"title": page.title, "words": "", "step_s": found.get("step_s")})


@cache
def verbs() -> Verbs:
    return Verbs()


def search_apart(words: list[str], pipe: "Connection") -> None:
    """Search, and send how far it is and what was found into *pipe*."""

    last = [0.0]

    def watch(counts: SearchCounts, best: SimulatedCandidate | None) -> None:
        now = time.monotonic()
        if now - last[0] >= EVERY_S:
            last[0] = now
            told = f"best {format_seconds(best.step_s)}" if best else "none fits yet"
            words = f"simulated {counts.simulated:,}, {counts.unseen:,} left; {told}"
            pipe.send(("progress", {"words": words}))

    try:
        # One process, which ends whole when it is ended; live answers have the other cores.
        asked = question_of(Verbs().searching.parse_args([*words[1:], "--workers", "1"]))
        result = asked.answer(watch=watch)
        found = search_facts(asked, result)
        about = About("search", shlex.join(["stepcast", *words]), __version__)
        page = page_of(result_view(found, result), about)
        pipe.send(("answer", Answer(page, {"title": page.title, "words": "", "step_s": None})))
    except MISTAKES as error:
        pipe.send(("mistake", str(error) or type(error).__name__))
