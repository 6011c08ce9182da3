"""A recorded run beside its traces: the wall clock, and what libraries logged of the same collectives."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepcast.ir.measured import CollectiveLog, LoggedCollective
from stepcast.ir.step import PART_OF_GROUP, PARTS
from stepcast.ir.timeline import SpanKind, Timeline
from stepcast.ir.work import Attention, Collective, Elementwise, GroupedMatmul, Matmul, Recorded, Work


def recorded_facts(
    ranks: Sequence[Mapping[str, Any]], logs: Sequence[CollectiveLog], collectives: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """*ranks* as their steps tell, *collectives* as the profiler saw them in its window."""
    window = [rank["window_step_s"] for rank in ranks if rank["window_step_s"]]
    return {
        "ranks": [dict(rank) for rank in ranks],
        "wall_step_s": max(window, default=None),
        "plain_step_s": max((rank["step_s"] for rank in ranks), default=None),
        "clock_spread_s": max((rank["ahead_s"] for rank in ranks), default=0.0)
        - min((rank["ahead_s"] for rank in ranks), default=0.0),
        "logs": [{"program": log.program, "calls": len(log.calls), "collectives": _joined(log, collectives),
                  "warnings": list(log.warnings)} for log in logs],
    }  # fmt: skip


def _joined(log: CollectiveLog, collectives: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls of the log by kind and size, each with those of the window that are alike."""
    logged: dict[tuple[str, int], list[LoggedCollective]] = defaultdict(list)
    for call in log.calls:
        logged[_plain(call.kind), call.size_bytes].append(call)
    seen: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in collectives:
        seen[_plain(str(row["kind"])), int(row["size_bytes"])].append(row)
    rows = []
    for key in sorted({*logged, *seen}, key=lambda key: (-key[1], key[0])):
        calls, alike = logged.get(key, []), seen.get(key, [])
        times = [call.seconds for call in calls if call.seconds is not None]
        rates = [call.bus_bytes_per_s for call in calls if call.bus_bytes_per_s is not None]
        counted = sum(int(row["count"]) for row in alike)
        rows.append(
            {
                "kind": str(alike[0]["kind"]) if alike else calls[0].kind.replace("_", "-"),
                "size_bytes": key[1],
                "logged": len(calls),
                "logged_s": statistics.median(times) if times else None,
                "busbw_bytes_per_s": statistics.median(rates) if rates else None,
                "traced": counted,
                "traced_s": sum(float(row["total_s"]) for row in alike) / counted if counted else None,
            }
        )
    return rows


def _plain(kind: str) -> str:
    """``all-reduce``, ``all_reduce`` and ``allreduce_coalesced`` are one kind."""
    return kind.lower().replace("_", "").replace("-", "").removesuffix("coalesced").removesuffix("tensor")


# A workload that was run, beside what was predicted: by kind of op, and as a step.

GRADIENT_KINDS = (Attention, Elementwise)


def kind_of(work: Work | None) -> str:
    """What ops are counted together."""
    match work:
        case Matmul() | GroupedMatmul() | Recorded():
            return type(work).__name__.lower().replace("grouped", "grouped ")
        case Attention():
            return "attention backward" if work.backward else "attention"
        case Elementwise():
            return str(work.kind)
        case Collective():
            return f"{work.group} {work.kind}"
    return "transfer" if work is None else type(work).__name__.lower()


@dataclass(frozen=True, slots=True)
class KindRow:
    kind: str
    ops: int
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float | None:
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None

    def facts(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "ops": self.ops,
            "measured_s": self.measured_s,
            "predicted_s": self.predicted_s,
            "error": self.error,
        }


def by_kind(ran: Iterable[tuple[Work | None, float]], seconds: Callable[[Work], float]) -> list[KindRow]:
    """Seconds measured and predicted of all ops of a kind, the longest first."""
    counts: dict[str, int] = defaultdict(int)
    measured: dict[str, float] = defaultdict(float)
    predicted: dict[str, float] = defaultdict(float)
    for work, took_s in ran:
        if work is None:
            continue
        kind = kind_of(work)
        counts[kind] += 1
        measured[kind] += took_s
        predicted[kind] += seconds(work)
    rows = [KindRow(kind, counts[kind], measured[kind], predicted[kind]) for kind in counts]
    return sorted(rows, key=lambda row: -row.measured_s)


def mean_abs_error(rows: Sequence[KindRow], least_share: float = 0.0) -> float | None:
    """Over kinds; those that take less than *least_share* of the time are too short to tell."""
    total_s = sum(row.measured_s for row in rows)
    errors = [abs(row.error) for row in rows if row.error is not None and row.measured_s >= least_share * total_s]
    return sum(errors) / len(errors) if errors else None


def step_parts(timeline: Timeline) -> tuple[float, dict[str, float]]:
    """Step time and its parts on an average rank; what no op fills is bubble."""
    step_s = timeline.span_s
    parts: Mapping[str, float] = dict.fromkeys(PARTS, 0.0)
    found, ranks = dict(parts), max(1, len(timeline.ranks))
    for span in timeline.spans():
        if span.kind is SpanKind.COMPUTE:
            part = "optimizer" if span.micro_batch is None else "compute"
        else:
            part = PART_OF_GROUP.get(span.lane.name, "other")
        found[part] += span.duration_s / ranks
    found["bubble"] = max(0.0, step_s - sum(found.values()))
    excess = sum(found.values()) - step_s  # messages beside computation
    if excess > 0:
        for part in ("dp", "ep", "tp", "pp", "cp"):
            less = min(found[part], excess)
            found[part], excess = found[part] - less, excess - less
        found["compute"] -= max(0.0, excess)
    return step_s, found
