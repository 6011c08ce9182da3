"""The profile that a published run's framework has, from the words of its row: data/rows/frameworks.toml."""

import re
import tomllib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from stepcast.frameworks.catalog import load_profile
from stepcast.frameworks.profile import Profile
from stepcast.validate.published.corrections import Record

FILE = Path(__file__).parents[2] / "data" / "rows" / "frameworks.toml"
RELEASE = re.compile(r"(\d\d\.\d\d)[. ].*NeMo Container")


def profile_of(record: Record) -> Profile:
    """The first entry of the table that fits decides."""
    return load_profile(next(entry["profile"] for entry in _entries() if _fits(entry, record)))


@lru_cache(maxsize=1)
def _entries() -> tuple[Mapping[str, Any], ...]:
    with open(FILE, "rb") as file:
        return tuple(tomllib.load(file)["row"])


def _fits(entry: Mapping[str, Any], record: Record) -> bool:
    def column(name: str) -> str:
        return (record.get(name) or "").strip()

    released = RELEASE.match(column("table"))
    return (
        column("framework").lower().startswith(entry["framework"])
        and ("release" not in entry or (released is not None and released[1] >= entry["release"]))
        and all(word in column(name).lower() for name, word in entry.get("words", {}).items())
        and ("says" not in entry or bool(column(entry["says"])))
    )
