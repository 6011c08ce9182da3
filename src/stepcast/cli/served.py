"""Answers of the local app, for the choices of its forms: a function for each of its verbs."""

import gc
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count
from math import inf
from typing import TYPE_CHECKING, cast

from stepcast.analyze.compare import compare as compare_facts
from stepcast.cli.analyze import ANALYSES, analyze_document
from stepcast.cli.forecasts import describe_candidate, result_view
from stepcast.forecast.prediction import roofline
from stepcast.inputs.configs.reader import read_text
from stepcast.inputs.huggingface.reader import looks_like as is_model
from stepcast.inputs.huggingface.reader import read as read_model
from stepcast.inputs.source import FormatError, Source
from stepcast.inputs.table import misused, read_as_one
from stepcast.ir.children import Child
from stepcast.ir.limits import DESCRIPTION
from stepcast.ir.timeline import Timeline
from stepcast.ir.types import FactDict, require
from stepcast.questions.alternatives import answer_alternatives
from stepcast.questions.changes import find_neighbours, find_remedies
from stepcast.questions.choices import build_question, option_of, read_choices, several_of
from stepcast.questions.plan import PlanQuestion, settle_plan
from stepcast.questions.question import AnalyzeQuestion, PredictQuestion
from stepcast.questions.runs import ask_with_file, run_facts, run_of_config
from stepcast.questions.search import SearchQuestion, search_facts, settle_search
from stepcast.questions.settle import SettledRun, settle
from stepcast.searching.result import SearchCounts, SimulatedCandidate
from stepcast.serve.app import MISTAKES, AppAnswer, Pause, Report
from stepcast.serve.fields import PREDICT, FormChoices, form_command, join_others, read_form
from stepcast.units import format_bytes, format_percent, format_seconds
from stepcast.version import __version__
from stepcast.views.compare import compare_view
from stepcast.views.document import About
from stepcast.views.html import page_of
from stepcast.views.plan import plan_view
from stepcast.views.search import alternatives_view
from stepcast.views.step import layout_words, step_view, subject
from stepcast.views.view import View

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

EVERY_S = 0.1
UPLOAD_S = 60.0
FORGET_EVERY = 100  # predictions
FORGOTTEN = ("stepcast.generate.", "stepcast.cost.", "stepcast.forecast.", "stepcast.simulation.", "stepcast.ir.")
PREDICTIONS = count(1)


def warm() -> None:
    """Load what the first answer needs before anybody asks for it."""
    predict(read_form(PREDICT, {field.name: field.initial for field in PREDICT}), None)


def predict(choices: FormChoices, pause: Pause | None) -> AppAnswer:
    return _step_answer(*predict_choices(choices), pause)


def predict_choices(choices: FormChoices) -> tuple[SettledRun, FactDict]:
    """Return the run that a form asks for, and its facts."""
    if next(PREDICTIONS) % FORGET_EVERY == 0:
        forget_costs()
    run = settle(build_question(PredictQuestion, dict(choices)))
    return run, _step_facts(run, form_command("predict", choices))


def _step_facts(run: SettledRun, command: str) -> FactDict:
    return {**run_facts(run), **_origin(command), **run.prediction.noting(run.assumptions).report.facts()}


def compare(first: FormChoices, second: FormChoices) -> AppAnswer:
    sides = [predict_choices(choices)[1] for choices in (first, second)]
    names = tuple(f"{subject(side)}, {layout_words(side['run'])}" for side in sides)
    if names[0] == names[1]:
        names = (f"{names[0]} (first)", f"{names[1]} (second)")
    facts = compare_facts(*sides).facts()
    commands = "\n".join(side["command"] for side in sides)
    return _answer(compare_view(facts, (names[0], names[1])), "compare", commands, facts["step_s"])


def plan(choices: FormChoices) -> AppAnswer:
    given = {name: value for name, value in choices if name != "currency" or dict(choices).get("price")}
    plan = settle_plan(build_question(PlanQuestion, {**given, "allow_oom": True})).answer()
    command = form_command("plan", tuple(given.items())) + (" --allow-oom" if plan.fits is False else "")
    return _answer(plan_view({**plan.to_dict(), **_origin(command)}), "plan", command)


def alternatives(choices: FormChoices) -> AppAnswer:
    given = join_others(choices)
    of_run = {"tokens", "price", "failures"} & given.keys()
    require(not of_run or "tokens" in of_run, "Tokens: a price or failures need the length of the run")
    verb, kind = ("plan", PlanQuestion) if of_run else ("predict", PredictQuestion)
    question = build_question(kind, given)
    require(several_of(question) != [], "choose a second cluster or framework to compare")
    command = form_command(verb, tuple(given.items()))
    return _answer(alternatives_view({**answer_alternatives(question).facts(), **_origin(command)}), verb, command)


def search(choices: FormChoices, report: Report) -> AppAnswer:
    return _run_apart(_search, (choices,), report)


def analyze(given: Sequence[tuple[str, bytes]], choices: FormChoices, report: Report) -> AppAnswer:
    """Return the analysis of measured runs, or the prediction of a configuration or of a model's config.json."""
    return _run_apart(_analyze, (given, choices), report, UPLOAD_S)


def _origin(command: str) -> FactDict:
    return {"command": command, "version": __version__}


def _answer(view: View, verb: str, command: str, step_s: float | None = None) -> AppAnswer:
    page = page_of(view, About(verb, command, __version__))
    return AppAnswer(page, {"title": page.title, "words": "", "step_s": step_s})


