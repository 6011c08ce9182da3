"""What a Workload holds: layout, counts, compute, and bytes per collective and group."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from stepcast.ir.dtype import DType
from stepcast.ir.work import Collective, Recorded, Transfer, Work
from stepcast.ir.workload import Layer, LayerTable, Phase, Workload

Facts = dict[str, Any]
MessageKey = tuple[str, str, str]  # kind, group, phase


def workload_facts(workload: Workload) -> Facts:
    """Totals of one step, of one rank of each stage given, summed over the stages."""
    compute_s: dict[str, float] = defaultdict(float)
    computed: dict[str, int] = defaultdict(int)
    messages: dict[MessageKey, dict[str, int]] = {}
    for stage in workload.stages:
        for layers, count in stage.counted_blocks(workload.micro_batches):
            if isinstance(layers, LayerTable):
                for phase in Phase:
                    compute_s[phase] += layers.recorded_s(phase) * count
                    computed["recorded"] += len(layers) * count
                for phase, op, times in layers.messages():
                    _count_message(messages, op.work, phase, count * times)
                continue
            ops = ((each, op) for layer in layers for each in Phase for op in layer.ops(each))
            for phase, op in ops:
                work = op.work
                if isinstance(work, Recorded):
                    compute_s[phase] += work.duration_s * count
                    computed["recorded"] += count
                elif isinstance(work, Collective | Transfer):
                    _count_message(messages, work, phase, count)
                else:
                    computed[type(work).__name__.lower()] += count
    rows: list[Facts] = [
        {"kind": kind, "group": group, "phase": phase, **counts}
        for (kind, group, phase), counts in messages.items()
    ]
    lines = workload.note("lines")
    communication_bytes = sum(row["total_bytes"] for row in rows)
    element = workload.note("element_dtype")
    elements = (
        {"communication_elements": round(communication_bytes / DType(element).bytes)} if element else {}
    )
    return {
        "kind": "workload",
        **workload.layout.facts(),
        "lines": int(lines) if lines else sum(stage.body_layer_count for stage in workload.stages),
        "micro_batches": workload.micro_batches,
        "layers_per_micro_batch": sum(stage.body_layer_count for stage in workload.stages),
        "stages_given": len(workload.stages),
        "boundary_bytes": workload.boundary_bytes,
        "compute_s": sum(compute_s.values()),
        "compute_by_phase_s": dict(compute_s),
        "ops": dict(computed),
        "communication_bytes": communication_bytes,
        **elements,
        "collectives": rows,
        "body": [
            {"layers": _names(block.layers), "repeat": block.repeat}
            for stage in workload.stages
            for block in stage.body
        ],
        "prologue": [layer.name for stage in workload.stages for layer in stage.prologue],
        "epilogue": [layer.name for stage in workload.stages for layer in stage.epilogue],
        "notes": {key: value for key, value in workload.notes if key != "lines"},
    }


def _names(layers: Sequence[Layer]) -> list[str]:
    return list(layers.names()) if isinstance(layers, LayerTable) else [layer.name for layer in layers]


def _count_message(messages: dict[MessageKey, dict[str, int]], work: Work, phase: Phase, count: int) -> None:
    assert isinstance(work, Collective | Transfer)
    kind, times = (work.kind, work.times) if isinstance(work, Collective) else (work.direction, 1)
    size_bytes = work.size_bytes
    row = messages.setdefault(
        (kind, work.group, phase),
        {"count": 0, "total_bytes": 0, "smallest_bytes": size_bytes, "largest_bytes": size_bytes},
    )
    row["count"] += count * times
    row["total_bytes"] += size_bytes * count * times
    row["smallest_bytes"] = min(row["smallest_bytes"], size_bytes)
    row["largest_bytes"] = max(row["largest_bytes"], size_bytes)
