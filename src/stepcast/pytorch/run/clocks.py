"""When ops ran: on the host's clock for a CPU, on the GPU's own for a GPU."""

import time
from typing import Any


SPIN_CYCLES, EMPTY_MARKS = 2_000_000, 101


class HostClock:
    """Calls end when they return."""

    def start(self) -> None:
        self._zero = time.perf_counter()

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, marks: list[tuple[float, float]]) -> list[tuple[float, float]]:
        return [(begin - self._zero, end - self._zero) for begin, end in marks]


class GpuClock:
    """Events between kernels, read when all have run."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._empty_s = self._between()

    def _between(self) -> float:
        """Seconds between two events with nothing in between, which no op takes."""
        torch = self._torch
        torch.cuda._sleep(SPIN_CYCLES)  # the GPU is busy while the host issues them
        marks = [(self._event(), self._event()) for _ in range(EMPTY_MARKS)]
        torch.cuda.synchronize()
        times = sorted(begin.elapsed_time(end) * 1e-3 for begin, end in marks)
        return float(times[len(times) // 2])

    def _event(self) -> Any:
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._zero = self._event()

    def mark(self) -> Any:
        return self._event()

    def read(self, marks: list[tuple[Any, Any]]) -> list[tuple[float, float]]:
        self._torch.cuda.synchronize()
        since = self._zero.elapsed_time
        times = [(since(begin) * 1e-3, since(end) * 1e-3) for begin, end in marks]
        return [(begin, max(begin, end - self._empty_s)) for begin, end in times]
