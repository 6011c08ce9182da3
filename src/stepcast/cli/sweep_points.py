"""Points of a sweep as questions: each is answered as the verb of the same name answers it."""

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby, islice
from pathlib import Path

from stepcast.forecast.predict import predict_many, throughput
from stepcast.forecast.prediction import Prediction
from stepcast.frameworks.catalog import load_profile
from stepcast.hardware import load_cluster
from stepcast.inputs.source import Source
from stepcast.ir.limits import RESULT, SEARCHES, UNASKED
from stepcast.ir.types import FactDict
from stepcast.models.catalog import load_model
from stepcast.questions.alternatives import VERBS
from stepcast.questions.choices import UnknownChoiceError, build_question, resolve_name
from stepcast.questions.plan import PlanQuestion, settle_plan
from stepcast.questions.question import PredictQuestion
from stepcast.questions.runs import training_facts
from stepcast.questions.search import SearchQuestion, best_row, settle_search
from stepcast.questions.settle import SettledRun, settle
from stepcast.sweep.engines import Answers
from stepcast.sweep.spec import Spec, Words
from stepcast.sweep.store import OUT_OF_TIME, RETRY
from stepcast.units import DAY, format_seconds

BREAKDOWN = "breakdown"
# Number of points that are tried to estimate the time of all, and number of points from which they are taken.
TRIED, TRIED_AMONG = 16, 10_000


def answers(ask: str, points: Sequence[Words]) -> Answers:
    """Return the answer of each point, or its error."""
    if ask == "predict":
        return _predict(points)
    return [_answer_or_error({"search": _search, "plan": _plan}[ask], words) for words in points]


def check_words(spec: Spec) -> None:
    """Raise a ValueError if a word is no choice of the question that is asked."""
    for name in spec.names:
        if name == BREAKDOWN and spec.ask == "predict":
            continue
        try:
            resolve_name(VERBS[spec.ask], name, True)
        except UnknownChoiceError as error:
            raise ValueError(
                f"{name!r} is no option of 'stepcast {spec.ask}' that a point can have{error.hint}"
            ) from None


def check_many(spec: Spec, workers: int) -> None:
    """Raise a ValueError with the time that all points would take if they are very many."""
    limit = UNASKED if spec.ask == "predict" else SEARCHES
    if spec.size <= limit.most or (points := spec.count_points()[0]) <= limit.most:
        return
    before, few = (TRIED, TRIED) if spec.ask == "predict" else (0, 1)
    start = spec.size // 2
    near = map(spec.point, range(start, min(spec.size, start + TRIED_AMONG)))
    wanted = (words for words in near if spec.filter is None or spec.filter(words))
    some = list(islice(wanted, before + few)) or [spec.point(start)]
    answers(spec.ask, some[:-few])
    began = time.perf_counter()
    answers(spec.ask, some[-few:])
    point_s = (time.perf_counter() - began) / len(some[-few:])
    took = f"{format_seconds(point_s)} each in a trial, {point_s * points / workers / DAY:,.1f} days"
    raise ValueError(
        f"{points:,} points take about {took} with {workers} workers; --limit N asks N of them, spread "
        f"evenly, and --limit {spec.size} all"
    )


def digest(name: str, value: object) -> str:
    """Return the digest that identifies a word: models, clusters, frameworks and files by their contents."""
    loaders: dict[str, Callable[[str], object]]
    loaders = {"model": load_model, "cluster": load_cluster, "framework": load_profile}
    try:
        if name in loaders:
            return _hash(repr(loaders[name](str(value))).encode())
        if name in ("calibration", "config"):
            return _hash(Source(str(value)).text(RESULT).encode())
    except (ValueError, OSError) as error:
        return f"{value!r}: {error}"
    return repr(value)


