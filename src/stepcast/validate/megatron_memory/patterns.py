"""Megatron-LM's ways to write which layers have experts, and which layers a stage holds."""

import re

TERM = re.compile(r"\[([01](?:,[01])*)\](?:\*(\d+))?")
REPEATED = re.compile(r"\(([^()]*)\)\*(\d+)")
COUNTED = re.compile(r"([a-zA-Z])\*(\d+)")


def layer_pattern(text: str) -> tuple[bool, ...]:
    """``([0]*3+[1]*11)``: three dense layers, then eleven of experts."""
    plain = text.replace(" ", "").strip("()")
    found: list[bool] = []
    for part in plain.split("+"):
        term = TERM.fullmatch(part)
        if term is None:
            raise ValueError(f"moe-layer-freq {text!r} is not known")
        found += [digit == "1" for digit in term[1].split(",")] * int(term[2] or 1)
    return tuple(found)


def stage_layers_of(text: str, pp: int) -> tuple[int, ...]:
    """``Et*3|(tt|)*6L``: layers of every stage and chunk in model order; E, m and L are embedding, module
    for a further token and loss.
    """
    plain = text.replace("\\", "").replace(",", "")
    while found := REPEATED.search(plain):
        plain = plain[: found.start()] + found[1] * int(found[2]) + plain[found.end() :]
    plain = COUNTED.sub(lambda one: one[1] * int(one[2]), plain)
    if set(plain) - set("EtmL|"):
        raise ValueError(f"pipeline layout {text!r} is not known")
    layers = tuple(piece.count("t") for piece in plain.split("|"))
    if len(layers) % pp:
        raise ValueError(f"pipeline layout {text!r} does not make {pp} stages")
    return layers
