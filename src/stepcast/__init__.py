"""stepcast: forecast a distributed LLM training step, and explain one after it ran."""

import sys

TYPE_CHECKING = False  # typing itself takes longer to load than all that stands here


def _is_command() -> bool:
    """Whether Python was started for the command ``stepcast`` itself, and not by a program that uses it."""
    began, words = (getattr(sys, "argv", None) or [""])[0], sys.orig_argv
    if began == "-m":  # which it is while the package is being found
        return words[words.index("-m") + 1 :][:1] == ["stepcast"] if "-m" in words else False
    return began.replace("\\", "/").rpartition("/")[2] in ("stepcast", "stepcast.exe")


if _is_command():
    # Ctrl-C is answered from here on; cli.start, the next file to be loaded, has more to do then.
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


from stepcast.version import __version__ as __version__  # noqa: E402 - after Ctrl-C is answered

if TYPE_CHECKING:
    from stepcast.forecast.options import Options as Options
    from stepcast.forecast.predict import predict_many as predict_many
    from stepcast.forecast.prediction import Prediction as Prediction
    from stepcast.forecast.simulate import simulate as simulate
    from stepcast.frameworks.catalog import load_framework as load_framework
    from stepcast.goodput.operation import Operation as Operation
    from stepcast.goodput.operation import load_failures as load_failures
    from stepcast.goodput.plan import Plan as Plan
    from stepcast.goodput.plan import TrainingPhase as TrainingPhase
    from stepcast.hardware import Cluster as Cluster
    from stepcast.hardware import Place as Place
    from stepcast.hardware import load_cluster as load_cluster
    from stepcast.inputs.source import FormatError as FormatError
    from stepcast.inputs.table import read as read
    from stepcast.ir.framework import Framework as Framework
    from stepcast.ir.layout import Layout as Layout
    from stepcast.ir.model import Model as Model
    from stepcast.ir.strategy import Strategy as Strategy
    from stepcast.ir.timeline import Timeline as Timeline
    from stepcast.ir.workload import Workload as Workload
    from stepcast.library import analyze as analyze
    from stepcast.library import compare as compare
    from stepcast.library import plan as plan
    from stepcast.library import predict as predict
    from stepcast.library import replay as replay
    from stepcast.library import rows as rows
    from stepcast.library import search as search
    from stepcast.models.catalog import load_model as load_model
    from stepcast.pytorch.record.recorder import record as record

# Public name -> module and name there. Loaded when first used: `import stepcast` alone costs nothing.
PUBLIC = {
    "Cluster": ("stepcast.hardware", "Cluster"),
    "FormatError": ("stepcast.inputs.source", "FormatError"),
    "Framework": ("stepcast.ir.framework", "Framework"),
    "Layout": ("stepcast.ir.layout", "Layout"),
    "Model": ("stepcast.ir.model", "Model"),
    "Operation": ("stepcast.goodput.operation", "Operation"),
    "Options": ("stepcast.forecast.options", "Options"),
    "Place": ("stepcast.hardware", "Place"),
    "Plan": ("stepcast.goodput.plan", "Plan"),
    "Prediction": ("stepcast.forecast.prediction", "Prediction"),
    "Strategy": ("stepcast.ir.strategy", "Strategy"),
    "Timeline": ("stepcast.ir.timeline", "Timeline"),
    "TrainingPhase": ("stepcast.goodput.plan", "TrainingPhase"),
    "Workload": ("stepcast.ir.workload", "Workload"),
    "analyze": ("stepcast.library", "analyze"),
    "compare": ("stepcast.library", "compare"),
    "load_cluster": ("stepcast.hardware", "load_cluster"),
    "load_failures": ("stepcast.goodput.operation", "load_failures"),
    "load_framework": ("stepcast.frameworks.catalog", "load_framework"),
    "load_model": ("stepcast.models.catalog", "load_model"),
    "plan": ("stepcast.library", "plan"),
    "record": ("stepcast.pytorch.record.recorder", "record"),
    "predict": ("stepcast.library", "predict"),
    "predict_many": ("stepcast.forecast.predict", "predict_many"),
    "read": ("stepcast.inputs.table", "read"),
    "replay": ("stepcast.library", "replay"),
    "rows": ("stepcast.library", "rows"),
    "search": ("stepcast.library", "search"),
    "simulate": ("stepcast.forecast.simulate", "simulate"),
}
__all__ = ["__version__", *PUBLIC]
FORMER_NAMES = {"Phase": "TrainingPhase"}


def __getattr__(name: str) -> object:
    name = FORMER_NAMES.get(name, name)
    if name in PUBLIC:
        from importlib import import_module

        module, attribute = PUBLIC[name]
        return getattr(import_module(module), attribute)
    raise AttributeError(f"module 'stepcast' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(type(sys)):  # type: ignore[misc]
    """``stepcast.analyze`` is the function, also after the room of that name was imported."""

    @property
    def analyze(self) -> object:
        return __getattr__("analyze")

    @analyze.setter
    def analyze(self, room: object) -> None:
        """Imports find the room among the modules; they need no attribute."""


sys.modules[__name__].__class__ = _Package
