"""Profiles: the decisions of software, and its defaults for choices that a user leaves open.

``settle`` applies, in this order, the profile, its presets for this model, GPU and layout, and the choices of the
user.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, field, fields, replace
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import NamedTuple

from stepcast.ir.dataclass import dataclass
from stepcast.ir.dtype import DType
from stepcast.ir.facts import FactDict, Facts
from stepcast.ir.framework import Framework, Modules
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.strategy import (
    NO_RECOMPUTE,
    STORED_AS,
    USUAL_OVERLAP,
    ContextKind,
    Overlap,
    Recompute,
    Sharding,
    Strategy,
    StrategyError,
    overlap_words,
    recompute_word,
)

# Fields of the software that a user or a preset may set; all others are choices.
DECISIONS = frozenset(each.name for each in fields(Framework)) - {"name"}


class StageSpread(StrEnum):
    """The ways in which recipes spread layers over stages."""

    FILLED = "filled"
    BALANCED = "by-cost"


@dataclass(frozen=True, slots=True)
class Defaults:
    """Default choices of a strategy."""

    precision: DType = DType.BF16
    sharding: Sharding = Sharding.ZERO_1
    sequence_parallel: bool = True
    recompute: Recompute = NO_RECOMPUTE
    overlap: Overlap = USUAL_OVERLAP
    context: ContextKind = ContextKind.RING
    seq: int = 4096
    # Model chunks per stage of interleaved schedules if their number is not given; 0: no default.
    chunks: int = 0


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of recipes, which apply if every condition holds; an empty condition always does."""

    settings: Facts = field(hash=False)
    model: tuple[str, ...] = ()  # starts of the model's name
    gpu: tuple[str, ...] = ()  # the first word of the GPU's name
    precision: tuple[DType, ...] = ()
    pp: tuple[int, ...] = ()
    # Experts spread over ranks.
    spread: bool = False
    # One stage, or several chunks on each: micro-batches can run in pairs (see Strategy).
    pairable: bool = False

    def applies(self, model: str, gpu: str, precision: DType, layout: Layout) -> bool:
        return (
            (not self.model or _plain(model).startswith(tuple(map(_plain, self.model))))
            and (not self.gpu or gpu.split("-")[0] in self.gpu)
            and (not self.precision or precision in self.precision)
            and (not self.pp or layout.pp in self.pp)
            and (not self.spread or layout.ep > 1)
            and (not self.pairable or layout.pp == 1 or layout.vpp > 1)
        )


