"""The model that sizes of a configuration are of: one of the catalogue, cut or not, or one of its own."""

import re
from collections.abc import Mapping, Sequence

from stepcast.ir.model import Model
from stepcast.models.catalog import catalogue_model, find_name, model_names
from stepcast.models.columns import LATENT_SIZES, words_of


def model_words(sizes: Mapping[str, int], names: Sequence[str], seq: int = 0) -> str:
    """What ``load_model`` takes for *sizes*, else for *names* that may be known; empty if neither tells.

    Sizes that several models have are those of the one that *names* or a sequence of *seq* tokens tell.
    """
    if not sizes.get("hidden"):
        return next(filter(None, map(_known, names)), "")
    same = [other for other in model_names() if _alike(catalogue_model(other), sizes)]
    layers = sizes.get("layers")
    whole = [other for other in same if catalogue_model(other).layers == layers]
    if whole:
        hints = [_known(name) for name in names]
        found = min(whole, key=lambda name: (name not in hints, catalogue_model(name).max_seq < seq))
        return _with_routing(found, catalogue_model(found), sizes)
    if same and layers and layers < catalogue_model(same[0]).layers:
        return _with_routing(f"{same[0]}-l{layers}", catalogue_model(same[0]), sizes)
    return words_of("configured", {**sizes, **({"seq": seq} if seq else {})})


def _with_routing(name: str, model: Model, sizes: Mapping[str, int]) -> str:
    """Return *name*, with the groups that *sizes* limit routing to where *model* has others."""
    groups = {key: sizes[key] for key in ("moe_groups", "moe_top_groups") if key in sizes}
    if model.experts is None or not groups:
        return name
    if (model.experts.groups, model.experts.top_groups) == tuple(groups.values()):
        return name
    return words_of(name, groups)


def _known(name: str) -> str:
    """The model that *name* begins with: llama3_8b of llama3_8b_pretrain_perf."""
    words = re.split(r"[_\-\s]+", name.rsplit("/", 1)[-1])
    for count in range(len(words), 0, -1):
        if found := find_name("-".join(words[:count])):
            return found
    return ""


def _alike(model: Model, sizes: Mapping[str, int]) -> bool:
    told = {
        "hidden": model.hidden,
        "heads": model.heads,
        "ffn": model.ffn or None,
        "moe_experts": model.experts.count if model.experts else None,
        "kv_heads": None if model.latent is not None else model.kv_heads,
        "moe_ffn": model.experts.ffn if model.experts else None,
        "moe_topk": model.experts.top_k if model.experts else None,
        "head_dim": None if model.latent is not None else model.head_dim,
    }
    if _differs(model, sizes):
        return False
    if (told["moe_experts"] or 0) != sizes.get("moe_experts", 0):
        return False
    names = (
        ("hidden", "heads", "kv_heads", "head_dim", "moe_ffn", "moe_topk")
        if model.experts
        else ("hidden", "heads", "kv_heads", "head_dim", "ffn")
    )
    return all(not told[name] or name not in sizes or told[name] == sizes[name] for name in names)


def _differs(model: Model, sizes: Mapping[str, int]) -> bool:
    """Return whether *sizes* give another attention: other latent ranks, or a window that *model* has not."""
    latent = {field: sizes[key] for key, field in LATENT_SIZES.items() if key in sizes}
    if latent and (model.latent is None or any(getattr(model.latent, key) != latent[key] for key in latent)):
        return True
    return "window" in sizes and (model.window is None or model.window.size != sizes["window"])
