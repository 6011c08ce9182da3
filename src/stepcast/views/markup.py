"""HTML and SVG put together so that text stays text: whatever is no Markup is escaped where it goes in."""

import html
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from stepcast.ir.tables import parse_tables
from stepcast.views.text import cut_middle, visible

VOID = {"meta", "link", "input", "br", "hr", "rect", "circle", "line", "path", "polygon", "polyline"}
LONGEST_TEXT = 600


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


Child = Any  # Markup, text, a number, None, or several of them


def text(value: object, most: int = LONGEST_TEXT) -> Markup:
    """Return *value* as text of a page: escaped, without characters that reverse or hide text.

    Overlong text is cut in the middle, with a note; the facts of the page have all of it.
    """
    return Markup(html.escape(cut_middle(visible(str(value)), most, "…"), quote=True))


def join(children: Iterable[Child]) -> Markup:
    return Markup("".join(_part(child) for child in children))


def _part(child: Child) -> str:
    if child is None or child is False:
        return ""
    if isinstance(child, Markup):
        return child
    return text(child) if isinstance(child, str | int | float) else join(child)


def tag(name: str, /, *children: Child, **attributes: object) -> Markup:
    """Return an element; ``class_`` is class, ``aria_label`` aria-label; None or False omits an attribute."""
    written = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in VOID and not children:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-") if key not in ("viewBox", "preserveAspectRatio") else key
    if value is True:
        return f" {name}"
    if isinstance(value, float):
        value = f"{value:.4g}" if abs(value) < 1e5 else f"{value:.0f}"
    return f' {name}="{text(value, 4000)}"'


def command_code(words: str) -> Markup:
    """Return a command line, or options of one, as code with each option and its value on one line."""
    first, *others = words.split(" --")
    options = [tag("span", text(words, 4000), class_="option") for words in (first, *(f"--{o}" for o in others))]
    return tag("code", options[0], [(" ", option) for option in options[1:]])


def fill_template(template: str, **parts: Child) -> Markup:
    """Return an HTML file of ours with *parts* in place of their names in braces; indented lines are joined."""
    joined = "".join(line.strip() for line in template.splitlines())
    return Markup(re.sub(r"\{(\w+)\}", lambda match: _part(parts[match[1]]), joined))


# ---- tooltips -----------------------------------------------------------------------------------------------

SOURCE = Path(__file__).parents[1] / "data" / "glossary.toml"


@cache
def load_definitions() -> dict[str, str]:
    """Return the definition of each term and synonym; names that are not acronyms are in lower case."""
    terms = parse_tables(SOURCE.read_text(encoding="utf-8"))["term"]
    names = ((name, term["text"]) for term in terms for name in (term["name"], *term.get("synonyms", ())))
    return {_normalise(name): text for name, text in names}


def _normalise(name: str) -> str:
    return name if name.isupper() else name.lower()


@cache
def _pattern() -> re.Pattern[str]:
    """Return the pattern of any term, the longest first; acronyms such as PP or NIC only in capitals."""
    names = sorted(load_definitions(), key=len, reverse=True)
    alternatives = (re.escape(name) if name.isupper() else f"(?i:{re.escape(name)})" for name in names)
    return re.compile(rf"(?<![\w-])(?:{'|'.join(alternatives)})(?![\w-])")


def explain(label: str) -> Markup:
    """Return *label* with its first term of the glossary as an ``abbr`` whose title is the definition."""
    match = _pattern().search(label)
    if match is None:
        return join((label,))
    definition = load_definitions()[_normalise(match[0])]
    return join((label[: match.start()], tag("abbr", match[0], title=definition), label[match.end() :]))
