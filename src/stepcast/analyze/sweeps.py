"""A user's nccl-tests log beside what a cluster should reach: per size, and where it falls short.

Sizes fall into three ranges by the prediction, not by fixed limits: *small* where latency is most of the
time, *large* where the bandwidth has levelled off, and *middle* between them.
"""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from stepcast.cost.collectives import bus_factor, price
from stepcast.cost.collectives.sweep import kind_of, measured_time_s, sweep_route, sweep_s
from stepcast.hardware import Cluster
from stepcast.ir.measured import CollectiveSweep

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Vector = NDArray[np.float64]

# Latency is most of it up to this many times the time of a message of SMALLEST_BYTES ...
LATENCY_FACTOR = 1.5
SMALLEST_BYTES, LARGEST_BYTES = 8.0, 2**63
# ... and bandwidth has levelled off from this share of its highest on.
LEVEL_SHARE = 0.8
# A size that takes this many times as long as the next larger one was disturbed: it is shown and not judged.
SPIKE_FACTOR = 1.25


class Range(StrEnum):
    SMALL = "small"
    MIDDLE = "middle"
    LARGE = "large"


@dataclass(frozen=True)
class MeasuredSweep:
    """The sizes of one log that were timed, and what *cluster* should need for them."""

    sweep: CollectiveSweep
    cluster: Cluster

    def check(self) -> None:
        """A ValueError that says why this log cannot be compared with this cluster."""
        kind_of(self.sweep)
        sweep_route(self.sweep, self.cluster)
        largest = max((row.size_bytes for row in self.sweep.rows), default=0)
        if largest > LARGEST_BYTES:
            raise ValueError(f"{self.sweep.source}: a size beyond {LARGEST_BYTES:,} bytes fits no memory")
        if not len(self.timed[0]):
            raise ValueError(f"{self.sweep.source}: no size has a time")

    @cached_property
    def timed(self) -> "tuple[Vector, Vector]":
        """Sizes and times, by size."""
        rows = [(row.size_bytes, measured_time_s(row)) for row in self.sweep.rows if row.size_bytes]
        points = sorted((float(size), time_s) for size, time_s in rows if time_s)
        return np.array([size for size, _ in points]), np.array([time_s for _, time_s in points])

    @property
    def sizes_bytes(self) -> "Vector":
        return self.timed[0]

    @property
    def measured_s(self) -> "Vector":
        return self.timed[1]

    @cached_property
    def predicted_s(self) -> "Vector":
        return self.seconds_on(self.cluster)

    def seconds_on(self, cluster: Cluster) -> "Vector":
        """What another cluster, or this one with a fault, should need."""
        return sweep_s(self.sweep, self.sizes_bytes, cluster)

    @property
    def reached(self) -> "Vector":
        """Measured over predicted bandwidth, by size."""
        return self.predicted_s / self.measured_s

    @cached_property
    def spikes(self) -> "NDArray[np.bool_]":
        slower = np.zeros(len(self.sizes_bytes), dtype=bool)
        slower[:-1] = self.measured_s[:-1] > SPIKE_FACTOR * self.measured_s[1:]
        return slower

    def within(self, part: Range) -> "NDArray[np.bool_]":
        """Which sizes belong to *part*; none is in two."""
        empty_s = float(sweep_s(self.sweep, np.array([SMALLEST_BYTES]), self.cluster)[0])
        small = self.predicted_s <= LATENCY_FACTOR * empty_s
        rate = self.sizes_bytes / self.predicted_s
        large = ~small & (rate >= LEVEL_SHARE * rate.max())
        parts: dict[Range, NDArray[np.bool_]] = {Range.SMALL: small, Range.MIDDLE: ~small & ~large, Range.LARGE: large}
        return parts[part]

    def mean_reached(self, part: Range, predicted_s: "Vector | None" = None) -> float | None:
        """Measured over predicted bandwidth in one range: a geometric mean, spikes left out."""
        chosen = self.within(part) & ~self.spikes
        if not chosen.any():
            return None
        predicted_s = self.predicted_s if predicted_s is None else predicted_s
        return float(np.exp(np.log(predicted_s[chosen] / self.measured_s[chosen]).mean()))

    def busbw(self, seconds: "Vector") -> "Vector":
        return self.sizes_bytes / seconds * bus_factor(kind_of(self.sweep), self.sweep.ranks)

    def facts(self) -> dict[str, Any]:
        """The comparison, by size and by range."""
        sweep, kind = self.sweep, kind_of(self.sweep)
        route = sweep_route(sweep, self.cluster)
        measured, predicted = self.busbw(self.measured_s), self.busbw(self.predicted_s)
        parts = {part: self.within(part) for part in Range}
        rows = []
        for at, size in enumerate(self.sizes_bytes.tolist()):
            best = price(kind, size, route)
            rows.append(
                {
                    "size_bytes": round(size),
                    "measured_s": float(self.measured_s[at]),
                    "predicted_s": float(self.predicted_s[at]),
                    "error": float(self.predicted_s[at] / self.measured_s[at] - 1),
                    "measured_busbw_bytes_per_s": float(measured[at]),
                    "predicted_busbw_bytes_per_s": float(predicted[at]),
                    "reached": float(self.reached[at]),
                    "algorithm": best.algorithm,
                    "protocol": best.protocol,
                    "range": next(part for part, chosen in parts.items() if chosen[at]),
                    "spike": bool(self.spikes[at]),
                }
            )
        errors = np.abs(self.reached - 1)
        return {
            "kind": "collective sweep",
            "file": sweep.source,
            "collective": kind,
            "ranks": sweep.ranks,
            "nodes": sweep.nodes,
            "device": sweep.device,
            "ranks_per_thread": sweep.ranks_per_thread,
            "cluster": self.cluster.name,
            "mean_abs_error": float(errors.mean()),
            "ranges": {str(part): self._range_facts(part, measured, predicted) for part in Range},
            "rows": rows,
        }

    def _range_facts(self, part: Range, measured: "Vector", predicted: "Vector") -> dict[str, Any] | None:
        chosen = self.within(part)
        if not chosen.any():
            return None
        return {
            "from_bytes": round(self.sizes_bytes[chosen].min()),
            "to_bytes": round(self.sizes_bytes[chosen].max()),
            "sizes": int(chosen.sum()),
            "reached": self.mean_reached(part),
            "measured_busbw_bytes_per_s": float(np.median(measured[chosen])),
            "predicted_busbw_bytes_per_s": float(np.median(predicted[chosen])),
            "measured_s": float(np.median(self.measured_s[chosen])),
            "predicted_s": float(np.median(self.predicted_s[chosen])),
        }
