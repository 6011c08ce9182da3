"""Logged steps, collectives, streams and stragglers as text."""

from collections.abc import Mapping
from typing import Any

from stepcast.report.cells import cells
from stepcast.report.text import MORE, bottleneck, facts, table
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds

Facts = Mapping[str, Any]
MOST_ROWS = 16


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def step_log_text(found: Facts, width: int) -> str:
    pairs: list[tuple[str, object]] = []
    if found["step_s"] is not None:
        within = f" (median), 90 % of steps within {format_seconds(found['p90_s'])}"
        pairs.append(("step", format_seconds(found["step_s"]) + within))
    if found["slow_steps"] or found["lost_s"]:
        slow = f"{len(found['slow_steps'])} clearly slower than the median"
        pairs.append(
            ("slow steps", f"{slow}; steps above it cost {format_seconds(found['lost_s'])} in total")
        )
    if found["tflops_per_gpu"] is not None:
        pairs.append(("model FLOP/s", f"{found['tflops_per_gpu']:.1f} TFLOP/s per GPU"))
    if found["tokens_per_s_per_gpu"] is not None:
        pairs.append(("tokens", f"{found['tokens_per_s_per_gpu']:,.0f} per second and GPU"))
    if found["peak_memory_bytes"] is not None:
        pairs.append(("peak memory", format_bytes(found["peak_memory_bytes"])))
    if found.get("run_s"):
        pairs.append(("run", format_seconds(found["run_s"])))
    pairs += [("steps logged", found["steps"]), ("program", found["program"])]
    rows = [
        (row["step"], format_seconds(row["seconds"]), f"{row['factor']:.2f}x") for row in found["slow_steps"]
    ]
    listed = table(("slow step", "took", "of the median"), rows[:MOST_ROWS], width) if rows else ""
    return _joined(facts(pairs, width), listed)


def collective_log_text(found: Facts, width: int) -> str:
    wrong_calls = len(found["unfinished"]) + len(found["mismatched"])
    verdict = f"{len(found['unfinished'])} unfinished and {len(found['mismatched'])} mismatched calls"
    pairs: list[tuple[str, object]] = [
        ("verdict", verdict if wrong_calls else "all ranks finished the same calls")
    ]
    if late := [row for row in found["stragglers"] if row["waited_s"] > 0][:1]:
        words = f"rank {late[0]['rank']} came last to {late[0]['last']:,} calls; the others waited "
        pairs.append(("latest rank", f"{words}{format_seconds(late[0]['waited_s'])} for it"))
    pairs += [
        ("program", found["program"]),
        ("ranks", len(found["ranks"])),
        ("calls", f"{found['calls']:,}"),
    ]
    rows = cells(
        found["collectives"][:MOST_ROWS],
        "kind group size_bytes calls",
        lambda row: "" if row["median_s"] is None else format_seconds(row["median_s"]),
        lambda row: "" if row["busbw_bytes_per_s"] is None else format_rate(row["busbw_bytes_per_s"]),
    )
    stuck = [
        f"{row['kind']} {row['turn']} of group {row['group']}: ranks {row['waiting']} wait"
        + (f" for ranks {row['absent']}, which never called it" if row["absent"] else "")
        for row in found["unfinished"]
    ]
    wrong = [
        f"call {row['turn']} of group {row['group']}: ranks called {row['called']}"
        for row in found["mismatched"]
    ]
    heads = ("collective", "group", "size", "calls", "median", "bus bandwidth")
    return _joined(facts(pairs, width), "\n".join(stuck), "\n".join(wrong), table(heads, rows, width))


STREAM_PARTS = {
    "compute": "computation",
    "exposed": "exposed communication",
    "copy": "copies",
    "idle": "GPU idle",
}


