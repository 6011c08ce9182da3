"""Words and colours of answers, which are data (``data/names.toml``)."""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "data" / "names.toml"


def load_names(table: str) -> Mapping[str, str]:
    """Return a table of words or colours by the keys of the JSON, in the order in which they are shown."""
    return _read()[table]


@cache
def _read() -> dict[str, dict[str, str]]:
    return tomllib.loads(SOURCE.read_text(encoding="utf-8"))
