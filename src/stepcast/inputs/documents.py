"""The facts of documents that ``show`` prints: workloads, timelines, logs, sweeps and models (see ``docs/json.md``)."""

from collections import defaultdict

import numpy as np

from stepcast.ir.measured import CollectiveSweep, OperatorTimes, RunLog
from stepcast.ir.model import Model
from stepcast.ir.timeline import NONE, SpanKind, Timeline
from stepcast.ir.types import DType, FactDict, pick
from stepcast.ir.work import Collective, Recorded, Transfer
from stepcast.ir.workload import Phase, Workload


def workload_facts(workload: Workload) -> FactDict:
    """Return the totals of one step, of one rank of each stage given, summed over the stages."""
    compute_s: dict[str, float] = defaultdict(float)
    computed: dict[str, int] = defaultdict(int)
    sent: dict[tuple[str, str, str], list[tuple[int, int]]] = defaultdict(list)  # kind, group, phase -> sizes, counts
    for stage in workload.stages:
        for layers, count in stage.counted_blocks(workload.micro_batches):
            for phase, op in ((op_phase, op) for layer in layers for op_phase in Phase for op in layer.ops(op_phase)):
                if isinstance(op.work, Recorded):
                    compute_s[phase] += op.work.duration_s * count
                    computed["recorded"] += count
                elif isinstance(op.work, Collective | Transfer):
                    kind, times = _message_kind(op.work)
                    sent[kind, op.work.group, phase].append((op.work.size_bytes, count * times))
                else:
                    computed[type(op.work).__name__.lower()] += count
    lines, element, stages = workload.note("lines"), workload.note("element_dtype"), workload.stages
    layer_count = sum(stage.body_layer_count for stage in stages)
    blocks = [block for stage in stages for block in stage.body]
    messages: list[FactDict] = [
        {"kind": kind, "group": group, "phase": phase, "count": sum(count for _, count in sizes)}
        | {"total_bytes": sum(size_bytes * count for size_bytes, count in sizes)}
        | {"smallest_bytes": min(sizes)[0], "largest_bytes": max(sizes)[0]}
        for (kind, group, phase), sizes in sent.items()
    ]
    communication_bytes = sum(row["total_bytes"] for row in messages)
    elements = {"communication_elements": round(communication_bytes / DType(element).bytes)} if element else {}
    return {
        "kind": "workload",
        **workload.layout.facts(),
        "lines": int(lines) if lines else layer_count,
        "micro_batches": workload.micro_batches,
        "layers_per_micro_batch": layer_count,
        "stages_given": len(workload.stages),
        "boundary_bytes": workload.boundary_bytes,
        "compute_s": sum(compute_s.values()),
        "compute_by_phase_s": dict(compute_s),
        "ops": dict(computed),
        "communication_bytes": communication_bytes,
        **elements,
        "collectives": messages,
        "body": [{"layers": [layer.name for layer in block.layers], "repeat": block.repeat} for block in blocks],
        "prologue": [layer.name for stage in workload.stages for layer in stage.prologue],
        "epilogue": [layer.name for stage in workload.stages for layer in stage.epilogue],
        "notes": {key: value for key, value in workload.notes if key != "lines"},
    }


def _message_kind(work: Collective | Transfer) -> tuple[str, int]:
    """Return what a message is, and how many of it follow one another."""
    return (work.kind, work.times) if isinstance(work, Collective) else (work.direction, 1)


def timeline_facts(timeline: Timeline) -> FactDict:
    """Return the facts of a timeline and of what its trace says of the run.

    Times are those of top-level spans, summed over the ranks present; parts of spans are in *communication*.
    """
    operations = operation_rows(timeline)
    rows_of = {rank: timeline.rank_of == rank for rank in timeline.ranks}
    spans = {
        str(rank): float(timeline.end_s[rows].max() - timeline.start_s[rows].min())
        for rank, rows in rows_of.items()
        if rows.any()
    }
    facts: FactDict = {
        "kind": "timeline",
        "measured": timeline.measured,
        "ranks": list(timeline.ranks),
        "spans": len(timeline),
        "lanes": len(timeline.lanes),
        "span_s": timeline.span_s,
        "rank_span_s": spans,
        **(timeline.layout.facts() if timeline.layout is not None else {}),
        **timeline.facts,
    }
    if timeline.stage_of_rank:
        facts["stage_of_rank"] = {str(rank): stage for rank, stage in timeline.stage_of_rank.items()}
    facts["operations_s"] = {row["name"]: row["total_s"] for row in operations}
    facts["operations"] = operations
    facts["communication"] = communication_rows(timeline)
    return facts


