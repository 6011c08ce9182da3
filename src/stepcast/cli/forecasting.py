"""The question that a command line asks, for verbs that take a model, a cluster and a strategy."""

import argparse
from typing import TYPE_CHECKING, Any

from stepcast.cli.options import add_choice, add_options
from stepcast.cli.output import print_notes
from stepcast.questions.question import (
    ABOUT_TRAINING,
    BATCH,
    CHOICES,
    DEFAULTS,
    EXECUTION,
    LAYOUT,
    PRICES,
    WHAT,
    PredictQuestion,
)

if TYPE_CHECKING:
    from stepcast.questions.settle import SettledRun


def add_forecast_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for each choice of a question, under the headings of the help."""
    parser.set_defaults(own=parser, described=None)
    for heading in (WHAT, LAYOUT, BATCH, EXECUTION, PRICES):
        group = parser.add_argument_group(heading)
        if heading == WHAT:
            add_options(
                group,
                """
                --config FILE     take model, strategy and framework from a Megatron-LM script or argument
                                  file, NeMo or Megatron-Bridge YAML, torchtitan TOML, DeepSpeed JSON,
                                  accelerate YAML; options given here win
                --ignore-unknown  leave out keys of --config that its tool does not have, instead of refusing
                                  them
                """,
            )
        for name, choice in CHOICES.items():
            if choice.group == heading:
                add_choice(group, name)


def question_of(args: argparse.Namespace, training: bool = False) -> PredictQuestion:
    """Return the question that *args* ask, with *training* also about a run of so many tokens.

    *args* may lack choices that their verb does not have.
    """
    names = [name for name in CHOICES if training or name not in ABOUT_TRAINING]
    values = {name: getattr(args, name, DEFAULTS[name]) for name in names}
    values["set"] = tuple(values["set"])
    described = getattr(args, "described", None)
    question = PredictQuestion(**values, file=described.file if described else "")
    return question.leave_unchecked(question.given - args.given)


def cluster_question(args: argparse.Namespace) -> PredictQuestion:
    """Return the question of *args* about the cluster alone, for runs whose program a file describes."""
    names = ("cluster", "set", "place", "background")
    values = {name: getattr(args, name, DEFAULTS[name]) for name in names}
    engine = getattr(args, "engine", DEFAULTS["engine"])
    return PredictQuestion(**{**values, "set": tuple(values["set"])}, engine=engine)


def forecast(args: argparse.Namespace, training: bool = False) -> "SettledRun":
    """Return the run that *args* ask for, predicted; print what has no effect and does no harm."""
    from stepcast.questions.settle import settle

    run = settle(question_of(args, training))
    if not getattr(args, "quiet", False):
        print_notes(run.notes)
    assert run.prediction
    return run


def run_facts(run: "SettledRun") -> dict[str, Any]:
    """Return what was asked, in the words of the JSON contract."""
    from stepcast.frameworks.words import recompute_word
    from stepcast.views.search import row_words

    strategy, node = run.strategy, run.cluster.node
    return {
        "model": run.model.name,
        "parameters": run.model.parameters,
        "cluster": run.cluster.name,
        "gpu": run.cluster.gpu.name,
        "gpus_per_node": node.gpus,
        "framework": run.framework.name,
        "execution": str(run.framework.execution),
        "kernels": str(run.framework.kernels),
        "strategy": {
            **row_words(strategy),
            "recompute": recompute_word(strategy.recompute),
            "global_batch": strategy.global_batch,
            "seq": strategy.seq,
        },
    }
