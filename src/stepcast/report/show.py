"""The facts of a document as text: one function per kind of document, looked up in a plain table."""

from collections.abc import Callable, Mapping
from typing import Any

from stepcast.units import format_bytes, format_count, format_percent, format_rate, format_seconds, format_short_count
from stepcast.views.cells import cells
from stepcast.views.text import facts, table

Facts = Mapping[str, Any]
MOST_ROWS = 16


def show_text(found: Facts, width: int) -> str:
    """A fact list, then tables, separated by blank lines."""
    return "\n\n".join(part for part in SHOWN[found["kind"]](found, width) if part)


def _layout(found: Facts) -> str:
    """Degrees whose product is the GPU count, then those that share the same GPUs."""
    if "tp" not in found:
        return "not known"
    product = " x ".join(
        f"{name} {found[name]}" for name in ("tp", "cp", "dp", "pp") if name != "cp" or found[name] > 1
    )
    parts = [f"{product} = {format_count(found['gpus'])} GPUs" if found["gpus"] > 1 else "one GPU"]
    if found["ep"] > 1:
        parts.append(f"ep {found['ep']}")
    if found["vpp"] > 1:
        parts.append(f"vpp {found['vpp']} (chunks per stage)")
    return ", ".join(parts)


def _cut(rows: list[Any]) -> tuple[list[Any], str]:
    """The first rows, and a line that says how many were left out."""
    if len(rows) <= MOST_ROWS:
        return rows, ""
    return rows[:MOST_ROWS], f"... and {len(rows) - MOST_ROWS} more (all of them with --json)"


def _workload(found: Facts, width: int) -> list[str]:
    repeats = [f"{block['repeat']} x {len(block['layers'])} lines" for block in found["body"] if block["repeat"] > 1]
    boundary = found["boundary_bytes"]
    pairs = [
        ("layout", _layout(found)),
        ("lines", format_count(found["lines"])),
        ("micro-batches", f"{found['micro_batches']} of {found['layers_per_micro_batch']} lines"),
        ("repeated layers", ", ".join(repeats) or "none"),
        ("once per step", f"{len(found['prologue'])} lines before, {len(found['epilogue'])} after"),
        ("compute", format_seconds(found["compute_s"]) + _phases(found["compute_by_phase_s"])),
        ("between stages", "not stated" if boundary is None else format_bytes(boundary) + " per micro-batch"),
    ]
    if "communication_elements" in found:
        pairs.append(("communicated", f"{format_count(found['communication_elements'])} elements"))
    if set(found["ops"]) - {"recorded"}:
        pairs.append(("ops", ", ".join(f"{count} {kind}" for kind, count in found["ops"].items())))
    rows = cells(
        sorted(found["collectives"], key=lambda row: -row["total_bytes"]),
        "kind group phase count, largest_bytes total_bytes",
    )
    shown, more = _cut(rows)
    headers = ("communication", "group", "phase", "count", "largest", "total per rank")
    return [facts(pairs, width), table(headers, shown, width) if rows else "", more]


def _phases(compute_by_phase_s: Mapping[str, float]) -> str:
    parts = [f"{phase} {format_seconds(seconds)}" for phase, seconds in compute_by_phase_s.items() if seconds]
    return f" ({', '.join(parts)})" if len(parts) > 1 else ""


MODEL_FACTS = ("hidden", "layers", "heads", "seq", "micro_batch", "micro_batches", "vocab", "dtype")


def _timeline(found: Facts, width: int) -> list[str]:
    ranks = found["ranks"]
    listed = f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks ({ranks[0]}..{ranks[-1]})"
    pairs: list[tuple[str, object]] = [
        ("layout", _layout(found)),
        ("seen", f"{listed}, {format_count(found['spans'])} spans on {found['lanes']} lanes"),
        ("span", format_seconds(found["span_s"])),
    ]
    model = ", ".join(f"{name.replace('_', '-')} {found[name]}" for name in MODEL_FACTS if found.get(name) is not None)
    if model:
        pairs.append(("model", model))
    for stage, count in (found.get("parameters") or {}).items():
        pairs.append((f"parameters, stage {stage}", f"{format_count(count)} per rank"))
    for name in ("devices", "world_size", "backend", "steps"):
        if value := found.get(name):
            pairs.append(
                (name.replace("_", " "), ", ".join(map(str, value)) if isinstance(value, list | tuple) else value)
            )
    operations = cells(found["operations"], "name kind count, total_s longest_s")
    messages = cells(
        found["communication"],
        "kind group size_bytes count, total_s shortest_s",
        lambda row: format_rate(row["size_bytes"] / row["shortest_s"]) if row["shortest_s"] else "-",
    )
    shown, more = _cut(operations)
    shown_messages, more_messages = _cut(messages)
    return [
        facts(pairs, width),
        table(("operation", "kind", "count", "total", "longest"), shown, width),
        more,
        table(
            ("communication", "group", "size", "count", "total", "shortest", "size / shortest"), shown_messages, width
        )
        if messages
        else "",
        more_messages,
    ]


