"""The verbs as functions: the words of the command line as arguments, with its defaults and its checks.

``predict(model="llama-3.1-8b", cluster="dgx-h100", gpus=64, tp=8)`` is ``stepcast predict --model
llama-3.1-8b --cluster dgx-h100 --gpus 64 --tp 8``: the same values, so the same answer. Values
that were made by hand (Model, Cluster, Strategy, Framework) are taken as they are.
"""

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from stepcast.cli.main import Parser, with_files
from stepcast.units import DEFAULT_CURRENCY

if TYPE_CHECKING:
    from stepcast.analyze.compare import Comparison
    from stepcast.cost.calibration import Calibration
    from stepcast.forecast.options import Options
    from stepcast.forecast.prediction import Prediction
    from stepcast.goodput.operation import Operation
    from stepcast.goodput.plan import Plan, TrainingPhase
    from stepcast.hardware import Cluster
    from stepcast.ir.framework import Framework
    from stepcast.ir.model import Model
    from stepcast.ir.strategy import Strategy
    from stepcast.questions.keywords import AnalyzeChoices, PlanChoices, ReplayChoices, SearchChoices
    from stepcast.questions.question import PredictChoices
    from stepcast.searching.result import SearchResult, SearchWatch

Path = str | PathLike[str]
# An option in a message, and the blank before a number that it is given.
OPTION = re.compile(r"(?<!\w)--([a-z][a-z0-9-]*)( (?=[0-9]))?")
REPEATED = ("set", "what-if", "stage", "allow", "fix")  # options that may be given several times


