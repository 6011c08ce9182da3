"""Points of a sweep as command lines: each is asked by the path that a person's command takes."""

import argparse
import contextlib
import hashlib
import io
import shlex
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from stepcast.cli.main import VERBS, build_parser
from stepcast.cli.options import option_of
from stepcast.cli.plan import planned
from stepcast.cli.predict import training
from stepcast.cli.search_facts import best_row
from stepcast.cli.search_question import question_of
from stepcast.forecast.predict import predict_many, throughput
from stepcast.frameworks.catalog import load_profile
from stepcast.hardware import load_cluster
from stepcast.models.catalog import load_model
from stepcast.questions.question import CHOICES
from stepcast.questions.settle import SettledRun, settle
from stepcast.questions.spelling import build_question
from stepcast.sweep.chunks import Answers
from stepcast.sweep.spec import Spec, Words
from stepcast.sweep.summary import OUT_OF_TIME
from stepcast.units import DAY, format_seconds

# Options that change what is printed or write files, and have no place in a point.
ASIDE = ("help", "json", "trace", "to_workload", "output", "explain_memory", "html", "save", "top")
BREAKDOWN = "breakdown"
# Points that are tried to tell how long very many take, and how many are looked at for them.
TRIED, TRIED_AMONG = 16, 10_000


def answers(ask: str, points: Sequence[Words]) -> Answers:
    """What each of *points* is told; one that cannot be answered is told why."""
    if ask == "predict":
        return _predicted(points)
    one = {"search": _best, "plan": _planned}[ask]
    return [one(words) for words in points]


def command(ask: str, words: Words) -> str:
    """The line that asks for a point alone."""
    shown = {name: value for name, value in words.items() if name != BREAKDOWN}
    return shlex.join(["stepcast", ask, *_arguments(shown)])


def check_words(spec: Spec) -> None:
    """A ValueError where a word is no option of what is asked."""
    from difflib import get_close_matches

    known = _options(spec.ask)
    for name in spec.names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"{name!r} is no option of 'stepcast {spec.ask}' that a point can have{hint}")


def check_many(spec: Spec, workers: int) -> None:
    """A ValueError that tells how long all points would take where they are very many."""
    from stepcast.ir.limits import SEARCHES, UNASKED

    limit = UNASKED if spec.ask == "predict" else SEARCHES
    if spec.size <= limit.most or (points := spec.counted()[0]) <= limit.most:
        return
    each_s = _trial_s(spec)
    took = f"{format_seconds(each_s)} each in a trial, {each_s * points / workers / DAY:,.1f} days"
    raise ValueError(
        f"{points:,} points take about {took} with {workers} workers; --limit N asks N of them, spread "
        f"evenly, and --limit {spec.size} all"
    )


def _trial_s(spec: Spec) -> float:
    """Seconds of a point, from a few that follow one another in the middle; predictions after others."""
    import time
    from itertools import islice

    before, few = (TRIED, TRIED) if spec.ask == "predict" else (0, 1)
    start = spec.size // 2
    near = map(spec.at, range(start, min(spec.size, start + TRIED_AMONG)))
    wanted = (words for words in near if spec.filter is None or spec.filter(words))
    some = list(islice(wanted, before + few)) or [spec.at(start)]
    answers(spec.ask, some[:-few])
    began = time.perf_counter()
    answers(spec.ask, some[-few:])
    return (time.perf_counter() - began) / len(some[-few:])


def digest(name: str, value: Any) -> str:
    """What a word stands for: names of models, clusters, frameworks and files by what they hold."""
    loaders: dict[str, Callable[[str], object]] = {
        "model": load_model,
        "cluster": load_cluster,
        "framework": load_profile,
    }
    try:
        if name in loaders:
            return _hashed(repr(loaders[name](value)).encode())
        if name in ("calibration", "config"):
            from stepcast.inputs.source import Source
            from stepcast.ir.limits import RESULT

            return _hashed(Source(value).text(RESULT).encode())
    except (ValueError, OSError) as error:
        return f"{value!r}: {error}"
    return repr(value)


