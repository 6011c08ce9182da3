"""``--emit TOOL[=FILE]``: a run as a configuration of another tool, read back to see that it asks for the same."""

from dataclasses import fields, replace

from stepcast.frameworks.catalog import FEATURES, load_profile, missing_features
from stepcast.hardware import Cluster
from stepcast.inputs.configs.reader import read_text
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model, pieces
from stepcast.ir.strategy import Strategy
from stepcast.ir.types import FactDict, Facts, dataclass, pick
from stepcast.outputs.configs import WRITERS, EmittedRun
from stepcast.questions import runs
from stepcast.questions.choices import Question, read_choices, spell_option
from stepcast.questions.question import CHOICES, PredictQuestion
from stepcast.questions.settle import SettledRun, settle
from stepcast.units import format_seconds
from stepcast.version import __version__

BATCH = ("micro_batch", "global_batch", "seq")


@dataclass(frozen=True, slots=True)
class EmittedConfig:
    """A configuration, and the options of ``predict`` for what its tool has no key for."""

    tool: str
    text: str
    remaining: list[str]
    lost: list[str]  # settings that neither the tool nor an option has

    def facts(self) -> FactDict:
        return pick(self, "tool text remaining lost")

    @property
    def notes(self) -> list[str]:
        """Return sentences about what the configuration alone does not say."""
        notes = []
        if self.remaining:
            notes.append(f"{self.tool} has no key for all of it: predict --config needs {' '.join(self.remaining)} too")
        if self.lost:
            notes.append(f"{self.tool} does not say {', '.join(self.lost)}, so that its prediction differs")
        return notes


def emit_config(
    text: str,
    question: Question,
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    framework: Framework,
    step_s: float,
) -> EmittedConfig:
    """Return the configuration of a run for ``TOOL`` or ``TOOL=FILE``; *question* names its model and its cluster."""
    tool, asked = text.partition("=")[0], {name: getattr(question, name) for name in ("model", "cluster", "set")}
    if tool not in WRITERS:
        raise ValueError(f"--emit {tool!r} is not known; expected one of {', '.join(WRITERS)}")
    ending, write = WRITERS[tool]
    title = f"{model.name} on {strategy.layout.gpus:,} {cluster.gpu.name}: {format_seconds(step_s)} per step "
    title += f"(stepcast {__version__})"
    choices = _state_choices(model, strategy, framework)
    emitted = write(EmittedRun(model, strategy, framework, cluster.node.gpus, title, choices))
    file = runs.run_of_config(read_text(emitted, f"emitted{ending}"), f"emitted{ending}")
    written_for = str(file.choices["framework"])
    if not framework.name.startswith(written_for.partition("-")[0]):
        raise ValueError(
            f"--emit {tool} is a configuration of {written_for}, and the step was predicted for {framework.name}: "
            f"use --framework {written_for}"
        )
    if missing := missing_features(load_profile(written_for), strategy, framework):
        raise ValueError(f"--emit {tool}: {missing[0]}")
    needed: FactDict = {name: value for name, value in asked.items() if value and name != "model"}
    remaining: FactDict = {"framework": framework.name} if written_for != framework.name else {}
    for name, degree in (("gpus", strategy.layout.gpus), *((name, getattr(strategy, name)) for name in BATCH)):
        if name not in file.choices and not (name == "global_batch" and "accumulation" in file.choices):
            remaining[name] = degree
    if "model" not in file.choices:
        remaining["model"] = asked["model"]
    run = _ask(file, {**needed, **remaining})
    if replace(run.model, name=model.name, max_seq=model.max_seq, source=model.source) != model:
        remaining["model"] = asked["model"]
    lost: list[str] = []
    for _ in range(3):  # again with what was found; an option may set another choice
        run = _ask(file, {**needed, **remaining})
        lost = []
        for name, value in _differences(run, strategy, framework):
            if name in remaining or value is None:
                lost.append(name.replace("_", " "))
            else:
                remaining[name] = value
    words = [word for name, value in remaining.items() for word in spell_option(name, value)]
    return EmittedConfig(tool, emitted, words, lost)


def _state_choices(model: Model, strategy: Strategy, framework: Framework) -> FactDict:
    """Return the choices of a run by option, as :class:`EmittedRun` has them."""
    layout, unused = strategy.layout, {"ep", "dispatcher"} if model.experts is None else set()
    unused |= {"cp_comm"} if layout.cp == 1 else set()
    unused |= {"schedule"} if layout.pp == 1 else set()
    choices = {**_state_layout(strategy), "clipping": framework.optimizer.clips}
    for owner in (strategy, framework):
        for name in (field.name for field in fields(owner) if field.name in runs.SETTERS):
            value, choice = getattr(owner, name), runs.SETTERS[name]
            choices[choice] = value if isinstance(value, int | float) or value is None else CHOICES[choice].write(value)
    used = {name: value for name, value in choices.items() if name not in unused and (value or value is False)}
    return {name.replace("_", "-"): value for name, value in used.items()}


def _state_layout(strategy: Strategy) -> FactDict:
    """Return the degrees of parallelism, the batch and the format of a run."""
    degrees = pick(strategy.layout, "gpus tp cp ep pp vpp expert_tp shard")
    return {**degrees, **pick(strategy, "micro_batch global_batch seq"), "precision": str(strategy.precision)}


def _ask(file: runs.RunFile, choices: Facts) -> SettledRun:
    given = read_choices(PredictQuestion, {name: value for name, value in choices.items() if value != ()})
    return settle(runs.ask_with_file(PredictQuestion, given, file))


def _differences(run: SettledRun, strategy: Strategy, framework: Framework) -> list[tuple[str, object]]:
    """Return the choices in which *run* differs, each with its value; None where no option sets it."""
    own, settled, overlaps = _state_layout(strategy), _state_layout(run.strategy), FEATURES["overlaps"].used
    pairs: list[tuple[str, object]] = [(name, value) for name, value in own.items() if value != settled[name]]
    for wanted, known in ((strategy, run.strategy), (framework, run.framework)):
        for name in (field.name for field in fields(wanted) if field.name not in runs.SET_BY_OTHERS):
            if getattr(wanted, name) == getattr(known, name):
                continue
            if name == "overlap" and overlaps(strategy, framework) == overlaps(run.strategy, run.framework):
                continue  # in this layout
            if name == "stage_layers" and pieces(run.model, strategy) == pieces(run.model, run.strategy):
                continue
            try:
                pairs.append(runs.choice_of_field(name, getattr(wanted, name)))
            except runs.NoOptionError:
                pairs.append((name, None))
    return pairs
