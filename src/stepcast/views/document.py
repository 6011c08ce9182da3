"""A page from its parts: the answer first, sections in order, then defaults and the command."""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cache
from importlib.resources import files

import msgspec

from stepcast.ir.dataclass import dataclass
from stepcast.ir.facts import Facts
from stepcast.views.markup import Child, Markup, explain, fill_template, join, tag, text
from stepcast.views.text import visible
from stepcast.views.view import asked_pairs


@dataclass(frozen=True, slots=True)
class Section:
    """Part of a page; *lead* says in a sentence what to see in it."""

    title: str
    body: Child
    lead: str = ""
    wide: bool = False

    @property
    def key(self) -> str:
        return "".join(each if each.isalnum() else "-" for each in self.title.lower()).strip("-")


@dataclass(frozen=True, slots=True)
class About:
    """The origin of a page: its command and version."""

    verb: str
    command: str = ""
    version: str = ""
    links: tuple[tuple[str, str], ...] = ()  # words and names of files next to the page


@dataclass(frozen=True, slots=True)
class Page:
    """One answer."""

    title: str
    headline: Child
    parts: Sequence[Section | None]
    about: About
    facts: Facts = field(default_factory=dict)
    assumptions: Sequence[str] = ()
    warnings: Sequence[str] = ()

    @property
    def sections(self) -> list[Section]:
        """Return the parts that have something to show."""
        return [part for part in self.parts if part]


def render(page: Page) -> bytes:
    """Return the file of a page."""
    document = fill_template(
        asset("page.html"),
        policy=text(policy(), 4000),
        version=page.about.version,
        title=page.title,
        style=Markup(asset("page.css")),
        verb=page.about.verb,
        links=[tag("a", section.title, href=f"#{section.key}") for section in page.sections],
        answer=body_of(page),
        facts=data_block("facts", page.facts),
        program=Markup(asset("page.js")),
    )
    return f"<!doctype html>\n{document}\n".encode("utf-8", "backslashreplace")


def body_of(page: Page) -> Markup:
    """Return everything between the bar at the top and the footer."""
    return join(
        (
            _asked(page),
            tag("header", page.headline, class_="answer"),
            _notes("Warnings", "warning", page.warnings),
            tag("div", _arrange(page.sections), class_="sections"),
            _notes("Defaults used", "assumed", page.assumptions),
            _command(page.about),
        )
    )


def _asked(page: Page) -> Markup | None:
    """Return the question at the head of the page, as text and JSON begin with it."""
    # The command is at the end of the page, with a button that copies it.
    pairs = asked_pairs({name: value for name, value in page.facts.items() if name != "command"})
    if not pairs:
        return None
    listed = [tag("div", tag("dt", name), tag("dd", text(str(value), 4000))) for name, value in pairs]
    return tag("dl", listed, class_="asked", aria_label="What was asked")


def data_block(key: str, value: object) -> Markup:
    """Return *value* as JSON that the page holds and nothing executes."""
    data = msgspec.json.encode(plain_json(value)).decode()
    for character in "<>&\u2028\u2029":
        data = data.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{text(key)}">{data}</script>')


def plain_json(value: object) -> object:
    """Return a value as JSON can hold it: valid text, and lists instead of arrays."""
    if isinstance(value, Mapping):
        return {visible(str(key)): plain_json(item) for key, item in value.items()}
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [plain_json(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _arrange(sections: Sequence[Section]) -> list[Markup]:
    """Return sections two to a row; a section that is alone in its row fills it."""
    placed: list[Markup] = []
    alone = True
    for index, section in enumerate(sections):
        if section.wide:
            placed.append(_section(section, True))
            alone = True
            continue
        last = index + 1 == len(sections) or sections[index + 1].wide
        placed.append(_section(section, alone and last))
        alone = not alone
    return placed


def _section(section: Section, wide: bool) -> Markup:
    return tag(
        "section",
        tag("h2", explain(section.title), id=f"{section.key}-title"),
        tag("p", section.lead, class_="lead") if section.lead else None,
        section.body,
        id=section.key,
        aria_labelledby=f"{section.key}-title",
        class_="wide" if wide else None,
    )


def _notes(title: str, kind: str, notes: Sequence[str]) -> Markup | None:
    if not notes:
        return None
    listed = [tag("li", text(note, 2000)) for note in dict.fromkeys(notes)]
    return tag("aside", tag("h2", title), tag("ul", listed), class_=f"notes {kind}", aria_label=title)


def _command(about: About) -> Markup | None:
    if not about.command:
        return None
    return tag(
        "aside",
        tag("h2", "The command that made this page"),
        tag(
            "div",
            tag("pre", tag("code", text(about.command, 4000)), tabindex="0", aria_label="command"),
            tag("button", "Copy", type="button", class_="quiet copy", data_copy=about.command),
            class_="command",
        ),
        [tag("p", tag("a", words, href=name)) for words, name in about.links],
        class_="notes made",
        aria_label="Command",
    )


# The style and the program that every page holds, and the digests by which its policy knows them.


@cache
def asset(name: str) -> str:
    """Return a file of this package as text."""
    return files("stepcast.views").joinpath("assets", name).read_text("utf-8")


@cache
def digest(name: str) -> str:
    """Return the digest by which a Content-Security-Policy allows a script or style inside the page."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(asset(name).encode()).digest()).decode()}'"


@cache
def policy() -> str:
    """Return what a page may do: run its own program and show its own style, and nothing else."""
    return (
        f"default-src 'none'; script-src {digest('page.js')}; style-src {digest('page.css')}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
