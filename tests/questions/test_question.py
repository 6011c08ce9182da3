"""Questions: one table of choices, from which options, keywords, files and commands follow."""

import argparse
import inspect
import shlex
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest

import stepcast
from stepcast.cli.forecasting import add_forecast_arguments, question_of
from stepcast.cli.main import VERBS, build_parser
from stepcast.cli.words import SEARCHED
from stepcast.questions.keywords import AnalyzeChoices, PlanChoices, ReplayChoices, SearchChoices
from stepcast.questions.question import CHOICES, DEFAULTS, NOUNS, PredictChoices, PredictQuestion
from stepcast.questions.rules import PREDICT
from stepcast.questions.settle import settle
from stepcast.questions.spelling import build_question, spell_choices

LLAMA: dict[str, Any] = {"model": "llama-3.1-8b", "cluster": "dgx-h100", "gpus": 64}


def ask(*words: str) -> PredictQuestion:
    parser = build_parser([verb for verb in VERBS if verb.name == "predict"])
    return question_of(parser.parse_args(["predict", *words]), training=True)


def test_the_keywords_of_predict_are_the_choices_of_a_question() -> None:
    named = set(inspect.signature(stepcast.predict).parameters) & set(CHOICES)
    assert named == set(NOUNS)
    assert set(get_type_hints(PredictChoices)) == set(CHOICES) - set(NOUNS)


# Options of verbs that write or print, and choices that functions name themselves.
PRINTED = {"html", "json", "output", "verbose", "debug", "plain", "help", "no_causal"}


@pytest.mark.parametrize(
    ("function", "keywords"),
    [
        (stepcast.search, SearchChoices),
        (stepcast.plan, PlanChoices),
        (stepcast.analyze, AnalyzeChoices),
        (stepcast.replay, ReplayChoices),
    ],
)
def test_the_keywords_of_a_function_are_the_options_of_its_verb(function: Callable[..., Any], keywords: type) -> None:
    verb = function.__name__
    parser = build_parser([each for each in VERBS if each.name == verb])._subparsers
    options = {
        option[2:].replace("-", "_")
        for action in parser._group_actions[0].choices[verb]._actions  # type: ignore[union-attr,index]
        for option in action.option_strings
        if option.startswith("--") and not option.startswith("--no-")
    }
    searched = {name.replace("-", "_") for name in (*SEARCHED, "precision")} if verb == "search" else set()
    named = {name.rstrip("_") for name in get_type_hints(keywords)}
    assert named == (options | searched) - PRINTED - set(inspect.signature(function).parameters)


def test_every_choice_has_an_option_and_rules_name_choices() -> None:
    parser = argparse.ArgumentParser()
    add_forecast_arguments(parser)
    listed = {action.dest for action in parser._actions} - {"help", "config", "ignore_unknown"}
    assert listed == {name for name, choice in CHOICES.items() if choice.group}
    assert {name for rule in PREDICT for name in rule.options} <= set(CHOICES)


# For each choice a value that is not its default.
VALUES: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "cluster": "dgx-h100",
    "gpu": "h100-sxm",
    "framework": "nemo",
    "set": ("node.nics=4", "gpus=8"),
    "calibration": "a.toml",
    "background": "b.toml",
    "stage_layers": "3,4",
    "recompute": "selective:mlp,norms",
    "offload": "optimizer=0.5",
    "overlap": "gradients,tensor",
    "optimizer": "adamw:bf16",
    "currency": "EUR",
    "zero_gradients": 0.25,
}


def other_value(name: str) -> Any:
    choice, default = CHOICES[name], DEFAULTS[name]
    if name in VALUES:
        return VALUES[name]
    if choice.deniable or default is False:
        return True
    return next((value for value in choice.values if value != default), 3)


@pytest.mark.parametrize("name", CHOICES)
def test_text_keywords_and_printed_commands_mean_the_same(name: str) -> None:
    value = other_value(name)
    asked = build_question({name: value})
    assert getattr(asked, name) == value
    assert ask(*spell_choices({name: value})) == asked
    assert asked.given == {name}
    if isinstance(value, int | float) and not isinstance(value, bool):
        assert build_question({name: str(value)}) == asked
    if CHOICES[name].deniable:
        assert ask(*spell_choices({name: False})) == build_question({f"no_{name}": True})


def test_names_of_other_tools_are_read() -> None:
    asked = build_question({"tensor_parallel_size": 2, "zero": 3, "gradient_checkpointing": True, "seq_length": "8k"})
    assert asked == PredictQuestion(tp=2, sharding="zero-3", recompute="full", seq=8192)


@pytest.mark.parametrize(
    ("choices", "error", "problem"),
    [
        ({"tpp": 2}, TypeError, "unexpected choice 'tpp'; did you mean tp?"),
        ({"tp": 0}, ValueError, "^tp: expected a whole number from 1 to"),
        ({"tp": True}, ValueError, "^tp: expected a value, not True"),
        ({"dropout": "yes"}, ValueError, "^dropout: expected True or False, not 'yes'"),
        ({"precision": "bf15"}, ValueError, "^precision: 'bf15' is not known; did you mean bf16"),
        ({"micro_batch": 1.5}, ValueError, "^micro_batch: expected a whole number"),
        ({"tp": 3}, ValueError, "use tp=2 or 4$"),
        ({"global_batch": 64, "accumulation": 3}, ValueError, "^accumulation=3 means a global batch of 192"),
    ],
)
def test_mistakes_are_told_in_the_words_of_python(
    choices: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        stepcast.predict(**LLAMA, **choices)


def test_settling_fills_in_defaults_and_changes_nothing() -> None:
    asked = build_question({**LLAMA, "gpus": None, "nodes": 8, "tp": 8})
    before = build_question({**LLAMA, "gpus": None, "nodes": 8, "tp": 8})
    run = settle(asked)
    assert asked == before
    assert (run.strategy.layout.dp, run.question.gpus) == (8, 64)
    assert any("sequences of 4096 tokens" in note for note in run.assumptions)
    changed = settle(run.question.change({"tp": 4, "nodes": None}))
    assert changed.strategy.layout.dp == 16
    assert (
        settle(ask(*shlex.split("--model llama-3.1-8b --cluster dgx-h100 --nodes 8 --tp 8"))).strategy == run.strategy
    )


@pytest.mark.parametrize(
    ("function", "choices", "error", "problem"),
    [
        (stepcast.search, {"global_batch": 32, "tpp": 2}, TypeError, "unexpected keyword argument 'tpp'"),
        (stepcast.plan, {"chekpoint_size": "1TB"}, TypeError, "did you mean checkpoint_size?"),
        (stepcast.plan, {"tokens": "many"}, ValueError, "^tokens: "),
        (stepcast.plan, {}, ValueError, "one of tokens=15T, steps=100000 or until=2027-01-31"),
        (stepcast.analyze, {}, TypeError, "unexpected keyword argument 'model'"),
    ],
)
def test_other_functions_tell_mistakes_in_the_words_of_python(
    function: Callable[..., object], choices: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        function(**LLAMA, **choices)
