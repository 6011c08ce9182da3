"""Write docs/glossary.md from data/glossary.toml: ``python tools/make_glossary.py``."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepcast" / "data" / "glossary.toml"
PAGE = ROOT / "docs" / "glossary.md"
INTRODUCTION = """# Glossary

What do the terms of training performance mean? Pages and the app show the same texts as tooltips. The types in the
code are on the [architecture page](architecture.md#types).
"""


def render_page() -> str:
    """Return the page: every term in alphabetical order, with a link to the page that says more."""
    terms = tomllib.loads(SOURCE.read_text(encoding="utf-8"))["term"]
    lines = [INTRODUCTION]
    for term in sorted(terms, key=lambda term: term["name"].lower()):
        synonyms = f" (also {', '.join(term['synonyms'])})" if "synonyms" in term else ""
        lines.append(f"- **{term['name']}**{synonyms}: {term['text']} [More]({term['page']})")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
