"""Begins to record when a process that torchrun (or a user) started has loaded its optimizers."""

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

TRIGGER = "torch.optim"


class _Then(Loader):
    """Loads a module as ever, then begins."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._loader.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        from stepcast.pytorch.record.recorder import Recorder, RecordingWindow

        folder = os.environ["STEPCAST_RECORD"]
        words = [int(word) for word in os.environ.get("STEPCAST_RECORD_WINDOW", "5,3").split(",")]
        Recorder(folder, RecordingWindow(*words)).start()


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != TRIGGER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            spec.loader = _Then(spec.loader)
        return spec


def watch_for_torch() -> None:
    sys.meta_path.insert(0, _Finder())
