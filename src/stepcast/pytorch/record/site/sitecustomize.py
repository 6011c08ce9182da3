"""Loaded by every Python process of a recorded job, before its program: watches for PyTorch."""

import importlib.machinery
import importlib.util
import os
import sys


def _others() -> None:
    """The sitecustomize that this one stands in front of."""
    here = os.path.dirname(os.path.abspath(__file__))
    paths = [path for path in sys.path if os.path.abspath(path or ".") != here]
    found = importlib.machinery.PathFinder.find_spec("sitecustomize", paths)
    if found is not None and found.loader is not None:
        found.loader.exec_module(importlib.util.module_from_spec(found))


_others()
if os.environ.get("STEPCAST_RECORD"):
    from stepcast.pytorch.record.watch import watch_for_torch

    watch_for_torch()
