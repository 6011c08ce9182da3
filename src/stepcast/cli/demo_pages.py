"""The pages of the demo: one of each shipped document, one of a prediction, and one that links them."""

import contextlib
import io
import shlex
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from stepcast.cli.output import write_file
from stepcast.version import __version__

CLUSTER = ("--cluster", "dgx-h100")
PREDICTION = ("predict", "--model", "llama-3.1-70b", *CLUSTER, "--gpus", "64", "--tp", "8", "--pp", "2")
# How each format is asked about; what says neither what runs nor what ran has no page.
ASKED = {
    "simai": ("simulate", CLUSTER),
    "optable": ("simulate", (*CLUSTER, "--repeat-layers", "36", "--backward-factor", "2")),
    "megatron": ("analyze", ()),
    "kineto": ("analyze", ()),
    "optimus": ("analyze", ()),
    "nccl-tests": ("analyze", CLUSTER),
}


class Made(NamedTuple):
    """A page that was written."""

    title: str
    file: str
    command: str


def write_pages(documents: list[tuple[str, str]], output: Path) -> Path:
    """Pages of *documents*, files with their formats; the page that links them all."""
    made = [_write(PREDICTION, "A prediction: Llama 3.1 70B on 64 H100", output / "prediction.html")]
    for file, kind in documents:
        if kind in ASKED:
            verb, options = ASKED[kind]
            name = Path(file).name
            made.append(_write((verb, file, *options), name, output / f"{name.split('.')[0]}.html"))
    index = output / "index.html"
    write_file(str(index), _index(made))
    return index


def _write(words: tuple[str, ...], title: str, path: Path) -> Made:
    """Run a verb as a user would, for its page alone."""
    from stepcast.cli.main import build_parser
    from stepcast.cli.verbs import Verb

    command = shlex.join(["stepcast", *words])
    args = build_parser([Verb(words[0], "")]).parse_args([*words, "--html", str(path)])
    args.command = command
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        import_module(f"stepcast.cli.{words[0]}").run(args)
    return Made(title, path.name, command)


def _index(made: list[Made]) -> bytes:
    from stepcast.views.document import About, Page, Section, render
    from stepcast.views.markup import join, tag

    rows = [
        tag("li", tag("a", tag("strong", each.title), href=f"./{each.file}"), tag("code", each.command))
        for each in made
    ]
    head = join(
        (
            tag("p", tag("strong", "stepcast demo"), class_="about"),
            tag(
                "h1",
                tag("span", str(len(made)), class_="number"),
                " ",
                tag("span", "pages to look into", class_="unit"),
            ),
            tag(
                "p", "Each is one file: open it, send it, print it. The line below each makes it again.", class_="lead"
            ),
        )
    )
    sections = [Section("Pages", tag("ul", rows, class_="links"), wide=True)]
    return render(Page("The demo", head, sections, About("demo", "stepcast demo", __version__)))
