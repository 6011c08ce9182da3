"""One question with several clusters, frameworks or numbers of GPUs: an answer each, and the best by objective."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from typing import TYPE_CHECKING

from stepcast.hardware import Cluster
from stepcast.ir.types import FactDict, Facts, dataclass, pick, require
from stepcast.questions.choices import AnyQuestion, Question, choices_of, option_of, several_of, spell_choices
from stepcast.questions.plan import PlanQuestion, settle_plan
from stepcast.questions.question import PredictQuestion
from stepcast.questions.runs import strategy_facts, training_facts
from stepcast.questions.search import SearchQuestion, Watching, settle_search
from stepcast.questions.settle import settle
from stepcast.searching.mixed import find_free_bytes
from stepcast.units import DEFAULT_CURRENCY
from stepcast.views.answer import Answer

if TYPE_CHECKING:
    from stepcast.ir.step import StepReport
    from stepcast.ir.strategy import Strategy

MOST_ALTERNATIVES = 64
# Objective -> the key of a row and whether less of it is better.
OBJECTIVES: Mapping[str, tuple[str, bool]] = {
    "step time": ("step_s", True),
    "throughput per GPU": ("tokens_per_s_per_gpu", False),
    "days": ("days", True),
    "cost": ("cost", True),
    "energy": ("energy_mwh", True),
}


def split_question(question: AnyQuestion) -> list[AnyQuestion]:
    """Return a question for each combination of the several values; prices go with the clusters, one for each."""
    names = [name for name in several_of(question) if name != "price"]
    for name in names:
        values = list(map(str, getattr(question, name)))
        twice = next((value for index, value in enumerate(values) if value in values[:index]), None)
        require(twice is None, f"{option_of(name)} names {twice} twice; leave one of them out")
    combinations = [dict(zip(names, values, strict=True)) for values in product(*(getattr(question, n) for n in names))]
    if len(combinations) > MOST_ALTERNATIVES:
        raise ValueError(f"{len(combinations)} alternatives are more than {MOST_ALTERNATIVES}; use a sweep")
    prices = getattr(question, "price", None)
    if isinstance(prices, tuple):
        places = next((getattr(question, name) for name in ("cluster", "gpu") if name in names), ())
        if len(prices) != len(places):
            raise ValueError(
                f"--price has {len(prices)} values for {len(places) or 1} clusters: give one for each, decimals with a "
                "point"
            )
        of_place = dict(zip(places, prices, strict=True))
        combinations = [{**row, "price": of_place[row.get("cluster", row.get("gpu"))]} for row in combinations]
    return [question.change(row) for row in combinations]


@dataclass(frozen=True, slots=True)
class Alternatives(Answer):
    """The answers to one question with several values; ``facts()`` is their JSON."""

    view, title = "search.alternatives_view", "comparison"
    verb: str
    model: str
    rows: tuple[FactDict, ...]
    failed: Mapping[str, str]  # why a combination has no answer
    assumptions: tuple[str, ...] = ()

    @property
    def winners(self) -> list[FactDict]:
        """The best row under each objective that at least two rows answer; one that does not fit never wins."""
        usable = [row for row in self.rows if row["fits"] is not False]
        winners = []
        for objective, (key, less) in OBJECTIVES.items():
            if objective == "step time" and not self.has_one_batch:
                continue
            sign = 1.0 if less else -1.0
            ranked = sorted((row for row in usable if row.get(key) is not None), key=lambda row: sign * row[key])
            if len(ranked) < 2:
                continue
            best, second = ranked[:2]
            ratio = max(best[key] / second[key], second[key] / best[key])
            # Costs, days and throughput are as uncertain as the step that they follow from.
            margin = best["high_s"] / best["step_s"] * second["step_s"] / second["low_s"]
            names = {"objective": objective, "name": best["name"], "value": float(best[key]), "second": second["name"]}
            winners.append({**names, "advantage": ratio - 1, "clear": ratio > margin})
        return winners

    @property
    def has_one_batch(self) -> bool:
        """True if the steps of all rows train on the same tokens, so that their times compare."""
        return len({(row["global_batch"], row["seq"]) for row in self.rows}) == 1

    @property
    def break_even(self) -> list[FactDict]:
        """The price per GPU-hour at which each row would cost as much as the cheapest."""
        priced = [row for row in self.rows if row["cost"] is not None and row["gpu_hours"] and row["fits"] is not False]
        if len(priced) < 2:
            return []
        cheapest = min(priced, key=lambda row: row["cost"] or 0.0)
        return [
            {
                "name": row["name"],
                "against": cheapest["name"],
                "price": row["price"],
                "break_even_price": (cheapest["cost"] or 0.0) / (row["gpu_hours"] or 1.0),
            }
            for row in priced
            if row is not cheapest
        ]

    def facts(self) -> FactDict:
        what = {"global batches (--global-batch)": "global_batch", "sequence lengths (--seq)": "seq"}
        differing = " and ".join(words for words, key in what.items() if len({row[key] for row in self.rows}) > 1)
        differ = f"the alternatives have different {differing}: compare throughput or days, not step times"
        return {
            **pick(self, "verb model"),
            "rows": list(self.rows),
            "failed": dict(self.failed),
            **pick(self, "winners break_even"),
            "assumptions": list(self.assumptions),
            "warnings": [differ] if differing else [],
        }


def answer_alternatives(question: Question, watching: Watching = nullcontext) -> Alternatives:
    """Answer *question* for each combination of its several values; the reasons of those that cannot run are kept."""
    questions = split_question(question)
    rows: list[FactDict] = []
    failed: dict[str, str] = {}
    assumptions: dict[str, list[str]] = {}  # and the rows that make each
    verb = next(name for name, kind in VERBS.items() if kind is type(question))
    several = [name for name, choice in choices_of(type(question)).items() if choice.several and name != "price"]
    differing = [name for name in several if len({str(getattr(single, name)) for single in questions}) > 1]
    for single in questions:  # a row is named by the values in which the questions differ
        values = [getattr(single, name) for name in differing]
        words = (f"{value:,} GPUs" if isinstance(value, int) else getattr(value, "name", value) for value in values)
        name = ", ".join(map(str, words))
        try:
            row, notes = _answer(verb, single, watching)
        except ValueError as error:
            failed[name] = str(error)
            continue
        rows.append({"name": name, **row})
        for note in dict.fromkeys(notes):
            assumptions.setdefault(note, []).append(name)
    if not rows:
        reasons = set(failed.values())
        raise ValueError(reasons.pop() if len(reasons) == 1 else "; ".join(map(": ".join, failed.items())))
    model = getattr(question, "model", None)
    named = (f"{'; '.join(of)}: {note}" if len(of) < len(rows) else note for note, of in assumptions.items())
    return Alternatives(verb, str(getattr(model, "name", model)), tuple(rows), failed, tuple(named))


Row = tuple[FactDict, Sequence[str]]


def _answer(verb: str, question: AnyQuestion, watching: Watching) -> Row:
    """Return the row of *question*, without a cost if no price of its GPU is known."""
    try:
        return _ANSWERS[verb](question, watching)
    except ValueError as error:
        if getattr(question, "price", None) != "auto":
            raise
        row, notes = _ANSWERS[verb](question.change({"price": None, "currency": DEFAULT_CURRENCY}), watching)
        return row, (*notes, f"no cost: {error}")


def _predict_row(question: PredictQuestion, _: Watching) -> Row:
    run = settle(question)
    training = training_facts(run.question, run.strategy, run.prediction.step_s) or {}
    row = _step_row(run.cluster, run.framework.name, run.strategy, run.prediction.report)
    row |= {**_money(training, run.question), "command": _command("predict", question)}
    return row, run.assumptions


def _search_row(question: SearchQuestion, watching: Watching) -> Row:
    settled = settle_search(question)
    result = settled.answer(top=1, watching=watching)
    require(result.best != (), "nothing fits" if result.counts.complete else "nothing found in the time given")
    best = result.best[0]
    row = _step_row(settled.cluster, settled.profile.name, best.strategy, settled.predict(best))
    row["free_bytes"] = find_free_bytes(best, settled.model, settled.cluster.gpu)
    training = training_facts(settled.question, best.strategy, best.step_s) or {}
    return {**row, **_money(training, settled.question), "command": settled.command(best)}, settled.assumptions


def _plan_row(question: PlanQuestion, _: Watching) -> Row:
    settled = settle_plan(question)
    facts, step = settled.answer().facts(), settled.steps[-1]
    if step is None:
        raise ValueError("a measured step (--step-s) is that of one cluster")
    row = _step_row(step.cluster, step.framework.name, step.strategy, step.prediction.report)
    run = {"energy_mwh": facts["energy_mwh"], "goodput": facts["goodput"], "command": _command("plan", question)}
    return {**row, **_money({**facts, "days": facts["days"]["median"]}, settled.question), **run}, settled.assumptions


def _command(verb: str, question: Question) -> str:
    """Return the command that asks *question*."""
    return shlex.join(["stepcast", verb, *spell_choices(question.choices)])


def _step_row(cluster: Cluster, framework: str, strategy: "Strategy", report: "StepReport") -> FactDict:
    memory, reached = report.memory_bytes or {}, report.throughput
    assert reached is not None
    return {
        **pick(cluster, "cluster=name gpu=gpu.name"),
        "framework": framework,
        **strategy_facts(strategy),
        **pick(strategy, "global_batch seq"),
        **pick(report, "step_s low_s high_s"),
        "tokens_per_s_per_gpu": reached.tokens_per_s / strategy.layout.gpus,
        "mfu": reached.mfu,
        "memory_bytes": memory.get("total"),
        "free_bytes": memory["capacity"] - memory["total"] if memory else None,
        "fits": memory.get("fits"),
    }


def _money(training: Facts, question: Question) -> FactDict:
    known = {name: training.get(name) for name in ("days", "gpu_hours", "cost", "currency")}
    return {**known, "price": getattr(question, "price", None), "energy_mwh": None, "goodput": None}


VERBS: Mapping[str, type[Question]] = {"predict": PredictQuestion, "search": SearchQuestion, "plan": PlanQuestion}
_ANSWERS: Mapping[str, Callable[..., Row]] = {"predict": _predict_row, "search": _search_row, "plan": _plan_row}
