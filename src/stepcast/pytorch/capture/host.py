"""The CPU's time outside of operators: checkpoints that it enters and runs again, and copies to and from the GPU.

Times are counted in additions (data/fits/captured.toml); the next operator is launched after them.
"""

from collections.abc import Callable

from torch import Tensor

from stepcast.hardware.catalog import load_fit
from stepcast.pytorch.capture.emulation import GPU

CALLS = load_fit("captured")["calls"]  # the host's time of calls, in launches
# A copy from pinned memory of the host, by the GPU; and the attribute of a tensor that is in such memory.
HOST_COPY, PINNED = "host_copy", "_stepcast_pinned"
HOST = "_stepcast_host"  # attribute of a tensor without data that is in the memory of the host
# The most bytes of other memory that the driver stages while the GPU still runs what was launched before: on an H200
# the CPU waited before copies of 4 MiB, and not before those of 1 MiB.
STAGED_BYTES = 2**20

_spent, _called = [0.0], list[str]()


def spend(calls: float) -> None:
    """Keep the host busy before the next operator for so many additions."""
    _spent[0] += calls


def call(kind: str) -> None:
    """Note that the host runs code of Python around operators: a module, or a function with a gradient of its own."""
    _called.append(kind)


def take_host_work() -> tuple[float, tuple[str, ...]]:
    """Return what the host spent, in additions, and what it called since it was last asked, and begin anew."""
    work = _spent[0], tuple(_called)
    _spent[0] = 0.0
    _called.clear()
    return work


def apply_function(own: Callable[..., object]) -> object:
    """Return ``torch.autograd.Function.apply`` that notes the functions of a program; *own* is that of PyTorch."""

    def apply(function: type, /, *args: object, **kwargs: object) -> object:
        if not function.__module__.startswith(__package__):
            call("function")
        return own(function, *args, **kwargs)

    return classmethod(apply)


def enter_checkpoint() -> str:
    """Return the kind of device that a checkpoint asks for, once, when it is entered."""
    spend(CALLS["checkpoint"])
    return GPU


# Functions and classes by module, with the CPU's time of their calls: of checkpoints an object for each tensor that is
# saved without reentrance, and the second forward, without reentrance (which saves again what hooks saved in the first)
# and with it; of ``torch.autograd.grad``, while that of ``backward()`` is counted apart.
HOST_CALLS: dict[tuple[str, str], Callable[..., float]] = {
    ("torch.utils.checkpoint", "_Holder"): lambda: CALLS["hook"],
    ("torch.utils.checkpoint", "_recomputation_hook"): lambda frame, *_: (
        CALLS["recompute"] + CALLS["unhook"] * len(getattr(frame(), "weak_holders", ()))
    ),
    ("torch.utils.checkpoint", "detach_variable"): lambda inputs: CALLS["recompute"],
    ("torch.autograd", "_engine_run_backward"): lambda *_, accumulate_grad=True, **__: (
        0.0 if accumulate_grad else CALLS["grad"]
    ),
}


def count_calls(own: Callable[..., object], calls: Callable[..., float]) -> Callable[..., object]:
    """Return *own*, which spends so many *calls* of the CPU's time whenever it is called."""

    def counted(*args: object, **kwargs: object) -> object:
        spend(calls(*args, **kwargs))
        return own(*args, **kwargs)

    return counted


def is_on_host(tensor: Tensor) -> bool:
    return bool(tensor.device.type == "cpu") or hasattr(tensor, HOST)


def begin_copy(source: Tensor, size_bytes: int) -> tuple[str, bool]:
    """Return the operator of a copy to the GPU, and whether the CPU waits for the GPU before it.

    The GPU reads pinned memory itself. The CPU stages other memory in parts, and waits before it stages many.
    """
    if hasattr(source, PINNED):
        return HOST_COPY, False
    spend(CALLS["staged"] * size_bytes)
    return "_to_copy", size_bytes > STAGED_BYTES


def fetch(size_bytes: int) -> None:
    """Copy a result to new memory of the host."""
    spend(CALLS["fetched"] * size_bytes if size_bytes > STAGED_BYTES else 0.0)