def streams_text(found: Facts, width: int, verbose: bool = True) -> str:
    """Return the verdict and the time of each GPU, and where *verbose* kernels and NVTX ranges."""
    step = found["steps"]
    pairs: list[tuple[str, object]] = []
    if step:
        pairs.append(("step", f"{format_seconds(step['median_s'])}, {step['count']} ranges {step['name']}"))
    named = {words: found["operations_s"][part] for part, words in STREAM_PARTS.items()}
    total_s = sum(named.values())
    pairs += bottleneck(named, total_s, (STREAM_PARTS["compute"],), "the time of a GPU")
    pairs += [("straggler", _slow_device(one)) for one in found["stragglers"]]
    if not found["stragglers"]:
        pairs.append(("straggler", "none" if len(found["devices"]) > 1 else "not known from one GPU"))
    pairs.append(("elapsed", format_seconds(found["elapsed_s"])))
    devices = [
        (
            row["device"],
            *(format_seconds(row[f"{part}_s"]) for part in ("compute", "exposed", "copy", "idle")),
        )
        for row in found["devices"]
    ]
    kernels = [(row["name"], row["runs"], format_seconds(row["total_s"])) for row in found["kernels"]]
    ranges = [(row["name"], row["runs"], format_seconds(row["total_s"])) for row in found["ranges"]]
    blocks = [
        facts(pairs, width),
        table(("GPU", "compute", "exposed communication", "copies", "idle"), devices, width),
    ]
    if not verbose:
        return _joined(*blocks, MORE.format("kernels and NVTX ranges"))
    return _joined(
        *blocks,
        table(("kernel", "runs", "total"), kernels[:MOST_ROWS], width),
        table(("NVTX range", "runs", "total"), ranges[:MOST_ROWS], width) if ranges else "",
    )


def _slow_device(one: Facts) -> str:
    more = format_seconds(one["extra_s"])
    return (
        f"GPU {one['rank']} computes {one['factor']:.2f}x as long as the median of the others ({more} more)"
    )


def stragglers_text(found: Facts, width: int, verbose: bool = True) -> str:
    """Return what slow operations cost and who is slow, and where *verbose* what each part costs alone."""
    cost_s = max(0.0, found["undelayed_s"] - found["ideal_s"])
    share = format_percent(cost_s / found["step_s"]) if found["step_s"] else "-"
    kinds = list(found["by_kind"].items())[:1]
    slow = found["stragglers"][:1]
    pairs: list[tuple[str, object]] = [
        ("step", format_seconds(found["step_s"])),
        ("slow operations cost", f"{format_seconds(cost_s)}, {share} of the step ({found['slowdown']:.3f}x)"),
        *(("bottleneck", f"{kind}: it alone makes the step {factor:.3f}x as long") for kind, factor in kinds),
        *(
            (
                "straggler",
                f"rank {one['rank']} (replica {one['dp_rank']}, stage {one['stage']}): {one['factor']:.3f}x",
            )
            for one in slow
        ),
        *((("straggler", "none"),) if not slow else ()),
        ("without CPU launch gaps", format_seconds(found["undelayed_s"])),
        ("with typical operations", format_seconds(found["ideal_s"])),
        ("due to the last stage", format_percent(found["last_stage_share"])),
        ("due to the slowest workers", format_percent(found["worst_workers_share"])),
        ("layout", f"dp {found['dp']} x pp {found['pp']}, {found['steps']} steps"),
    ]
    parts = [
        *((f"stage {at}", f"{value:.3f}") for at, value in enumerate(found["by_stage"])),
        *((f"replica {at}", f"{value:.3f}") for at, value in enumerate(found["by_dp_rank"])),
        *((kind, f"{value:.3f}") for kind, value in found["by_kind"].items()),
    ]
    workers = cells(found["stragglers"], "rank dp_rank stage", lambda row: f"{row['factor']:.3f}")
    blocks = [
        facts(pairs, width),
        table(("slow rank", "replica", "stage", "slowdown"), workers[:MOST_ROWS], width) if workers else "",
    ]
    if not verbose:
        return _joined(*blocks, MORE.format("the slowdown by each stage, replica and kind of operation"))
    return _joined(*blocks, table(("with recorded times of this alone", "slowdown"), parts[:40], width))
