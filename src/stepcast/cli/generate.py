"""``stepcast generate --model M --cluster C --tp N ...``: serving and rollouts of a model."""

import argparse

from stepcast.cli.output import show_view
from stepcast.questions.generation import answer_generation
from stepcast.version import __version__
from stepcast.views.generation import generation_view


def run(args: argparse.Namespace) -> int:
    question = args.question if args.run is None else args.question.change({"model": args.run})
    facts = {**answer_generation(question).facts(), "command": args.command, "version": __version__}
    show_view(args, generation_view(facts))
    return 0
