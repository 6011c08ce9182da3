"""``stepcast rl MODEL --cluster C --gpus N ...``: a step of RL post-training, or a search for the best use of GPUs."""

import argparse

from stepcast.cli.output import ProgressBar, show_view
from stepcast.ir.progress import watch_progress
from stepcast.rl.question import answer_rl, ask_rl, rl_facts, search_rl
from stepcast.version import __version__
from stepcast.views.generation import rl_search_view, rl_view


def run(args: argparse.Namespace) -> int:
    question, config = ask_rl(
        {name: getattr(args.question, name) for name in args.question.given}, args.run, args.config
    )
    about = {"command": args.command, "version": __version__}
    if question.search:
        with watch_progress(ProgressBar("rl", " candidates")):
            found = search_rl(question)
        show_view(args, rl_search_view({**found, "config": config, **about}))
        return 0

    show_view(args, rl_view({**rl_facts(answer_rl(question), question, config), **about}))
    return 0
