"""``stepcast plan --model M --cluster C --gpus N ... --tokens 15T``"""

import argparse
from dataclasses import replace

from stepcast.cli.output import origin, print_notes, show_alternatives, show_view, write_file
from stepcast.outputs.plain import table_bytes
from stepcast.questions.choices import several_of
from stepcast.questions.plan import settle_plan
from stepcast.views.plan import plan_view
from stepcast.views.text import visible


def run(args: argparse.Namespace) -> int:
    if args.captured:
        raise ValueError(
            "--captured: a plan needs --model, whose checkpoints and restarts it knows; 'stepcast predict --captured "
            "FILE' and 'stepcast search --captured FILE' predict the step of a captured program"
        )
    if several_of(args.question):
        return show_alternatives(args, args.question)
    settled = settle_plan(args.question)
    print_notes(dict.fromkeys(note for step in settled.steps if step for note in step.notes))
    if args.run_file:
        settled = replace(settled, warnings=(*settled.warnings, *args.run_file.warnings))
    facts = {**settled.answer().to_dict(), **origin(args)}
    if args.output:
        write_file(args.output, table_bytes(args.output, facts["choices"]))
    show_view(args, plan_view(facts), below=[f"wrote {visible(args.output)}"] if args.output else ())
    return 0