def _sweep(found: Facts, width: int) -> list[str]:
    pairs = [
        ("collective", found["collective"] or "not stated"),
        ("ranks", f"{found['ranks']} on {found['nodes']} node{'s' if found['nodes'] != 1 else ''}"),
        ("device", found["device"] or "not stated"),
        ("element", found["dtype"] or "not stated"),
    ]
    rows = cells(found["rows"], "size_bytes out_of_place_s in_place_s algbw_bytes_per_s")
    return [facts(pairs, width), table(("size", "out of place", "in place", "size / time"), rows, width)]


def _operator_times(found: Facts, width: int) -> list[str]:
    pairs = [("measured", f"{format_count(found['points'])} operators")]
    if found["left_out"]:
        pairs.append(("not known", f"{sum(found['left_out'].values())} rows"))
    pairs.append(("use", "stepcast calibrate FILE --gpu G -o C.toml"))
    rows = cells(found["operators"], "operator dtype points, shortest_s longest_s")
    return [facts(pairs, width), table(("operator", "dtype", "points", "shortest", "longest"), rows, width)]


def _run_log(found: Facts, width: int) -> list[str]:
    pairs = [
        ("layout", _layout(found)),
        ("parameters", format_count(found["parameters"])),
        ("batch", f"{found['global_batch']} = {found['micro_batches']} micro-batches of {found['micro_batch']}"),
        ("found", f"{found['blocks']} rank reports, {found['layer_records']} layer records"),
        ("batches", f"{found['batches']} lines"),
        ("median batch", format_seconds(found["median_batch_s"]) if found["median_batch_s"] else "not known"),
    ]
    rows = cells(found["stages"], "stage", lambda row: row["ends_with"] or "-", "layers median_forward_s")
    return [facts(pairs, width), table(("stage", "ends with", "layers", "forward per micro-batch"), rows, width)]


def _model(found: Facts, width: int) -> list[str]:
    pairs = [
        (
            name.replace("_", " "),
            format_count(value) if isinstance(value, int) and not isinstance(value, bool) else value,
        )
        for name, value in found.items()
        if name not in ("kind", "format", "file", "title", "warnings") and not isinstance(value, dict)
    ]
    return [facts(pairs, width)]


SHOWN: dict[str, Callable[[Facts, int], list[str]]] = {
    "workload": _workload,
    "timeline": _timeline,
    "sweep": _sweep,
    "operator times": _operator_times,
    "run log": _run_log,
    "model": _model,
}


# ---- captured programs ----

PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


def captured_text(found: Facts, width: int) -> str:
    """What it is, what fills its memory, and its layers with their repeats."""
    memory = found["memory_bytes"]
    pairs = [
        ("program", found["name"]),
        ("parameters", format_count(found["parameters"])),
        ("a step", f"{format_short_count(found['flops'])} FLOPs in {found['ops']:,} kernels"),
        ("of a batch", f"{found['batch']:,} ({found['tokens']:,} tokens) in {found['precision']}"),
        ("peak memory", format_bytes(found["peak_memory_bytes"])),
        *((f"  {name}", format_bytes(memory[name])) for name in PARTS),
        *((name, value) for name, value in found["facts"].items() if value),
    ]
    blocks = [
        (block["repeat"], len(block["layers"]), _named(block["layers"]))
        for block in found["body"]
        if block["repeat"] > 1
    ]
    rows = table(("repeats", "modules", "from, to"), blocks[:MOST_ROWS], width) if blocks else ""
    return "\n\n".join(part for part in (facts(pairs, width), rows) if part)


def _named(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]}, {layers[-1]}"


# ---- workloads that were run ----


def ran_text(found: Facts, width: int) -> str:
    """Return the measured and the predicted step of a workload that was run."""
    ranks = found["ranks"]
    pairs = [
        ("ran on", found["device"]),
        ("ranks", f"{len(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]} alone" if ranks else "none"),
        ("ops", f"{found['ops']:,}"),
        ("step", format_seconds(found["step_s"])),
        ("predicted step", format_seconds(found["predicted_step_s"])),
    ]
    if found["priced_collectives_s"]:
        pairs.append(("messages, priced", format_seconds(found["priced_collectives_s"])))
    error = found["mean_abs_error"]
    if error is not None:
        pairs.append(("mean error by kind", format_percent(error)))
    rows = cells(
        found["kinds"],
        "kind ops measured_s predicted_s",
        lambda row: "" if row["error"] is None else f"{row['error']:+.1%}",
    )
    heads = ("kind of op", "ops", "measured", "predicted", "error")
    return "\n\n".join((facts(pairs, width), table(heads, rows, width)))