class _Words(Parser):
    """Raises what is wrong instead of ending the program."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(re.sub(r"^argument (?:-\w, |-\w/)?", "", message))


def predict(
    model: "Model | str | None" = None,
    cluster: "Cluster | str | None" = None,
    strategy: "Strategy | None" = None,
    framework: "Framework | str | None" = None,
    options: "Options | None" = None,
    calibration: "Calibration | Path | None" = None,
    *,
    config: Path | None = None,
    ignore_unknown: bool = False,
    **choices: "Unpack[PredictChoices]",
) -> "Prediction":
    """Predict one training step.

    With a *strategy* it is run as it is; else *choices* are the options of ``stepcast predict`` (``gpus=64,
    tp=8, seq="8k", sharding="zero-3"``), and the framework makes those that are left out. *config* is a
    configuration of another tool, or a run that ``predict --save`` wrote; choices given here win over it.
    """
    if strategy is not None:
        if choices:
            raise ValueError(f"{_first(choices)}: a Strategy says it already; leave one of them out")
        return _predict_strategy(model, cluster, strategy, framework, options, calibration)
    if options is not None:
        raise ValueError("options: they go with a Strategy; give place='packed' and the like by name")
    from stepcast.cli.configured import described
    from stepcast.cli.forecasting import run_facts
    from stepcast.questions.question import PredictQuestion
    from stepcast.questions.settle import settle
    from stepcast.questions.spelling import read_choices, replaced_names

    nouns = {"model": model, "cluster": cluster, "framework": framework, "calibration": calibration}
    given = read_choices({**nouns, **choices})
    file = None
    if config is not None:
        file = described(argparse.Namespace(config=fspath(config), run=None, ignore_unknown=ignore_unknown))
    elif ignore_unknown:
        raise ValueError("ignore_unknown has no effect without config")
    if file is None:
        question = PredictQuestion(**given)
    else:
        gone = {*given, *replaced_names(given)} - {"set"}
        filed = {name: value for name, value in file.choices.items() if name not in gone}
        both = {"set": (*filed.get("set", ()), *given.get("set", ()))}
        question = PredictQuestion(**{**filed, **given, **both}, file=file.file, unchecked=frozenset(filed))
    with _python_words():
        run = settle(question)
    prediction = run.prediction.noting(run.assumptions, file.warnings if file else [])
    return replace(prediction, asked=run_facts(run))


def _predict_strategy(
    model: "Model | str | None",
    cluster: "Cluster | str | None",
    strategy: "Strategy",
    framework: "Framework | str | None",
    options: "Options | None",
    calibration: "Calibration | Path | None",
) -> "Prediction":
    from stepcast.forecast.options import DEFAULTS
    from stepcast.forecast.predict import predict as run
    from stepcast.frameworks.catalog import DEFAULT, load_profile, profile_of
    from stepcast.frameworks.profile import missing_features
    from stepcast.questions.settle import load_calibration

    if model is None or cluster is None:
        raise ValueError("a step needs a model and a cluster")
    software = framework or DEFAULT
    profile = load_profile(software) if isinstance(software, str) else profile_of(software)
    prediction = run(
        _model(model),
        _cluster(cluster),
        strategy,
        profile.framework,
        options or DEFAULTS,
        load_calibration(fspath(calibration)) if isinstance(calibration, str | PathLike) else calibration,
    )
    missing = missing_features(profile, strategy, profile.framework)
    return prediction.noting(warnings=missing) if missing else prediction


def search(
    model: "Model | str",
    cluster: "Cluster | str",
    gpus: int | str | Sequence[int],
    global_batch: int | None = None,
    seq: int | str | None = None,
    framework: "Framework | str | None" = None,
    *,
    axes: Mapping[str, Sequence[Any]] | None = None,
    top: int = 10,
    most_bytes: float | None = None,
    watch: "SearchWatch | None" = None,
    **choices: "Unpack[SearchChoices]",
) -> "SearchResult":
    """The *top* best strategies, as ``stepcast search`` finds them; *choices* are its options (``tp=8`` fixes
    one, ``max_memory="70GiB"``, ``objective="cost"``), and *axes* restrict them by name: ``{"tp": (4, 8)}``.
    *watch* is called after each simulation with the counts and the best so far.

    A Framework made by hand is searched as it stands, with *axes*, *objective*, *most_bytes* and *watch*.
    """
    if framework is not None and not isinstance(framework, str):
        from stepcast.searching.search import search as run

        if global_batch is None or not isinstance(seq, int) or isinstance(gpus, str):
            raise ValueError("a Framework made by hand needs numbers: gpus, global_batch and seq")
        objective, workers = choices.pop("objective", None) or "step", int(choices.pop("workers", None) or 1)
        if choices:
            raise TypeError(f"{_first(choices)}: a Framework made by hand is searched as it is; give axes")
        return run(
            _model(model),
            _cluster(cluster),
            gpus,
            global_batch,
            seq,
            framework,
            axes=axes,
            objective=objective,
            top=top,
            most_bytes=most_bytes,
            watch=watch,
            workers=workers,
        )
    counts = gpus if isinstance(gpus, int | str) else ",".join(map(str, gpus))
    if most_bytes is not None:
        raise ValueError("most_bytes is for a Framework made by hand: give max_memory instead")
    allow = choices.pop("allow", None) or []
    words = {
        "model": model,
        "cluster": cluster,
        "gpus": counts,
        "global_batch": global_batch,
        "seq": seq,
        "framework": framework,
        "top": top,
        "allow": [
            *(f"{name.replace('_', '-')}={','.join(map(str, each))}" for name, each in (axes or {}).items()),
            *([allow] if isinstance(allow, str) else allow),
        ],
    }
    from stepcast.cli.search_question import question_of

    with _python_words():
        return question_of(_args("search", (), {**words, **choices})).answer(watch=watch)


def plan(
    phases: "Sequence[TrainingPhase] | None" = None,
    operation: "Operation | None" = None,
    price_per_gpu_hour: float | None = None,
    pue: float = 1.0,
    runs: int = 1000,
    seed: int = 0,
    currency: str = DEFAULT_CURRENCY,
    **choices: "Unpack[PlanChoices]",
) -> "Plan":
    """A whole run: of *phases* under an *operation*, or by the options of ``stepcast plan``, such as
    ``model="llama-3.1-8b", cluster="dgx-h100", gpus=64, tokens="15T"``.

    A run that does not fit into GPU memory is a ValueError, unless ``allow_oom=True``; ``Plan.fits`` is then
    False. It is None for measured steps, whose memory is not checked.
    """
    if phases is not None and operation is not None:
        from stepcast.goodput.plan import plan as run

        if choices:
            raise ValueError(f"{_first(choices)}: phases say it already; leave one of them out")
        return run(phases, operation, price_per_gpu_hour, pue, runs, seed, currency)
    if phases is not None or operation is not None:
        raise ValueError("phases and an operation go together")
    from stepcast.cli.plan import planned

    price = choices.pop("price", price_per_gpu_hour)
    words = {"price": price, "pue": pue, "runs": runs, "seed": seed, "currency": currency, **choices}
    with _python_words():
        return planned(_args("plan", (), words)).plan


def analyze(*files: Path, **choices: "Unpack[AnalyzeChoices]") -> dict[str, Any]:
    """Where a measured run's time went: what ``stepcast analyze FILE... --json`` prints."""
    from stepcast.cli.analyze import analysed

    return analysed(_args("analyze", files, choices))[0]


def replay(*files: Path, what_if: str | Sequence[str] = (), **choices: "Unpack[ReplayChoices]") -> dict[str, Any]:
    """A measured run under changed conditions: what ``stepcast replay --json`` prints."""
    from stepcast.cli.replay import replayed

    changes = [what_if] if isinstance(what_if, str) else list(what_if)
    return dict(replayed(_args("replay", files, {"what_if": changes, **choices})).facts)