@cache
def program() -> str:
    """Return the digest of all code and data that an answer follows from."""
    root = Path(__file__).resolve().parents[1]
    code_hash = hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*")):
        if path.suffix in (".py", ".toml", ".csv", ".json") and path.is_file():
            code_hash.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return code_hash.hexdigest()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _predict(points: Sequence[Words]) -> Answers:
    results: Answers = [{} for _ in points]
    asked: list[tuple[int, SettledRun]] = []
    for place, words in enumerate(points):
        given = {name: value for name, value in words.items() if name != BREAKDOWN}
        try:
            asked.append((place, settle(build_question(PredictQuestion, given))))
        except Exception as error:
            results[place] = _describe_error(error)
    for _, group in groupby(asked, key=lambda entry: shared_values(entry[1])):
        several = list(group)
        for (place, run), prediction in zip(several, _predictions([run for _, run in several]), strict=True):
            results[place] = _answer_or_error(_row, run, prediction, bool(points[place].get(BREAKDOWN)))
    return results


def shared_values(run: SettledRun) -> tuple[object, ...]:
    """Return what runs that are predicted together have in common."""
    return run.model, id(run.cluster), run.framework, id(run.calibration), run.options.place, run.options.engine


def _predictions(asked: Sequence[SettledRun]) -> list[Prediction | Exception]:
    """Return predictions of runs that differ in their strategies alone; an error takes the place of a failed one."""
    first = asked[0]
    values = first.model, first.cluster, [run.strategy for run in asked], first.framework
    try:
        return list(predict_many(*values, first.options, first.calibration))
    except Exception as error:
        if len(asked) == 1:
            return [error]
    middle = len(asked) // 2
    return [*_predictions(asked[:middle]), *_predictions(asked[middle:])]


def _row(asked: SettledRun, prediction: Prediction | Exception, breakdown: bool) -> FactDict:
    if isinstance(prediction, Exception):
        raise prediction
    step_s = prediction.step_s
    fast = throughput(asked.model, asked.cluster, asked.strategy, step_s)
    run = training_facts(asked.question, asked.strategy, step_s) or {}
    # The report, which takes as long as the step, is needed where hosts or unmeasured costs may widen the interval.
    band = None if prediction.options.issue_s else prediction.band
    low_s, high_s = band.around(step_s) if band and band.measured else prediction.interval_s
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
        exposed = sum(part.exposed_s for part in report.communication_s.values())
        row |= {"bubble": report.breakdown_s["bubble"] / step_s, "exposed": exposed / step_s}
    return row


def _answer_or_error(answer: Callable[..., FactDict], *given: object) -> FactDict:
    """Return a row; an error takes the place of its figures."""
    try:
        return answer(*given)
    except Exception as error:
        return _describe_error(error)


def _describe_error(error: Exception) -> FactDict:
    is_passing = isinstance(error, OSError | MemoryError)
    return {"error": str(error) or type(error).__name__, "state": RETRY if is_passing else None}


def _plan(words: Words) -> FactDict:
    """Return the mean of the simulated runs; a run that does not fit is a row too, as in ``predict``."""
    question = build_question(PlanQuestion, words)
    plan = settle_plan(question.change({"allow_oom": question.step_s is None})).answer()
    facts, fits = plan.to_dict(), plan.fits
    gpu_s = sum(phase["steps"] * phase["step_s"] * phase["gpus"] for phase in facts["phases"])
    memory = [phase["memory_bytes"]["total"] for phase in facts["phases"] if phase["memory_bytes"]]
    return {
        "step_s": facts["days"]["without_interruption"] * DAY / facts["steps"],
        "tokens_per_s_per_gpu": facts["tokens"] / gpu_s if facts["tokens"] else None,
        "mfu": facts["mfu"],
        "memory_bytes": max(memory, default=None),
        "fits": None if fits is None else int(fits),
        "days": facts["days"]["mean"],
        **{name: facts[name] for name in ("gpu_hours", "cost", "goodput")},
    }


def _search(words: Words) -> FactDict:
    row, counts = best_row(settle_search(build_question(SearchQuestion, {**words, "workers": 1})))
    state = {"state": OUT_OF_TIME} if counts.out_of_time else {}
    if row is None:
        return state or {"error": "nothing fits", "fits": 0}
    names = ("step_s", "low_s", "high_s", "tokens_per_s_per_gpu", "mfu", "memory_bytes")
    figures = {name: row[name] for name in (*names, "days", "gpu_hours", "cost")}
    return {**figures, "fits": 1, "found": row["command"], **state}
