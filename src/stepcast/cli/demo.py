"""``stepcast demo``: a forecast with its page, then the shipped example files with theirs."""

import argparse
import contextlib
import io
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from stepcast.cli.options import parse_arguments
from stepcast.cli.output import print_json, terminal_width, write_file, write_trace
from stepcast.cli.show import facts_of
from stepcast.cli.streams import heading
from stepcast.inputs.source import DATA, Source, read_toml
from stepcast.inputs.table import read_sources, recognise
from stepcast.ir.types import FactDict, require
from stepcast.version import __version__
from stepcast.views.declared import phrase
from stepcast.views.document import About, Page, Section, render
from stepcast.views.markup import join, tag
from stepcast.views.text import bullet, table, wrap

TRACED = "megatron-rank7.txt"
DEMO = read_toml(str(DATA / "demo.toml"))


class DemoPage(NamedTuple):
    """A page that the demo wrote, and what the command printed."""

    title: str
    file: str
    command: str
    printed: str


def run(args: argparse.Namespace) -> int:
    folder = Path(args.examples) if args.examples else shipped_examples()
    require(folder.is_dir(), f"{folder}: no such folder; name the one of the examples with --examples")
    output = Path(args.output)
    require(not output.exists() or output.is_dir(), f"{output}: is a file; name a folder to write to with --output")
    output.mkdir(parents=True, exist_ok=True)
    forecast = _write_page(
        DEMO["forecast"].split(), "A forecast: Llama 3.1 8B on eight H100", output / "prediction.html"
    )
    width = terminal_width()
    if not args.json:
        print(heading("A forecast: how long does a training step take, and does it fit?"))
        print(f"\n$ {forecast.command}\n{forecast.printed.rstrip()}\n", flush=True)
    documents: list[FactDict] = []
    for path in sorted(filter(Path.is_file, folder.iterdir())):
        source = Source(path)
        entry = recognise(source)
        facts = facts_of(read_sources([source], entry))
        documents.append({"file": str(path), "format": entry.name, **facts})
    source = Source(folder / TRACED)
    trace = output / "megatron-rank7.perfetto.json"
    write_trace(read_sources([source], recognise(source)), str(trace))
    index = _write_pages(forecast, documents, output)
    if args.json:
        print_json({"documents": documents, "written": [str(trace), str(index)]})
        return 0
    print(heading("The example files, recognised by their content"), end="\n\n")
    print(table(("document", "format", "layout", "contents"), map(_row, documents), width), end="\n\n")
    for facts in documents:
        for warning in facts["warnings"]:
            print(bullet(f"{Path(facts['file']).name}: {warning}", "note: ", width))
    written = f"wrote {index}: open it in a browser; it links a page of the forecast and of each file"
    lines = [*wrap(written, width), f"wrote {trace}: open it at ui.perfetto.dev"]
    print("", *lines, "", heading("Try next"), "", sep="\n")
    command = sys.argv[0] if sys.argv[0].endswith("stepcast") else "stepcast"
    for purpose, words in DEMO["next"].items():
        print(f"# {purpose}\n{command} {words.replace('examples/', f'{folder}/')}")
    return 0


def shipped_examples() -> Path:
    """Return the folder of the examples: in this checkout, else inside the package; one with other files is left."""
    package = Path(__file__).resolve().parents[1]
    places = (Path("examples"), package / "examples", package.parents[1] / "examples")
    return next((place for place in places if (place / TRACED).is_file()), places[0])


def _row(document: FactDict) -> tuple[str, str, str, str]:
    layout = " ".join(f"{name}{document[name]}" for name in ("tp", "pp", "dp") if document.get(name)) or "-"
    kind = str(document["kind"])
    # A few words that a person can check against the file.
    words = phrase(f"demo-{kind.replace(' ', '-')}", document) if kind in DEMO["summarised"] else kind
    return Path(document["file"]).name, document["format"], layout, words


def _write_pages(forecast: DemoPage, documents: list[FactDict], output: Path) -> Path:
    """Write a page for each document and one that links them all; return the latter."""
    pages = [forecast]
    for document in documents:
        if document["format"] in DEMO["questions"]:
            verb, *options = DEMO["questions"][document["format"]].split()
            name = Path(document["file"]).name
            path = output / f"{name.split('.')[0]}.html"
            pages.append(_write_page([verb, document["file"], *options], name, path))
    index = output / "index.html"
    links = ((tag("a", tag("strong", page.title), href=f"./{page.file}"), page.command) for page in pages)
    rows = [tag("li", link, tag("code", command)) for link, command in links]
    count = tag("h1", tag("span", str(len(pages)), class_="number"), " ", tag("span", "pages", class_="unit"))
    lead = "Each page is self-contained HTML and works offline. The command below its title reproduces it."
    head = join((tag("p", tag("strong", "stepcast demo"), class_="about"), count, tag("p", lead, class_="lead")))
    sections = [Section("Pages", tag("ul", rows, class_="links"), wide=True)]
    write_file(str(index), render(Page("The demo", head, sections, About("demo", "stepcast demo", __version__))))
    return index


def _write_page(words: Sequence[str], title: str, path: Path) -> DemoPage:
    """Run a verb as a user would, with ``--html``."""
    from stepcast.cli.main import Verb, build_parser

    command = shlex.join(["stepcast", *words])
    verb = Verb(words[0], "")
    args = parse_arguments(build_parser([verb]), [*words, "--html", str(path)])
    args.command = command
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
        verb.run(args)
    return DemoPage(title, path.name, command, printed.getvalue())