@cache
def program() -> str:
    """The digest of all code and data that an answer follows from."""
    root = Path(__file__).resolve().parents[1]
    found = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml", ".csv", ".json") and path.is_file():
            found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def _hashed(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


@cache
def _parser(verb: str) -> argparse.ArgumentParser:
    return build_parser([each for each in VERBS if each.name == verb])


@cache
def _options(verb: str) -> list[str]:
    """Return the names of what a point can say."""
    if verb == "predict":
        denied = [f"no_{name}" for name, choice in CHOICES.items() if choice.deniable]
        return sorted([*CHOICES, *denied, BREAKDOWN])
    from importlib import import_module

    parser = argparse.ArgumentParser(add_help=False)
    import_module(f"stepcast.cli.{verb}").add_arguments(parser)
    words = {word for action in parser._actions for word in action.option_strings}
    return sorted({word.lstrip("-").replace("-", "_") for word in words} - set(ASIDE))


def _arguments(words: Words) -> list[str]:
    found = []
    for name, value in words.items():
        option = option_of(name)
        if isinstance(value, bool):
            found += [option] if value else []
        elif isinstance(value, list):
            found += [f"{option}={each}" for each in value]
        else:
            found.append(f"{option}={value}")
    return found


def parsed(verb: str, words: Words) -> argparse.Namespace:
    """What a command line of *words* would say; a ValueError where it would be refused."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _parser(verb).parse_args([verb, *_arguments(words)])
    except SystemExit:
        told = said.getvalue().strip().removeprefix("stepcast: ")
        raise ValueError(told.partition("; usage:")[0]) from None


# ---- predictions --------------------------------------------------------------------------------------


def _predicted(points: Sequence[Words]) -> Answers:
    found: Answers = [{} for _ in points]
    asked: list[tuple[int, SettledRun]] = []
    for place, words in enumerate(points):
        given = {name: value for name, value in words.items() if name != BREAKDOWN}
        try:
            asked.append((place, settle(build_question(given))))
        except Exception as error:
            found[place] = _failed(error)
    for _, group in groupby(asked, key=lambda each: _shared(each[1])):
        several = list(group)
        predictions = _predictions([each for _, each in several])
        for (place, each), prediction in zip(several, predictions, strict=True):
            found[place] = _row(each, prediction, bool(points[place].get(BREAKDOWN)))
    return found


def _shared(asked: SettledRun) -> tuple[Any, ...]:
    options = asked.options
    values = asked.model, id(asked.cluster), asked.framework, id(asked.calibration)
    return (*values, options.place, options.residual, options.engine)


def _predictions(asked: Sequence[SettledRun]) -> list[Any]:
    """Predictions of what differs in its strategy alone; an error stands for those that have none."""
    first = asked[0]

    def predicted(some: Sequence[SettledRun]) -> list[Any]:
        strategies = [each.strategy for each in some]
        values = first.model, first.cluster, strategies, first.framework
        return list(predict_many(*values, first.options, first.calibration))

    try:
        return predicted(asked)
    except Exception as error:
        if len(asked) == 1:
            return [error]
    middle = len(asked) // 2
    return [*_predictions(asked[:middle]), *_predictions(asked[middle:])]


def _row(asked: SettledRun, prediction: Any, breakdown: bool) -> dict[str, Any]:
    if isinstance(prediction, Exception):
        return _failed(prediction)
    try:
        step_s = prediction.step_s
        fast = throughput(asked.model, asked.cluster, asked.strategy, step_s)
        run = training(asked.question, asked.strategy, step_s) or {}
        low_s, high_s = prediction.band.around(step_s) if prediction.band else (None, None)
        row = {
            "step_s": step_s,
            "low_s": low_s,
            "high_s": high_s,
            "tokens_per_s_per_gpu": fast.tokens_per_s / asked.strategy.layout.gpus,
            "mfu": fast.mfu,
            "memory_bytes": float(max(stage.total for stage in prediction.memory)),
            "fits": int(prediction.fits),
            **{name: run.get(name) for name in ("days", "gpu_hours", "cost")},
        }
        if breakdown:
            report = prediction.report
            exposed = sum(each.exposed_s for each in report.communication_s.values())
            row |= {"bubble": report.breakdown_s["bubble"] / step_s, "exposed": exposed / step_s}
    except Exception as error:
        return _failed(error)
    return row


def _failed(error: Exception) -> dict[str, Any]:
    return {"error": str(error) or type(error).__name__}


# ---- searches and plans -------------------------------------------------------------------------------


def _planned(words: Words) -> dict[str, Any]:
    """Days are the mean of the simulated runs; a run that does not fit is a row too, as in ``predict``."""
    try:
        args = parsed("plan", words)
        args.allow_oom = args.step_s is None
        answer = planned(args)
    except Exception as error:
        return _failed(error)
    found, fits = answer.facts, answer.plan.fits
    ideal_s = found["days"]["without_interruption"] * DAY
    gpu_s = sum(phase["steps"] * phase["step_s"] * phase["gpus"] for phase in found["phases"])
    memory = [phase["memory_bytes"]["total"] for phase in found["phases"] if phase["memory_bytes"]]
    return {
        "step_s": ideal_s / found["steps"],
        "tokens_per_s_per_gpu": found["tokens"] / gpu_s if found["tokens"] else None,
        "mfu": found["mfu"],
        "memory_bytes": max(memory, default=None),
        "fits": None if fits is None else int(fits),
        "days": found["days"]["mean"],
        **{name: found[name] for name in ("gpu_hours", "cost", "goodput")},
    }


def _best(words: Words) -> dict[str, Any]:
    try:
        row, counts = best_row(question_of(parsed("search", {**words, "workers": 1})))
    except Exception as error:
        return _failed(error)
    state = {"state": OUT_OF_TIME} if counts.out_of_time else {}
    if row is None:
        return state or {"error": "nothing fits", "fits": 0}
    names = ("step_s", "low_s", "high_s", "tokens_per_s_per_gpu", "mfu", "memory_bytes")
    found = {name: row[name] for name in (*names, "days", "gpu_hours", "cost")}
    return {**found, "fits": 1, "found": row["command"], **state}
