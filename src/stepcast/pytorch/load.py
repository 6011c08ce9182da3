"""Import PyTorch and transformers, or raise an error that says how to get them."""

from types import ModuleType


def load_torch(verb: str) -> ModuleType:
    """Return PyTorch for *verb*, with or without a GPU."""
    try:
        import torch
    except ImportError:
        raise ValueError(
            f"{verb} needs PyTorch, which is not installed; install the extra: pip install 'stepcast[torch]'"
        ) from None
    module: ModuleType = torch
    return module


def load_torch_with_gpu() -> ModuleType:
    """Return PyTorch on a machine with a CUDA GPU, for ``profile``."""
    torch = load_torch("profile")
    if not torch.cuda.is_available():
        raise ValueError("PyTorch finds no CUDA GPU here; run profile on the machine whose GPU it is to measure")
    return torch


def load_transformers(verb: str) -> ModuleType:
    try:
        import transformers
    except ImportError:
        raise ValueError(
            f"{verb} builds the models of a config with transformers, which is not installed; install the "
            "extra: pip install 'stepcast[torch]'"
        ) from None
    transformers.logging.set_verbosity_error()
    module: ModuleType = transformers
    return module
