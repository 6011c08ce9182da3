"""``stepcast rl MODEL --cluster C --gpus N ...``: a step of RL post-training, or a search for the best use of GPUs."""

import argparse

from stepcast.cli.output import ProgressBar, origin, show_view
from stepcast.ir.progress import watch_progress
from stepcast.rl.question import answer_rl, ask_rl, rl_facts, search_rl
from stepcast.views.generation import rl_search_view, rl_view


def run(args: argparse.Namespace) -> int:
    given = {name: getattr(args.question, name) for name in args.stated}
    question, config = ask_rl(given, args.run, args.config)
    if question.search:
        with watch_progress(ProgressBar("rl", " candidates")):
            found = search_rl(question)
        show_view(args, rl_search_view({**found, "config": config, **origin(args)}))
    else:
        show_view(args, rl_view({**rl_facts(answer_rl(question), question, config), **origin(args)}))
    return 0
