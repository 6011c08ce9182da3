"""The weights of layers and of the ends of a model, from the lists of ``data/weights.txt``, and the linear layers among
them that LoRA can adapt.
"""

from functools import cache, lru_cache
from operator import attrgetter
from typing import NamedTuple

from stepcast.ir.architecture import Architecture, Split, Weight, WeightPart
from stepcast.ir.layers.lists import Amount, Conditions, evaluate, read_amount, read_lines
from stepcast.ir.types import replace

FILE = "weights.txt"
INPUTS_SPLIT = {"columns": False, "rows": True}


class WeightLine(NamedTuple):
    """A line of a list: sizes and conditions are worked out for each model."""

    weight: Weight
    sizes: tuple[Amount, ...]
    ways: Amount
    bias: str
    conditions: Conditions


@cache
def _read_list(name: str) -> list[WeightLine]:
    return [_read_line(text, conditions) for text, conditions in read_lines(FILE, name)]


def _read_line(text: str, conditions: Conditions) -> WeightLine:
    name, _, rest = text.partition(": ")
    part, *words = rest.split()
    options = dict(word.split("=") for word in words if "=" in word)
    assert options.keys() <= {"split", "ways", "bias", "lora", "pair"}, text
    plain = [word for word in words if "=" not in word]
    sides = [INPUTS_SPLIT[word] for word in plain if word in INPUTS_SPLIT]
    sizes = [read_amount(word) for word in plain if word not in (*INPUTS_SPLIT, "per-channel")]
    lora = tuple(options.get("lora", "").replace("_", " ").split(",")) if "lora" in options else ()
    weight = Weight(
        name,
        WeightPart(part),
        (),
        Split(options.get("split", "none")),
        inputs_split=sides[0] if sides else None,
        per_channel="per-channel" in plain,
        lora=lora,
        pair=options.get("pair", options.get("lora", "")).replace("_", " "),
    )
    return WeightLine(weight, tuple(sizes), read_amount(options.get("ways", "0")), options.get("bias", ""), conditions)


@lru_cache(maxsize=4096)
def list_weights(model: Architecture, name: str) -> tuple[Weight, ...]:
    """Return the weights of the list *name* that *model* has."""

    def find(word: str) -> object:
        return attrgetter(word)(model)

    def holds(condition: str) -> bool:
        word, equals, value = condition.partition("=")
        return find(word) == value if equals else bool(find(word))

    weights: list[Weight] = []
    for weight, sizes, ways, bias, conditions in _read_list(name):
        if all(holds(word) is wanted for word, wanted in conditions):
            shape = tuple(int(evaluate(size, find)) for size in sizes)
            weights.append(replace(weight, shape=shape, most_ways=int(evaluate(ways, find))))
            if bias and find(bias):
                split = Split.NONE if weight.inputs_split else weight.split
                weights.append(Weight(f"{weight.name.removesuffix('weight')}bias", weight.part, shape[:1], split))
    return tuple(weights)


class AdaptedLinear(NamedTuple):
    """A linear layer that LoRA can adapt; those with one *pair* share their input, and fused one pair of matrices.

    Tensor-parallel ranks split its outputs, its inputs (*by_rows*) or neither. *experts* of them exist, if any.
    """

    name: str
    pair: str
    inputs: int
    outputs: int
    by_rows: bool
    split: bool
    experts: int


@lru_cache(maxsize=4096)
def adapted_linears(model: Architecture, name: str) -> tuple[AdaptedLinear, ...]:
    """Return the linear layers in the list *name* that LoRA can adapt."""
    linears: dict[tuple[str, str], AdaptedLinear] = {}
    for weight in list_weights(model, name):
        experts = weight.shape[0] if weight.part is WeightPart.EXPERTS else 0
        for key in ((layer, weight.pair) for layer in weight.lora):
            outputs = weight.shape[-2] // len(weight.lora) + (linears[key].outputs if key in linears else 0)
            split = bool(weight.inputs_split), weight.split is not Split.NONE
            linears[key] = AdaptedLinear(*key, weight.shape[-1], outputs, *split, experts)
    return tuple(linears.values())


def norm_readers(model: Architecture, name: str) -> tuple[str, ...]:
    """Return the linear layers in the list *name* that read the stream as a norm leaves it."""
    linears = adapted_linears(model, name)
    readers = (linear.name for linear in linears if linear.inputs == model.hidden and not linear.by_rows)
    return tuple(dict.fromkeys(readers))
