"""stepcast: forecast a distributed LLM training step, and explain one after it ran."""

import sys

TYPE_CHECKING = False  # the import of typing takes longer than all of this module


def _is_command() -> bool:
    """Return True if Python was started for the command ``stepcast`` itself, not for a program that uses it."""
    began, words = (getattr(sys, "argv", None) or [""])[0], sys.orig_argv
    if began == "-m":  # while Python looks for the package
        return words[words.index("-m") + 1 :][:1] == ["stepcast"] if "-m" in words else False
    return began.replace("\\", "/").rpartition("/")[2] in ("stepcast", "stepcast.exe")


if _is_command():
    # Handle Ctrl-C from here on, until cli.start installs its own handler.
    if TYPE_CHECKING:
        from signal import SIGINT, default_int_handler, getsignal, signal
    else:
        from _signal import SIGINT, default_int_handler, getsignal, signal

    def _end(number: object, frame: object) -> None:
        import os

        os.write(2, b"stepcast: interrupted\n")
        os._exit(130)

    if getsignal(SIGINT) is default_int_handler:  # a shell's background commands ignore it
        signal(SIGINT, _end)
    del SIGINT, default_int_handler, getsignal, signal


from stepcast.version import __version__ as __version__  # noqa: E402 - after Ctrl-C is handled

# The modules of public names, as the stub of the package imports them; each is loaded at first use, so that
# `import stepcast` alone is fast.
with open(f"{__file__.removesuffix('.py')}.pyi", encoding="utf-8") as stub:
    PUBLIC = {words[-1]: words[1] for words in map(str.split, stub) if words[:1] == ["from"]}
__all__ = [*PUBLIC]
FORMER_NAMES = {"Phase": "TrainingPhase"}


def __getattr__(name: str) -> object:
    name = FORMER_NAMES.get(name, name)
    if name in PUBLIC:
        from importlib import import_module

        return getattr(import_module(PUBLIC[name]), name)
    raise AttributeError(f"module 'stepcast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(type(sys)):  # type: ignore[misc]
    """The package; ``stepcast.analyze`` is the function, also after the package of that name was imported."""

    @property
    def analyze(self) -> object:
        return __getattr__("analyze")

    @analyze.setter
    def analyze(self, package: object) -> None:
        """Ignore the package of that name; imports find it in ``sys.modules``."""


sys.modules[__name__].__class__ = _Package
