"""``stepcast generate`` and ``stepcast rl``: serving and rollouts of a model, and steps of RL post-training."""

import argparse

from stepcast.cli.output import ProgressBar, origin, show_view
from stepcast.ir.progress import watch_progress
from stepcast.questions.generation import answer_generation
from stepcast.rl.question import answer_rl, ask_rl, rl_facts, search_rl
from stepcast.views.generation import generation_view, rl_search_view, rl_view


def run_generate(args: argparse.Namespace) -> int:
    question = args.question if args.run is None else args.question.change({"model": args.run})
    show_view(args, generation_view({**answer_generation(question).facts(), **origin(args)}))
    return 0


def run_rl(args: argparse.Namespace) -> int:
    given = {name: getattr(args.question, name) for name in args.stated}
    question, config = ask_rl(given, args.run, args.config)
    if question.search:
        with watch_progress(ProgressBar("rl", " candidates")):
            result = search_rl(question)
        show_view(args, rl_search_view({**result, "config": config, **origin(args)}))
    else:
        show_view(args, rl_view({**rl_facts(answer_rl(question), question, config), **origin(args)}))
    return 0
