"""Functions by name, for tables of which a call needs one."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def loaded(name: str) -> Callable[..., Any]:
    """The function that ``room.module:function`` names, whose module is loaded only when it is called."""
    module, _, function = name.partition(":")

    def call(*arguments: Any, **named: Any) -> Any:
        return getattr(import_module(f"stepcast.{module}"), function)(*arguments, **named)

    return call
