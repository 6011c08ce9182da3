"""Runs in files and as command lines: configurations of other tools, and runs that ``predict --save`` wrote.

``--emit TOOL[=FILE]`` writes a run as a configuration of another tool, which is read back to see that it asks for the
same.
"""

import json
import math
import os
import shlex
from dataclasses import fields, replace
from typing import TYPE_CHECKING

import msgspec

from stepcast.forecast.prediction import Prediction
from stepcast.frameworks.catalog import DECISIONS, FEATURES, Profile, fit_precision, load_profile, missing_features
from stepcast.frameworks.catalog import settle as settle_profile
from stepcast.hardware import Cluster, Gpu
from stepcast.inputs.model_table import SIZES
from stepcast.inputs.source import Source, prefix_errors, read_toml
from stepcast.ir.framework import FORMATS, OPTIMIZERS, Framework, Optimizer
from stepcast.ir.model import Model, pieces
from stepcast.ir.strategy import ScheduleKind, Strategy, overlap_words, recompute_word
from stepcast.ir.types import FactDict, Facts, dataclass, pick, require
from stepcast.models.catalog import load_model, model_words
from stepcast.questions import choices as readers
from stepcast.questions.question import CHOICES, DEFAULTS, PredictQuestion
from stepcast.questions.settle import SettledRun, settle
from stepcast.units import DAY, HOUR, format_seconds
from stepcast.version import __version__

if TYPE_CHECKING:
    from stepcast.inputs.configs.keys import RunConfig

