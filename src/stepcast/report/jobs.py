"""Logged steps, collectives, streams and stragglers as text."""

from collections.abc import Mapping
from typing import Any

from stepcast.report.cells import cells
from stepcast.report.text import facts, table
from stepcast.units import format_bytes, format_percent, format_rate, format_seconds

Facts = Mapping[str, Any]
MOST_ROWS = 16


def _joined(*parts: str) -> str:
    return "\n\n".join(part for part in parts if part)


def step_log_text(found: Facts, width: int) -> str:
    pairs: list[tuple[str, object]] = [("program", found["program"]), ("steps", found["steps"])]
    if found["step_s"] is not None:
        within = f", nine in ten within {format_seconds(found['p90_s'])}"
        pairs.append(("step", format_seconds(found["step_s"]) + within))
    if found["tflops_per_gpu"] is not None:
        pairs.append(("model FLOP/s", f"{found['tflops_per_gpu']:.1f} TFLOP/s per GPU"))
    if found["tokens_per_s_per_gpu"] is not None:
        pairs.append(("tokens", f"{found['tokens_per_s_per_gpu']:,.0f} a second and GPU"))
    if found["peak_memory_bytes"] is not None:
        pairs.append(("peak memory", format_bytes(found["peak_memory_bytes"])))
    if found.get("run_s"):
        pairs.append(("run", format_seconds(found["run_s"])))
    if found["lost_s"]:
        pairs.append(("beyond the usual step", format_seconds(found["lost_s"])))
    rows = [
        (row["step"], format_seconds(row["seconds"]), f"{row['factor']:.2f}") for row in found["slow_steps"]
    ]
    slow = table(("slow step", "took", "times usual"), rows[:MOST_ROWS], width) if rows else ""
    return _joined(facts(pairs, width), slow)


def collective_log_text(found: Facts, width: int) -> str:
    pairs = [("program", found["program"]), ("ranks", len(found["ranks"])), ("calls", f"{found['calls']:,}")]
    rows = cells(
        found["collectives"][:MOST_ROWS],
        "kind group size_bytes calls",
        lambda row: "" if row["median_s"] is None else format_seconds(row["median_s"]),
        lambda row: "" if row["busbw_bytes_per_s"] is None else format_rate(row["busbw_bytes_per_s"]),
    )
    stuck = [
        f"{row['kind']} {row['turn']} of group {row['group']}: ranks {row['waiting']} wait"
        + (f" for ranks {row['absent']}, which never came" if row["absent"] else "")
        for row in found["unfinished"]
    ]
    wrong = [
        f"call {row['turn']} of group {row['group']}: ranks called {row['called']}"
        for row in found["mismatched"]
    ]
    heads = ("collective", "group", "size", "calls", "median", "bus bandwidth")
    return _joined(facts(pairs, width), table(heads, rows, width), "\n".join(stuck), "\n".join(wrong))


def streams_text(found: Facts, width: int) -> str:
    step = found["steps"]
    pairs: list[tuple[str, object]] = [("elapsed", format_seconds(found["elapsed_s"]))]
    if step:
        pairs.append(("step", f"{format_seconds(step['median_s'])}, {step['count']} ranges {step['name']}"))
    devices = [
        (
            row["device"],
            *(format_seconds(row[f"{part}_s"]) for part in ("compute", "exposed", "copy", "idle")),
        )
        for row in found["devices"]
    ]
    kernels = [(row["name"], row["runs"], format_seconds(row["total_s"])) for row in found["kernels"]]
    ranges = [(row["name"], row["runs"], format_seconds(row["total_s"])) for row in found["ranges"]]
    return _joined(
        facts(pairs, width),
        table(("GPU", "compute", "exposed communication", "copies", "idle"), devices, width),
        table(("kernel", "runs", "total"), kernels[:MOST_ROWS], width),
        table(("range of NVTX", "runs", "total"), ranges[:MOST_ROWS], width) if ranges else "",
    )


def stragglers_text(found: Facts, width: int) -> str:
    pairs: list[tuple[str, object]] = [
        ("layout", f"dp {found['dp']} x pp {found['pp']}, {found['steps']} steps"),
        ("step", format_seconds(found["step_s"])),
        ("without gaps of the host", format_seconds(found["undelayed_s"])),
        ("were all operations as usual", format_seconds(found["ideal_s"])),
        ("slowed down", f"{found['slowdown']:.3f} times"),
        ("the last stage explains", format_percent(found["last_stage_share"])),
        ("the slowest workers explain", format_percent(found["worst_workers_share"])),
    ]
    parts = [
        *((f"stage {at}", f"{value:.3f}") for at, value in enumerate(found["by_stage"])),
        *((f"replica {at}", f"{value:.3f}") for at, value in enumerate(found["by_dp_rank"])),
        *((kind, f"{value:.3f}") for kind, value in found["by_kind"].items()),
    ]
    workers = cells(found["stragglers"], "rank dp_rank stage", lambda row: f"{row['factor']:.3f}")
    return _joined(
        facts(pairs, width),
        table(("recorded times of this alone", "slow the step down"), parts[:40], width),
        table(("slow rank", "replica", "stage", "times"), workers[:MOST_ROWS], width) if workers else "",
    )
