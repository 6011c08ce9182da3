"""Models written as a table of plain values: the catalogue's TOML files, and what configurations are read to."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import TypeVar, get_args

from stepcast.inputs.source import prefix_errors
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Activation, Biases, Hybrid, Latent, Norm, NormKind, Position, PositionKind, QkNorm
from stepcast.ir.types import FactDict, require
from stepcast.units import nearest

NORMS = {"rms": Norm(), "layer": Norm(NormKind.LAYER), "layer+bias": Norm(NormKind.LAYER, bias=True)}
SIZES = ("layers", "hidden", "heads", "vocab", "max_seq")  # of every model
FIELDS = {field.name: field.type for field in fields(Model)} | {"positions": int}
# Parts that a word describes; biases are joined by +.
PART_WORDS = ("norm", "position", "biases", "qk_norm", "activation")
# Parts that a model may have, each a table of its own.
PARTS: Mapping[str, Callable[..., object]] = {
    name: part
    for name, kind in FIELDS.items()
    for part in get_args(kind)
    if isinstance(part, type) and is_dataclass(part)
}

Kind = TypeVar("Kind")


def model_of(name: str, table: Mapping[str, object]) -> Model:
    """Return the model that *table* describes, with what can be derived filled in.

    Fields are the Model's own; ``norm`` is rms, layer or layer+bias, ``biases`` lists the biased layers,
    ``position`` is a kind (yarn: rotary with a factor), with ``positions`` rows (max_seq unless given) where learned.
    Left out: kv_heads = heads, head_dim = hidden / heads, ffn = 4 x hidden if not gated.
    """
    with prefix_errors(f"model {name}", kinds=(TypeError, ValueError)):
        for key in sorted(set(table) - set(FIELDS)):
            raise ValueError(f"unknown key {key}{nearest(key, FIELDS, 3, 0.6) or '; known: ' + ', '.join(FIELDS)}")
        return build_model(name, table)


def build_model(name: str, table: Mapping[str, object]) -> Model:
    """Return the model of a table whose keys are known."""
    values: FactDict = {key: _convert(key, value) for key, value in table.items()}
    if isinstance(hybrid := values.get("hybrid"), Hybrid):
        values.setdefault("layers", len(hybrid.pattern))
        values.setdefault("ffn", 0)
    for key in (key for key in SIZES if key in values):
        require(type(values[key]) is int and values[key] > 0, f"{key} must be a positive whole number")
    missing = [key for key in SIZES if key not in values]
    require(not missing, f"lacks {', '.join(missing)}")
    hidden, heads = values["hidden"], values["heads"]
    rows = values.pop("positions", None) or values["max_seq"]
    if isinstance(word := values.get("position"), str):
        values["position"] = part_of("position", word, rows)
    if isinstance(latent := values.get("latent"), Latent):
        values.setdefault("head_dim", latent.nope_dim + latent.rope_dim)
    if "head_dim" not in values:
        require(
            hidden % heads == 0, f"hidden size {hidden} is not a multiple of {heads} attention heads; give head_dim"
        )
        values["head_dim"] = hidden // heads
    values.setdefault("kv_heads", heads)
    if "ffn" not in values:
        require(not values.get("gated", True), "lacks ffn")
        values["ffn"] = 4 * hidden
    return Model(**(values | {"name": name}))


def shortest_period(pattern: Sequence[Kind]) -> tuple[Kind, ...]:
    """Return the shortest beginning of *pattern* that, repeated, gives all of it."""
    lengths = range(1, min(len(pattern), 64))
    repeats = (length for length in lengths if all(pattern[i] == pattern[i % length] for i in range(len(pattern))))
    return tuple(pattern[: next(repeats, len(pattern))])


def part_words(model: Model) -> dict[str, str]:
    """Return the words of ``PART_WORDS`` for a model."""
    biases = [field.name for field in fields(Biases) if getattr(model.biases, field.name)]
    return {
        "norm": next(word for word, norm in NORMS.items() if norm == model.norm),
        "position": "yarn" if model.position.scaled else str(model.position.kind),
        "biases": "+".join(biases) or "none",
        "qk_norm": str(model.qk_norm),
        "activation": str(model.activation),
    }


def part_of(key: str, word: str, rows: int) -> object:
    """Return the part of a model that one of its ``PART_WORDS`` means; learned positions have *rows*."""
    if key == "position":
        kind = PositionKind("rotary" if word == "yarn" else word)
        return Position(kind, rows if kind is PositionKind.LEARNED else 0, scaled=word == "yarn")
    return _convert(key, [part for part in word.split("+") if part != "none"] if key == "biases" else word)


def _convert(key: str, value: object) -> object:
    """Return a value of a table as the field of the Model needs it."""
    if key in PARTS:
        if not isinstance(value, dict):
            raise ValueError(f"{key} must be a table")
        return PARTS[key](**{name: tuple(item) if isinstance(item, list) else item for name, item in value.items()})
    if key == "position" and isinstance(value, dict):
        return Position(**{**value, "kind": PositionKind(value.get("kind", "rotary"))})
    if key in ("activation", "qk_norm"):
        return Activation(str(value)) if key == "activation" else QkNorm(str(value))
    if key == "norm":
        require(value in NORMS, f"norm must be one of {', '.join(NORMS)}, not {value!r}")
        return NORMS[str(value)]
    if key == "biases":
        if not isinstance(value, list | dict):
            raise ValueError("biases must be a list")
        return Biases(**(value if isinstance(value, dict) else dict.fromkeys(value, True)))
    require(isinstance(value, int | float | bool | str), f"{key} must be a single value")
    return value
