"""A cache by the identity of objects: comparing them would cost more."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

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
