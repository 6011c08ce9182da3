"""What was worked out for some objects, found again by their identity: to compare them would cost more."""

from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

Value = TypeVar("Value")
Thing = TypeVar("Thing")
Key = TypeVar("Key", bound=Hashable)


class ByIdentity(Generic[Value]):
    """Values by the objects they were made of, which stay alive beside them. Full, it begins anew."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: dict[tuple[object, ...], tuple[Sequence[object], Value]] = {}

    def get(self, made_of: Sequence[object], make: Callable[[], Value], *key: object) -> Value:
        """The value for *made_of* and *key*, made now unless it is known."""
        place = (*key, *map(id, made_of))
        found = self._known.get(place)
        if found is None:
            if len(self._known) >= self._most:
                self._known.clear()
            found = self._known[place] = (made_of, make())
        return found[1]

    def of(self, one: Thing, make: Callable[[Thing, Key], Value], key: Key) -> Value:
        """The same for a single object, of which most ask: ``make(one, key)``."""
        place = (key, id(one))
        found = self._known.get(place)
        if found is None:
            if len(self._known) >= self._most:
                self._known.clear()
            found = self._known[place] = ((one,), make(one, key))
        return found[1]

    def cache_clear(self) -> None:
        """As ``lru_cache`` calls it."""
        self._known.clear()
