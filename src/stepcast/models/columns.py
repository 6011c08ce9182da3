"""A model from a row of a table of measurements: its name where the catalogue knows it, else its sizes."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from stepcast.ir.model import Model
from stepcast.ir.model_parts import Experts, Latent, PositionKind, Window
from stepcast.models.catalog import UnknownModelError, catalogue_model, load_model
from stepcast.models.table import model_of

# Column -> field of the Model. ``seq`` and the ``moe_`` columns are treated by hand.
SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab")
EXPERT_SIZES = {
    "moe_experts": "count",
    "moe_topk": "top_k",
    "moe_ffn": "ffn",
    "moe_shared_ffn": "shared_ffn",
    "moe_dense_layers": "first_dense",
    "moe_groups": "groups",
    "moe_top_groups": "top_groups",
}
# Column -> field of multi-head latent attention.
LATENT_SIZES = {
    "mla_kv_rank": "kv_rank",
    "mla_nope_dim": "nope_dim",
    "mla_rope_dim": "rope_dim",
    "mla_value_dim": "value_dim",
    "mla_query_rank": "query_rank",
}
ALL_SIZES = (*SIZES, "seq", "window", *EXPERT_SIZES, *LATENT_SIZES)
# Megatron's GPT-2 vocabulary of 50,257 padded for eight-way tensor parallelism.
PADDED_GPT_VOCAB = 51200


def model_of_columns(name: str, columns: Mapping[str, object]) -> Model:
    """The model of a row with the columns of ``ALL_SIZES`` and params_b; blank ones say nothing.

    A known name gives the architecture and the columns correct its sizes. An unknown name needs hidden;
    an MLP four times as wide (or of no given width) makes it a GPT, else it is a Llama. Missing layers
    follow from params_b, which also tells tied from untied weights; missing heads are taken about 128 wide.
    """
    sizes = {key: _whole(key, columns[key]) for key in ALL_SIZES if not _blank(columns, key)}
    try:
        model = load_model(name)
    except UnknownModelError:
        model = _from_sizes(name, sizes, columns)
    model = _corrected(model, sizes)
    seq = sizes.get("seq", model.max_seq)
    if model.position.kind is PositionKind.LEARNED or seq > model.max_seq:
        model = model.with_max_seq(seq)
    return replace(model, name=name)


def sizes_of(text: str, where: str) -> dict[str, str]:
    """The columns that ``layers=16,vocab=32000`` gives."""
    known, found = (*ALL_SIZES, "params_b"), {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if key not in known or not (equals and value):
            raise ValueError(
                f"model {where}: {part.strip()!r} is no size; expected {', '.join(known)}, as layers=16"
            )
        try:
            float(value)
        except ValueError:
            raise ValueError(f"model {where}: {key} {value!r} is not a number") from None
        found[key] = value
    return found


def words_of(name: str, columns: Mapping[str, object]) -> str:
    """The name with the sizes of *columns*, as ``load_model`` takes it."""
    said = [key for key in (*ALL_SIZES, "params_b") if not _blank(columns, key)]
    return f"{name}:{','.join(f'{key}={float(str(columns[key])):.15g}' for key in said)}"


def _blank(columns: Mapping[str, object], key: str) -> bool:
    value = columns.get(key)
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _whole(key: str, value: object) -> int:
    try:
        number = float(str(value))
    except ValueError:
        raise ValueError(f"column {key}: {value!r} is not a number") from None
    if not number.is_integer() or number < 0:
        raise ValueError(f"column {key}: {value!r} is not a whole number")
    return int(number)


def _corrected(model: Model, sizes: Mapping[str, int]) -> Model:
    """*model* with the row's own sizes."""
    changes: dict[str, Any] = {key: sizes[key] for key in SIZES if key in sizes and key != "layers"}
    if model.latent is not None:
        changes.pop("kv_heads", None)
    hidden, heads = changes.get("hidden", model.hidden), changes.get("heads", model.heads)
    if (hidden, heads) != (model.hidden, model.heads):
        changes.setdefault("kv_heads", heads if model.kv_heads == model.heads else model.kv_heads)
        if model.head_dim * model.heads == model.hidden:
            changes.setdefault("head_dim", hidden // heads)
    experts = model.experts
    routed = {field: sizes[key] for key, field in EXPERT_SIZES.items() if key in sizes}
    if experts is not None and routed:
        experts = replace(experts, **routed)  # type: ignore[arg-type]
    elif routed.get("count"):
        experts = Experts(**routed)  # type: ignore[arg-type]
    if sizes.get("window"):
        changes["window"] = Window(sizes["window"], model.window.pattern if model.window else (True,))
    latent = {field: sizes[key] for key, field in LATENT_SIZES.items() if key in sizes}
    if latent:
        changes["latent"] = replace(model.latent, **latent) if model.latent else Latent(**latent)
        changes["head_dim"] = changes["latent"].nope_dim + changes["latent"].rope_dim
        changes["kv_heads"] = heads
    model = replace(model, experts=experts, **changes)
    return model.with_layers(sizes["layers"]) if "layers" in sizes else model


def _from_sizes(name: str, sizes: Mapping[str, int], columns: Mapping[str, object]) -> Model:
    if "hidden" not in sizes:
        raise UnknownModelError(f"model {name!r} is not in the catalogue, and the row gives no hidden size")
    hidden = sizes["hidden"]
    heads = sizes.get("heads") or _heads(hidden)
    seq = sizes.get("seq", 2048)
    if re.match(r"bloom", name, re.IGNORECASE):
        like = replace(catalogue_model("bloom-176b"), ffn=4 * hidden)
    elif sizes.get("ffn", 4 * hidden) == 4 * hidden:
        like = replace(catalogue_model("megatron-22b"), ffn=4 * hidden, vocab=PADDED_GPT_VOCAB)
    else:
        like = model_of(
            name,
            {
                "layers": 1,
                "hidden": hidden,
                "heads": heads,
                "ffn": sizes["ffn"],
                "vocab": 32000,
                "max_seq": seq,
            },
        )
    one = _corrected(replace(like, layers=1), {"hidden": hidden, "heads": heads, **sizes, "layers": 1})
    published = None if _blank(columns, "params_b") else float(str(columns["params_b"])) * 1e9
    if "layers" in sizes:
        model = one.with_layers(sizes["layers"])
        return _tied_or_not(model, published) if published else model
    if published is None:
        raise UnknownModelError(f"model {name!r}: the row gives neither layers nor params_b")
    layer = one.parameters_of(range(1))
    return one.with_layers(max(round((published - one.parameters + layer) / layer), 1))


def _tied_or_not(model: Model, published: float) -> Model:
    """Whether embedding and head are one is rarely said; the published parameter count tells."""
    other = replace(model, tied=not model.tied)
    return min(model, other, key=lambda choice: abs(choice.parameters - published))


def _heads(hidden: int) -> int:
    """The number of heads that divides *hidden* and comes closest to a width of 128."""
    divisors = [heads for heads in range(1, min(hidden, 1024) + 1) if hidden % heads == 0]
    return min(divisors, key=lambda heads: abs(hidden / heads - 128))
