"""``stepcast rl MODEL --cluster C --gpus N ...``: a step of RL post-training, or a search for the best use of GPUs."""

import argparse

from stepcast.cli.options import add_options, add_question
from stepcast.cli.output import show_view
from stepcast.rl.question import RlQuestion
from stepcast.version import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser, "run MODEL  a model, instead of --model", run={"nargs": "?"})
    add_question(parser, RlQuestion)
    add_options(parser.add_argument_group("input and output"), "rl", config={"default": None})


def run(args: argparse.Namespace) -> int:
    from stepcast.rl.question import ask_rl

    question, config = ask_rl(
        {name: getattr(args.question, name) for name in args.question.given}, args.run, args.config
    )
    about = {"command": args.command, "version": __version__}
    if question.search:
        from stepcast.cli.output import ProgressBar
        from stepcast.ir.progress import watch_progress
        from stepcast.rl.search import search_rl
        from stepcast.views.generation import rl_search_view

        with watch_progress(ProgressBar("rl", " candidates")):
            found = search_rl(question)
        show_view(args, rl_search_view({**found, "config": config, **about}))
        return 0
    from stepcast.rl.question import answer_rl, rl_facts
    from stepcast.views.generation import rl_view

    facts = {**rl_facts(answer_rl(question), question), "config": config, **about}
    show_view(args, rl_view(facts))
    return 0
