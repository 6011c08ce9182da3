"""The verbs as Python functions, with the options of the command line as keywords, its defaults and its checks.

``predict(model="llama-3.1-8b", cluster="dgx-h100", gpus=64, tp=8)`` asks the same question as ``stepcast predict
--model llama-3.1-8b --cluster dgx-h100 --gpus 64 --tp 8`` and so has the same answer. Python values (Model, Cluster,
Strategy, Framework) may take the place of names.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Unpack

from stepcast.cost.calibration import Calibration
from stepcast.forecast.options import DEFAULTS, Options
from stepcast.forecast.predict import predict as predict_step
from stepcast.forecast.predict import predict_many as predict_steps
from stepcast.forecast.prediction import Prediction
from stepcast.frameworks.catalog import DEFAULT, load_profile, missing_features
from stepcast.hardware import Cluster, load_cluster
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import FactDict, Facts, require
from stepcast.models.catalog import load_model
from stepcast.questions.choices import AnyQuestion, UnknownChoiceError, build_question, read_choices, several_of
from stepcast.questions.question import AnalyzeQuestion, PredictQuestion, ReplayQuestion
from stepcast.questions.runs import RunFile, answer_facts, ask_with_file, read_run_file, run_facts
from stepcast.questions.settle import load_calibration, settle
from stepcast.units import DEFAULT_CURRENCY

if TYPE_CHECKING:
    from stepcast import keywords
    from stepcast.analyze.compare import Comparison, GateResult
    from stepcast.analyze.kineto.whatif import KinetoReplay
    from stepcast.analyze.replay import ReplayResult
    from stepcast.analyze.result import AnalysisResult
    from stepcast.analyze.watch import WatchAlert, WatchedStep
    from stepcast.generation.forecast import GenerationForecast
    from stepcast.goodput.plan import Operation, Plan, TrainingPhase
    from stepcast.questions.alternatives import Alternatives
    from stepcast.rl.step import RlStep
    from stepcast.searching.result import SearchResult, SearchWatch

Path = str | PathLike[str]
# An option in a message, and the blank before a number or a word such as NAME that it is given.
OPTION = re.compile(r"(?<!\w)--([a-z][a-z0-9-]*)( (?=[0-9]|[A-Z]+\b))?")


def predict(
    model: Model | str | None = None,
    cluster: Cluster | str | None = None,
    strategy: Strategy | None = None,
    framework: Framework | str | None = None,
    options: Options | None = None,
    calibration: "Calibration | Path | None" = None,
    *,
    config: Path | None = None,
    ignore_unknown: bool = False,
    **choices: "Unpack[keywords.PredictChoices]",
) -> Prediction:
    """Predict one training step.

    Args:
        model: a name from ``stepcast list models``, a config.json, or a Model.
        cluster: a name from ``stepcast list clusters``, a GPU (one node of it), a TOML file, or a Cluster.
        strategy: a Strategy that replaces all *choices*; *options* go with it.
        framework: the framework whose defaults fill unset choices.
        calibration: measurements of your GPU that ``stepcast profile`` wrote.
        config: a configuration of another tool, or a run that ``predict --save`` wrote; choices given here win.
        ignore_unknown: ignore keys of *config* that its tool does not have.
        choices: the options of ``stepcast predict``, such as ``gpus=64, tp=8, seq="8k", sharding="zero-3"``.
    """
    if strategy is not None:
        if choices:
            raise TypeError(f"predict() got both a strategy and {_first(choices)!r}, which the strategy states already")
        if model is None or cluster is None:
            raise TypeError("predict() missing a model or a cluster")
        profile = load_profile(framework or DEFAULT)
        values = load_model(model), _load_cluster(cluster), strategy, profile.framework
        predicted = predict_step(*values, options or DEFAULTS, _load_calibration(calibration))
        missing = missing_features(profile, strategy, profile.framework)
        return predicted.noting(warnings=missing) if missing else predicted
    if options is not None:
        raise TypeError("predict() takes options only with a strategy; use keywords such as place='packed'")
    nouns = {"model": model, "cluster": cluster, "framework": framework, "calibration": calibration}
    with _in_python_words("predict"):
        question, file = _ask(PredictQuestion, {**nouns, **choices}, config, ignore_unknown)
        run = settle(question)
    prediction = run.prediction.noting(run.assumptions, file.warnings if file else [])
    return replace(prediction, asked=run_facts(run), describe=partial(answer_facts, run=run, file=file))


def predict_many(
    model: Model | str,
    cluster: Cluster | str,
    strategies: Iterable[Strategy],
    framework: Framework | str | None = None,
    options: Options | None = None,
    calibration: "Calibration | Path | None" = None,
) -> list[Prediction]:
    """Predict one step for each strategy, faster than one by one: they share cost estimates and simulations."""
    values = load_model(model), _load_cluster(cluster), strategies, load_profile(framework or DEFAULT).framework
    return list(predict_steps(*values, options or DEFAULTS, _load_calibration(calibration)))


def search(
    model: Model | str,
    cluster: Cluster | str,
    gpus: int | str | Sequence[int],
    global_batch: int | None = None,
    seq: int | str | None = None,
    framework: Framework | str | None = None,
    *,
    axes: Mapping[str, Sequence[Any]] | None = None,
    top: int = 10,
    most_bytes: float | None = None,
    watch: "SearchWatch | None" = None,
    **choices: "Unpack[keywords.SearchChoices]",
) -> "SearchResult":
    """Search the best strategies, as ``stepcast search`` does.

    A Framework value is searched as it is, with *axes*, *objective*, *most_bytes* and *watch* alone.

    Args:
        model: the name of a model, or a Model.
        cluster: the name of a cluster, or a Cluster.
        gpus: the total number of GPUs, several numbers, or ``"64..512"``.
        global_batch: the sequences per step.
        seq: the tokens of a sequence.
        framework: the framework whose defaults fill unset choices and whose features are searched.
        axes: the values that choices may take by name, such as ``{"tp": (4, 8)}``; the same as ``tp=(4, 8)``.
        top: the number of strategies to rank.
        most_bytes: the memory per GPU that a candidate may use, with a Framework value.
        watch: a function that is called after each simulation with the counts and the best so far.
        choices: the options of ``stepcast search``, such as ``tp=8, max_memory="70GiB", objective="cost"``.
    """
    if framework is not None and not isinstance(framework, str):
        from stepcast.searching.search import search as run

        if global_batch is None or not isinstance(seq, int) or isinstance(gpus, str):
            raise TypeError("search() with a Framework needs numbers: gpus, global_batch and seq")
        objective, workers = choices.pop("objective", None) or "step", int(choices.pop("workers", None) or 1)
        if choices:
            raise TypeError(f"search() with a Framework takes axes instead of {_first(choices)!r}")
        values = load_model(model), _load_cluster(cluster), gpus, global_batch, seq, framework
        limits: FactDict = {"most_bytes": most_bytes, "watch": watch, "workers": workers}
        return run(*values, axes=axes, objective=objective, top=top, **limits)
    if most_bytes is not None:
        raise TypeError("search() takes most_bytes only with a Framework; use max_memory instead")
    from stepcast.questions.search import SearchQuestion, search_facts, settle_search

    if twice := sorted(set(axes or ()) & set(choices)):
        raise TypeError(f"search() got both axes and a keyword for {twice[0]!r}")
    given: FactDict = {"model": model, "cluster": cluster, "gpus": gpus, "global_batch": global_batch, "seq": seq}
    given |= {"framework": framework, "top": top, **(axes or {}), **choices}
    with _in_python_words("search"):
        settled = settle_search(build_question(SearchQuestion, given))
        return replace(settled.answer(watching=lambda: nullcontext(watch)), describe=partial(search_facts, settled))


def plan(
    phases: "Sequence[TrainingPhase] | str | None" = None,
    operation: "Operation | None" = None,
    price_per_gpu_hour: float | None = None,
    pue: float = 1.0,
    runs: int = 1000,
    seed: int = 0,
    currency: str = DEFAULT_CURRENCY,
    **choices: "Unpack[keywords.PlanChoices]",
) -> "Plan":
    """Plan a whole training run, as ``stepcast plan`` does.

    A run that does not fit into GPU memory is a ValueError, unless ``allow_oom=True``; ``Plan.fits`` is then
    False. It is None for measured steps, whose memory is not checked.

    Args:
        phases: the name of a model, as ``model=`` of *choices*; or phases, with an *operation* and without *choices*.
        operation: failures, checkpoints and repairs of the run.
        price_per_gpu_hour: the price of a GPU-hour in *currency*.
        pue: energy of the building over that of the machines.
        runs: the number of simulated runs.
        seed: the random seed.
        currency: a symbol or a code.
        choices: the options of ``stepcast plan``, such as ``model="llama-3.1-8b", cluster="dgx-h100", gpus=64,
            tokens="15T"``.
    """
    if isinstance(phases, str):
        if "model" in choices:
            raise TypeError("plan() got two models")
        choices["model"], phases = phases, None
    if phases is not None and operation is not None:
        from stepcast.goodput.plan import plan as run

        if choices:
            raise TypeError(f"plan() got both phases and {_first(choices)!r}, which the phases state already")
        return run(phases, operation, price_per_gpu_hour, pue, runs, seed, currency)
    if phases is not None or operation is not None:
        raise TypeError("plan() takes phases and an operation together")
    from stepcast.questions.plan import PlanQuestion, settle_plan

    config, ignore_unknown = choices.pop("config", None), bool(choices.pop("ignore_unknown", False))
    price = choices.pop("price", price_per_gpu_hour)
    words = {"price": price, "pue": pue, "runs": runs, "seed": seed, "currency": currency, **choices}
    with _in_python_words("plan"):
        question, file = _ask(PlanQuestion, words, config, ignore_unknown)
        settled = settle_plan(question)
        return replace(settled, warnings=(*settled.warnings, *(file.warnings if file else ()))).answer()


def alternatives(verb: str, **choices: object) -> "Alternatives":
    """Answer ``predict``, ``search`` or ``plan`` for several clusters, frameworks or numbers of GPUs.

    Args:
        verb: ``"predict"``, ``"search"`` or ``"plan"``.
        choices: the keywords of that function, with lists for ``cluster``, ``gpu``, ``framework`` or ``gpus``, such as
            ``alternatives("plan", model="llama-3.1-8b", cluster=["dgx-h100", "dgx-h200"], gpus=64, tokens="1T")``.
    """
    from stepcast.questions.alternatives import VERBS, answer_alternatives

    require(verb in VERBS, f"{verb!r} has no alternatives; use {', '.join(VERBS)}")
    with _in_python_words(verb):
        question = build_question(VERBS[verb], choices)
        require(
            several_of(question) != [], "no alternatives: give a list of clusters, GPUs, frameworks or numbers of GPUs"
        )
        return answer_alternatives(question)


def predict_generation(
    model: Model | str | None = None,
    cluster: Cluster | str | None = None,
    **choices: "Unpack[keywords.GenerateChoices]",
) -> "GenerationForecast":
    """Forecast serving at a concurrency, or a batch of responses; ``.facts()`` is the JSON of ``stepcast generate``.

    Args:
        model: a name from ``stepcast list models``, a config.json, or a Model.
        cluster: a name from ``stepcast list clusters``, a TOML file, or a Cluster.
        choices: the options of ``stepcast generate``, such as ``tp=4, prompt_length=1024, concurrency=64``.
    """
    from stepcast.questions.generation import GenerateQuestion, answer_generation

    with _in_python_words("predict_generation"):
        return answer_generation(build_question(GenerateQuestion, {"model": model, "cluster": cluster, **choices}))


def predict_rl(
    model: Model | str | None = None,
    cluster: Cluster | str | None = None,
    *,
    config: Path | None = None,
    **choices: "Unpack[keywords.RlChoices]",
) -> "RlStep":
    """Forecast a step of RL post-training, as ``stepcast rl`` does; ``step_s`` and ``phases_s`` are its times.

    Args:
        model: a name from ``stepcast list models``, a config.json, or a Model.
        cluster: a name from ``stepcast list clusters``, a TOML file, or a Cluster.
        config: a NeMo RL YAML, verl overrides, OpenRLHF arguments or a TRL GRPO config; choices given here win.
        choices: the options of ``stepcast rl``, such as ``gpus=16, rollout_gpus=16, prompts=64, group=16``.
    """
    from stepcast.rl.question import answer_rl, ask_rl, rl_facts

    with _in_python_words("predict_rl"):
        given = {name: value for name, value in choices.items() if value is not None}
        given |= {} if cluster is None else {"cluster": cluster}
        question, keys = ask_rl(given, model, _path(config))
        return replace(answer_rl(question), describe=partial(rl_facts, question=question, config=keys))


def analyze(*files: Path, **choices: "Unpack[keywords.AnalyzeChoices]") -> "AnalysisResult":
    """Return where the time of a measured run went; ``.facts()`` is the JSON of ``stepcast analyze``."""
    from stepcast.cli.analyze import analyze_files

    trace = choices.pop("trace", None)
    with _in_python_words("analyze"):
        question = build_question(AnalyzeQuestion, choices)
        return analyze_files(_paths(files), question, _path(trace))[0]


def replay(
    *files: Path, what_if: str | Sequence[str] = (), **choices: "Unpack[keywords.ReplayChoices]"
) -> "ReplayResult | KinetoReplay":
    """Return a measured run under changed conditions; ``.facts()`` is the JSON of ``stepcast replay``."""
    from stepcast.cli.replay import replay_files

    trace = choices.pop("trace", None)
    with _in_python_words("replay"):
        question = build_question(ReplayQuestion, {"what_if": what_if, **choices})
        return replay_files(_paths(files), question, _path(trace))[0]


def compare(
    predicted: "Prediction | AnalysisResult | Mapping[str, object] | Path",
    measured: "Prediction | AnalysisResult | Mapping[str, object] | Path",
) -> "Comparison":
    """Compare two steps: Predictions, results of analyses, their facts, files of measured runs, or JSON of a verb.

    A prediction and a measurement may be given in either order; the prediction becomes the first side.
    """
    from stepcast.analyze.compare import compare as compare_facts
    from stepcast.analyze.compare import compare_files, is_measured
    from stepcast.cli.compare import read_facts

    sides = [fspath(side) if isinstance(side, PathLike) else side for side in (predicted, measured)]
    accounts = [read_facts(side) if isinstance(side, str) else _facts_of(side) for side in sides]
    files = [side for side in sides if isinstance(side, str)]
    if len(files) == len(sides):
        return compare_files(files, accounts)
    return compare_facts(*sorted(accounts, key=is_measured))


def _facts_of(side: object) -> Facts:
    facts = side if isinstance(side, Mapping) else getattr(side, "facts", dict)()
    if not facts:
        raise TypeError(f"compare() takes answers, their facts or files, not {type(side).__name__}")
    return facts


def gate(
    *measured: Path,
    history: Path | None = None,
    name: str = "default",
    label: str = "",
    accept: bool = False,
    baseline: Path | None = None,
    save: Path | None = None,
    forecast: Path | None = None,
    min_change: float = 0.01,
) -> "GateResult":
    """Return the verdict on the last of *measured* runs, as ``stepcast gate`` does; ``.failed`` is its exit status.

    Args:
        measured: logs, traces or folders of runs, one after the other.
        history: a SQLite file with the runs before; the runs are added to it.
        name: the history of one configuration within the file.
        label: a name of the run, such as its commit.
        accept: accept a regression as the new baseline; it then does not fail.
        baseline: a baseline that *save* wrote, or a measured run, instead of a history.
        save: a file to write the runs to as a baseline.
        forecast: the JSON of a forecast; a step slower than its interval fails.
        min_change: the smallest regression that fails, as a share of the step.
    """
    from stepcast.cli.compare import GateOptions, gate_files

    paths = {"history": _path(history), "baseline": _path(baseline), "save": _path(save), "forecast": _path(forecast)}
    options = GateOptions(name=name, label=label, accept=accept, min_change=min_change, **paths)
    with _in_python_words("gate"):
        return gate_files(_paths(measured), options)


def watch(
    log: Path, forecast: Path | None = None, steps: int | None = None, idle_s: float | None = None
) -> "Iterator[WatchedStep | WatchAlert]":
    """Yield the steps and alerts of a running job's log, or of a folder of logs, as ``stepcast watch`` does.

    Args:
        log: the log of Megatron-LM, torchtitan, NeMo, DeepSpeed, the Trainer of transformers or MLPerf.
        forecast: the JSON of a forecast to compare with.
        steps: the steps of the run, if its log does not say.
        idle_s: end after so many seconds without a line; 0 ends with the log; None never ends.
    """
    from stepcast.analyze.watch import StepWatch
    from stepcast.cli.compare import read_forecast, watch_events

    return watch_events(fspath(log), StepWatch(read_forecast(_path(forecast)), steps), idle_s)


def rows(*answers: Any) -> list[FactDict]:
    """Return Predictions, results of searches and Plans as rows, for ``pandas.DataFrame(stepcast.rows(...))``."""
    table: list[FactDict] = []
    for answer in answers:
        if hasattr(answer, "row"):
            table.append(answer.row())
        elif hasattr(answer, "best"):
            table += answer.facts()["rows"]
        elif hasattr(answer, "goodput") and hasattr(answer, "facts"):
            facts = answer.facts()
            days = {f"days_{name}": value for name, value in facts["days"].items()}
            single = {name: value for name, value in facts.items() if not isinstance(value, Mapping | list)}
            table.append({**days, **single})
        elif isinstance(answer, Iterable) and not isinstance(answer, str | Mapping):
            table += rows(*answer)
        else:
            raise TypeError(f"{type(answer).__name__} has no rows; use predictions, searches or plans")
    return table


def _ask(
    kind: type[AnyQuestion], choices: Facts, config: Path | None, ignore_unknown: bool
) -> tuple[AnyQuestion, RunFile | None]:
    """Return the question of *choices* and of a configuration file, and what is known of that."""
    given = read_choices(kind, choices)
    file = read_run_file(None, _path(config), ignore_unknown=ignore_unknown)
    return ask_with_file(kind, given, file), file


def _load_cluster(cluster: Cluster | str) -> Cluster:
    return load_cluster(cluster) if isinstance(cluster, str) else cluster


def _load_calibration(given: "Calibration | Path | None") -> Calibration | None:
    return load_calibration(fspath(given)) if isinstance(given, str | PathLike) else given


def _path(file: Path | None) -> str | None:
    return None if file is None else fspath(file)


def _paths(files: Sequence[Path]) -> list[str]:
    if not files:
        raise TypeError("no file given; name the files or the folder of a measured run")
    return [fspath(file) for file in files]


def _first(choices: Facts) -> str:
    return next(iter(choices))


@contextmanager
def _in_python_words(function: str) -> Iterator[None]:
    """Name keywords instead of options in errors: ``tp=2`` for ``--tp 2``."""
    try:
        yield
    except UnknownChoiceError as error:
        message = f"{function}() got an unexpected keyword argument {error.name!r}{error.hint}"
        raise TypeError(message) from None
    except ValueError as error:
        if error.args == (str(error),):
            error.args = (OPTION.sub(lambda match: match[1].replace("-", "_") + ("=" if match[2] else ""), str(error)),)
        raise error.with_traceback(None) from None
