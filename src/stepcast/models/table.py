"""A model written as a table of plain values, as in the catalogue's TOML files -> Model."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from stepcast.ir.check import require
from stepcast.ir.model import Model
from stepcast.ir.model_parts import (
    Activation,
    Biases,
    Experts,
    Hybrid,
    Latent,
    Norm,
    NormKind,
    Position,
    PositionKind,
    QkNorm,
    Window,
)
from stepcast.ir.recurrent import Delta, Selective

NORMS = {
    "rms": Norm(),
    "layer": Norm(NormKind.LAYER),
    "layer+bias": Norm(NormKind.LAYER, bias=True),
}
SIZES = ("layers", "hidden", "heads", "vocab", "max_seq")  # no model is without
PARTS: dict[str, type[Window | Experts | Latent | Hybrid | Delta | Selective]] = {
    "window": Window,
    "experts": Experts,
    "latent": Latent,
    "hybrid": Hybrid,
    "delta": Delta,
    "selective": Selective,
}
WORDS: dict[str, type[Activation] | type[QkNorm]] = {"activation": Activation, "qk_norm": QkNorm}
FIELDS = {field.name: field.type for field in fields(Model)} | {"positions": int}
# Python's own types of the plain fields, so that a slip in a user's file is named.
PLAIN = (int, float, bool, str)


def model_of(name: str, table: Mapping[str, Any]) -> Model:
    """The model *table* describes, with what can be derived filled in.

    Fields are the Model's own; ``norm`` is rms, layer or layer+bias, ``biases`` lists the biased layers,
    ``position`` is a kind, with ``positions`` rows (as many as max_seq unless given) where learned.
    Left out: kv_heads = heads, head_dim = hidden / heads, ffn = 4 x hidden if not gated.
    """
    try:
        return _build(name, dict(table))
    except (TypeError, ValueError) as error:
        raise ValueError(f"model {name}: {error}") from None


def _build(name: str, table: dict[str, Any]) -> Model:
    for key in sorted(set(table) - set(FIELDS)):
        from difflib import get_close_matches

        near = get_close_matches(key, FIELDS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(FIELDS)}"
        require(False, f"unknown key {key}; {hint}")
    values = {key: _value(key, value) for key, value in table.items()}
    positions = values.pop("positions", None)
    if "hybrid" in values:
        values.setdefault("layers", len(values["hybrid"].pattern))
        values.setdefault("ffn", 0)
    for key in (key for key in SIZES if key in values):
        require(type(values[key]) is int and values[key] > 0, f"{key} must be a positive whole number")
    missing = [key for key in SIZES if key not in values]
    require(not missing, f"lacks {', '.join(missing)}")
    hidden, heads = values["hidden"], values["heads"]
    if "position" in values:
        kind = PositionKind(values["position"])
        rows = (positions or values["max_seq"]) if kind is PositionKind.LEARNED else 0
        values["position"] = Position(kind, rows)
    if "latent" in values:
        values.setdefault("head_dim", values["latent"].nope_dim + values["latent"].rope_dim)
    if "head_dim" not in values:
        require(hidden % heads == 0, f"hidden {hidden} is not a multiple of heads {heads}; give head_dim")
        values["head_dim"] = hidden // heads
    values.setdefault("kv_heads", heads)
    if "ffn" not in values:
        require(not values.get("gated", True), "lacks ffn")
        values["ffn"] = 4 * hidden
    return Model(**(values | {"name": name}))


def _value(key: str, value: Any) -> Any:
    """A table's value as the Model's field wants it."""
    if key in PARTS:
        require(isinstance(value, dict), f"{key} must be a table")
        return PARTS[key](**{inner: _tupled(item) for inner, item in value.items()})
    if key in WORDS:
        return WORDS[key](value)
    if key == "norm":
        require(value in NORMS, f"norm must be one of {', '.join(NORMS)}, not {value!r}")
        return NORMS[value]
    if key == "biases":
        require(isinstance(value, list), "biases must be a list")
        return Biases(**dict.fromkeys(value, True))
    require(isinstance(value, PLAIN), f"{key} must be a single value")
    return value


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