TABLE = "predict"
CONFIGS = (".py", ".yaml", ".yml", ".sh", ".bash", ".slurm", ".sbatch", ".args", ".txt")
MOST_OPTIONS = 1_000
BATCH = ("micro_batch", "global_batch", "seq")
# Choices that no tool has a key for: the cluster's, the data's, and those of the simulation.
UNWRITTEN = (
    *("set", "place", "lengths", "batching", "expert_load", "expert_replicas"),
    *("calibration", "engine", "background"),
)
# Field of a Framework or a Strategy -> the choice that sets it.
SETTERS = {choice.sets: name for name, choice in CHOICES.items() if choice.sets}
# Fields that other options set: the layout and the batch, adapters by their rank, the profile by its name.
SET_BY_OTHERS = {"layout", "micro_batch", "global_batch", "seq", "precision", "training", "name"}
SET_BY_OTHERS |= {"lora_separate", "document", "longest", "filled"}


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file that describes a run: the choices of a question, and how much of the file was understood."""

    choices: Facts
    file: str
    config: "RunConfig | None" = None

    def facts(self, command: str) -> FactDict | None:
        """Return the use of each key, and the *command* that asks for the same without the file."""
        if self.config is None:
            return None
        names = "format understood ignored not_modelled unknown unset assumed"
        return {"file": self.file, **msgspec.to_builtins(pick(self.config, names)), "command": command}

    @property
    def warnings(self) -> list[str]:
        """Return a sentence for each reason why keys are not modelled, and one for unrecognised keys."""
        if self.config is None:
            return []
        keys = self.config.not_modelled
        reasons = {why: ", ".join(key for key in keys if keys[key] == why) for why in keys.values()}
        warnings = [f"{self.file}: {listed} not modelled: {why}" for why, listed in reasons.items()]
        if self.config.unknown:
            warnings.append(f"{self.file}: unrecognised keys left out: {', '.join(self.config.unknown)}")
        return warnings


def read_run_file(
    run: str | None,
    config: str | None,
    *,
    model: object = None,
    ignore_unknown: bool = False,
    takes_workloads: bool = False,
) -> RunFile | None:
    """Return what the file *config* describes, with *run* as its model, or what *run* does; None without both."""
    file: RunFile | None = None
    describes_run = run is not None and _is_run(run)
    require(
        config is None or not describes_run, f"{run}: --config {config} describes a run already; leave one of them out"
    )
    require(
        run is None or model is None or describes_run, f"{run}: --model names the model already; leave one of them out"
    )
    if config is not None:
        file = _read_config(config, ignore_unknown)
        if run is not None:
            file = replace(file, choices={**file.choices, "model": run})
    elif run is not None and describes_run and not (takes_workloads and is_workload(run)):
        file = _read_config(run, ignore_unknown)
    elif run is not None:
        file = RunFile({"model": run}, run)
    if ignore_unknown and (file is None or file.config is None):
        raise ValueError(
            "--ignore-unknown has no effect: it is for keys of a configuration; use --config as well, or leave it out"
        )
    return file


def ask_with_file(kind: type[readers.AnyQuestion], given: Facts, file: RunFile | None) -> readers.AnyQuestion:
    """Return the question of the choices *given*, and of those of a *file* that they leave open."""
    if file is None:
        return kind(**given)
    if missing := [name for name in file.choices if name not in readers.choices_of(kind)]:
        raise ValueError(f"{file.file}: {missing[0]} is not a choice here")
    replaced = ({*given} | readers.replaced_names(given, readers.EXCLUSIVE)) - {"set"}
    if "micro_batch" in given and "global_batch" in file.choices:
        replaced.add("accumulation")  # which follows from both
    cut = file.config.by_pipeline.get(given["pp"] > 1, {}) if file.config and "pp" in given else {}
    filed = {name: cut.get(name, value) for name, value in file.choices.items() if name not in replaced}
    overrides = (*filed.get("set", ()), *given.get("set", ()))
    return kind(**{**filed, **given, "set": overrides}, file=file.file, unchecked=frozenset(filed))


def _is_run(name: str) -> bool:
    """Return True if a file has more than a model, which is TOML with sizes at its top or a config of Hugging Face."""
    if not os.path.isfile(name):
        return False
    if name.endswith(".json"):
        from stepcast.inputs.huggingface.reader import looks_like

        return "config.json" not in os.path.basename(name) and not looks_like(Source(name).head)
    if name.endswith(".toml"):
        return len(set(SIZES) & set(read_toml(name))) < 2
    return name.endswith(CONFIGS)


def is_workload(name: str) -> bool:
    """Return True if *name* is a workload file."""
    from stepcast.inputs.table import recognise

    if not os.path.isfile(name) or name.endswith((".toml", ".json")):
        return False
    try:
        return recognise(Source(name)).gives == "workload"
    except ValueError:
        return False


def _read_config(name: str, ignore_unknown: bool) -> RunFile:
    """Read a saved run, or a configuration of another tool."""
    from stepcast.inputs.configs.reader import read_config

    if name.endswith(".toml") and os.path.isfile(name) and isinstance(saved := read_toml(name).get(TABLE), dict):
        if len(saved) > MOST_OPTIONS:
            raise ValueError(f"{name}: more than {MOST_OPTIONS:,} options; is it a run that --save wrote?")
        return RunFile(_read_table(saved, name), name)
    config = read_config(name)
    if config.unknown and not ignore_unknown:
        dashes = "--" if config.format == "megatron-lm" else ""
        hints = {key: f" (did you mean '{dashes}{near}'?)" if near else "" for key, near in config.unknown.items()}
        keys = [f"{dashes + key!r}{hint}" for key, hint in hints.items()]
        more = f" and {len(keys) - 5} more" if keys[5:] else ""
        raise ValueError(f"{name}: {config.format} has no {', '.join(keys[:5])}{more}; --ignore-unknown leaves it out")
    return run_of_config(config, name)


def run_of_config(config: "RunConfig", name: str) -> RunFile:
    """Return the run of a configuration that was read from the file *name*."""
    choices = {"framework": config.framework, **config.options}
    names, seq = [config.model, os.path.basename(name).partition(".")[0]], int(config.options.get("seq", 0))
    if model := model_words(config.sizes, names, seq):
        try:
            loaded = load_model(model)
        except ValueError:
            if config.unread:
                raise ValueError(f"{name}: {config.unread[0]}") from None
            raise
        if loaded.vocab_multiple and loaded.padded_vocab(int(config.options.get("tp") or 1)) == loaded.vocab:
            model = model_words({**config.sizes, "vocab_multiple": 0}, names, seq)
        choices, assumed = {"model": model, **choices}, list(config.assumed)
        known, _, own = model.partition(":")
        if own and known != "configured":
            assumed.append(f"the model has the sizes of {known}, but {own.replace(',', ', ')}, as the file says")
        elif own and "vocab" not in config.sizes:
            assumed.append(f"a vocabulary of {loaded.vocab:,} tokens, which the file does not state")
        config = replace(config, assumed=tuple(assumed))
    return RunFile(_read_table(choices, name), name, config)


def _read_table(table: Facts, file: str) -> FactDict:
    with prefix_errors(file, kinds=(TypeError, ValueError)):
        return readers.read_choices(PredictQuestion, table)


def write_command(run: SettledRun) -> str:
    """Return the command that asks for the same run without its file."""
    return shlex.join(["stepcast", "predict", *readers.spell_choices(_stated_choices(run))])


def _stated_choices(run: SettledRun) -> FactDict:
    """Return the choices of *run*, its place once: by the number of GPUs, and without the cluster of a single GPU."""
    again = ("nodes", "dp") if run.question.gpu is None else ("nodes", "dp", "cluster")
    return {name: value for name, value in run.question.choices.items() if name not in again}


def save_run(run: SettledRun) -> bytes:
    """Return the run as a file that ``stepcast predict FILE`` runs again, with the defaults used."""
    settled = {"gpus": run.strategy.layout.gpus, **run.batch, "framework": run.question.framework or run.framework.name}
    if run.question.accumulation is not None:
        del settled["global_batch"]
    values = {**_stated_choices(run), **settled}.items()
    lines = [
        "# Run it again with 'stepcast predict FILE'; options on the command line win.",
        f"stepcast = {json.dumps(__version__)}",
        "",
        f"[{TABLE}]",
    ]
    lines += [f"{name.replace('_', '-')} = {json.dumps(value, default=str)}" for name, value in values]
    lines += ["", "# Defaults used:", *(f"# - {note}" for note in run.assumptions)] if run.assumptions else []
    return ("\n".join(lines) + "\n").encode()


class NoOptionError(ValueError):
    """A setting that no option makes."""


def predict_words(profile: Profile, model: Model, gpu: Gpu, strategy: Strategy, framework: Framework) -> list[str]:
    """Return the options of ``predict`` for a strategy: layout, batch, and what differs from *profile*."""
    choices = predict_choices(profile, model, gpu, strategy, framework)
    return [word for name, value in choices.items() for word in readers.spell_option(name, value)]


def predict_choices(
    profile: Profile, model: Model, gpu: Gpu, strategy: Strategy, framework: Framework
) -> dict[str, object]:
    """Return the choices of ``predict`` for a strategy: layout, batch, and what differs from *profile*."""
    layout, stated = strategy.layout, _state_batch(strategy)
    degrees = {name: getattr(layout, name) for name in ("tp", "cp", "ep", "pp", "vpp") if getattr(layout, name) > 1}
    degrees |= {name: getattr(layout, name) for name in ("expert_tp", "shard") if getattr(layout, name)}
    choices: dict[str, object] = {"framework": profile.name, "gpus": layout.gpus}
    choices |= {**degrees, **{name: getattr(stated, name) for name in BATCH}}
    if strategy.precision is not fit_precision(profile, gpu, []).defaults.precision:
        choices["precision"] = str(strategy.precision)
    # Presets and formats depend on precision and sharding, so differences are those with them given.
    given = pick(strategy, "precision"), pick(strategy, "precision sharding")
    settled, sharded = (settle_profile(profile, model, gpu.name, layout, facts) for facts in given)
    usual = settled.strategy(layout, strategy.micro_batch, strategy.global_batch, strategy.seq)
    usual = replace(usual, schedule=ScheduleKind.INTERLEAVED if layout.vpp > 1 else ScheduleKind.ONE_F_ONE_B)
    for wanted, known in ((strategy, usual), (framework, sharded.framework)):
        for name in (field.name for field in fields(wanted) if field.name not in SET_BY_OTHERS):
            if getattr(wanted, name) != getattr(known, name):
                choices.update(_choices_of_field(name, getattr(wanted, name), getattr(known, name)))
    return choices


def _choices_of_field(name: str, value: object, known: object) -> list[tuple[str, str | bool]]:
    """Return the choices that set the field *name* to *value*; of an optimizer, those that differ from *known*."""
    if not isinstance(value, Optimizer) or not isinstance(known, Optimizer):
        return [choice_of_field(name, value)]
    pairs: list[tuple[str, str | bool]] = []
    if (value.kind, value.moment_dtype) != (known.kind, known.moment_dtype):
        pairs.append(choice_of_field(name, value))
    pairs += [("master_weights", value.master_weights)] if value.master_weights != known.master_weights else []
    pairs += [("clipping", value.clips)] if value.clips != known.clips else []
    return pairs


def choice_of_field(name: str, value: object) -> tuple[str, str | bool]:
    """Return the choice that sets the field *name* of a Strategy or a Framework, and its value there."""
    if isinstance(value, Optimizer):
        formats = [word for word in OPTIMIZERS[value.kind].formats if FORMATS[word] is value.moment_dtype]
        return name, ":".join([value.kind, *formats])
    if name not in SETTERS or value is None or (name in ("stage_layers", "fp8_parameters") and not value):
        kind = "the framework" if name in DECISIONS else "the strategy"
        raise NoOptionError(f"no option sets {name} of {kind} to {value!r}")
    setter = SETTERS[name]
    if CHOICES[setter].deniable or DEFAULTS[setter] is False:
        return setter, bool(value)
    return setter, CHOICES[setter].write(value)


def run_facts(run: SettledRun) -> FactDict:
    """Return what was asked, in the words of the JSON contract."""
    strategy = run.strategy
    words = {**strategy.facts(), "recompute": recompute_word(strategy.recompute)}
    return {
        **pick(run, "model=model.name parameters=model.parameters cluster=cluster.name gpu=cluster.gpu.name"),
        **pick(run, "gpus_per_node=cluster.node.gpus framework=framework.name"),
        "execution": str(run.framework.execution),
        "kernels": str(run.framework.kernels),
        "strategy": {**words, **pick(strategy, "global_batch seq")},
    }


def answer_facts(prediction: Prediction, run: SettledRun, file: RunFile | None = None) -> FactDict:
    """Return the JSON of a prediction: the question, the report, the training run, remedies, and keys of a *file*."""
    from stepcast.questions.changes import find_remedies

    more = {
        "training": training_facts(run.question, run.strategy, prediction.step_s),
        **({} if prediction.fits else find_remedies(run, prediction.step_s)),
        "config": file.facts(write_command(run)) if file else None,
    }
    known = {name: value for name, value in more.items() if value is not None}
    return {**run_facts(run), **prediction.report.facts(), **known}


def strategy_facts(strategy: Strategy) -> FactDict:
    """Return all that a search decides of a strategy, with its overlap and its uneven split of layers."""
    return {
        **strategy.facts(),
        "overlap": ",".join(overlap_words(strategy.overlap)) or "none",
        "stage_layers": ",".join(map(str, strategy.stage_layers)),
    }


def training_facts(asked: readers.Question, strategy: Strategy, step_s: float) -> FactDict | None:
    """Return what training on the question's tokens takes without interruptions; ``stepcast plan`` includes those."""
    tokens, gpu_hour = getattr(asked, "tokens", None), getattr(asked, "price", None)
    if tokens is None:
        return None
    steps = math.ceil(tokens / strategy.tokens)
    hours = steps * step_s / HOUR * strategy.layout.gpus
    cost, currency = (None, None) if gpu_hour is None else (hours * gpu_hour, getattr(asked, "currency", None))
    length = {"tokens": tokens, "steps": steps, "days": steps * step_s / DAY, "gpu_hours": hours}
    return {**length, "cost": cost, "currency": currency}


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
    question: readers.Question,
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    framework: Framework,
    step_s: float,
) -> EmittedConfig:
    """Return the configuration of a run for ``TOOL`` or ``TOOL=FILE``; *question* names its model and its cluster."""
    from stepcast.inputs.configs.reader import read_text
    from stepcast.outputs.configs import WRITERS, EmittedRun

    tool, asked = text.partition("=")[0], {name: getattr(question, name) for name in ("model", "cluster")}
    require(tool in WRITERS, f"--emit {tool!r} is not known; expected one of {', '.join(WRITERS)}")
    ending, write = WRITERS[tool]
    title = f"{model.name} on {strategy.layout.gpus:,} {cluster.gpu.name}: {format_seconds(step_s)} per step "
    title += f"(stepcast {__version__})"
    stated = _state_batch(strategy)
    choices = _state_choices(model, stated, framework)
    emitted = write(EmittedRun(model, stated, framework, cluster.node.gpus, title, choices))
    file = run_of_config(read_text(emitted, f"emitted{ending}"), f"emitted{ending}")
    written_for = str(file.choices["framework"])
    if not framework.name.startswith(written_for.partition("-")[0]):
        raise ValueError(
            f"--emit {tool} is a configuration of {written_for}, and the step was predicted for {framework.name}: "
            f"use --framework {written_for}"
        )
    if missing := missing_features(load_profile(written_for), strategy, framework):
        raise ValueError(f"--emit {tool}: {missing[0]}")
    needed: FactDict = {"cluster": asked["cluster"]} if asked["cluster"] else {}
    remaining: FactDict = {"framework": framework.name} if written_for != framework.name else {}
    usual = [(name, getattr(question, name, DEFAULTS[name])) for name in UNWRITTEN]
    remaining |= {name: value for name, value in usual if value != DEFAULTS[name]}
    for name, degree in (("gpus", strategy.layout.gpus), *((name, getattr(stated, name)) for name in BATCH)):
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
    listed = ((name, value if isinstance(value, tuple) else (value,)) for name, value in remaining.items())
    words = [word for name, values in listed for value in values for word in readers.spell_option(name, value)]
    return EmittedConfig(tool, emitted, words, lost)


