"""The kernel, compiled by numba where it is installed, which is imported only here and only when used."""

import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from types import FunctionType, SimpleNamespace
from typing import Any

from stepcast.simulation.fluid import kernel
from stepcast.simulation.pieces import ProgramError

Function = Callable[..., Any]
WRITTEN_IN = {each.__name__ for each in kernel.WRITTEN_IN}


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
        from numba.core.options import DefaultOptions
    except ImportError:
        return None
    unkept: dict[str, Function] = {}

    # The kernel makes no arrays, so none need be counted: that would take most of its time.
    uncounted = {"_nrt": False} if hasattr(DefaultOptions, "_nrt") else {}

    def compile_(function: FunctionType, **options: Any) -> Function:
        inline = "always" if function.__name__ in WRITTEN_IN else "never"
        compile_one: Any = numba.njit
        found: Function = compile_one(function, error_model="numpy", inline=inline, **uncounted, **options)
        return found

    def plain() -> dict[str, Function]:
        return _bound(kernel.FUNCTIONS, compile_)

    try:
        kept = _bound(kernel.FUNCTIONS, partial(compile_, cache=True))
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
    names: dict[str, Any] = {}
    for function in functions:
        names.update(function.__globals__)
    # Numba keeps what it compiled until the file of a function changes. Each contains what it calls of other
    # files, so all are told to be of the one that changed last, this one with its options included.
    newest = max({__file__, *(function.__code__.co_filename for function in functions)}, key=_changed)
    for function in functions:
        again = FunctionType(function.__code__.replace(co_filename=newest), names, function.__name__)
        again.__module__, again.__qualname__ = function.__module__, function.__qualname__
        names[function.__name__] = compile_(again)
    return names


def _changed(file: str) -> tuple[int, str]:
    try:
        return os.stat(file).st_mtime_ns, file
    except OSError:  # in an archive, where numba keeps nothing
        return 0, file
