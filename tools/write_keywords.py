"""Write ``src/stepcast/keywords.pyi``: ``python -m tools.write_keywords``."""

from pathlib import Path

from stepcast.keywords import FUNCTIONS, TYPES

STUB = Path(__file__).parents[1] / "src" / "stepcast" / "keywords.pyi"
HEAD = '''"""The keywords of the functions in ``library``; ``python -m tools.write_keywords`` writes this file."""

import datetime
import os
from collections.abc import Mapping, Sequence
from typing import TypedDict

from stepcast.questions.choices import Question

FUNCTIONS: Mapping[str, tuple[str, type[Question], Mapping[str, str]]]
TYPES: Mapping[str, Mapping[str, str]]
'''


def write_stub() -> str:
    """Return the text of the stub."""
    text = HEAD
    for name, types in TYPES.items():
        text += f'\nclass {name}(TypedDict, total=False):\n    """Keywords of ``stepcast.{FUNCTIONS[name][0]}``."""\n\n'
        text += "".join(f"    {keyword}: {kind}\n" for keyword, kind in types.items())
    return text


if __name__ == "__main__":
    STUB.write_text(write_stub(), encoding="utf-8")
