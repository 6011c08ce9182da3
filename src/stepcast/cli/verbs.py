"""The verbs: a summary, a paragraph and two examples of each, and its page in the docs (``data/verbs.txt``)."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Verbs with a second spelling.
SPELLINGS = {"analyse": "analyze"}


class Verb(NamedTuple):
    """A verb of the command line; its module in ``cli`` has its name."""

    name: str
    summary: str
    page: str = ""
    about: str = ""
    examples: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # verbs of other tools and of everyday language that mean it

    @property
    def module(self) -> str:
        return f"stepcast.cli.{self.name}"

    @property
    def sentence(self) -> str:
        return f"{self.summary[:1].upper()}{self.summary[1:]}."

    @property
    def epilog(self) -> str | None:
        """Two example commands."""
        return "\n".join(["examples:", *(f"  stepcast {each}" for each in self.examples)]) if self.page else None

    def help(self, width: int) -> str:
        """Return the text of ``stepcast help VERB``."""
        from stepcast.views.text import wrap

        options = f"All options: stepcast {self.name} --help"
        if not self.page:
            return f"{self.sentence}\n\n{options}"
        about = "\n".join(wrap(self.about, width))
        return f"{about}\n\n{self.epilog}\n\n{options}. Documentation: docs/{self.page}.md"


def _read_verbs(texts: str) -> Iterator[Verb]:
    for block in texts.replace("\n    ", "\t").splitlines():
        head, *lines = block.split("\t")
        name, _, rest = head.partition(": ")
        summary, _, page = rest.removesuffix("]").partition(" [")
        examples = tuple(line.removeprefix("$ ") for line in lines if line.startswith("$ "))
        others = [word for line in lines if line.startswith("also: ") for word in line.split()[1:]]
        about = " ".join(line for line in lines if not line.startswith(("$", "also: ")))
        yield Verb(name, summary, page, about, examples, tuple(others))


VERBS = tuple(_read_verbs((Path(__file__).parents[1] / "data" / "verbs.txt").read_text(encoding="utf-8")))
OTHER_VERBS = {other: verb.name for verb in VERBS for other in verb.others}
