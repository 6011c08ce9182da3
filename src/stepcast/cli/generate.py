"""``stepcast generate --model M --cluster C --tp N ...``: serving and rollouts of a model."""

import argparse

from stepcast.cli.output import origin, show_view
from stepcast.questions.generation import answer_generation
from stepcast.views.generation import generation_view


def run(args: argparse.Namespace) -> int:
    question = args.question if args.run is None else args.question.change({"model": args.run})
    show_view(args, generation_view({**answer_generation(question).facts(), **origin(args)}))
    return 0
