"""The language of help, reports, pages, documentation and docstrings: plain English in the field's own terms."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.shared import nodes_of

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "stepcast"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]

RETIRED_WORDS = re.compile(
    r"\b(told|tells|said|beside|lies|stands|habits?|meanwhile|alike|drawn|further|forwarding)\b", re.IGNORECASE
)
RETIRED_PHRASES = (
    "what layers keep", "states whole", "likely within", "nine times in ten", "eight of ten", "an average stage spends",
    "cannot be better", "work done again", "waits for its host", "wait for their host", "grown over steps",
    "issued one by one", "in all (", "GPUs in all", "nodes in all", "change the cluster, as", "of a GPU-hour",
    "stay out of fp8", "by the norm of all", "what to make least", "one file, without a network", "within that band",
    "less memory, more time", "to see one of them", "one each ", "as uncertain as", "nothing said otherwise",
    "as usual", "chunks of a stage", "answered at once", "who has it may ask", "the first is first", "none beats it",
    "under the slope", "a head sorts", "is no configuration that", "change nothing here", "the house on one page",
    "ten minutes lead", "none of their times", "where? give", "fill what is left out",
)  # fmt: skip
OPENERS = re.compile(r"(What|Of|Whose|Which|Where|How|That|As|Than)\b(?!-)")


CODE = re.compile(r"`[^`]*`")


def retired(text: str) -> set[str]:
    """Return the retired words and phrases in *text*."""
    lowered = " ".join(text.split()).lower()
    found = {match[0].lower() for match in RETIRED_WORDS.finditer(lowered)}
    return found | {phrase for phrase in RETIRED_PHRASES if phrase.lower() in lowered}


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of the strings of a module that people may read: all with a space, docstrings apart."""
    bodies = (node.body for node in nodes_of(path) if isinstance(node, DOCUMENTED))
    docstrings = {id(body[0].value) for body in bodies if body and isinstance(body[0], ast.Expr)}
    for node in nodes_of(path):
        if not (isinstance(node, ast.Constant) and isinstance(node.value, str)) or id(node) in docstrings:
            continue
        if " " in node.value.strip() and not node.value.startswith(FORMER_SPELLINGS):
            yield node.lineno, node.value


def docstrings(path: Path) -> Iterator[tuple[str, str]]:
    """Yield name and docstring of every function and class of a module, and of the module itself."""
    for node in nodes_of(path):
        if isinstance(node, DOCUMENTED):
            yield getattr(node, "name", path.stem), ast.get_docstring(node) or ""


def ends_sentence(text: str) -> bool:
    """Return True if the first paragraph ends like a sentence, or is a command."""
    first = text.split("\n\n")[0].strip()
    return first[-1] in ".:?!" or first.startswith("``")


# Former spellings are accepted and not shown in help; JSON keys keep their names.
FORMER_SPELLINGS = ("deep-ep forwarding flex", "further-tokens mtp-num-layers", "busiest_links=link links=alike")


RETIRED_NAMES = {
    "told",
    "said",
    "tells",
    "beside",
    "lies",
    "stands",
    "habit",
    "habits",
    "further",
    "meanwhile",
    "alike",
    "drawn",
}
# Alone they do not say what a variable, an argument or a function is.
VAGUE_NAMES = {"at", "each", "found", "kept", "like", "made"}


def names(path: Path) -> Iterator[str]:
    """Yield the names of functions, classes, arguments, variables and attributes that a module makes."""
    for node in nodes_of(path):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield name


PACKAGES = sorted(path.name for path in SOURCE.iterdir() if path.is_dir() and any(path.rglob("*.py")))


def modules(package: str) -> list[Path]:
    return sorted((SOURCE / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_strings_avoid_retired_words(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {', '.join(sorted(words))}: {text[:80]!r}"
        for path in modules(package)
        for line, text in prose(path)
        if (words := retired(text))
    ]
    assert not wrong, f"{len(wrong)} strings\n" + "\n".join(wrong)


@pytest.mark.parametrize("package", PACKAGES)
def test_docstrings_are_sentences(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)} {name}: {text.splitlines()[0]}"
        for path in modules(package)
        for name, text in docstrings(path)
        if text and (OPENERS.match(text) or not ends_sentence(text) or RETIRED_WORDS.search(text))
    ]
    assert not wrong, f"{len(wrong)} docstrings\n" + "\n".join(wrong)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documents_avoid_retired_words(path: Path) -> None:
    wrong = [f"{number}: {', '.join(sorted(words))}: {line[:90]}"
             for number, line in enumerate(path.read_text().splitlines(), 1) if (words := retired(CODE.sub("", line)))]  # fmt: skip
    assert not wrong, f"{len(wrong)} lines\n" + "\n".join(wrong)


def test_names_in_code_have_no_retired_words() -> None:
    listed = {(path.name, name) for path in SOURCE.rglob("*.py") for name in names(path)}
    assert not {pair for pair in listed if RETIRED_NAMES & set(pair[1].lower().split("_"))}
    assert not {pair for pair in listed if pair[1].strip("_").lower() in VAGUE_NAMES}
