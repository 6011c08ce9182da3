"""Benchmarks, each in a process of its own: ``python -m benchmarks [NAME ...] [WORD ...]``.

Without a name: those of ``USUAL``, one after the other. Words are passed on to those that take some.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

USUAL = (
    "startup",
    "readers",
    "collectives",
    "compute",
    "engine",
    "simulate",
    "fluid",
    "predictions",
    "strategies",
    "growth",
    "search",
    "runs",
    "kineto_analysis",
    "pages",
)
# Files to write or read, sizes, parts, or words of the cases to run: see their first lines.
WITH_WORDS = {
    *("allocator_trace", "eager_memory", "fluid", "hta", "kineto_analysis", "published_choices", "search", "sweep"),
    *("ten_searches", "whole_searches"),
}


def list_benchmarks() -> list[str]:
    """Return the modules next to this one that run as programs."""
    here = Path(__file__)
    programs = (path for path in here.parent.glob("*.py") if path != here)
    return sorted(path.stem for path in programs if '\nif __name__ == "__main__":\n' in path.read_text())


def main(arguments: Sequence[str]) -> int:
    """Run the benchmarks that *arguments* name and return the first exit status that is not 0."""
    known = list_benchmarks()
    count = next((index for index, word in enumerate(arguments) if word not in known), len(arguments))
    names, words = arguments[:count] or USUAL, arguments[count:]
    if words and not (count and WITH_WORDS.issuperset(names)):
        print(f"no benchmark is named {words[0]}; choose from {', '.join(known)}", file=sys.stderr)
        return 2
    statuses = []
    for name in names:
        print(f"== {name}", flush=True)
        statuses.append(subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *words], check=False).returncode)
        print()
    return next(filter(None, statuses), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
