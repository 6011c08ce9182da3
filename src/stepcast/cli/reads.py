"""Which files this command has read, by whatever way it came to them.

A cluster may build on another file, a run's folder hold a log beside its traces: what an output must not
replace is known only when it has been opened. Python reports every file it opens (PEP 578); this keeps those
that were opened to be read.
"""

import os
import re
import sys
from typing import Any

from stepcast.outputs.files import file_identity

_watching = False
_opened: set[str] = set()


def watch() -> None:
    """Keep the files opened from now on."""
    global _watching
    if not _watching:
        sys.addaudithook(_note)
        _watching = True
    _opened.clear()


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str | bytes) and not flags & (os.O_WRONLY | os.O_RDWR):
            _opened.add(os.fsdecode(path))
    elif event == "sqlite3.connect" and isinstance(arguments[0], str):  # which opens its files by itself
        name = arguments[0].removeprefix("file://").removeprefix("file:").partition("?")[0]
        _opened.add(re.sub("%([0-9a-fA-F]{2})", lambda found: chr(int(found[1], 16)), name))


def identities() -> set[tuple[int, int]]:
    """What was read, as :func:`stepcast.outputs.files.file_identity` knows it."""
    return {found for path in _opened if (found := file_identity(path))}