def compare(predicted: Any, measured: Any) -> "Comparison":
    """Compare two accounts of a step: Predictions, facts of them, or files of measured runs.

    Of a prediction and a measurement the prediction becomes the first side, in either order.
    """
    from stepcast.analyze.compare import compare as side_by_side
    from stepcast.analyze.compare import is_measured

    return side_by_side(*sorted((_account(predicted), _account(measured)), key=is_measured))


def rows(*answers: Any) -> list[dict[str, Any]]:
    """Predictions, results of searches and plans as rows, for ``pandas.DataFrame(stepcast.rows(...))``."""
    found: list[dict[str, Any]] = []
    for answer in answers:
        if hasattr(answer, "row"):
            found.append(answer.row())
        elif hasattr(answer, "best"):
            found += [_searched(rank, each) for rank, each in enumerate(answer.best, 1)]
        elif hasattr(answer, "goodput"):
            found.append(_planned(answer.facts()))
        elif isinstance(answer, Iterable) and not isinstance(answer, str | Mapping):
            found += rows(*answer)
        else:
            raise ValueError(f"{type(answer).__name__} has no rows; give predictions, searches or plans")
    return found


def _searched(rank: int, found: Any) -> dict[str, Any]:
    from stepcast.views.search import row_words

    return {"rank": rank, **row_words(found.strategy), "step_s": found.step_s, "memory_bytes": found.memory_bytes}


def _planned(facts: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in facts.items() if not isinstance(value, Mapping | list)}
    return {**{f"days_{name}": value for name, value in facts["days"].items()}, **plain}


def _account(side: Any) -> Mapping[str, Any]:
    if isinstance(side, Mapping):
        return side
    if hasattr(side, "facts"):
        facts: Mapping[str, Any] = side.facts()
        return facts
    return analyze(side)


def _model(model: "Model | str") -> "Model":
    from stepcast.models.catalog import load_model

    return load_model(model) if isinstance(model, str) else model


def _cluster(cluster: "Cluster | str") -> "Cluster":
    from stepcast.hardware import load_cluster

    return load_cluster(cluster) if isinstance(cluster, str) else cluster


def _first(choices: Mapping[str, Any]) -> str:
    return next(iter(choices))


@contextmanager
def _python_words() -> Iterator[None]:
    """Name keywords instead of options in what is wrong: ``tp=2`` for ``--tp 2``."""
    try:
        yield
    except ValueError as error:
        if type(error) is not ValueError or "--" not in str(error):
            raise
        raise ValueError(OPTION.sub(_keyword, str(error))) from None


def _keyword(option: "re.Match[str]") -> str:
    return option[1].replace("-", "_") + ("=" if option[2] else "")


def _args(verb: str, files: Sequence[Path], choices: Mapping[str, Any]) -> argparse.Namespace:
    """Return the arguments that *choices* spell, read and checked as the command line's are."""
    from stepcast.cli.words import FIX, SEARCHED, other_names
    from stepcast.questions.spelling import alias_flags

    parser = _Words(prog=f"stepcast.{verb}", add_help=False)
    import_module(f"stepcast.cli.{verb}").add_arguments(parser)
    options = {word for action in parser._actions for word in action.option_strings}
    options |= {f"--{name}" for name in (*SEARCHED, "precision")} if FIX in options else set()
    for name in choices:
        plain = name.rstrip("_").replace("_", "-")
        meant = other_names().get(plain) or alias_flags().get(plain, (plain, ""))[0]
        if not {f"--{plain}", f"--{meant}"} & options:
            near = get_close_matches(f"--{plain}", options, n=1)
            hint = f"; did you mean {near[0][2:].replace('-', '_')}?" if near else ""
            raise TypeError(f"{verb}() got an unexpected keyword argument {name!r}{hint}")
    words = [fspath(file) for file in files]
    nouns = ("model", "cluster", "framework")
    made = {name: value for name, value in choices.items() if name in nouns and _made(value)}
    for name, value in choices.items():
        if value is not None:
            words += _spell(name, name if name in made else value)
    args: argparse.Namespace = with_files(parser, words)
    for name, value in made.items():
        setattr(args, name, value)
    args.verb, args.quiet, args.command = verb, True, None
    return args


def _spell(name: str, value: Any) -> list[str]:
    """Return an option and its value as words: flags, lists, and everything else as text."""
    plain = name.rstrip("_").replace("_", "-")
    if isinstance(value, bool):
        return [f"--{plain}" if value else f"--no-{plain}"]
    if isinstance(value, list | tuple) and plain in REPEATED:
        return [f"--{plain}={each}" for each in value]
    return [f"--{plain}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"]


def _made(value: Any) -> bool:
    """Whether it is a noun of the library rather than a name of one."""
    return value is not None and not isinstance(value, str | PathLike)
