"""Types that all packages share: values, number formats of tensors, and the facts of answers.

The decorator ``dataclass`` is that of the standard library, but its classes are structs of msgspec. The standard one
compiles five or more functions for every class when it is imported, which was a quarter of the time of ``stepcast
predict``; the methods of structs are compiled already. Classes behave the same: ``fields``, ``replace``, ``asdict``,
``pickle``, inheritance and ``inspect.signature`` work. ``InitVar``, ``order``, ``unsafe_hash`` and fields without
``init`` are not supported; what is derived from fields is a ``cached_property``. Fields of the types Size, Natural and
Quantity are checked when a value is made, before what the class itself checks.

Caches by identity have objects as keys rather than their values, which take longer to compare. Facts are one dictionary
for each answer, in the words of the JSON contract; text, pages and JSON are made of them.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Generic, NamedTuple, TypedDict, TypeVar

from stepcast.units import format_percent

Size = Annotated[int, 1]  # at least 1
Natural = Annotated[int, 0]  # at least 0
Quantity = Annotated[float, 0]  # finite, at least 0

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
    from functools import cached_property as cached_property

    def assign(instance: object, name: str, value: object) -> None:
        """Set a field of a frozen instance that is being made."""
else:
    import dataclasses

    from msgspec import Struct, structs
    from msgspec import field as struct_field

    assign, replace = structs.force_setattr, structs.replace

    HIDDEN = ("__dict__", "__weakref__", "__slots__")

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, kw_only=False):
        """Return the class as a struct that the functions of ``dataclasses`` take for a dataclass."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, slots=slots, eq=eq, kw_only=kw_only)
        # A class whose base is a struct is one itself, but knows only of the options of its base.
        is_struct = issubclass(cls, Struct)
        bases = cls.__bases__ if is_struct else (*(base for base in cls.__bases__ if base is not object), Struct)
        values = {name: value for name, value in cls.__dict__.items() if name not in HIDDEN}
        if is_struct:
            names = [name for name in cls.__struct_fields__ if name in cls.__annotations__]
            defaults = dict(zip(reversed(cls.__struct_fields__), reversed(cls.__struct_defaults__), strict=False))
            values = {name: value for name, value in values.items() if name not in names}
            values |= {name: defaults[name] for name in names if name in defaults}
        options = {"frozen": frozen, "eq": eq, "dict": not slots, "weakref": not slots}
        all_fields = dict(getattr(cls, dataclasses._FIELDS, {}))
        fields = _make_fields(cls.__annotations__, values, kw_only)
        all_fields |= fields
        values["__annotations__"] = {name: field.type for name, field in fields.items()}
        if not kw_only and (keyword_names := [name for name, field in fields.items() if field.kw_only]):
            # Structs take all of their own fields by position or none: a base has those that follow KW_ONLY.
            base_values = {name: values.pop(name) for name in keyword_names if name in values}
            base_values["__module__"] = cls.__module__
            base_values["__annotations__"] = {name: values["__annotations__"].pop(name) for name in keyword_names}
            bases = (type(Struct)(f"{cls.__name__}Options", bases, base_values, kw_only=True, **options),)
        _add_methods(values, all_fields, frozen and eq)
        _add_checks(values, fields, getattr(cls, "__post_init__", None))
        values[dataclasses._FIELDS] = all_fields
        struct = type(Struct)(cls.__name__, bases, values, kw_only=kw_only, **options)
        struct.__qualname__, struct.__slots__ = cls.__qualname__, tuple(all_fields)  # slots in the order of the fields
        return struct

    def _make_fields(annotations, values, kw_only):
        """Return the fields of a class, and leave in *values* their defaults as structs take them."""
        fields = {}
        for name, kind in annotations.items():
            if kind is dataclasses.KW_ONLY:
                kw_only = True
                continue
            default = values.pop(name, dataclasses.MISSING)
            field = default if isinstance(default, dataclasses.Field) else dataclasses.field(default=default)
            field.name, field.type, field._field_type = name, kind, dataclasses._FIELD
            field.kw_only = kw_only or field.kw_only is True
            fields[name] = field
            if field.default_factory is not dataclasses.MISSING:
                values[name] = struct_field(default_factory=field.default_factory)
            elif field.default is not dataclasses.MISSING:
                values[name] = field.default
        return fields

    def _add_methods(methods, fields, is_hashed):
        """Add the methods in which some fields do not count."""
        compared_names = [name for name, field in fields.items() if field.compare]
        hashed_names = [name for name in compared_names if fields[name].hash is not False]
        shown_names = [name for name, field in fields.items() if field.repr]
        if len(compared_names) < len(fields):
            compared_values = _values_of(compared_names)
            methods["__eq__"] = lambda self, other: (
                compared_values(self) == compared_values(other) if other.__class__ is self.__class__ else NotImplemented
            )
        if is_hashed and len(hashed_names) < len(fields) and "__hash__" not in methods:
            hashed_values = _values_of(hashed_names)
            methods["__hash__"] = lambda self: hash(hashed_values(self))
        if len(shown_names) < len(fields) and "__repr__" not in methods:
            methods["__repr__"] = lambda self: (
                f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown_names)})"
            )

    def _add_checks(values, fields, post_init):
        """Check the numbers among *fields* before *post_init*."""
        counts = [(name, field.type.__metadata__[0]) for name, field in fields.items() if field.type in (Size, Natural)]
        amounts = [name for name, field in fields.items() if field.type == Quantity]

        def check(self):
            for name, least in counts:
                value = getattr(self, name)
                if type(value) is not int or value < least:
                    require_counts(self, least, name)
            for name in amounts:
                if not 0 <= getattr(self, name) < math.inf:
                    require_amounts(self, name)
            if post_init is not None:
                post_init(self)

        if counts or amounts:
            values["__post_init__"] = check

    def _values_of(names):
        """Return the function that gives the values of an instance as a tuple."""
        if len(names) > 1:
            return attrgetter(*names)
        return lambda self: tuple([getattr(self, name) for name in names])

    class cached_property:  # noqa: N801
        """``functools.cached_property`` without the lock that it has before Python 3.12."""

        def __init__(self, function):
            self.function, self.__doc__ = function, function.__doc__

        def __set_name__(self, owner, name):
            self.name = name

        def __get__(self, instance, owner=None):
            if instance is None:
                return self
            value = instance.__dict__[self.name] = self.function(instance)
            return value


