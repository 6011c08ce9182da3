"""When ops ran: on the host's clock for a CPU, on the GPU's own for a GPU."""

import time
from typing import Any


class HostClock:
    """Calls end when they return."""

    quiet = False

    def start(self) -> None:
        self._zero = time.perf_counter()

    def begin(self) -> float:
        return time.perf_counter()

    def end(self) -> float:
        return time.perf_counter()

    def elapsed_s(self) -> float:
        return time.perf_counter() - self._zero

    def read(self, marks: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(begin - self._zero, end - self._zero) for begin, end in marks]


class GpuClock:
    """Events between kernels, read when all have run: an op begins where the one before it ended."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._last: Any = None
        self.quiet = False  # no events between ops: what they take themselves is seen by the difference

    def _event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._zero = self._last = self._event()

    def begin(self) -> Any:
        return None if self.quiet else self._last

    def end(self) -> Any:
        if not self.quiet:
            self._last = self._event()
        return self._last

    def elapsed_s(self) -> float:
        """Since the start, when all has run."""
        end = self._event()
        self._torch.cuda.synchronize()
        return float(self._zero.elapsed_time(end)) * 1e-3

    def read(self, marks: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        self._torch.cuda.synchronize()
        since = self._zero.elapsed_time
        return [(since(begin) * 1e-3, since(end) * 1e-3) for begin, end in marks if begin is not None]
