"""Tooltips: the definition of a term of training performance where a label contains it."""

import re
import tomllib
from functools import cache
from pathlib import Path

from stepcast.views.markup import Markup, join, tag

SOURCE = Path(__file__).parents[1] / "data" / "glossary.toml"


@cache
def load_definitions() -> dict[str, str]:
    """Return the definition of each term and synonym; names that are not acronyms are in lower case."""
    terms = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["term"]
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