def _state_batch(strategy: Strategy) -> Strategy:
    """Return *strategy* with the batch as a question states it: pairs for DPO, the longest samples before padding."""
    pairs = strategy.objective.sequences
    micro_batch, global_batch = strategy.micro_batch // pairs, strategy.global_batch // pairs
    return replace(strategy, micro_batch=micro_batch, global_batch=global_batch, seq=strategy.longest or strategy.seq)


def _state_choices(model: Model, strategy: Strategy, framework: Framework) -> FactDict:
    """Return the choices of a run by option, as :class:`EmittedRun` has them."""
    layout, unused = strategy.layout, {"ep", "dispatcher"} if model.experts is None else set()
    unused |= {"cp_comm"} if layout.cp == 1 else set()
    unused |= {"schedule"} if layout.pp == 1 else set()
    choices = {**_state_layout(strategy), "clipping": framework.optimizer.clips}
    for owner in (strategy, framework):
        for name in (field.name for field in fields(owner) if field.name in SETTERS):
            value, choice = getattr(owner, name), SETTERS[name]
            choices[choice] = value if isinstance(value, int | float) or value is None else CHOICES[choice].write(value)
    used = {name: value for name, value in choices.items() if name not in unused and (value or value is False)}
    return {name.replace("_", "-"): value for name, value in used.items()}


