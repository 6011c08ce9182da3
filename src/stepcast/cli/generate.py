"""``stepcast generate --model M --cluster C --tp N ...``: serving and rollouts of a model."""

import argparse

from stepcast.cli.options import add_options, add_question
from stepcast.cli.output import show_view
from stepcast.questions.generation import GenerateQuestion, answer_generation
from stepcast.version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "run MODEL  a model, instead of --model", run={"nargs": "?"})
    add_question(parser, GenerateQuestion)
    add_options(parser.add_argument_group("output"), "--html\n--json")


def run(args: argparse.Namespace) -> int:
    from stepcast.views.generation import generation_view

    question = args.question if args.run is None else args.question.change({"model": args.run})
    facts = {**answer_generation(question).facts(), "command": args.command, "version": __version__}
    show_view(args, generation_view(facts))
    return 0
