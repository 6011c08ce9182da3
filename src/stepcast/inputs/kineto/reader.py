"""PyTorch profiler traces (Kineto's Chrome JSON, plain or gzip): one file per rank make one Timeline."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepcast.inputs.source import Source

if TYPE_CHECKING:
    from stepcast.ir.timeline import Timeline

BARE_EVENT = re.compile(r'\[\s*\{[^{}]{0,2000}"ph"\s*:\s*"[A-Za-z]"')


def looks_like(head: str) -> bool:
    """An object with traceEvents, or with Kineto's header where that alone fills the head; or bare events."""
    start = head.lstrip("\ufeff \t\r\n")
    if start.startswith("{"):
        return '"traceEvents"' in start or (
            '"schemaVersion"' in start and ('"distributedInfo"' in start or '"deviceProperties"' in start)
        )
    return BARE_EVENT.match(start) is not None


def read_run(sources: Sequence[Source]) -> "Timeline":
    """The traces of a run's ranks as one Timeline."""
    # Here, so that recognising other formats does not load numpy.
    from stepcast.inputs.kineto.run import read_run as read

    return read(sources)