def _state_layout(strategy: Strategy) -> FactDict:
    """Return the degrees of parallelism, the batch and the format of a run."""
    degrees = pick(strategy.layout, "gpus tp cp ep pp vpp expert_tp shard")
    return {**degrees, **pick(strategy, "micro_batch global_batch seq"), "precision": str(strategy.precision)}


def _ask(file: RunFile, choices: Facts) -> SettledRun:
    given = readers.read_choices(PredictQuestion, {name: value for name, value in choices.items() if value != ()})
    return settle(ask_with_file(PredictQuestion, given, file))


def _differences(run: SettledRun, strategy: Strategy, framework: Framework) -> list[tuple[str, object]]:
    """Return the choices in which *run* differs, each with its value; None where no option sets it."""
    own, settled = (_state_layout(_state_batch(known)) for known in (strategy, run.strategy))
    overlaps = FEATURES["overlaps"].used
    pairs: list[tuple[str, object]] = [(name, value) for name, value in own.items() if value != settled[name]]
    for wanted, known in ((strategy, run.strategy), (framework, run.framework)):
        for name in (field.name for field in fields(wanted) if field.name not in SET_BY_OTHERS):
            if getattr(wanted, name) == getattr(known, name):
                continue
            if name == "overlap" and overlaps(strategy, framework) == overlaps(run.strategy, run.framework):
                continue  # in this layout
            if name == "stage_layers" and pieces(run.model, strategy) == pieces(run.model, run.strategy):
                continue
            try:
                pairs += _choices_of_field(name, getattr(wanted, name), getattr(known, name))
            except NoOptionError:
                pairs.append((name, None))
    return pairs
