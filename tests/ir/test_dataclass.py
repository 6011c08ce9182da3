"""Classes of ``ir.types`` behave as those of the standard library."""

import copy
import dataclasses
import inspect
import pickle
from dataclasses import field
from functools import cached_property
from typing import Any

import pytest
from msgspec import Struct

from stepcast.ir.layout import Layout
from stepcast.ir.types import dataclass, replace


@dataclass(frozen=True, slots=True)
class Point:
    """A frozen value with slots."""

    x: int
    y: float = 1.0
    names: tuple[str, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Base:
    """A frozen value with a dictionary."""

    numbers: list[int] = field(default_factory=list, hash=False)
    hidden: int = field(default=3, repr=False)

    def __post_init__(self) -> None:
        if -1 in self.numbers:
            raise ValueError("negative")

    @cached_property
    def total(self) -> int:
        return sum(self.numbers)


@dataclass(frozen=True)
class Child(Base):
    """A value with inherited fields."""

    extra: str = "e"


@dataclass
class Bag:
    """A value that changes."""

    content: Any = None
    one: dict[str, int] = field(default_factory=dict, kw_only=True)


@dataclass(frozen=True, eq=False)
class Same:
    """A value that is equal only to itself."""

    x: int


def test_values_are_equal_hashed_and_printed_by_their_fields() -> None:
    assert Point(1) == Point(1, 1.0, ("other",)) != Point(2)
    assert Point(1) != (1, 1.0)  # type: ignore[comparison-overlap]
    assert hash(Point(1)) == hash(Point(1, names=("other",)))
    assert repr(Point(1)) == "Point(x=1, y=1.0, names=())"
    assert repr(Child([1, 2])) == "Child(numbers=[1, 2], extra='e')"
    assert Child([1]) != Base([1])
    assert hash(Child([1])) == hash(Child([1]))
    assert Same(1) != Same(1)
    assert len({Same(1), Same(1)}) == 2
    with pytest.raises(TypeError):
        hash(Bag())


def test_a_value_that_contains_itself_is_printed() -> None:
    bag = Bag()
    bag.content = bag
    assert repr(bag) == "Bag(content=..., one={})"


@pytest.mark.parametrize("value", [Point(1), Base([1]), Child([2])])
def test_frozen_values_do_not_change(value: Any) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(AttributeError):
        setattr(value, name, 5)
    with pytest.raises(AttributeError):
        delattr(value, name)


@pytest.mark.parametrize(
    "value", [Point(1, 2.0, ("a",)), Base([1]), Child([2], extra="f"), Bag(3, one={"a": 1}), Layout(tp=2)]
)
def test_values_can_be_copied_pickled_and_replaced(value: Any) -> None:
    assert pickle.loads(pickle.dumps(value)) == copy.deepcopy(value) == copy.copy(value) == value
    names = [each.name for each in dataclasses.fields(value) if each.init]
    assert dataclasses.replace(value, **{names[0]: getattr(value, names[0])}) == value
    assert list(dataclasses.asdict(value)) == [each.name for each in dataclasses.fields(value)]


def test_structs_are_dataclasses_whose_slots_have_the_order_of_their_fields() -> None:
    names = tuple(each.name for each in dataclasses.fields(Layout))
    assert isinstance(Layout(), Struct)
    assert Layout.__slots__ == names == Layout.__match_args__ == tuple(inspect.signature(Layout).parameters)
    assert Layout(tp=2, dp=4) == replace(Layout(tp=2), dp=4) != replace(Layout(tp=2), dp=2)
    with pytest.raises(AttributeError):
        Layout().tp = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="tp"):
        replace(Layout(), tp=0)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="x"):
        Point()  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        Bag(1, {})  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="negative"):
        Base([-1])
    assert Base().numbers is not Base().numbers
    assert Child([1, 2]).total == 3
    assert Base().hidden == 3


def test_the_signature_is_known_before_the_first_instance() -> None:
    @dataclass(frozen=True, slots=True)
    class New:
        """A value nobody has made."""

        first: int
        second: str = "b"

    assert list(inspect.signature(New).parameters) == ["first", "second"]
    assert list(inspect.signature(Point).parameters) == ["x", "y", "names"]
    assert New(1).second == "b"