def operation_rows(timeline: Timeline) -> list[FactDict]:
    """Return top-level operations by name, longest first; host activity is apart from device work."""
    rows = np.flatnonzero(timeline.top_level)
    keys = timeline.name_of[rows].astype(np.int64) * len(SpanKind) + timeline.kind_of[rows]
    distinct, inverse = np.unique(keys, return_inverse=True)
    counts = np.bincount(inverse, minlength=len(distinct))
    totals = np.bincount(inverse, weights=timeline.duration_s[rows], minlength=len(distinct))
    longest = np.zeros(len(distinct))
    np.maximum.at(longest, inverse, timeline.duration_s[rows])
    columns = zip(*(column.tolist() for column in (distinct, counts, totals, longest)), strict=True)
    operations = [
        {"name": timeline.names[key // len(SpanKind)], "kind": SpanKind(key % len(SpanKind)).name.lower()}
        | {"count": count, "total_s": total, "longest_s": high}
        for key, count, total, high in columns
    ]
    return sorted(operations, key=lambda row: (-row["total_s"], row["name"]))


def communication_rows(timeline: Timeline) -> list[FactDict]:
    """Return messages by kind, group and size, with the shortest time each took."""
    rows = []
    order = np.argsort(timeline.work_of, kind="stable")
    works = timeline.work_of[order]
    starts = np.flatnonzero(np.diff(works, prepend=NONE - 1))
    ends = np.append(starts[1:], len(works))[: len(starts)]
    for start, end in zip(starts, ends, strict=True):
        work = None if works[start] == NONE else timeline.works[works[start]]
        if not isinstance(work, Collective | Transfer):
            continue
        times_s = timeline.duration_s[order[start:end]]
        kind, times = _message_kind(work)
        count = int(end - start) * times
        row = {"kind": str(kind), "group": str(work.group), "size_bytes": work.size_bytes, "count": count}
        row |= {"total_bytes": work.size_bytes * count, "total_s": float(times_s.sum())}
        rows.append(row | {"shortest_s": float(times_s.min()) / times})
    return sorted(rows, key=lambda row: -row["total_s"])


def run_log_facts(log: RunLog) -> FactDict:
    """Return counts of what a log holds, and the medians of warm steps."""
    times, ends, batch = log.layer_times, dict(enumerate(log.stage_ends)), log.batch_time()
    stages = [
        {"stage": stage, "ends_with": ends.get(stage)}
        | {"layers": len(set(times.layer_of[times.stage_of == stage].tolist()))}
        | {"median_forward_s": median.seconds, "steps": [median.first, median.last]}
        for stage, median in sorted(log.stage_forward().items())
    ]
    return {
        "kind": "run log",
        **log.layout.facts(),
        **pick(log, "parameters micro_batch micro_batches global_batch blocks"),
        "layer_records": len(times),
        "batches": len(log.batches),
        "median_batch_s": batch.seconds if batch else None,
        "median_batch_range": [batch.first, batch.last] if batch else None,
        "stages": stages,
        **log.facts,
    }


SIZE = "size_bytes out_of_place_s in_place_s"


def sweep_facts(sweep: CollectiveSweep) -> FactDict:
    """Return the sizes of a sweep with their times and bandwidths."""
    times_s = [row.in_place_s if row.out_of_place_s is None else row.out_of_place_s for row in sweep.rows]
    return {
        "kind": "sweep",
        **pick(sweep, "collective=kind ranks nodes device dtype"),
        "sizes": len(sweep.rows),
        "rows": [
            {**pick(row, SIZE), "algbw_bytes_per_s": row.size_bytes / time_s if time_s else 0.0}
            for row, time_s in zip(sweep.rows, times_s, strict=True)
        ],
    }


def operator_times_facts(measured: OperatorTimes) -> FactDict:
    """Return counts and ranges by operator and number format."""
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    for operator in measured.operators:
        work = operator.works[0]
        groups[operator.name, "" if isinstance(work, Recorded) else str(work.dtype)].append(operator.seconds)
    return {
        "kind": "operator times",
        "device": measured.device or None,
        "points": len(measured.operators),
        "left_out": dict(measured.left_out),
        "operators": [
            {"operator": name, "dtype": dtype, "points": len(seconds)}
            | {"shortest_s": min(seconds), "longest_s": max(seconds)}
            for (name, dtype), seconds in groups.items()
        ],
    }


def model_facts(model: Model) -> FactDict:
    """Return the sizes and exact parameter counts of a model."""
    facts = {"kind": "model", **pick(model, "name layers hidden heads kv_heads head_dim ffn vocab max_seq tied gated")}
    kinds = {"activation": model.activation, "position": model.position.kind, "norm": model.norm.kind}
    facts |= {name: str(kind) for name, kind in kinds.items()}
    facts |= pick(model, "parameters active_parameters embedding_parameters head_parameters")
    experts = "experts=experts.count experts_per_token=experts.top_k expert_ffn=experts.ffn expert_layers"
    return facts if model.experts is None else facts | pick(model, experts)
