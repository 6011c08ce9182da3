"""The keys of a Hugging Face config, checked as they are read."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from stepcast.inputs.source import FormatError, read_words
from stepcast.ir.model_parts import Activation

ACTIVATIONS = {word: Activation(ours) for word, ours in read_words("configs")["activations"].items()}

KIND_WORDS: dict[type, str] = {bool: "true or false", str: "text", list: "a list", dict: "a JSON object"}
Kind = TypeVar("Kind")
LAYER_TYPES = {"sliding_attention": True, "chunked_attention": True, "full_attention": False}


def shown(value: object) -> str:
    """Return a value for a message: on one line and short."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a JSON object"
    if type(value) is int and value.bit_length() > 128:
        return "a number of more than 38 digits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class ConfigTable:
    """A config's keys, checked as they are read; of several names the first that is there and not null counts."""

    def __init__(self, table: Mapping[str, object], kind: str) -> None:
        self.table = table
        self.kind = kind

    def find(self, *names: str) -> tuple[str, object]:
        """Return name and value of the first key present, or the first name and None."""
        return next(((name, self.table[name]) for name in names if self.table.get(name) is not None), (names[0], None))

    def has(self, *names: str) -> bool:
        return self.find(*names)[1] is not None

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number; a missing key is an error unless there is a *default*."""
        name, value = self.find(*names)
        if value is None:
            if default is None:
                raise FormatError(f"the {self.kind} config lacks {' or '.join(names)}")
            return default
        if isinstance(value, float) and math.isfinite(value) and value.is_integer():
            value = int(value)
        if type(value) is not int or not least <= value < 2**62:
            raise FormatError(f"{name} must be a whole number of at least {least}, not {shown(value)}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.table.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e18:
            raise FormatError(f"{name} must be a number, zero or more, not {shown(value)}")
        return float(value)

    def _value(self, names: Sequence[str], kind: type[Kind], default: Kind) -> Kind:
        name, value = self.find(*names)
        if value is not None and not isinstance(value, kind):
            raise FormatError(f"{name} must be {KIND_WORDS[kind]}, not {shown(value)}")
        return default if value is None else value

    def flag(self, *names: str, default: bool) -> bool:
        return self._value(names, bool, default)

    def word(self, *names: str, default: str) -> str:
        return self._value(names, str, default)

    def items(self, name: str) -> list[object]:
        return self._value([name], list, [])

    def inner(self, name: str) -> "ConfigTable":
        """Return a nested table; an empty one if it is not there."""
        return ConfigTable(self._value([name], dict, {}), self.kind)

    def activation(self, *names: str, default: str) -> Activation:
        word = self.word(*names, default=default)
        if word not in ACTIVATIONS:
            raise FormatError(f"unknown activation {shown(word)}; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[word]

    def share(self, name: str, default: float) -> float:
        """Return a share between 0 and 1; all of it where the config states another number."""
        share = self.number(name, default)
        return share if 0 < share < 1 else 1.0

    def window(
        self, name: str, layers: int, pattern: Sequence[bool], default: int | None = None
    ) -> dict[str, object] | None:
        """Return the fields of local attention, where a size is given; layer_types outranks *pattern*."""
        if default is None and not self.has(name):
            return None
        size = self.count(name, default=default)
        if types := self.layer_types(LAYER_TYPES, layers):
            pattern = [LAYER_TYPES[kind] for kind in types]
        if not any(pattern):
            return None
        return {"size": size, "pattern": shortest_period(pattern), "chunked": name == "attention_chunk_size"}

    def layer_types(self, known: Iterable[str], layers: int | None = None) -> list[str]:
        """Return the kind of each layer, empty where the config does not list them; each must be *known*."""
        types = self.items("layer_types")
        if types and layers is not None and len(types) != layers:
            raise FormatError(f"layer_types has {len(types)} entries for {layers} layers")
        unknown = [kind for kind in types if not isinstance(kind, str) or kind not in known]
        if unknown:
            raise FormatError(f"unknown layer type {shown(unknown[0])}; known: {', '.join(known)}")
        return [str(kind) for kind in types]

    def layer_numbers(self, name: str, layers: int) -> set[int]:
        """Return the layers that a list names."""
        numbers = set()
        for layer in self.items(name):
            if type(layer) is not int or not 0 <= layer < layers:
                raise FormatError(f"{name} names {shown(layer)}; there are {layers} layers")
            numbers.add(layer)
        return numbers


def shortest_period(pattern: Sequence[bool]) -> tuple[bool, ...]:
    """Return the shortest beginning of *pattern* that, repeated, gives all of it."""
    for length in range(1, min(len(pattern), 64)):
        if all(pattern[i] == pattern[i % length] for i in range(len(pattern))):
            return tuple(pattern[:length])
    return tuple(pattern)
