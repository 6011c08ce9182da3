"""Every benchmark, one after the other: ``python -m benchmarks [NAME ...]``."""

import sys
from importlib import import_module

BENCHMARKS = (
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


def main() -> None:
    for name in sys.argv[1:] or BENCHMARKS:
        print(f"== {name}", flush=True)
        import_module(f"benchmarks.{name}").run()
        print()


main()
