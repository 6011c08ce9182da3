"""Import PyTorch and transformers, or raise an error that says how to get them."""

from importlib import import_module
from types import ModuleType


def _load(package: str, need: str) -> ModuleType:
    try:
        return import_module(package)
    except ImportError:
        raise ValueError(f"{need}, which is not installed; install the extra: pip install 'stepcast[torch]'") from None


def load_torch(verb: str) -> ModuleType:
    """Return PyTorch for *verb*, with or without a GPU."""
    return _load("torch", f"{verb} needs PyTorch")


def load_torch_with_gpu() -> ModuleType:
    """Return PyTorch on a machine with a CUDA GPU, for ``profile``."""
    torch = load_torch("profile")
    if not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA GPU here; run profile on the machine whose GPU it is to measure")
    return torch


def load_transformers(verb: str) -> ModuleType:
    transformers = _load("transformers", f"{verb} builds the models of a config with transformers")
    transformers.logging.set_verbosity_error()
    return transformers
