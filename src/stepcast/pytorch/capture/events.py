"""What a traced step leaves behind: its operators in order, and the tensors they read and write."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

TF32 = "tf32"  # the first option of events that multiply fp32 operands so


class Moment(IntEnum):
    """When an operator ran."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2


class Tensor(NamedTuple):
    """One operand: its shape, strides and format, and the storage that holds it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    storage: int

    @property
    def elements(self) -> int:
        """Elements in memory: those of a broadcast dimension are one."""
        found = 1
        for size, stride in zip(self.shape, self.stride, strict=True):
            if stride:
                found *= size
        return found

    @property
    def numel(self) -> int:
        found = 1
        for size in self.shape:
            found *= size
        return found


class Event(NamedTuple):
    """One dispatched operator."""

    name: str
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    options: tuple[Any, ...]
    moment: Moment
    module: int
    again: bool  # of a forward that is computed again in the backward
    source: int = -1  # in a backward: the event of the forward whose gradient this computes


@dataclass
class Storage:
    """The life of one piece of memory: bytes, and the numbers of the events that made and freed it."""

    size_bytes: int
    made: int
    freed: int | None = None
    role: str = "activations"


@dataclass
class StepTrace:
    """A step as it was traced."""

    events: list[Event] = field(default_factory=list)
    storages: list[Storage] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    parameters: dict[int, int] = field(default_factory=dict)  # elements by the storage that holds them
    gradients: dict[int, int] = field(default_factory=dict)  # a gradient's storage by its parameter's
    given: set[int] = field(default_factory=set)  # events outside of what is compiled
    looked: set[int] = field(default_factory=set)  # events whose end the host waits for
