"""The catalogue of frameworks: profiles in data/frameworks/*.toml, and users' own in the same format.

A profile may extend another; its own values win, and its presets come after those of the other. ``[sources]``
names where its values are documented, as in the catalogue of clusters.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from typing import get_type_hints

from stepcast.frameworks.profile import Defaults, Preset, Profile, StageSpread
from stepcast.hardware.catalog import CatalogError, Description, flat, nearest
from stepcast.inputs.source import FormatError, Source
from stepcast.ir.dtype import DType
from stepcast.ir.facts import FactDict, Facts
from stepcast.ir.framework import Dispatcher, Framework, Optimizer, OptimizerKind, Overhead
from stepcast.ir.limits import BASES, DESCRIPTION
from stepcast.ir.strategy import (
    ContextKind,
    RecomputeKind,
    RecomputeModule,
    ScheduleKind,
    Sharding,
    overlap_of,
    overlap_words,
    recompute_of,
)
from stepcast.units import Dimension, parse_quantity

DATA = Path(__file__).parents[1] / "data"
DEFAULT = "megatron-core"
AS_TRAINED = "as trained"
# Bytes of one parameter, or shares of what is allocated: nothing comes near.
MOST_PER_PARAMETER = 1000

Read = Callable[[object], object]
Keys = Mapping[str, tuple[str, Read]]
"""Key of a profile -> the field it sets and how its value is read."""
PLAIN = {bool: "true or false", int: "a whole number", str: "text"}


def _kind(*kinds: type) -> Read:
    """Return a reader of plain values, or of the values of enumerations, which also read their former names."""

    def read(value: object) -> object:
        if kinds[0] in PLAIN:
            if type(value) is not kinds[0]:
                raise ValueError(f"{value!r} is not {PLAIN[kinds[0]]}")
            return value
        for kind in kinds:
            with suppress(ValueError, TypeError):
                return kind(value)
        known = ", ".join(str(word) for kind in kinds for word in getattr(kind, "__members__", {}).values())
        raise ValueError(f"{value!r} is not known; expected one of {known}")

    return read


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{value!r} is not a number")
    if not value <= MOST_PER_PARAMETER:
        raise ValueError(f"{value!r} is not at most {MOST_PER_PARAMETER}")
    return float(value)


def _count(value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{value!r} is not a whole number above zero")
    return value


def _size(value: object) -> float:
    return parse_quantity(value, Dimension.SIZE)


def _format(value: object) -> object:
    return AS_TRAINED if value == AS_TRAINED else _kind(DType)(value)


def _words(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise ValueError(f"{value!r} is not a list of words")
    return tuple(value)


def _some_of(*kinds: type) -> Read:
    return lambda value: tuple(str(_kind(*kinds)(word)) for word in _words(value)) if value else ()


def _fields_of(kind: type, special: Mapping[str, tuple[str, Read]], left_out: Collection[str] = ()) -> Keys:
    """Return a key for each field of *kind*, read by the type of the field, except the *special* ones."""
    kinds = {name: hint for name, hint in get_type_hints(kind).items() if name not in left_out}
    usual = {name: (name, _number if hint is float else _kind(hint)) for name, hint in kinds.items()}
    return {key: (name, read) for name, (key, read) in {**usual, **special}.items()}


SOFTWARE = _fields_of(
    Framework,
    {
        "gradient_dtype": ("gradients", _format),
        "bucket_bytes": ("bucket", lambda value: None if value == "by ranks" else round(_size(value))),
    },
    ("name", "optimizer", "overhead"),
)
OPTIMIZER = _fields_of(Optimizer, {"kind": ("name", _kind(OptimizerKind)), "moment_dtype": ("moment_format", _format)})
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
        "recompute": ("recompute", lambda value: recompute_of(str(_kind(str)(value)))),
        "overlap": ("overlap", lambda value: overlap_of(_words(value))),
        **{name: (name, _count) for name in ("seq", "chunks")},
    },
)
# Settings of presets: decisions of the software, and choices that recipes make.
SETTINGS: Keys = {
    **{key: entry for key, entry in SOFTWARE.items() if key not in ("gradients", "peak")},
    **{key: CHOICES[key] for key in ("sharding", "recompute", "overlap", "chunks")},
    "overlap_experts": ("overlap_experts", _kind(bool)),
    "further_tokens": ("further_tokens", _count),
    "stage_layers": ("stage_layers", _kind(StageSpread)),
}
CONDITIONS: Mapping[str, Read] = {
    "model": _words,
    "gpu": _words,
    "precision": lambda value: tuple(_kind(DType)(word) for word in _words(value)),
    "pp": lambda value: tuple(_count(each) for each in value) if isinstance(value, list) else (_count(value),),
    "spread": _kind(bool),
    "pairable": _kind(bool),
}
# Features of the software; a run that uses others of the kind gets a warning.
SUPPORTS: Keys = {
    "schedules": ("schedules", _some_of(ScheduleKind)),
    "shardings": ("shardings", _some_of(Sharding)),
    "pipeline_shardings": ("pipeline_shardings", _some_of(Sharding)),
    "dispatchers": ("dispatchers", _some_of(Dispatcher)),
    "recompute": ("recompute", _some_of(RecomputeKind, RecomputeModule)),
    "overlaps": ("overlaps", lambda value: overlap_words(overlap_of(_words(value))) if value else ()),
    "contexts": ("contexts", _some_of(ContextKind)),
}
TABLES: Mapping[str, Keys] = {
    "software": SOFTWARE,
    "optimizer": OPTIMIZER,
    "memory": MEMORY,
    "defaults": CHOICES,
    "supports": SUPPORTS,
}
KEYS = ("description", "extends", *(f"{table}.{key}" for table, entries in TABLES.items() for key in entries))


def framework_names() -> tuple[str, ...]:
    folder = DATA / "frameworks"
    return tuple(sorted(item.name.removesuffix(".toml") for item in folder.iterdir() if item.name.endswith(".toml")))


def load_profile(name_or_path: str) -> Profile:
    """Load a framework of the catalogue, by name in any letter case, or from a TOML file."""
    return _load(name_or_path, (), "")


def load_framework(name_or_path: str = DEFAULT) -> Framework:
    """Load a framework without the defaults of its profile."""
    return load_profile(name_or_path).framework


def profile_of(framework: Framework) -> Profile:
    """Return the profile whose defaults go with a Framework value.

    A value that ``load_framework`` returned has its profile; presets do not touch fields that were changed
    since. A value of another name has the general defaults.
    """
    if framework.name not in framework_names():
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
    as_trained = profile.as_trained - fixed
    return replace(profile, framework=framework, presets=presets, as_trained=as_trained)


def looks_like_framework(text: str) -> bool:
    """Return True if the start of a TOML file has a table that only profiles have."""
    lines = [line.strip() for line in text.splitlines()]
    return any(line.startswith("extends") and "=" in line for line in lines) or any(
        line in ("[software]", "[optimizer]", "[defaults]", "[supports]", "[[presets]]") for line in lines
    )


def _load(name: str, chain: tuple[str, ...], named_at: str) -> Profile:
    if not name.endswith(".toml"):
        word = name.strip().lower().replace("_", "-").replace(" ", "-")
        word = OTHER_NAMES.get(word, word)
        if word not in framework_names():
            known = list(framework_names())
            hint = nearest(word, known) or f"; known are {', '.join(known)}, or a file NAME.toml"
            raise CatalogError(named_at, "", f"unknown framework {name!r}{hint}")
        return _load_catalogued(word)
    path = Path(name)
    if str(path.resolve()) in chain:
        raise CatalogError(named_at, "extends", f"{path.name} extends itself")
    if len(chain) == BASES.most:
        raise CatalogError(named_at, "extends", BASES.message)
    try:
        text = Source(path).text(DESCRIPTION)
    except FormatError as error:
        raise CatalogError(name, "", error.message) from None
    return _read_profile(path.stem, text, name, (*chain, str(path.resolve())), path.parent)


# Other names of software, and tools that run another's training loop.
OTHER_NAMES = {
    **dict.fromkeys(("megatron", "mcore", "megatroncore"), "megatron-core"),
    **dict.fromkeys(("bridge", "megatronbridge"), "megatron-bridge"),
    **dict.fromkeys(("deepspeed", "ds", "zero", "hf-deepspeed"), "deepspeed-transformers"),
    **dict.fromkeys(("hf", "huggingface", "hugging-face", "hf-trainer", "trl"), "transformers"),
    **dict.fromkeys(("torch", "ddp", "accelerate"), "pytorch"),
    **dict.fromkeys(("fsdp", "fsdp2", "torch-fsdp"), "pytorch-fsdp"),
    **dict.fromkeys(("titan", "torch-titan"), "torchtitan"),
    **dict.fromkeys(("nemo2", "nemo-2", "nemo-framework"), "nemo"),
    **dict.fromkeys(("olmo", "olmocore"), "olmo-core"),
    **dict.fromkeys(("mosaic", "composer", "llmfoundry"), "llm-foundry"),
}


@lru_cache(maxsize=64)
def _load_catalogued(name: str) -> Profile:
    file = DATA / "frameworks" / f"{name}.toml"
    return _read_profile(name, file.read_text(encoding="utf-8"), f"{name}.toml", (), None)


def _read_profile(name: str, text: str, file: str, chain: tuple[str, ...], folder: Path | None) -> Profile:
    described = Description.parse(text, file)
    presets = described.table.pop("presets", [])
    entries = flat(described.table)
    described.check_keys(entries, KEYS)
    described.check_sources((*KEYS, "presets"), "profile")
    base = _load_base(described, entries.pop("extends", None), chain, folder)
    description = entries.pop("description", "")
    values: dict[str, FactDict] = {table: {} for table in TABLES}
    for key, value in entries.items():
        part, _, own = key.partition(".")
        set_field, read = TABLES[part][own]
        values[part][set_field] = _read_value(read, value, described.where(key), key)
    keys = [*entries, *(["presets"] if presets else [])]
    sources = {key: described.source(key) for key in keys}
    try:
        return _build(base, name, str(description), values, sources, _read_presets(described, presets))
    except CatalogError:
        raise
    except ValueError as error:
        raise CatalogError(file, "", str(error)) from None


def _load_base(described: Description, extends: object, chain: tuple[str, ...], folder: Path | None) -> Profile:
    if extends is None:
        return Profile(Framework(), Defaults())
    if not isinstance(extends, str):
        raise described.error("extends", f"{extends!r} is not the name of a framework")
    if extends.endswith(".toml"):  # a path is relative to the file that names it
        extends = str((folder or Path()) / extends)
    return _load(extends, chain, described.where("extends"))


def _build(
    base: Profile,
    name: str,
    description: str,
    values: Mapping[str, Facts],
    sources: Mapping[str, str],
    presets: tuple[Preset, ...],
) -> Profile:
    software, formats, as_trained = dict(values["software"]), dict(values["optimizer"]), set(base.as_trained)
    for table, key in ((software, "gradient_dtype"), (formats, "moment_dtype")):
        if key in table:
            as_trained.discard(key)
            if table[key] == AS_TRAINED:
                as_trained.add(key)
                del table[key]
    old = base.framework
    optimizer: Optimizer = replace(old.optimizer, **formats)
    overhead: Overhead = replace(old.overhead, **values["memory"])
    return Profile(
        framework=replace(old, name=name, optimizer=optimizer, overhead=overhead, **software),
        defaults=replace(base.defaults, **values["defaults"]),
        description=description or base.description,
        presets=(*base.presets, *presets),
        as_trained=frozenset(as_trained),
        sources={**base.sources, **sources},
        supports={**base.supports, **values["supports"]},
    )


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
        conditions[key] = _read_value(CONDITIONS[key], value, where, f"presets.{key}")
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
        raise CatalogError(where, key, str(error)) from None