def _step_answer(run: SettledRun, facts: FactDict, pause: Pause | None) -> AppAnswer:
    """Return the answer about a step; with *pause* also its timeline and what to change."""
    about = About("predict", facts["command"], __version__)
    if pause is not None:
        if not run.prediction.fits:
            facts |= find_remedies(run, facts["step_s"])
        changes = find_neighbours(run, facts["command"], pause)
        view = step_view(facts, run.prediction.shown_timeline, roofline(run.prediction), changes)
    else:
        view = step_view(facts, None, roofline(run.prediction))
    memory = facts["memory_bytes"]
    figures = f"MFU {format_percent(facts['mfu'])}, {format_bytes(memory['total'])}, {memory['verdict']}"
    title = f"{format_seconds(facts['step_s'])}: {subject(facts)}"
    words = f"{layout_words(facts['run'])}; {figures}"
    return AppAnswer(page_of(view, about), {"title": title, "words": words, "step_s": facts["step_s"]})


def forget_costs() -> None:
    """Clear the caches of workloads, costs and programs, which neighbouring questions share and other ones fill."""
    for name, module in list(sys.modules.items()):
        if name.startswith(FORGOTTEN):
            for value in list(vars(module).values()):
                if not isinstance(value, type) and callable(clear := getattr(value, "cache_clear", None)):
                    clear()
    gc.collect()


# ---- answers in a process of their own, which can be ended --------------------------------------------------

Send = Callable[[dict[str, str]], None]


def _run_apart(
    task: Callable[..., AppAnswer], given: tuple[object, ...], report: Report, most_s: float = inf
) -> AppAnswer:
    """Return the answer of *task* from another process, so that other answers do not wait and it can be ended."""
    child, until = Child(_send_answer, task, given), time.monotonic() + most_s
    try:
        while True:
            while not child.pipe.poll(EVERY_S):
                report({})
                require(time.monotonic() <= until, f"the answer takes longer than {most_s:.0f} s; use the command line")
            kind, value = child.pipe.recv()
            if kind == "answer":
                return cast("AppAnswer", value)
            if kind == "mistake":
                raise ValueError(value)
            report(value)
    except EOFError:
        raise ValueError("the work ended without an answer, perhaps because memory ran out") from None
    finally:
        child.end()


def _send_answer(pipe: "Connection", task: Callable[..., AppAnswer], given: tuple[object, ...]) -> None:
    """Send the progress and the answer of *task* into *pipe*."""
    try:
        pipe.send(("answer", task(*given, lambda progress: pipe.send(("progress", progress)))))
    except MISTAKES as error:
        pipe.send(("mistake", str(error) or type(error).__name__))


def _predict_file(source: Source, choices: FactDict) -> AppAnswer:
    """Return the prediction of a configuration, or of a model's config.json with the *choices* of the form."""
    if is_model(source.head):
        filed, given = None, {**choices, "model": replace(read_model(source), name=source.path)}
    else:
        filed = run_of_config(read_text(source.text(DESCRIPTION), source.path), source.path)
        needed = ["cluster", *(["model"] if "model" not in filed.choices else [])]
        needed += [] if {"gpus", "nodes", "dp"} & {*filed.choices} else ["gpus"]
        given = {name: choices[name] for name in needed if name in choices}
    run = settle(ask_with_file(PredictQuestion, read_choices(PredictQuestion, given), filed))
    named = " ".join(f"{option_of(name)} {value}" for name, value in given.items() if filed or name != "model")
    line = f"stepcast predict {'--config' if filed else '--model'} {source.path} {named}"
    return _step_answer(run, _step_facts(run, line), lambda: None)


def _analyze(given: Sequence[tuple[str, bytes]], choices: FormChoices, send: Send) -> AppAnswer:
    sources, form = [Source(name, data) for name, data in given], dict(choices)
    cluster = form.pop("ran_on", None)
    try:
        entry, document = read_as_one(sources, None)
        if entry.name not in ANALYSES:
            raise misused(entry, given[0][0], "only measured runs are analyzed")
    except ValueError:
        if len(sources) == 1:
            with suppress(FormatError):
                return _predict_file(sources[0], form)
        raise
    result = analyze_document(entry, document, AnalyzeQuestion(cluster=cluster))
    names = " ".join(name for name, _ in given)
    line = f"stepcast analyze {names}" + (f" --cluster {cluster}" if cluster else "")
    timeline = document if isinstance(document, Timeline) else None
    return _answer(result.show(timeline), "analyze", line, result.facts().get("step_s"))


def _search(choices: FormChoices, send: Send) -> AppAnswer:
    last = [0.0]

    def watch(counts: SearchCounts, best: SimulatedCandidate | None) -> None:
        now = time.monotonic()
        if now - last[0] >= EVERY_S:
            last[0] = now
            state = f"best {format_seconds(best.step_s)}: {describe_candidate(best)}" if best else "none fits yet"
            send({"words": f"simulated {counts.simulated:,}, {counts.unseen:,} left; {state}"})

    # A single process, so that ending it ends all; live answers have the other cores.
    asked = settle_search(build_question(SearchQuestion, {**dict(choices), "workers": 1}))
    result = asked.answer(watching=lambda: nullcontext(watch))
    command = form_command("search", choices)
    return _answer(result_view({**search_facts(asked, result), **_origin(command)}, result), "search", command)
