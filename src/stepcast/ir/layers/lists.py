"""Lists of ``data/*.txt``: lines under headings in brackets, with sizes made of names and with conditions.

Sizes are numbers and names, multiplied and added up (``2*inner``). All conditions after a question mark must be true,
those with an exclamation mark false; in a line of their own they hold for the lines below, up to the next such line.

Those of ``data/weights.txt`` are the weights of layers and of the ends of a model, some of them linear layers that LoRA
can adapt.
"""

from collections.abc import Callable
from functools import cache, lru_cache
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

from stepcast.ir.architecture import Architecture, Split, Weight, WeightPart
from stepcast.ir.types import DType, replace

FOLDER = Path(__file__).parents[2] / "data"
FORMATS = {str(dtype): dtype for dtype in DType}
Find = Callable[[str], object]
Amount = float | str | tuple[tuple[float | str, ...], ...]
"""A number, a name, or a sum of products of these."""
Conditions = tuple[tuple[str, bool], ...]


@cache
def _split_lists(file: str) -> dict[str, str]:
    lists = f"\n{(FOLDER / file).read_text(encoding='utf-8')}".split("\n[")[1:]
    return {name: text for name, _, text in (part.partition("]") for part in lists)}


def read_lines(file: str, name: str) -> list[tuple[str, Conditions]]:
    """Return the lines of a list with the conditions of each."""
    lines: list[tuple[str, Conditions]] = []
    shared: list[str] = []
    for line in _split_lists(file)[name].splitlines():
        text, mark, after = (part.strip() for part in line.partition("#")[0].partition("?"))
        if text:
            words = (*shared, *after.split())
            lines.append((text, tuple((word.removeprefix("!"), not word.startswith("!")) for word in words)))
        elif mark:
            shared = after.split()
    return lines


def read_amount(text: str) -> Amount:
    terms = tuple(tuple(map(_read_factor, term.split("*"))) for term in text.split("+"))
    return terms if len(terms) > 1 or len(terms[0]) > 1 else terms[0][0]


def _read_factor(word: str) -> float | str:
    """Return a number, or a name; that of a format is the bytes of its elements."""
    if word in FORMATS:
        return FORMATS[word].bytes
    return word if word[0].isalpha() else float(word) if "." in word else int(word)


def evaluate(amount: Amount, find: Find) -> float:
    """Return the number that *amount* is where *find* returns the values of names."""
    if isinstance(amount, tuple):
        return sum([prod([evaluate(factor, find) for factor in term]) for term in amount])
    if not isinstance(amount, str):
        return amount
    value = find(amount)
    assert isinstance(value, int | float | DType), f"{amount} is no number"
    return value.bytes if isinstance(value, DType) else value


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
    return [_read_line(text, conditions) for text, conditions in read_lines("weights.txt", name)]


def _read_line(text: str, conditions: Conditions) -> WeightLine:
    name, _, rest = text.partition(": ")
    part, *words = rest.split()
    options = dict(word.split("=") for word in words if "=" in word)
    assert options.keys() <= {"split", "ways", "bias", "lora", "pair"}, text
    plain = [word for word in words if "=" not in word]
    sides = [INPUTS_SPLIT[word] for word in plain if word in INPUTS_SPLIT]
    sizes = [read_amount(word) for word in plain if word not in (*INPUTS_SPLIT, "per-channel")]
    lora = tuple(options.get("lora", "").replace("_", " ").split(",")) if "lora" in options else ()
    split, pair = Split(options.get("split", "none")), options.get("pair", options.get("lora", "")).replace("_", " ")
    inputs_split, per_channel = sides[0] if sides else None, "per-channel" in plain
    weight = Weight(name, WeightPart(part), (), split, 0, inputs_split, per_channel, lora, pair)
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