def _plain(name: str) -> str:
    """Return letters and digits alone: spellings of a model differ in punctuation."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


@dataclass(frozen=True, slots=True)
class Profile:
    """A framework with its defaults; *sources* name where each of its values is documented."""

    framework: Framework
    defaults: Defaults
    description: str = ""
    presets: tuple[Preset, ...] = ()
    # Which of gradients and moments have the training precision, whichever that is.
    as_trained: frozenset[str] = frozenset()
    sources: Mapping[str, str] = field(default_factory=dict, hash=False)
    # Features of the software by the keys of FEATURES; a missing key allows anything.
    supports: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return self.framework.name

    def settings(self, model: str, gpu: str, precision: DType, layout: Layout) -> FactDict:
        """Return the settings of the presets that apply; later ones win."""
        settings: FactDict = {}
        for preset in self.presets:
            if preset.applies(model, gpu, precision, layout):
                settings |= preset.settings
        return settings

    def chunks(self, model: Model, gpu: str, layout: Layout) -> tuple[int, bool]:
        """Return the chunks per stage of the presets, else the default, and whether presets set them."""
        chunks = self.settings(model.name, gpu, self.defaults.precision, layout).get("chunks")
        return (chunks, True) if chunks else (self.defaults.chunks, False)


def profile_facts(profile: Profile) -> FactDict:
    """Return all of a profile as facts for ``show`` and ``list``."""
    framework, defaults = profile.framework, profile.defaults
    software = {
        name: str(value) if isinstance(value, str) else value
        for name, value in asdict(framework).items()
        if name not in ("name", "optimizer", "overhead")
    }
    for name in profile.as_trained & set(software):
        software[name] = "as trained"
    optimizer = asdict(framework.optimizer)
    optimizer["moment_dtype"] = (
        "as trained" if "moment_dtype" in profile.as_trained else str(framework.optimizer.moment_dtype)
    )
    return {
        "kind": "framework",
        "name": profile.name,
        "description": profile.description,
        "software": software,
        "optimizer": optimizer,
        "memory": asdict(framework.overhead),
        "defaults": {
            "precision": str(defaults.precision),
            "sharding": str(defaults.sharding),
            "sequence_parallel": defaults.sequence_parallel,
            "recompute": recompute_word(defaults.recompute),
            "overlap": list(overlap_words(defaults.overlap)),
            "context": str(defaults.context),
            "seq": defaults.seq,
            "chunks": defaults.chunks,
        },
        "supports": {key: list(words) for key, words in profile.supports.items()},
        "presets": len(profile.presets),
        "sources": dict(profile.sources),
    }


class Feature(NamedTuple):
    """A feature that software may lack: its name, and the values of it that a run uses."""

    noun: str
    used: Callable[[Strategy, Framework], tuple[str, ...]]


def _is_replicated(strategy: Strategy) -> bool:
    return strategy.layout.dp * strategy.layout.cp > 1


def _used_sharding(strategy: Strategy, pipelined: bool) -> tuple[str, ...]:
    return (strategy.sharding,) if _is_replicated(strategy) and (strategy.layout.pp > 1) is pipelined else ()


def _used_recompute(strategy: Strategy, framework: Framework) -> tuple[str, ...]:
    return (strategy.recompute.kind, *strategy.recompute.modules)


def _used_overlaps(strategy: Strategy, framework: Framework) -> tuple[str, ...]:
    """Return the overlaps that hide anything in this layout."""
    layout, replicated = strategy.layout, _is_replicated(strategy)
    acts = {
        "gradients": replicated,
        "parameters": replicated and strategy.sharding is not Sharding.NONE,
        "tensor": layout.tp > 1,
        "tensor-gradients": layout.tp > 1,
        "transfers": layout.pp > 1,
        "experts": strategy.pairs_micro_batches,
    }
    return tuple(word for word in overlap_words(strategy.overlap) if acts[word])


# Keys of [supports] in profiles. Most software has fewer kinds of sharding inside pipelines.
FEATURES: Mapping[str, Feature] = {
    "schedules": Feature("schedule", lambda run, _: (run.schedule,) if run.layout.pp > 1 else ()),
    "shardings": Feature("sharding", lambda run, _: _used_sharding(run, False)),
    "pipeline_shardings": Feature("sharding in a pipeline", lambda run, _: _used_sharding(run, True)),
    "dispatchers": Feature("token dispatch", lambda run, software: (software.dispatcher,) if run.layout.ep > 1 else ()),
    "recompute": Feature("recomputation", _used_recompute),
    "overlaps": Feature("overlap", _used_overlaps),
    "contexts": Feature("context-parallel exchange", lambda run, _: (run.context,) if run.layout.cp > 1 else ()),
}


def missing_features(profile: Profile, strategy: Strategy, framework: Framework) -> list[str]:
    """Return a sentence for each thing a run uses that the software of *profile* does not have."""
    return [
        f"{profile.name} has no {word} {feature.noun} ({_others(profile.supports[key])})"
        for key, feature in FEATURES.items()
        if key in profile.supports
        for word in feature.used(strategy, framework)
        if word not in profile.supports[key]
    ]


def _others(words: tuple[str, ...]) -> str:
    return f"it has {', '.join(words)}" if words else "nor any other"


@dataclass(frozen=True, slots=True)
class Settled:
    """A framework, and the fields of a Strategy that do not follow from layout and batch."""

    framework: Framework
    choices: Facts

    def strategy(self, layout: Layout, micro_batch: int, global_batch: int, seq: int) -> Strategy:
        return Strategy(layout, micro_batch, global_batch, seq, **self.choices)


def settle(profile: Profile, model: Model, gpu: str, layout: Layout, given: Facts | None = None) -> Settled:
    """Return the run under *profile* with the fields of a Strategy or a Framework that are *given*."""
    given, defaults = given or {}, profile.defaults
    precision: DType = given.get("precision", defaults.precision)
    settings = profile.settings(model.name, gpu, precision, layout)
    overlap = settings.pop("overlap", defaults.overlap)
    choices: FactDict = {
        "precision": precision,
        "sharding": settings.pop("sharding", defaults.sharding),
        "sequence_parallel": defaults.sequence_parallel,
        "recompute": settings.pop("recompute", defaults.recompute),
        "overlap": replace(overlap, experts=True) if settings.pop("overlap_experts", False) else overlap,
        "context": defaults.context,
        "further_tokens": settings.pop("further_tokens", 0) if model.next_token_layers else 0,
    }
    spread = settings.pop("stage_layers", None)
    if spread and "stage_layers" not in given:
        count = layout.pp * layout.vpp
        by_word = filled_stages(model.layers, count) if spread is StageSpread.FILLED else balanced_stages(model, count)
        choices["stage_layers"] = by_word
    decisions = {name: value for name, value in settings.items() if name in DECISIONS}
    stored = DType.FP32 if given.get("autocast") else STORED_AS.get(precision, precision)
    if "gradient_dtype" in profile.as_trained:
        decisions["gradient_dtype"] = stored
    if "moment_dtype" in profile.as_trained:
        decisions["optimizer"] = replace(profile.framework.optimizer, moment_dtype=stored)
    if profile.framework.modules is Modules.TRANSFORMERS and model.dropout > 0:
        decisions["dropout"] = True
    decisions |= {name: value for name, value in given.items() if name in DECISIONS}
    choices |= {name: value for name, value in given.items() if name not in DECISIONS}
    choices["sequence_parallel"] = choices["sequence_parallel"] and layout.tp > 1
    return Settled(replace(profile.framework, **decisions), choices)


def filled_stages(layers: int, pieces: int) -> tuple[int, ...]:
    """Return stages that are full except the last, which has the loss and the MTP layers. If that leaves the last
    without a layer, the first has one less, for the embedding (Megatron-Bridge's DeepSeek-V3 pipeline layouts).
    """
    if pieces == 1:
        return ()
    share = -(-layers // pieces)
    first = share if layers > share * (pieces - 1) else share - 1
    last = layers - first - share * (pieces - 2)
    return (first, *(share,) * (pieces - 2), last) if last >= 0 else ()


def balanced_stages(model: Model, count: int) -> tuple[int, ...]:
    """Return the layers of stages that end where the matmuls so far exceed their share, the head's included.

    So does nanotron (models/base.py, build_model), block after block: layers, the last norm, the head, a cast to fp32
    and the loss. The head is in the last stage here even where it alone exceeds a share: nanotron then leaves later
    stages the cast and the loss, and fails where one of them is left with nothing.
    """
    if count == 1:
        return ()
    layer_cost = 4 * model.hidden * model.heads * model.head_dim + 3 * model.hidden * model.ffn
    costs = [layer_cost] * model.layers + [0, model.vocab * model.hidden, 0, 0]
    ends: list[int] = []
    for block, cost in enumerate(accumulate(costs[:-1]), 1):
        if len(ends) < count - 1 and cost > sum(costs) * (len(ends) + 1) / count:
            ends.append(min(block, model.layers))
    if len(ends) < count - 1:
        raise StrategyError(
            f"pp {count} leaves a stage of {model.layers} layers without any part of the model, since the software "
            "splits them by cost: use a smaller pp or --stage-layers"
        )
    return tuple(end - start for start, end in pairwise([0, *ends, model.layers]))
