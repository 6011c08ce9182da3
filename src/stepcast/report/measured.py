"""What logs and sweeps hold."""

from typing import Any

from stepcast.ir.runlog import RunLog
from stepcast.ir.sweep import CollectiveSweep
from stepcast.report.workload import layout_facts

Facts = dict[str, Any]


def sweep_facts(sweep: CollectiveSweep) -> Facts:
    rows = []
    for row in sweep.rows:
        time_s = row.out_of_place_s if row.out_of_place_s is not None else row.in_place_s
        rate = row.size_bytes / time_s if time_s else 0.0
        rows.append(
            {
                "size_bytes": row.size_bytes,
                "out_of_place_s": row.out_of_place_s,
                "in_place_s": row.in_place_s,
                "algbw_bytes_per_s": rate,
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
