"""The decorator ``dataclass`` of the standard library, whose classes are structs of msgspec.

The standard decorator compiles five or more functions for every class when it is imported, which was a quarter of the
time of ``stepcast predict``; the methods of structs are compiled already. Classes behave the same: ``fields``,
``replace``, ``asdict``, ``pickle``, inheritance and ``inspect.signature`` work. ``InitVar``, ``order``, ``unsafe_hash``
and fields without ``init`` are not supported; what is derived from fields is a ``cached_property``.

Fields of the types Size, Natural and Quantity are checked when a value is made, before what the class itself checks.

At the end are the checks that classes call when a value is built, and caches whose keys are objects rather than their
values, which take longer to compare.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Annotated, Generic, TypeVar

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
    from operator import attrgetter

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

    def get(self, made_of: Sequence[object], make: Callable[[], Value], *key: object) -> Value:
        """Return the value for *made_of* and *key*, made now unless it is known."""
        place = (*key, *map(id, made_of))
        return (self._known.get(place) or self._add(place, made_of, make()))[1]

    def of(self, thing: Thing, make: Callable[[Thing, Key], Value], key: Key) -> Value:
        """Return the value for a single object, the usual case: ``make(thing, key)``."""
        place = (key, id(thing))
        return (self._known.get(place) or self._add(place, (thing,), make(thing, key)))[1]

    def _add(
        self, place: tuple[object, ...], made_of: Sequence[object], value: Value
    ) -> tuple[Sequence[object], Value]:
        if len(self._known) >= self._most:
            self._known.clear()
        entry = self._known[place] = (made_of, value)
        return entry

    def cache_clear(self) -> None:
        """Forget all values; ``lru_cache`` has a method of this name."""
        self._known.clear()


class Remembered(dict[Key, Value]):
    """Values by equal keys, forgotten with the other caches."""

    def cache_clear(self) -> None:
        self.clear()
