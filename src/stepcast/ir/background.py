"""What others send over a cluster's network meanwhile."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class FlowSpread(StrEnum):
    """Whom each GPU sends to: the GPU of the same place ..."""

    RING = "ring"  # in the next of the nodes, after the last in the first
    EXCHANGE = "exchange"  # in every other, to each as much
    INCAST = "incast"  # in the first


@dataclass(frozen=True, slots=True)
class Pattern:
    """Each GPU of *nodes* sends *size_bytes* every *period_s*."""

    name: str
    nodes: tuple[int, ...]
    spread: FlowSpread
    size_bytes: float
    period_s: float
    start_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OtherJob:
    """Another training job, which fills *nodes*; *words* are the options of ``stepcast predict``."""

    name: str
    nodes: tuple[int, ...]
    words: Mapping[str, Any]
    start_s: float = 0.0


Others = tuple[Pattern | OtherJob, ...]
