"""The kernel, compiled by numba where it is installed, which is imported only here and only when used."""

from collections.abc import Callable, Sequence
from functools import cache
from types import FunctionType, SimpleNamespace
from typing import Any

from stepcast.simulation.fluid import kernel
from stepcast.simulation.pieces import ProgramError

Function = Callable[..., Any]


def kernel_of(compiled: bool | None = None) -> Any:
    """The functions of the kernel by name, which may know whether they are ``compiled``.

    *compiled* asks for numba or forbids it; by default it is used when it is installed.
    """
    found = _compiled() if compiled is not False else None
    if compiled and found is None:
        raise ProgramError("the compiled engine needs numba: pip install stepcast[compiled]")
    return found or PLAIN


PLAIN = SimpleNamespace(**{each.__name__: each for each in kernel.FUNCTIONS}, compiled=False)


@cache
def _compiled() -> SimpleNamespace | None:
    try:
        import numba
    except ImportError:
        return None
    unkept: dict[str, Function] = {}

    def plain() -> dict[str, Function]:
        return _bound(kernel.FUNCTIONS, numba.njit(error_model="numpy"))

    try:
        kept = _bound(kernel.FUNCTIONS, numba.njit(cache=True, error_model="numpy"))
    except RuntimeError:  # nowhere to keep it, as in a container whose folders are read-only
        kept = plain()

    def named(name: str) -> Function:
        def call(*arguments: Any) -> Any:
            if not unkept:
                try:
                    return kept[name](*arguments)
                except OSError:  # compiled and not kept, as on a full disk; it has not run yet
                    unkept.update(plain())
            return unkept[name](*arguments)

        return call

    return SimpleNamespace(
        **{each.__name__: named(each.__name__) for each in kernel.FUNCTIONS}, compiled=True
    )


def _bound(functions: Sequence[FunctionType], compile_: Callable[[FunctionType], Function]) -> dict[str, Any]:
    """*functions*, each calling only those before it, by names that mean the compiled ones."""
    names = dict(functions[0].__globals__)
    for function in functions:
        again = FunctionType(function.__code__, names, function.__name__)
        again.__module__, again.__qualname__ = function.__module__, function.__qualname__
        names[function.__name__] = compile_(again)
    return names
