"""PyTorch, or the one line that says how to get it."""

from typing import Any


class MissingTorchError(ValueError):
    """PyTorch, or a library beside it, is not installed."""


def load_torch(verb: str) -> Any:
    """PyTorch for *verb*, with or without a GPU."""
    try:
        import torch
    except ImportError:
        raise MissingTorchError(
            f"{verb} needs PyTorch, which is not installed; install the extra: pip install 'stepcast[torch]'"
        ) from None
    return torch


def load_transformers(verb: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise MissingTorchError(
            f"{verb} builds the models of a config with transformers, which is not installed; install the "
            "extra: pip install 'stepcast[torch]'"
        ) from None
    transformers.logging.set_verbosity_error()
    return transformers
