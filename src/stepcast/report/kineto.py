"""Analysed profiler traces as text."""

from typing import Any

from stepcast.report.cells import cells
from stepcast.report.text import MORE, bottleneck, facts, table
from stepcast.units import format_percent, format_seconds

# Of the parts of a rank's window, so that a rank fits a line.
HEADS = {
    "exposed communication": "exposed",
    "exposed copies": "copies",
    "idle: host": "host late",
    "idle: between kernels": "gaps",
    "idle: dependency": "held back",
}
MOST_RANKS = 16
MOST_ROWS = 10
NAME_WIDTH = 60


def kineto_text(found: dict[str, Any], width: int, verbose: bool = True) -> str:
    """Return the facts of a KinetoAnalysis: the verdict, the breakdown, and where *verbose* the details."""
    ranks = found["ranks"]
    one = ranks[0]
    head: list[tuple[str, object]] = [
        ("step", format_seconds(found["step_s"])),
        *bottleneck(mean_parts(found), found["step_s"], ("compute",)),
        *_straggler(found),
        ("ranks", f"{len(ranks)}, {one['steps'] or 'no'} steps marked"),
        ("compute", f"{format_seconds(found['compute_s'])} per step"),
        (
            "communication",
            f"{format_seconds(found['communication_s'])}: "
            f"{format_seconds(found['overlapped_comm_s'])} behind computation, "
            f"{format_seconds(found['exposed_comm_s'])} exposed",
        ),
        ("idle", f"{format_seconds(found['bubble_s'])} per step"),
    ]
    if one["launch_lag_s"] is not None:
        head.append(
            (
                "host",
                f"{one['launches_per_step']:,} launches per step, "
                f"{format_seconds(one['launch_lag_s'])} ahead of the GPU (median)",
            )
        )
    blocks = [facts(head, width), _ranks(found, width), _classes(found, width)]
    if not verbose:
        return "\n\n".join([*blocks, MORE.format("kernels, collectives and streams")])
    blocks.append(_kernels(found, width))
    if found["communication_by_group_s"]:
        rows = [
            (name, format_seconds(times["total"]), format_seconds(times["exposed"]))
            for name, times in found["communication_by_group_s"].items()
        ]
        blocks.append(table(("communication of", "per step", "exposed"), rows, width))
    if found["collectives"]:
        blocks.append(_collectives(found, width))
    if len(ranks) == 1 and ranks[0]["streams"]:
        blocks.append(_streams(ranks[0], width))
    return "\n\n".join(blocks)


def mean_parts(found: dict[str, Any]) -> dict[str, float]:
    """Return the mean over ranks of the seconds a step spends in each part."""
    ranks = found["ranks"]
    return {
        part: sum(rank["breakdown_s"][part] / max(rank["steps"], 1) for rank in ranks) / len(ranks)
        for part in ranks[0]["breakdown_s"]
    }


def _ranks(found: dict[str, Any], width: int) -> str:
    parts = list(found["ranks"][0]["breakdown_s"])
    rows = []
    for rank in found["ranks"][:MOST_RANKS]:
        count = max(rank["steps"], 1)
        cells = [format_seconds(rank["breakdown_s"][part] / count) for part in parts]
        waits = rank["wait_s"]
        rows.append((str(rank["rank"]), *cells, "-" if waits is None else format_seconds(waits / count)))
    lines = table(("rank", *(HEADS.get(part, part) for part in parts), "waits"), rows, width)
    left_out = len(found["ranks"]) - MOST_RANKS
    return lines + (f"\n... and {left_out} more" if left_out > 0 else "")


def _classes(found: dict[str, Any], width: int) -> str:
    whole = sum(found["operations_s"].values()) or 1.0
    rows = [
        (name, format_seconds(seconds), format_percent(seconds / whole))
        for name, seconds in found["operations_s"].items()
    ]
    return table(("class of kernels", "per step", "share"), rows, width)


def _kernels(found: dict[str, Any], width: int) -> str:
    rows = cells(found["kernels"][:MOST_ROWS], lambda kernel: _short(kernel["name"]), "class count, total_s")
    return table(("kernel", "class", "runs", "total"), rows, width)


def _short(name: str) -> str:
    """Without the words that every PyTorch kernel starts with."""
    for word in ("void ", "at::native::", "(anonymous namespace)::"):
        name = name.replace(word, "")
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


def _collectives(found: dict[str, Any], width: int) -> str:
    rows = cells(
        found["collectives"][:MOST_ROWS],
        "kind group size_bytes count, total_s transfer_s",
        lambda row: format_seconds(row["wait_s"]) if row["matched"] else "-",
        "busbw_bytes_per_s",
    )
    heads = ("collective", "group", "size", "runs", "total", "one transfer", "waits", "bus bandwidth")
    return table(heads, rows, width)


def _streams(rank: dict[str, Any], width: int) -> str:
    rows = cells(rank["streams"], "name spans, busy_s compute_s communication_s exposed_communication_s")
    return table(("stream", "spans", "busy", "compute", "communication", "exposed"), rows, width)


def _straggler(found: dict[str, Any]) -> list[tuple[str, object]]:
    """Return the slow ranks, and how long the others wait in collectives that they come to last."""
    if not found["stragglers"]:
        return [("straggler", "none" if len(found["ranks"]) > 1 else "not known from one rank")]
    steps = max(found["ranks"][0]["steps"], 1)
    lines: list[tuple[str, object]] = []
    for one in found["stragglers"]:
        text = f"rank {one['rank']} computes {one['factor']:.2f}x as long as the median of the others"
        if one["meetings"]:
            waits_s = one["waits_s"] / steps
            text += (
                f"; the others wait {format_seconds(waits_s)} per step, and it came last to {one['last']:,} "
                f"of {one['meetings']:,} matched collectives"
            )
        lines.append(("straggler", text))
    return lines
