"""A recorded run beside its traces: the wall clock, and what libraries logged of the same collectives."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from stepcast.ir.steplog import CollectiveLog, LoggedCollective


def recorded_facts(
    ranks: Sequence[Mapping[str, Any]],
    logs: Sequence[CollectiveLog],
    collectives: Sequence[Mapping[str, Any]],
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
