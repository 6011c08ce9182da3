"""The options of ``stepcast predict`` for a strategy under a framework: what differs from its habits."""

from dataclasses import fields, replace

from stepcast.frameworks.profile import DECISIONS, Profile, settle
from stepcast.ir.framework import Framework
from stepcast.ir.model import Model
from stepcast.ir.strategy import ScheduleKind, Strategy
from stepcast.questions.choices import option_of
from stepcast.questions.question import CHOICES, DEFAULTS


class UnsaidError(ValueError):
    """A setting that no option says."""


# Field of a Framework or a Strategy -> the choice that sets it.
SETTERS = {choice.sets: name for name, choice in CHOICES.items() if choice.sets}
# What other words say: the layout and the batch, adapters by their rank, the profile by its name.
ELSEWHERE = {"layout", "micro_batch", "global_batch", "seq", "precision", "training", "name"}


def predict_words(
    profile: Profile, model: Model, gpu: str, strategy: Strategy, framework: Framework
) -> list[str]:
    """Layout, batch and every option that differs from what *profile* does on *gpu* anyway."""
    layout = strategy.layout
    words = ["--framework", profile.name, "--gpus", str(layout.gpus)]
    for name in ("tp", "cp", "ep", "pp", "vpp"):
        if getattr(layout, name) > 1:
            words += [f"--{name}", str(getattr(layout, name))]
    for name in ("expert_tp", "shard"):
        if getattr(layout, name):
            words += [f"--{name.replace('_', '-')}", str(getattr(layout, name))]
    for name in ("micro_batch", "global_batch", "seq"):
        words += [f"--{name.replace('_', '-')}", str(getattr(strategy, name))]
    if strategy.precision is not profile.defaults.precision:
        words += ["--precision", str(strategy.precision)]
    # Presets and formats depend on the precision, so what differs is told with it said.
    settled = settle(profile, model, gpu, layout, {"precision": strategy.precision})
    usual = settled.strategy(layout, strategy.micro_batch, strategy.global_batch, strategy.seq)
    usual = replace(usual, schedule=ScheduleKind.INTERLEAVED if layout.vpp > 1 else ScheduleKind.ONE_F_ONE_B)
    for wanted, known in ((strategy, usual), (framework, settled.framework)):
        for name in (field.name for field in fields(wanted) if field.name not in ELSEWHERE):
            if getattr(wanted, name) != getattr(known, name):
                words += _spelled(name, getattr(wanted, name))
    return words


def _spelled(name: str, value: object) -> list[str]:
    if name not in SETTERS or value is None or (name == "stage_layers" and not value):
        kind = "the framework" if name in DECISIONS else "the strategy"
        raise UnsaidError(f"no option sets {name} of {kind} to {value!r}")
    choice = CHOICES[SETTERS[name]]
    if choice.deniable:
        return [option_of(SETTERS[name] if value else f"no-{SETTERS[name]}")]
    option = option_of(SETTERS[name])
    return [option] if DEFAULTS[SETTERS[name]] is False else [option, choice.write(value)]