def require(condition: bool, message: str) -> None:
    """Raise a ValueError with *message* unless *condition* holds."""
    if not condition:
        raise ValueError(message)


def require_counts(owner: object, at_least: int, *names: str) -> None:
    """Check that each named field of *owner* is an int of *at_least* or more."""
    for name in names:
        value = getattr(owner, name)
        if type(value) is not int or value < at_least:
            raise ValueError(f"{name} must be a whole number of at least {at_least}, not {value!r}")


def require_amounts(owner: object, *names: str) -> None:
    """Check that each named field of *owner* is a finite number, zero or more."""
    for name in names:
        value = getattr(owner, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must be a finite number, zero or more, not {value!r}")


Value = TypeVar("Value")
Thing = TypeVar("Thing")
Key = TypeVar("Key", bound=Hashable)


class ByIdentity(Generic[Value]):
    """Values by the objects they were made of, which stay alive with them. A full cache is cleared."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[tuple[object, ...], tuple[Sequence[object], Value]] = {}

    def get(self, parts: Sequence[object], make: Callable[[], Value], *key: object) -> Value:
        """Return the value for *parts* and *key*, made now unless it is known."""
        place = (*key, *map(id, parts))
        return (self._known.get(place) or self._add(place, parts, make()))[1]

    def of(self, thing: Thing, make: Callable[[Thing, Key], Value], key: Key) -> Value:
        """Return the value for a single object, the usual case: ``make(thing, key)``."""
        place = (key, id(thing))
        return (self._known.get(place) or self._add(place, (thing,), make(thing, key)))[1]

    def intern(self, parts: Value, place: tuple[int, ...]) -> Value:
        """Return one object for the same *parts*, whose identities are *place*."""
        return (self._known.get(place) or self._add(place, (parts,), parts))[1]

    def _add(self, place: tuple[object, ...], parts: Sequence[object], value: Value) -> tuple[Sequence[object], Value]:
        if len(self._known) >= self._most:
            self._known.clear()
        entry = self._known[place] = (parts, value)
        return entry

    def cache_clear(self) -> None:
        """Forget all values; ``lru_cache`` has a method of this name."""
        self._known.clear()


class Remembered(dict[Key, Value]):
    """Values by equal keys, forgotten with the other caches."""

    def cache_clear(self) -> None:
        self.clear()


# ---- number formats of tensors -------------------------------------------------------------------------


class DType(StrEnum):
    FP64 = "fp64"
    FP32 = "fp32"
    TF32 = "tf32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    FP4 = "fp4"
    NVFP4 = "nvfp4"
    INT64 = "int64"
    INT32 = "int32"
    INT16 = "int16"
    INT8 = "int8"
    BOOL = "bool"

    @property
    def bytes(self) -> float:
        """Bytes of one stored element; block scales of mxfp8 and nvfp4 are not counted."""
        return ELEMENT_BYTES[self]

    @property
    def scaled(self) -> bool:
        """True if numbers are stored relative to a scale: a cast must first find the largest magnitude."""
        return self in SCALED


SCALED = frozenset({DType.FP8, DType.MXFP8, DType.FP4, DType.NVFP4})
# The digits of a name are the bits of an element in memory, where TF32, a way to multiply, is fp32.
BITS = {dtype: int("".join(filter(str.isdigit, dtype))) for dtype in DType if dtype is not DType.BOOL}
ELEMENT_BYTES: dict[DType, float] = {dtype: bits // 8 or bits / 8 for dtype, bits in BITS.items()} | {DType.BOOL: 1}
FP32_BYTES = ELEMENT_BYTES[DType.FP32]


# ---- facts of answers ----------------------------------------------------------------------------------


def group_by_key(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return the values of each key."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def sum_by_key(pairs: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    """Return the sum of the numbers of each key."""
    sums: dict[Key, float] = {}
    for key, number in pairs:
        sums[key] = sums.get(key, 0.0) + number
    return sums


Fact = Any
"""The value of one fact: a number, a text, or facts inside facts, as JSON has them."""
Facts = Mapping[str, Fact]
"""The facts of an answer or of one of its rows, by the names of the JSON contract."""
FactDict = dict[str, Fact]
"""Facts that are being collected."""


def pick(source: object, spec: str) -> FactDict:
    """Return attributes of *source* as facts, such as ``gpus time_s=seconds gpu=cluster.gpu.name``."""
    pairs = (word.partition("=") for word in spec.split())
    return {name: attrgetter(path or name)(source) for name, _, path in pairs}


class OperatorFacts(TypedDict):
    """All runs of one operator in a step, on an average GPU."""

    name: str
    kind: str
    dtype: str
    count: float
    flops: float
    bytes: float
    seconds: float
    bound: str


class RooflineFacts(TypedDict):
    gpu: str
    dtype: str
    peak_flops: float
    bytes_per_s: float
    operators: list[OperatorFacts]


class ChangeFacts(TypedDict):
    """The same step with one choice made otherwise."""

    change: str
    step_s: float
    memory_bytes: float | None
    fits: bool
    command: str


class PointFacts(TypedDict):
    """A measurement and its prediction, in seconds or bytes."""

    name: str
    measured: float
    predicted: float


class IntervalFacts(NamedTuple):
    """The interval that holds the true value, *level* of the time where that is known."""

    low_s: float
    high_s: float
    level: float | None

    @property
    def words(self) -> str:
        """Return the name of the band, such as ``90 % interval``."""
        return "interval" if self.level is None else f"{format_percent(self.level, 0)} interval"


def read_interval(facts: Facts) -> IntervalFacts:
    """Return the band of a step, wherever its facts come from: the one place that reads it."""
    band = facts.get("uncertainty") or facts
    return IntervalFacts(float(band["low_s"]), float(band["high_s"]), band.get("level"))


# Answers that cannot be true: numbers carry their units in their names, so that one place can look at all.

LONGEST_S = 1e9  # thirty years; no cluster is used as long
SHARES = ("mfu", "efficiency")
REMEDY = "look for a nonsense value in the input"


def find_doubts(facts: Mapping[str, object]) -> list[str]:
    """Return warnings of values in an answer that cannot be true; raise a ValueError for a value that is no number."""
    doubts, timed = [], False
    for name, seconds, value in _numbers(facts, "", False):
        if not math.isfinite(value):
            raise ValueError(f"{name} comes out as {value}, which is no answer; {REMEDY}")
        if name in SHARES and value > 1:
            doubts.append(f"{name} is {value:.3g}, and no GPU does more than its peak: {REMEDY}")
        if seconds and value > LONGEST_S and not timed:  # its parts are as long
            timed = True
            doubts.append(f"{name} is {value:.3g} s, longer than thirty years: {REMEDY}")
    return list(dict.fromkeys(doubts))


def _numbers(value: object, name: str, seconds: bool) -> Iterator[tuple[str, bool, float]]:
    """Yield every number within *value*, its name, and True if it is in seconds, as all within ``breakdown_s``."""
    if isinstance(value, float):
        yield name, seconds, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            timed = str(key).endswith("_s") and not str(key).endswith("per_s")
            yield from _numbers(item, str(key), seconds or timed)
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for item in value:
            yield from _numbers(item, name, seconds)
