"""The engines, behind one seam: chunks in, in any order out with their answers."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

from stepcast.sweep.chunks import Answer, Done, PointChunk


@dataclass(frozen=True, slots=True)
class EngineSetting:
    """How an engine is asked to work: *workers* at once, at *address*, with files in *folder*."""

    workers: int
    address: str | None
    folder: str


class SweepEngine(Protocol):
    """Takes a chunk only when a worker is free for it, so that no more wait than can be held."""

    def __call__(self, chunks: Iterator[PointChunk], answer: Answer, setting: EngineSetting) -> Iterator[Done]: ...


# Name -> module with a function ``run``, and the extra that installs what it needs.
ENGINES = {
    "local": ("stepcast.sweep.engines.local", ""),
    "ray": ("stepcast.sweep.engines.on_ray", "ray"),
    "dask": ("stepcast.sweep.engines.on_dask", "dask"),
    "slurm": ("stepcast.sweep.engines.on_slurm", "slurm"),
}


def load_engine(name: str) -> SweepEngine:
    """The engine *name*; a ValueError that says what to install where it cannot be loaded."""
    module, extra = ENGINES[name]
    try:
        run: SweepEngine = import_module(module).run
    except ImportError as error:
        if not extra:
            raise
        raise ValueError(f"--engine {name} needs the package {error.name}: pip install 'stepcast[{extra}]'") from None
    return run
