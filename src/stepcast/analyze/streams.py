"""Kernels on streams of GPUs: what of the time they compute, communicate beside it, or stand still."""

import re
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from stepcast.ir.timeline import SpanKind, Timeline

MOST_ROWS = 20
NUMBERS = re.compile(r"\d+")
SLOW_DEVICE = 1.1  # times the compute time of the median of the others
LEAST_STEPS = 3  # ranges of one name that are taken for steps


@dataclass(frozen=True)
class StreamsAnalysis:
    timeline: Timeline

    def facts(self) -> dict[str, Any]:
        line = self.timeline
        on_gpu = np.isin(line.kind_of, [SpanKind.COMPUTE, SpanKind.COMMUNICATION, SpanKind.COPY])
        devices = sorted({int(rank) for rank in line.rank_of[on_gpu]})
        rows = [self._device(device) for device in devices]
        count = max(1, len(rows))
        step = self._steps()
        return {
            "devices": rows,
            "elapsed_s": line.span_s,
            "step_s": step["median_s"] if step else None,
            "steps": step,
            "operations_s": {
                part: sum(row[f"{part}_s"] for row in rows) / count for part in ("compute", "exposed", "copy", "idle")
            },
            "exposed_comm_s": sum(row["exposed_s"] for row in rows) / count,
            "bubble_s": sum(row["idle_s"] for row in rows) / count,
            "kernels": self._kernels(on_gpu),
            "ranges": self._ranges(),
            "stragglers": _slow_devices(rows),
            "critical_path": [],
            "warnings": list(line.warnings),
        }

    def _device(self, device: int) -> dict[str, Any]:
        line = self.timeline
        own = line.rank_of == device

        def covered(*kinds: SpanKind) -> npt.NDArray[np.float64]:
            rows = own & np.isin(line.kind_of, list(kinds))
            return _union(line.start_s[rows], line.end_s[rows])

        compute = covered(SpanKind.COMPUTE)
        both = covered(SpanKind.COMPUTE, SpanKind.COMMUNICATION)
        every = covered(SpanKind.COMPUTE, SpanKind.COMMUNICATION, SpanKind.COPY)
        elapsed_s = float(every[:, 1].max() - every[:, 0].min()) if len(every) else 0.0
        compute_s, both_s, every_s = map(_length_s, (compute, both, every))
        return {
            "device": device,
            "elapsed_s": elapsed_s,
            "compute_s": compute_s,
            "communication_s": _length_s(covered(SpanKind.COMMUNICATION)),
            "exposed_s": both_s - compute_s,
            "copy_s": every_s - both_s,
            "idle_s": elapsed_s - every_s,
        }

    def _kernels(self, on_gpu: npt.NDArray[np.bool_]) -> list[dict[str, Any]]:
        line = self.timeline
        totals = np.bincount(line.name_of[on_gpu], line.duration_s[on_gpu], len(line.names))
        counts = np.bincount(line.name_of[on_gpu], minlength=len(line.names))
        most = np.argsort(-totals)[:MOST_ROWS]
        return [
            {"name": line.names[at], "runs": int(counts[at]), "total_s": float(totals[at])}
            for at in most.tolist()
            if counts[at]
        ]

    def _ranges(self) -> list[dict[str, Any]]:
        """NVTX ranges by name, numbers within names left open."""
        line, found = self.timeline, defaultdict(list)
        for at in np.flatnonzero(line.kind_of == SpanKind.HOST).tolist():
            found[NUMBERS.sub("*", line.names[line.name_of[at]])].append(at)
        rows: list[dict[str, Any]] = [
            {"name": name, "runs": len(places), "total_s": float(line.duration_s[places].sum())}
            for name, places in found.items()
        ]
        return sorted(rows, key=lambda row: -row["total_s"])[:MOST_ROWS]

    def _steps(self) -> dict[str, Any] | None:
        """Ranges that are named as steps, from the start of one to the start of the next."""
        line, found = self.timeline, defaultdict(list)
        for at in np.flatnonzero(line.kind_of == SpanKind.HOST).tolist():
            name = NUMBERS.sub("*", line.names[line.name_of[at]])
            if re.search(r"step|iter|batch", name, re.IGNORECASE):
                found[name].append(float(line.start_s[at]))
        if not found:
            return None
        name, starts = max(found.items(), key=lambda each: len(each[1]))
        if len(starts) < LEAST_STEPS:
            return None
        return {"name": name, "count": len(starts), "median_s": float(np.median(np.diff(sorted(starts))))}


def _slow_devices(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the GPUs that compute clearly longer than the median of the others, slowest first."""
    found: list[dict[str, Any]] = []
    for row in rows:
        others = [other["compute_s"] for other in rows if other is not row]
        usual_s = float(np.median(others)) if others else 0.0
        if usual_s and row["compute_s"] >= SLOW_DEVICE * usual_s:
            extra_s = row["compute_s"] - usual_s
            found.append({"rank": row["device"], "factor": row["compute_s"] / usual_s, "extra_s": extra_s})
    return sorted(found, key=lambda row: -float(row["factor"]))


def _union(start_s: npt.NDArray[np.float64], end_s: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The stretches of time that any of the spans covers, as (start, end) rows."""
    if not len(start_s):
        return np.zeros((0, 2))
    order = np.argsort(start_s, kind="stable")
    start_s, reached = start_s[order], np.maximum.accumulate(end_s[order])
    first = np.concatenate(([True], start_s[1:] > reached[:-1]))
    last = np.concatenate((first[1:], [True]))
    return np.stack((start_s[first], reached[last]), axis=1)


def _length_s(stretches: npt.NDArray[np.float64]) -> float:
    return float((stretches[:, 1] - stretches[:, 0]).sum())


def analyze_streams(timeline: Timeline) -> StreamsAnalysis:
    return StreamsAnalysis(timeline)
