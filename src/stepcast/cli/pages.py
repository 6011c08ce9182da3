"""Answers of verbs as text, JSON, and pages for ``--html FILE``."""

import argparse
import os
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

from stepcast.cli.output import print_json, print_warnings, terminal_width, write_file
from stepcast.cli.streams import show_status
from stepcast.questions.choices import option_of
from stepcast.version import __version__
from stepcast.views.text import visible

if TYPE_CHECKING:
    from stepcast.questions.choices import Question
    from stepcast.questions.search import Watching
    from stepcast.views.document import About
    from stepcast.views.view import View

SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-._~/")


def about(args: argparse.Namespace) -> "About":
    """Return the origin of a page, with a link to the trace that was written with it."""
    from stepcast.views.document import About

    links = []
    if trace := getattr(args, "trace", None):
        where = os.path.relpath(trace, os.path.dirname(os.path.abspath(args.html)))
        links.append(("Trace for ui.perfetto.dev", link_to(where)))
    return About(args.verb, getattr(args, "command", ""), __version__, tuple(links))


def show_view(args: argparse.Namespace, view: "View", verbose: bool = True, below: Sequence[str] = ()) -> None:
    """Write the page of an answer if ``--html`` asks for it, then print the answer, with texts *below* it."""
    write_view(args, view)
    print_view(args, view, verbose, below)


# Output of one answer, which several have none of.
SINGLE = ("output", "trace", "save", "to_workload", "gantt", "critical_path", "jitter", "explain_memory", "emit")


def show_alternatives(args: argparse.Namespace, question: "Question", watching: "Watching" = nullcontext) -> int:
    """Answer a question with several clusters, frameworks or numbers of GPUs; return the exit status."""
    from stepcast.questions.alternatives import answer_alternatives
    from stepcast.views.alternatives import alternatives_view

    for name in SINGLE:
        if getattr(args, name, None):
            raise ValueError(f"{option_of(name)} is for a single answer: name one cluster and framework")
    try:
        answer = answer_alternatives(question, watching)
    finally:
        show_status("")
    show_view(args, alternatives_view({**answer.facts(), "command": args.command, "version": __version__}))
    return 0 if any(row["fits"] is not False for row in answer.rows) else 1


def write_view(args: argparse.Namespace, view: "View") -> None:
    """Write the page of an answer if ``--html`` asks for it."""
    if args.html:
        from stepcast.views.html import render_page

        write_file(args.html, render_page(view, about(args)))


def print_view(args: argparse.Namespace, view: "View", verbose: bool = True, below: Sequence[str] = ()) -> None:
    """Print JSON, or the answer as text, the name of the page that was written, and the warnings."""
    if args.json:
        print_json(view.facts)
        return
    from stepcast.views.terminal import render_text

    if text := render_text(view, terminal_width(), verbose):
        print(text)
    for more in below:
        print(f"\n{more}")
    if args.html:
        print(f"\n{told_page(args)}")
    print_warnings(view.shown_warnings)


def told_page(args: argparse.Namespace) -> str:
    return f"wrote {visible(args.html)}: open it in a browser"


def link_to(path: str) -> str:
    """Return the relative URL of a file next to a page."""
    data = os.fsencode(path.replace(os.sep, "/"))
    return "./" + "".join(chr(byte) if byte in SAFE else f"%{byte:02X}" for byte in data)
