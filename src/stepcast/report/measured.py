"""What logs and sweeps hold."""

from typing import Any

from stepcast.ir.operator_times import OperatorTimes
from stepcast.ir.runlog import RunLog
from stepcast.ir.sweep import CollectiveSweep
from stepcast.ir.work import Recorded

Facts = dict[str, Any]


def run_log_facts(log: RunLog) -> Facts:
    """Counts of what was found, and the medians of warm steps."""
    times = log.layer_times
    ends = dict(enumerate(log.stage_ends))
    stages = [
        {
            "stage": stage,
            "ends_with": ends.get(stage),
            "layers": len(set(times.layer_of[times.stage_of == stage].tolist())),
            "median_forward_s": median.seconds,
            "steps": [median.first, median.last],
        }
        for stage, median in sorted(log.stage_forward().items())
    ]
    batch = log.batch_time()
    return {
        "kind": "run log",
        **log.layout.facts(),
        "parameters": log.parameters,
        "micro_batch": log.micro_batch,
        "micro_batches": log.micro_batches,
        "global_batch": log.global_batch,
        "blocks": log.blocks,
        "layer_records": len(times),
        "batches": len(log.batches),
        "median_batch_s": batch.seconds if batch else None,
        "median_batch_range": [batch.first, batch.last] if batch else None,
        "stages": stages,
        **log.facts,
    }


def sweep_facts(sweep: CollectiveSweep) -> Facts:
    rows = []
    for row in sweep.rows:
        time_s = row.out_of_place_s if row.out_of_place_s is not None else row.in_place_s
        rows.append(
            {
                "size_bytes": row.size_bytes,
                "out_of_place_s": row.out_of_place_s,
                "in_place_s": row.in_place_s,
                "algbw_bytes_per_s": row.size_bytes / time_s if time_s else 0.0,
            }
        )
    return {
        "kind": "sweep",
        "collective": sweep.kind,
        "ranks": sweep.ranks,
        "nodes": sweep.nodes,
        "device": sweep.device,
        "dtype": sweep.dtype,
        "sizes": len(rows),
        "rows": rows,
    }


def operator_times_facts(measured: OperatorTimes) -> Facts:
    """Counts and ranges by operator and number format."""
    groups: dict[tuple[str, str], list[float]] = {}
    for one, seconds in measured.kinds():
        work = one.works[0]
        dtype = "" if isinstance(work, Recorded) else str(work.dtype)
        groups.setdefault((one.name, dtype), []).extend(seconds)
    return {
        "kind": "operator times",
        "device": measured.device or None,
        "points": len(measured.operators),
        "left_out": dict(measured.left_out),
        "operators": [
            {
                "operator": name,
                "dtype": dtype,
                "points": len(seconds),
                "shortest_s": min(seconds),
                "longest_s": max(seconds),
            }
            for (name, dtype), seconds in groups.items()
        ],
    }
