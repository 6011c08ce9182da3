"""Profiles of frameworks: the decisions of software, and its defaults for choices that a user leaves open; and their
catalogue, data/frameworks/*.toml, with users' own files in the same format.

A profile may extend another; its own values win, and its presets come after those of the other. ``[sources]``
names where its values are documented, as in the catalogue of clusters. ``settle`` applies, in this order, the profile,
its presets for this model, GPU and layout, and the choices of the user.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, field, fields, replace
from enum import StrEnum
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Annotated, NamedTuple, get_type_hints

from msgspec import Meta

from stepcast.hardware.catalog import CatalogError, Description, Entry, data_names, flat, read_chained
from stepcast.hardware.cluster import Gpu
from stepcast.inputs.source import DATA, read_words
from stepcast.ir import strategy as strategies
from stepcast.ir.framework import (
    FORMATS,
    OPTIMIZERS,
    Dispatcher,
    Framework,
    Modules,
    Optimizer,
    OptimizerKind,
    Overhead,
)
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.strategy import ContextKind, Overlap, Recompute, ScheduleKind, Sharding, Strategy, StrategyError
from stepcast.ir.tables import Count, TableError, convert_table
from stepcast.ir.types import DType, FactDict, Facts, dataclass
from stepcast.units import Dimension, nearest, parse_quantity

# Fields of the software that a user or a preset may set; all others are choices.
DECISIONS = frozenset(decision.name for decision in fields(Framework)) - {"name"}


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
    recompute: Recompute = strategies.NO_RECOMPUTE
    overlap: Overlap = strategies.USUAL_OVERLAP
    context: ContextKind = ContextKind.RING
    seq: int = 4096
    chunks: int = 0  # model chunks per stage of interleaved schedules if their number is not given; 0: no default


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings of recipes, which apply if every condition holds; an empty condition always does."""

    settings: Facts = field(hash=False)
    model: tuple[str, ...] = ()  # starts of the model's name
    gpu: tuple[str, ...] = ()  # the first word of the GPU's name
    precision: tuple[DType, ...] = ()
    pp: tuple[int, ...] = ()
    sharding: tuple[Sharding, ...] = ()
    spread: bool = False  # experts spread over ranks
    pairable: bool = False  # one stage, or several chunks on each: micro-batches can run in pairs (see Strategy)

    def applies(self, model: str, gpu: str, precision: DType, layout: Layout, sharding: Sharding | None) -> bool:
        return (
            (not self.model or _plain(model).startswith(tuple(map(_plain, self.model))))
            and (not self.gpu or gpu.split("-")[0] in self.gpu)
            and (not self.precision or precision in self.precision)
            and (not self.pp or layout.pp in self.pp)
            and (not self.sharding or sharding in self.sharding)
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

    def settings(self, model: str, gpu: str, precision: DType, layout: Layout, sharding: Sharding | None) -> FactDict:
        """Return the settings of the presets that apply; later ones win."""
        settings: FactDict = {}
        for preset in self.presets:
            if preset.applies(model, gpu, precision, layout, sharding):
                settings |= preset.settings
        return settings

    def chunks(self, model: Model, gpu: str, layout: Layout) -> tuple[int, bool]:
        """Return the chunks per stage of the presets, else the default, and whether presets set them."""
        chunks = self.settings(model.name, gpu, self.defaults.precision, layout, None).get("chunks")
        return (chunks, True) if chunks else (self.defaults.chunks, False)


def profile_facts(profile: Profile) -> FactDict:
    """Return all of a profile as facts for ``show`` and ``list``."""
    defaults, software = profile.defaults, asdict(profile.framework)
    name, optimizer, overhead = (software.pop(part) for part in ("name", "optimizer", "overhead"))
    for decision in profile.as_trained:
        (software if decision in software else optimizer)[decision] = AS_TRAINED
    return {
        "kind": "framework",
        "name": name,
        "description": profile.description,
        "software": software,
        "optimizer": optimizer,
        "memory": overhead,
        "defaults": {
            **{field.name: getattr(defaults, field.name) for field in fields(defaults)},
            "recompute": strategies.recompute_word(defaults.recompute),
            "overlap": list(strategies.overlap_words(defaults.overlap)),
        },
        "supports": {key: list(words) for key, words in profile.supports.items()},
        "presets": len(profile.presets),
        "sources": dict(profile.sources),
    }


RecomputeWord = StrEnum("RecomputeWord", [*strategies.RecomputeKind, *strategies.RecomputeModule])  # type: ignore[misc]


OptimizerWord = StrEnum(  # type: ignore[misc]
    "OptimizerWord",
    {
        word: word
        for kind, facts in OPTIMIZERS.items()
        for word in (kind, *(f"{kind}:{name}" for name in facts.formats))
    },
)


class Feature(NamedTuple):
    """A feature that software may lack: its name, the values that it can have (None: overlaps), and those that a run
    uses.
    """

    noun: str
    kind: type[StrEnum] | None
    used: Callable[[Strategy, Framework], tuple[str, ...]]


def _used_sharding(strategy: Strategy, pipelined: bool) -> tuple[str, ...]:
    layout = strategy.layout
    return (strategy.sharding,) if layout.dp * layout.cp > 1 and (layout.pp > 1) is pipelined else ()


def _used_overlaps(strategy: Strategy, framework: Framework) -> tuple[str, ...]:
    """Return the overlaps that hide anything in this layout."""
    layout = strategy.layout
    replicated = layout.dp * layout.cp > 1
    acts = {
        "gradients": replicated,
        "parameters": replicated and strategy.sharding is not Sharding.NONE,
        "tensor": layout.tp > 1,
        "tensor-gradients": layout.tp > 1,
        "transfers": layout.pp > 1,
        "experts": strategy.pairs_micro_batches,
    }
    return tuple(word for word in strategies.overlap_words(strategy.overlap) if acts[word])


def _used_optimizer(_: Strategy, framework: Framework) -> tuple[str, ...]:
    """Return the optimizer as ``--optimizer`` spells it, without fp32, the format of its moments that is usual."""
    optimizer = framework.optimizer
    names = [name for name in OPTIMIZERS[optimizer.kind].formats if FORMATS[name] is optimizer.moment_dtype]
    return (":".join([optimizer.kind, *(name for name in names if name != "fp32")]),)


# Keys of [supports] in profiles; a run that uses other values gets a warning. Most software has fewer kinds of sharding
# inside pipelines.
FEATURES: Mapping[str, Feature] = {
    "schedules": Feature("schedule", ScheduleKind, lambda run, _: (run.schedule,) if run.layout.pp > 1 else ()),
    "shardings": Feature("sharding", Sharding, lambda run, _: _used_sharding(run, False)),
    "pipeline_shardings": Feature("sharding in a pipeline", Sharding, lambda run, _: _used_sharding(run, True)),
    "dispatchers": Feature("token dispatch", Dispatcher,
                           lambda run, software: (software.dispatcher,) if run.layout.ep > 1 else ()),
    "recompute": Feature("recomputation", RecomputeWord,
                         lambda run, _: (run.recompute.kind, *run.recompute.modules)),
    "overlaps": Feature("overlap", None, _used_overlaps),
    "contexts": Feature("context-parallel exchange", ContextKind,
                        lambda run, _: (run.context,) if run.layout.cp > 1 else ()),
    "optimizers": Feature("optimizer", OptimizerWord, _used_optimizer),
    "split_optimizers": Feature("optimizer with tensor or pipeline parallelism", OptimizerWord,
                                lambda run, it: _used_optimizer(run, it) if run.layout.tp * run.layout.pp > 1 else ()),
    "base_weights": Feature("format of frozen weights", strategies.BaseWeights, lambda run, _: (run.base_weights,)),
}  # fmt: skip


def missing_features(profile: Profile, strategy: Strategy, framework: Framework) -> list[str]:
    """Return a sentence for each thing a run uses that the software of *profile* does not have."""
    missing = []
    for key, feature in FEATURES.items():
        if (known := profile.supports.get(key)) is not None:
            others = f"it has {', '.join(known)}" if known else "nor any other"
            unknown = [word for word in feature.used(strategy, framework) if word not in known]
            missing += [f"{profile.name} has no {word} {feature.noun} ({others})" for word in unknown]
    return missing


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
    settings = profile.settings(model.name, gpu, precision, layout, given.get("sharding", defaults.sharding))
    overlap = settings.pop("overlap", defaults.overlap)
    choices: FactDict = {
        "precision": precision,
        "sharding": settings.pop("sharding", defaults.sharding),
        "sequence_parallel": defaults.sequence_parallel,
        "recompute": settings.pop("recompute", defaults.recompute),
        "overlap": replace(overlap, experts=True) if settings.pop("overlap_experts", False) else overlap,
        "context": defaults.context,
        "mtp_layers": settings.pop("mtp_layers", 0) if model.next_token_layers else 0,
    }
    spread = settings.pop("stage_layers", None)
    if spread and "stage_layers" not in given:
        split = filled_stages if spread is StageSpread.FILLED else balanced_stages
        choices["stage_layers"] = split(model, layout.pp * layout.vpp)
    decisions = {name: value for name, value in settings.items() if name in DECISIONS}
    stored = DType.FP32 if given.get("autocast") else strategies.STORED_AS.get(precision, precision)
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


def filled_stages(model: Model, pieces: int) -> tuple[int, ...]:
    """Return stages that are full except the last, which has the loss and the MTP layers. If that leaves the last
    without a layer, the first has one less, for the embedding (Megatron-Bridge's DeepSeek-V3 pipeline layouts).
    """
    if pieces == 1:
        return ()
    layers, share = model.layers, -(-model.layers // pieces)
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


DEFAULT = "megatron-core"
AS_TRAINED = "as trained"
MOST_PER_PARAMETER = 1000  # bytes of one parameter, or shares of what is allocated: nothing comes near

Read = Callable[[object], object]
Keys = Mapping[str, tuple[str, Read]]
"""Key of a profile -> the field it sets and how its value is read."""


def _read_as(kind: object) -> Read:
    """Return a reader of the values of a type."""
    return partial(convert_table, kind=kind)  # type: ignore[arg-type]


_size = partial(parse_quantity, dimension=Dimension.SIZE)
_number = _read_as(Annotated[float, Meta(le=MOST_PER_PARAMETER)])


def _format(value: object) -> object:
    return AS_TRAINED if value == AS_TRAINED else convert_table(value, DType)


def _words(value: object) -> tuple[str, ...]:
    return convert_table(value, tuple[str, ...])


def _some_of(kind: type[StrEnum] | None) -> Read:
    if kind is None:
        return lambda value: strategies.overlap_words(strategies.overlap_of(_words(value))) if value else ()
    return lambda value: tuple(map(str, convert_table(value, tuple[kind, ...])))  # type: ignore[valid-type]


def _fields_of(kind: type, special: Mapping[str, tuple[str, Read]], left_out: Collection[str] = ()) -> Keys:
    """Return a key for each field of *kind*, read by the type of the field, except the *special* ones."""
    kinds = {name: hint for name, hint in get_type_hints(kind).items() if name not in left_out}
    usual = {name: (name, _number if hint is float else _read_as(hint)) for name, hint in kinds.items()}
    return {key: (name, read) for name, (key, read) in {**usual, **special}.items()}


SOFTWARE = _fields_of(
    Framework,
    {
        "gradient_dtype": ("gradients", _format),
        "bucket_bytes": ("bucket", lambda value: None if value == "by ranks" else round(_size(value))),
    },
    ("name", "optimizer", "overhead"),
)
OPTIMIZER = _fields_of(
    Optimizer, {"kind": ("name", _read_as(OptimizerKind)), "moment_dtype": ("moment_format", _format)}
)
MEMORY = _fields_of(
    Overhead,
    {
        **{f"{name}_bytes": (name, _size) for name in ("context", "communicator")},
        "buffer_bytes": ("buffers", _size),
        **{f"{name}_bytes": (f"{name}_bytes_per_parameter", _number) for name in ("step", "gradient")},
    },
)
CHOICES = _fields_of(
    Defaults,
    {
        "recompute": ("recompute", lambda value: strategies.recompute_of(convert_table(value, str))),
        "overlap": ("overlap", lambda value: strategies.overlap_of(_words(value))),
        **{name: (name, _read_as(Count)) for name in ("seq", "chunks")},
    },
)
# Settings of presets: decisions of the software, and choices that recipes make.
SETTINGS: Keys = {
    **{key: entry for key, entry in SOFTWARE.items() if key not in ("gradients", "peak")},
    **{key: CHOICES[key] for key in ("sharding", "recompute", "overlap", "chunks")},
    "overlap_experts": ("overlap_experts", _read_as(bool)),
    "mtp_layers": ("mtp_layers", _read_as(Count)),
    "stage_layers": ("stage_layers", _read_as(StageSpread)),
}
CONDITIONS = _fields_of(
    Preset,
    {"pp": ("pp", lambda value: convert_table(value if isinstance(value, list) else [value], tuple[Count, ...]))},
    ("settings",),
)
SUPPORTS: Keys = {key: (key, _some_of(feature.kind)) for key, feature in FEATURES.items()}
TABLES: Mapping[str, Keys] = {"software": SOFTWARE, "optimizer": OPTIMIZER, "memory": MEMORY, "defaults": CHOICES,
                              "supports": SUPPORTS}  # fmt: skip
KEYS = ("description", "extends", *(f"{table}.{key}" for table, entries in TABLES.items() for key in entries))


def load_profile(name_or_path: str | Framework) -> Profile:
    """Load a framework of the catalogue, by name in any letter case, or from a TOML file.

    A Framework value that ``load_framework`` returned has its profile; presets do not touch fields that were changed
    since. A value of another name has the general defaults.
    """
    if isinstance(name_or_path, Framework):
        return _profile_of(name_or_path)
    if name_or_path.endswith(".toml"):
        return _build(Path(name_or_path).stem, _read_entries(name_or_path, (), ""), name_or_path)
    return _load_catalogued(_find_name(name_or_path, ""))


@lru_cache(maxsize=64)
def _load_catalogued(name: str) -> Profile:
    return _build(name, _read_entries(name, (), ""), f"{name}.toml")


def load_framework(name_or_path: str = DEFAULT) -> Framework:
    """Load a framework without the defaults of its profile."""
    return load_profile(name_or_path).framework


def _profile_of(framework: Framework) -> Profile:
    if framework.name not in data_names("frameworks"):
        return Profile(framework, Defaults())
    profile = load_profile(framework.name)
    old = profile.framework
    changed = {field.name for field in fields(Framework) if getattr(old, field.name) != getattr(framework, field.name)}
    if not changed:
        return profile
    fixed = changed | ({"moment_dtype"} if "optimizer" in changed else set())
    presets = tuple(
        replace(preset, settings={key: value for key, value in preset.settings.items() if key not in changed})
        for preset in profile.presets
    )
    return replace(profile, framework=framework, presets=presets, as_trained=profile.as_trained - fixed)


def fit_precision(profile: Profile, gpu: Gpu, assumptions: list[str]) -> Profile:
    """Return *profile* with fp16 as its default in place of bf16 on a GPU that multiplies bf16 as fp32."""
    half = gpu.half_format
    if profile.defaults.precision is not DType.BF16 or half is DType.BF16:
        return profile
    assumptions.append(f"precision {half}, since {gpu.name} has no bf16 matrix units (--precision)")
    return replace(profile, defaults=replace(profile.defaults, precision=half))


def looks_like_framework(text: str) -> bool:
    """Return True if the start of a TOML file has a table that only profiles have."""
    tables = ("[software]", "[optimizer]", "[defaults]", "[supports]", "[[presets]]")
    lines = map(str.strip, text.splitlines())
    return any((line.startswith("extends") and "=" in line) or line in tables for line in lines)


# Other names of software, and tools that run another's training loop.
OTHER_NAMES = {alias: name for name, others in read_words("choices")["framework"].items() for alias in others.split()}


def _find_name(name: str, named_at: str) -> str:
    """Return the catalogue's spelling of *name*."""
    word = name.strip().lower().replace("_", "-").replace(" ", "-")
    word = OTHER_NAMES.get(word, word)
    if word not in (known := data_names("frameworks")):
        hint = nearest(word, known) or f"; known are {', '.join(known)}, or a file NAME.toml"
        raise CatalogError(named_at, "", f"unknown framework {name!r}{hint}")
    return word


def _read_entries(name: str, chain: tuple[str, ...], named_at: str) -> dict[str, Entry]:
    """Return the values of a profile and of those that it extends, by dotted key; its presets come after theirs."""
    file = name
    if name.endswith(".toml"):
        text, chain = read_chained(name, chain, named_at, "extends")
    else:
        file = f"{_find_name(name, named_at)}.toml"
        text = (DATA / "frameworks" / file).read_text(encoding="utf-8")
    described = Description.parse(text, file)
    presets = _read_presets(described, described.table.pop("presets", []))
    values = flat(described.table)
    described.check_keys(values, KEYS)
    described.check_sources((*KEYS, "presets"), "profile")
    base = values.pop("extends", None)
    if base is not None and not isinstance(base, str):
        raise described.error("extends", f"{base!r} is not the name of a framework")
    if base is not None and base.endswith(".toml"):  # a path is relative to the file that names it
        base = str(Path(name).parent / base)
    entries = {} if base is None else _read_entries(base, chain, described.where("extends"))
    if presets:
        inherited = entries["presets"].value if "presets" in entries else ()
        assert isinstance(inherited, tuple)
        values["presets"] = (*inherited, *presets)
    return entries | {key: Entry(value, described.where(key), described.source(key)) for key, value in values.items()}


def _build(name: str, entries: dict[str, Entry], file: str) -> Profile:
    entry_values: FactDict = {key: entry.value for key, entry in entries.items()}
    description, presets = str(entry_values.pop("description", "")), entry_values.pop("presets", ())
    values: dict[str, FactDict] = {table: {} for table in TABLES}
    for key, value in entry_values.items():
        part, _, word = key.partition(".")
        field_name, read = TABLES[part][word]
        values[part][field_name] = _read_value(read, value, entries[key].where, key)
    as_trained = set()
    for table, key in (("software", "gradient_dtype"), ("optimizer", "moment_dtype")):
        if values[table].get(key) == AS_TRAINED:
            as_trained.add(key)
            del values[table][key]
    try:
        optimizer, overhead = Optimizer(**values["optimizer"]), Overhead(**values["memory"])
        framework = Framework(name, optimizer=optimizer, overhead=overhead, **values["software"])
        defaults = Defaults(**values["defaults"])
    except ValueError as error:
        raise CatalogError(file, "", str(error)) from None
    sources = {key: entry.source for key, entry in entries.items() if key != "description"}
    return Profile(framework, defaults, description, presets, frozenset(as_trained), sources, values["supports"])


def _read_presets(described: Description, tables: object) -> tuple[Preset, ...]:
    lines = [
        number for number, line in enumerate(described.text.splitlines(), start=1) if line.strip() == "[[presets]]"
    ]
    if not isinstance(tables, list) or not all(isinstance(table, Mapping) for table in tables):
        raise described.error("presets", "is not a list of [[presets]] tables")
    if len(lines) != len(tables):
        lines = [0] * len(tables)
    return tuple(_read_preset(table, f"{described.file}:{line}") for table, line in zip(tables, lines, strict=True))


def _read_preset(table: Facts, where: str) -> Preset:
    conditions, settings = FactDict(), FactDict()
    for key, value in table.items():
        if key == "set" and isinstance(value, Mapping):
            continue
        if key not in CONDITIONS:
            raise CatalogError(where, f"presets.{key}", f"unknown key{nearest(key, [*CONDITIONS, 'set'])}")
        conditions[key] = _read_value(CONDITIONS[key][1], value, where, f"presets.{key}")
    for key, value in table.get("set", {}).items():
        if key not in SETTINGS:
            raise CatalogError(where, f"presets.set.{key}", f"unknown key{nearest(key, SETTINGS)}")
        name, read = SETTINGS[key]
        settings[name] = _read_value(read, value, where, f"presets.set.{key}")
    if not settings:
        raise CatalogError(where, "presets", "has no settings; write them as set = { dropout = true }")
    return Preset(settings, **conditions)


def _read_value(read: Read, value: object, where: str, key: str) -> object:
    try:
        return read(value)
    except (ValueError, TypeError) as error:
        raise CatalogError(where, key, error.problem if isinstance(error, TableError) else str(error)) from None
