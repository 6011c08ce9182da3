"""The keys of a Hugging Face config.json, each checked as it is read."""

import math
from collections.abc import Mapping

from stepcast.inputs.errors import FormatError
from stepcast.ir.model_parts import Activation, Window

ACTIVATIONS: dict[str, Activation] = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "swiglu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_NEW,
    "gelu_fast": Activation.GELU,
    "gelu_accurate": Activation.GELU,
    "gelu_pytorch_tanh": Activation.GELU,
    "quick_gelu": Activation.GELU,
    "relu": Activation.RELU,
    "relu2": Activation.SQUARED_RELU,
}

LAYER_TYPES = {"sliding_attention": True, "chunked_attention": True, "full_attention": False}


def shown(value: object) -> str:
    """A value as it may stand in a message: on one line and short."""
    if isinstance(value, list):
        return "a list"
    if isinstance(value, dict):
        return "a JSON object"
    if type(value) is int and value.bit_length() > 128:
        return "a number of more than 38 digits"
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


class Keys:
    """A config's table. Where several names are given, the first that is there and not null counts."""

    def __init__(self, table: Mapping[str, object], kind: str) -> None:
        self.table = table
        self.kind = kind

    def find(self, *names: str) -> tuple[str, object]:
        """Name and value of the first key present, or the first name and None."""
        for name in names:
            value = self.table.get(name)
            if value is not None:
                return name, value
        return names[0], None

    def has(self, *names: str) -> bool:
        return self.find(*names)[1] is not None

    def count(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """A whole number; a missing key is an error unless there is a *default*."""
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
        if type(value) not in (int, float) or not 0 <= value < 1e18:  # type: ignore[operator]
            raise FormatError(f"{name} must be a number, zero or more, not {shown(value)}")
        return float(value)  # type: ignore[arg-type]

    def flag(self, *names: str, default: bool) -> bool:
        name, value = self.find(*names)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise FormatError(f"{name} must be true or false, not {shown(value)}")
        return value

    def word(self, *names: str, default: str) -> str:
        name, value = self.find(*names)
        if value is None:
            return default
        if not isinstance(value, str):
            raise FormatError(f"{name} must be text, not {shown(value)}")
        return value

    def items(self, name: str) -> list[object]:
        value = self.table.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise FormatError(f"{name} must be a list, not {shown(value)}")
        return value

    def inner(self, name: str) -> "Keys":
        """A nested table; an empty one if it is not there."""
        value = self.table.get(name)
        if value is None:
            return Keys({}, self.kind)
        if not isinstance(value, dict):
            raise FormatError(f"{name} must be a JSON object, not {shown(value)}")
        return Keys(value, self.kind)

    def activation(self, *names: str, default: str) -> Activation:
        word = self.word(*names, default=default)
        if word not in ACTIVATIONS:
            raise FormatError(f"unknown activation {shown(word)}; known: {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[word]

    def window(
        self, layers: int, pattern: tuple[bool, ...] = (True,), size_key: str = "sliding_window"
    ) -> Window | None:
        """Return local attention, where *size_key* gives a size; layer_types outranks *pattern*."""
        if not self.has(size_key):
            return None
        size = self.count(size_key)
        types = self.items("layer_types")
        if types:
            if len(types) != layers:
                raise FormatError(f"layer_types has {len(types)} entries for {layers} layers")
            unknown = [kind for kind in types if not isinstance(kind, str) or kind not in LAYER_TYPES]
            if unknown:
                known = ", ".join(LAYER_TYPES)
                raise FormatError(f"unknown layer type {shown(unknown[0])}; known: {known}")
            pattern = tuple(LAYER_TYPES[str(kind)] for kind in types)
        chunked = size_key == "attention_chunk_size"
        return Window(size, shortest_period(pattern), chunked) if any(pattern) else None


def shortest_period(pattern: tuple[bool, ...]) -> tuple[bool, ...]:
    """The shortest beginning of *pattern* that, repeated, gives all of it."""
    for length in range(1, min(len(pattern), 64)):
        if all(pattern[i] == pattern[i % length] for i in range(len(pattern))):
            return pattern[:length]
    return pattern
