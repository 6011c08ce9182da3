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

if TYPE_CHECKING:
    from stepcast.analyze.compare import Comparison as Comparison
    from stepcast.analyze.gate import GateResult as GateResult
    from stepcast.analyze.kineto.whatif import KinetoReplay as KinetoReplay
    from stepcast.analyze.replay import ReplayResult as ReplayResult
    from stepcast.analyze.result import AnalysisResult as AnalysisResult
    from stepcast.analyze.watch import WatchAlert as WatchAlert
    from stepcast.analyze.watch import WatchedStep as WatchedStep
    from stepcast.checking.check import check as check
    from stepcast.checking.run import RunCheck as RunCheck
    from stepcast.cost.calibration import Calibration as Calibration
    from stepcast.forecast.options import Options as Options
    from stepcast.forecast.prediction import Prediction as Prediction
    from stepcast.forecast.simulate import simulate as simulate
    from stepcast.frameworks.catalog import load_framework as load_framework
    from stepcast.generation.forecast import GenerationForecast as GenerationForecast
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
    from stepcast.ir.strategy import Sharding as Sharding
    from stepcast.ir.strategy import Strategy as Strategy
    from stepcast.ir.timeline import Timeline as Timeline
    from stepcast.ir.workload import Workload as Workload
    from stepcast.library import alternatives as alternatives
    from stepcast.library import analyze as analyze
    from stepcast.library import compare as compare
    from stepcast.library import gate as gate
    from stepcast.library import plan as plan
    from stepcast.library import predict as predict
    from stepcast.library import predict_generation as predict_generation
    from stepcast.library import predict_many as predict_many
    from stepcast.library import predict_rl as predict_rl
    from stepcast.library import replay as replay
    from stepcast.library import rows as rows
    from stepcast.library import search as search
    from stepcast.library import watch as watch
    from stepcast.models.catalog import load_model as load_model
    from stepcast.pytorch.record.recorder import record as record
    from stepcast.questions.alternatives import Alternatives as Alternatives
    from stepcast.questions.generation import GenerateChoices as GenerateChoices
    from stepcast.questions.measured import AnalyzeChoices as AnalyzeChoices
    from stepcast.questions.measured import ReplayChoices as ReplayChoices
    from stepcast.questions.plan import PlanChoices as PlanChoices
    from stepcast.questions.question import PredictChoices as PredictChoices
    from stepcast.questions.search import SearchChoices as SearchChoices
    from stepcast.rl.question import RlChoices as RlChoices
    from stepcast.rl.step import RlStep as RlStep
    from stepcast.searching.result import SearchCounts as SearchCounts
    from stepcast.searching.result import SearchResult as SearchResult
    from stepcast.searching.result import SearchWatch as SearchWatch
    from stepcast.searching.result import SimulatedCandidate as SimulatedCandidate

# The public names of each module, loaded at first use, so that `import stepcast` alone is fast.
NAMES = {
    "analyze.compare": "Comparison",
    "analyze.gate": "GateResult",
    "analyze.kineto.whatif": "KinetoReplay",
    "analyze.replay": "ReplayResult",
    "analyze.result": "AnalysisResult",
    "analyze.watch": "WatchAlert WatchedStep",
    "checking.check": "check",
    "checking.run": "RunCheck",
    "cost.calibration": "Calibration",
    "forecast.options": "Options",
    "forecast.prediction": "Prediction",
    "forecast.simulate": "simulate",
    "frameworks.catalog": "load_framework",
    "generation.forecast": "GenerationForecast",
    "goodput.operation": "Operation load_failures",
    "goodput.plan": "Plan TrainingPhase",
    "hardware": "Cluster Place load_cluster",
    "inputs.source": "FormatError",
    "inputs.table": "read",
    "ir.framework": "Framework",
    "ir.layout": "Layout",
    "ir.model": "Model",
    "ir.strategy": "Sharding Strategy",
    "ir.timeline": "Timeline",
    "ir.workload": "Workload",
    "library": "alternatives analyze compare gate plan predict predict_generation predict_many predict_rl replay rows "
    "search watch",
    "models.catalog": "load_model",
    "pytorch.record.recorder": "record",
    "questions.alternatives": "Alternatives",
    "questions.generation": "GenerateChoices",
    "questions.measured": "AnalyzeChoices ReplayChoices",
    "questions.plan": "PlanChoices",
    "questions.question": "PredictChoices",
    "questions.search": "SearchChoices",
    "rl.question": "RlChoices",
    "rl.step": "RlStep",
    "searching.result": "SearchCounts SearchResult SearchWatch SimulatedCandidate",
}
PUBLIC = {name: f"stepcast.{module}" for module, names in NAMES.items() for name in names.split()}
__all__ = ["__version__", *PUBLIC]
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
