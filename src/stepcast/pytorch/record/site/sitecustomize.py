"""Start a recorder in every Python process of a recorded job that loads PyTorch's optimizers.

Python imports this module before the program, in the place of another sitecustomize, which it runs too.
"""

import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

TRIGGER = "torch.optim"


def load_and_record(load: Callable[[ModuleType], object], module: ModuleType) -> None:
    """Load a module as its own loader does, then start to record."""
    load(module)
    from stepcast.pytorch.record.recorder import Recorder

    skip, steps = map(int, os.environ.get("STEPCAST_RECORD_WINDOW", "5,3").split(","))
    Recorder(os.environ["STEPCAST_RECORD"], skip, steps).start()


class OptimizerFinder(MetaPathFinder):
    """Finds ``torch.optim`` once."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader.exec_module = partial(load_and_record, spec.loader.exec_module)  # type: ignore[method-assign]
        return spec


def run_replaced_sitecustomize() -> None:
    """Run the sitecustomize that this one hides."""
    here = os.path.dirname(os.path.abspath(__file__))
    spec = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path or ".") != here])
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


run_replaced_sitecustomize()
if os.environ.get("STEPCAST_RECORD"):
    sys.meta_path.insert(0, OptimizerFinder())
