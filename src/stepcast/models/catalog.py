"""Models by name: reads data/models/*.toml, one file per family, and only the file that is asked for."""

import os
import re
import tomllib
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepcast.ir.model import Model
from stepcast.models.table import model_of

FOLDER = Path(__file__).parents[1] / "data" / "models"
INDEX = "index"

# Fine-tuned checkpoints have the architecture of their base.
TUNED = re.compile(r"(hf|base|instruct|chat|it|pt)$")
CUT = re.compile(r"^(.+?)[-_ ]+(?:l(\d+)|(\d+)[-_ ]?(?:l|layers?))$", re.IGNORECASE)


# A name and sizes of its own.
SIZED = re.compile(r"^(.+?):(\w+\s*=[^/\\]*)$")


class UnknownModelError(ValueError):
    """A name that is neither in the catalogue nor a file."""


def model_names() -> tuple[str, ...]:
    """Every name of the catalogue, in the order of its files."""
    return tuple(_index()[1])


def load_model(name_or_path: str | os.PathLike[str]) -> Model:
    """A model of the catalogue, or of a file: Hugging Face config.json, its folder, or TOML.

    Case and punctuation do not matter. A last word such as ``l12`` or ``12layers`` cuts the model to that
    many layers: ``llama3-70b-l12``. A name may carry sizes that differ, or all of a model that is not known:
    ``llama3-8b:layers=16,vocab=32000``, ``mine:layers=24,hidden=2048``.
    """
    text = os.fspath(name_or_path).strip()
    if sized := SIZED.match(text):
        from stepcast.models.columns import model_of_columns, sizes_of

        model = model_of_columns(sized[1], sizes_of(sized[2], text))
        return replace(model, name=Path(sized[1]).stem) if os.path.exists(sized[1]) else model
    if os.path.basename(text) != text and os.path.exists(text):
        return _model_of_file(Path(text))
    found = find_name(text)
    if found is not None:
        return catalogue_model(found)
    if os.path.exists(text):
        return _model_of_file(Path(text))
    cut = CUT.match(text)
    if cut is not None:
        base = find_name(cut[1])
        if base is not None:
            return _cut(catalogue_model(base), int(cut[2] or cut[3]), text)
    raise UnknownModelError(_unknown(text))


def find_name(text: str) -> str | None:
    """The catalogue's own name for *text*, or None."""
    known = _index()[0]
    word = _plain(text)
    while word:
        # A point between digits matters (gpt3-1.3b is not gpt3-13b), but one left out is forgiven.
        found = known.get(word) or known.get(f"no point {word}")
        if found:
            return found
        word, changed = TUNED.subn("", word)
        if not changed:
            return None
    return None


@lru_cache(maxsize=512)
def catalogue_model(name: str) -> Model:
    """The model of that exact name."""
    return model_of(name, _family(_index()[1][name])[name])


def family_of(name: str) -> str:
    """The file a name of the catalogue stands in, without its ending."""
    return _index()[1][name]


def _plain(text: str) -> str:
    """Lower case, without owner and punctuation other than points."""
    return re.sub(r"[^a-z0-9.]", "", text.rsplit("/", 1)[-1].lower())


@lru_cache(maxsize=1)
def _index() -> tuple[dict[str, str], dict[str, str]]:
    """Plain spelling -> name, and name -> family."""
    spellings: dict[str, str] = {}
    families: dict[str, str] = {}
    for family, models in _toml(INDEX).items():
        for name, aliases in models.items():
            families[name] = family
            for alias in (name, *aliases):
                spellings[_plain(alias)] = name
    without: dict[str, set[str]] = {}
    for word, name in spellings.items():
        without.setdefault(word.replace(".", ""), set()).add(name)
    for word, names in without.items():
        if len(names) == 1:
            spellings[f"no point {word}"] = next(iter(names))
    return spellings, families


@lru_cache(maxsize=64)
def _family(family: str) -> dict[str, dict[str, Any]]:
    """Name -> full table, the family's common values filled in."""
    tables: dict[str, dict[str, Any]] = {}
    for group in _toml(family)["family"]:
        common = {key: value for key, value in group.items() if key != "models"}
        for name, table in group["models"].items():
            tables[name] = common | table
    return tables


def _toml(stem: str) -> dict[str, Any]:
    with open(FOLDER / f"{stem}.toml", "rb") as file:
        return tomllib.load(file)


def _cut(model: Model, layers: int, name: str) -> Model:
    from dataclasses import replace

    if not 1 <= layers <= model.layers:
        raise UnknownModelError(
            f"{name}: {model.name} has {model.layers} layers; it cannot be cut to {layers}"
        )
    return replace(model.with_layers(layers), name=f"{model.name}-l{layers}")


def _model_of_file(path: Path) -> Model:
    from stepcast.inputs.errors import FormatError
    from stepcast.inputs.huggingface.reader import read
    from stepcast.inputs.source import Source
    from stepcast.inputs.toml import read_toml

    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".toml":
        table = read_toml(path)
        try:
            return model_of(str(table.pop("name", path.stem)), table)
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
    try:
        return read(Source(path))
    except FormatError as error:
        raise error.at(str(path)) from None


def _unknown(text: str) -> str:
    from difflib import get_close_matches

    spellings, families = _index()
    plain, words = _plain(text), [word for word in spellings if " " not in word]
    begun = sorted(word for word in words if plain and word.startswith(plain))  # left off before its end
    near = [*begun, *get_close_matches(plain, words, n=5, cutoff=0.6)]
    names = list(dict.fromkeys(spellings[word] for word in near))[:3]
    hint = f"did you mean {' or '.join(names)}?" if names else f"'stepcast list models' has {len(families)}"
    return f"unknown model {text!r}, and no such file; {hint}"
