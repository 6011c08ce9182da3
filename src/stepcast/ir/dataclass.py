"""The decorator ``dataclass`` of the standard library, without the code that it compiles for each class.

The standard decorator compiles five or more functions for every class when it is imported, which was a quarter of the
time of ``stepcast predict``. Here frozen classes with slots become structs of msgspec, if nothing speaks against it,
and methods of others are shared functions, except ``__init__``: it is compiled after a dozen instances, and most
classes of a command have fewer. Classes behave the same: ``fields``, ``replace``,
``asdict``, ``pickle``, inheritance and ``inspect.signature`` work. ``InitVar``, ``order`` and ``unsafe_hash`` are not
supported.

At the end are the checks that classes call when a value is built, and caches whose keys are objects rather than their
values, which take longer to compare.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace
    from functools import cached_property as cached_property
else:
    import dataclasses
    from operator import attrgetter
    from reprlib import recursive_repr
    from types import MemberDescriptorType
    from typing import ClassVar

    from msgspec import Struct
    from msgspec import field as struct_field
    from msgspec.structs import replace as replace_struct

    def dataclass(cls=None, /, *, frozen=False, slots=False, eq=True, kw_only=False):
        """Add the methods of a dataclass to a class."""
        if cls is None:
            return lambda cls: dataclass(cls, frozen=frozen, slots=slots, eq=eq, kw_only=kw_only)
        own = set(cls.__dict__)
        own_hash = "__hash__" in own and not (cls.__dict__["__hash__"] is None and "__eq__" in own)
        fields = _collect_fields(cls, kw_only)
        if frozen and slots and eq and _suits_struct(cls, fields):
            return _make_struct(cls, fields)
        if slots:
            cls = _add_slots(cls, [field.name for field in fields])
        if "__init__" not in own:
            _add_init(cls, fields, frozen, slots)
        if "__repr__" not in own:
            _add_repr(cls, [field.name for field in fields if field.repr])
        if eq and "__eq__" not in own:
            _add_eq(cls, [field.name for field in fields if field.compare])
        if eq and not own_hash:
            hashed = [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
            _add_hash(cls, hashed if frozen else None)
        if frozen:
            _freeze(cls, frozenset(field.name for field in fields))
            if slots and not {"__getstate__", "__setstate__"} & own:
                cls.__getstate__, cls.__setstate__ = _get_state, _set_state
        return cls

    def _collect_fields(cls, kw_only):
        """Return the fields of a class, those of its bases first, and note them where the standard library does."""
        every = {}
        for base in cls.__mro__[-1:0:-1]:
            every |= getattr(base, dataclasses._FIELDS, {})
        own = cls.__dict__
        for name, kind in cls.__annotations__.items():
            if kind is dataclasses.KW_ONLY or kind == "KW_ONLY":
                kw_only = True
                continue
            default = own.get(name, dataclasses.MISSING)
            is_field = isinstance(default, dataclasses.Field)
            field = default if is_field else dataclasses.field(default=default)
            field.name, field.type, field._field_type = name, kind, dataclasses._FIELD
            if kind.startswith("ClassVar") if isinstance(kind, str) else getattr(kind, "__origin__", kind) is ClassVar:
                field._field_type = dataclasses._FIELD_CLASSVAR
            elif isinstance(default, list | dict | set):
                raise ValueError(f"mutable default {type(default)} for field {name}: use default_factory")
            if field.kw_only is dataclasses.MISSING:
                field.kw_only = kw_only
            if is_field:
                if field.default is dataclasses.MISSING:
                    delattr(cls, name)
                else:
                    setattr(cls, name, field.default)
            every[name] = field
        setattr(cls, dataclasses._FIELDS, every)
        fields = [field for field in every.values() if field._field_type is dataclasses._FIELD]
        if "__match_args__" not in own:
            cls.__match_args__ = tuple([field.name for field in fields if field.init and not field.kw_only])
        return fields

    def _suits_struct(cls, fields):
        """Return True if a struct of msgspec, whose methods are compiled code, behaves the same."""
        plain = all(each.init and each.repr and each.compare and not each.kw_only for each in fields)
        assigns = hasattr(cls, "__post_init__") and "__setattr__" in cls.__post_init__.__code__.co_names
        listed = [name for name in getattr(cls, dataclasses._FIELDS) if name in cls.__annotations__]
        own = {"__eq__", "__hash__", "__init__", "__repr__", "__getstate__", "__new__"}.intersection(cls.__dict__)
        return plain and not assigns and not own and cls.__bases__ == (object,) and len(listed) == len(fields)

    def _make_struct(cls, fields):
        """Return the class as a struct that the functions of ``dataclasses`` take for a dataclass."""
        names = [each.name for each in fields]
        own = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__", *names)}
        for each in fields:
            if each.default_factory is not dataclasses.MISSING:
                own[each.name] = struct_field(default_factory=each.default_factory)
            elif each.default is not dataclasses.MISSING:
                own[each.name] = each.default
        struct = type(Struct)(cls.__name__, (Struct,), own, frozen=True)
        struct.__qualname__, struct.__slots__ = cls.__qualname__, tuple(names)  # slots in the order of the fields
        return struct

    def _add_slots(cls, names):
        """Return the class with slots instead of a dictionary; as it is made, it cannot be changed to that."""
        inherited = {name for base in cls.__mro__[1:] for name in base.__dict__.get("__slots__", ())}
        own = {name: value for name, value in cls.__dict__.items() if name not in ("__dict__", "__weakref__", *names)}
        own["__slots__"] = tuple([name for name in names if name not in inherited])
        slotted = type(cls)(cls.__name__, cls.__bases__, own)
        slotted.__qualname__ = cls.__qualname__
        return slotted

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

    def replace(instance, /, **changes):
        """Return a copy with other values of some fields, faster than the standard function."""
        if isinstance(instance, Struct):
            return replace_struct(instance, **changes)
        cls = instance.__class__
        names = _INIT_NAMES.get(cls)
        if names is None:
            fields = getattr(cls, dataclasses._FIELDS).values()
            names = [each.name for each in fields if each.init and each._field_type is dataclasses._FIELD]
            _INIT_NAMES[cls] = names
        for name in names:
            if name not in changes:
                changes[name] = getattr(instance, name)
        return cls(**changes)

    _INIT_NAMES = {}

    FEW = 12
    """Instances of a class that are filled field by field before its ``__init__`` is compiled."""

    def _add_init(cls, fields, frozen, slots):
        names = [field.name for field in fields if field.init and not field.kw_only]
        is_plain = all(field.init for field in fields)
        assign = object.__setattr__
        left = FEW if is_plain else 0

        def compile_init():
            init = _compile_init(cls, fields, frozen, slots)
            cls.__init__ = init
            return init

        def __init__(self, *values, **named):  # noqa: N807
            nonlocal left
            left -= 1
            given = dict(zip(names, values, strict=False)) | named
            known = [field for field in fields if field.name in given]
            missing = [field for field in fields if field.name not in given]
            if left < 0 or not len(known) == len(given) == len(values) + len(named) or any(map(_is_needed, missing)):
                compile_init()(self, *values, **named)
                return
            for field in fields:
                name = field.name
                if name in given:
                    assign(self, name, given[name])
                else:
                    has_factory = field.default_factory is not dataclasses.MISSING
                    assign(self, name, field.default_factory() if has_factory else field.default)
            if hasattr(self, "__post_init__"):
                self.__post_init__()

        __init__.__qualname__ = f"{cls.__qualname__}.__init__"
        __init__.compile = compile_init
        cls.__init__ = __init__
        cls.__signature__ = _Signature()

    def _is_needed(field):
        return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING

    class _Signature:
        """Lets ``inspect.signature`` see the arguments of an ``__init__`` that was not compiled yet."""

        def __get__(self, instance, owner):
            import inspect

            getattr(owner.__init__, "compile", lambda: None)()
            signature = inspect.signature(owner.__init__)
            return signature.replace(parameters=[*signature.parameters.values()][1:])

    def _compile_init(cls, fields, frozen, slots):
        """Return ``__init__``. Frozen instances are filled through their slots or their dictionary."""
        names = {"MISSING": dataclasses.MISSING}
        arguments, keywords, body = [], [], []
        in_dict = frozen and any(not isinstance(getattr(cls, each.name, None), MemberDescriptorType) for each in fields)
        if in_dict:
            body.append("values = self.__dict__")
        for field in fields:
            name, value = field.name, field.name
            has_factory, has_default = (
                each is not dataclasses.MISSING for each in (field.default_factory, field.default)
            )
            names[f"_default_{name}"] = field.default_factory if has_factory else field.default
            if has_factory:
                made = f"_default_{name}()"
                value = f"{made} if {name} is MISSING else {name}" if field.init else made
            elif not field.init:
                if not (slots and has_default):
                    continue
                value = f"_default_{name}"
            if field.init:
                default = "=MISSING" if has_factory else f"=_default_{name}" if has_default else ""
                (keywords if field.kw_only else arguments).append(name + default)
            slot = getattr(cls, name, None)
            if not frozen:
                body.append(f"self.{name} = {value}")
            elif isinstance(slot, MemberDescriptorType):
                names[f"_set_{name}"] = slot.__set__
                body.append(f"_set_{name}(self, {value})")
            else:
                body.append(f"values[{name!r}] = {value}")
        if hasattr(cls, "__post_init__"):
            body.append("self.__post_init__()")
        listed = ", ".join(["self", *arguments, *(["*", *keywords] if keywords else ())])
        exec(f"def __init__({listed}):\n " + "\n ".join(body or ["pass"]), names)
        init = names["__init__"]
        init.__qualname__, init.__module__ = f"{cls.__qualname__}.__init__", cls.__module__
        return init

    def _add_repr(cls, names):
        @recursive_repr()
        def __repr__(self):  # noqa: N807
            listed = ", ".join([f"{name}={getattr(self, name)!r}" for name in names])
            return f"{self.__class__.__qualname__}({listed})"

        cls.__repr__ = __repr__

    def _add_eq(cls, names):
        values = _values_of(names)

        def __eq__(self, other):  # noqa: N807
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        cls.__eq__ = __eq__

    def _add_hash(cls, names):
        if names is None:
            cls.__hash__ = None
            return
        values = _values_of(names)
        cls.__hash__ = lambda self: hash(values(self))

    def _values_of(names):
        """Return the function that gives the values of an instance as a tuple."""
        if len(names) > 1:
            return attrgetter(*names)
        return lambda self: tuple([getattr(self, name) for name in names])

    def _freeze(cls, names):
        def refuse(self, name):
            if type(self) is cls or name in names:
                raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")

        def __setattr__(self, name, value):  # noqa: N807
            refuse(self, name)
            super(cls, self).__setattr__(name, value)

        def __delattr__(self, name):  # noqa: N807
            refuse(self, name)
            super(cls, self).__delattr__(name)

        cls.__setattr__, cls.__delattr__ = __setattr__, __delattr__

    def _get_state(self):
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def _set_state(self, state):
        for field, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)


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
        entry = self._known.get(place)
        if entry is None:
            if len(self._known) >= self._most:
                self._known.clear()
            entry = self._known[place] = (made_of, make())
        return entry[1]

    def of(self, one: Thing, make: Callable[[Thing, Key], Value], key: Key) -> Value:
        """Return the value for a single object, the usual case: ``make(one, key)``."""
        place = (key, id(one))
        entry = self._known.get(place)
        if entry is None:
            if len(self._known) >= self._most:
                self._known.clear()
            entry = self._known[place] = ((one,), make(one, key))
        return entry[1]

    def cache_clear(self) -> None:
        """Forget all values; ``lru_cache`` has a method of this name."""
        self._known.clear()


class Remembered(dict[Key, Value]):
    """Values by equal keys, forgotten with the other caches."""

    def cache_clear(self) -> None:
        self.clear()
