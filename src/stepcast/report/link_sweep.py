"""A measured sweep beside its prediction, as text."""

from typing import Any

from stepcast.report.cells import cells
from stepcast.report.text import bullet, facts, table
from stepcast.units import format_bytes, format_percent, format_seconds

Facts = dict[str, Any]


def sweep_text(found: Facts, width: int) -> str:
    nodes = found["nodes"]
    causes = "; ".join(one["means"] for one in found["findings"])
    pairs = [
        ("verdict", causes or "all sizes reach the predicted bandwidth"),
        ("collective", found["collective"]),
        ("ranks", f"{found['ranks']} on {nodes} node{'s' if nodes != 1 else ''}"),
        ("device", found["device"] or "not stated"),
        ("cluster", found["cluster"]),
        ("mean error", f"{format_percent(found['mean_abs_error'])} of the measured times"),
        *((f"{name} sizes", _range(one)) for name, one in found["ranges"].items() if one),
    ]
    rows = cells(
        found["rows"],
        lambda row: format_bytes(row["size_bytes"]) + (" *" if row["spike"] else ""),
        "measured_s predicted_s measured_busbw_bytes_per_s predicted_busbw_bytes_per_s reached",
        lambda row: f"{row['algorithm']} {row['protocol']}",
    )
    heads = ("size", "measured", "predicted", "busbw", "predicted", "reached", "predicted with")
    blocks = [facts(pairs, width), *_findings(found["findings"], width), table(heads, rows, width)]
    if any(row["spike"] for row in found["rows"]):
        blocks.append("* slower than the next larger size: disturbed, and not judged")
    return "\n\n".join(blocks)


def _range(one: Facts) -> str:
    reached = (
        "disturbed"
        if one["reached"] is None
        else f"{format_percent(one['reached'])} of the predicted bandwidth"
    )
    return f"{format_bytes(one['from_bytes'])} to {format_bytes(one['to_bytes'])}: {reached}"


def _findings(found: list[Facts], width: int) -> list[str]:
    return [
        "\n".join(
            [
                bullet(f"{one['cause']}: {one['means']}", "- ", width),
                bullet(one["rule"], "  because ", width),
                bullet(one["check"], "  look at ", width),
            ]
        )
        for one in found
    ]


def calibration_text(found: Facts, width: int) -> str:
    """Constants fitted to sweeps."""
    pairs = [
        ("cluster", found["cluster"]),
        ("points", f"{found['points']} sizes of {len(found['logs'])} logs"),
        (
            "mean error",
            f"{format_percent(found['before'])} before, {format_percent(found['after'])} after, "
            f"{format_percent(found['left_out'])} on sizes left out",
        ),
    ]
    rows = [
        (key, one["text"], _give_or_take(key, one), one["means"]) for key, one in found["constants"].items()
    ]
    return "\n\n".join(
        [
            facts(pairs, width),
            table(("constant", "value", "give or take", "what it is"), rows, width, whole=(0,)),
        ]
    )


def _give_or_take(key: str, one: Facts) -> str:
    error = one["standard_error"]
    return format_seconds(error) if one["text"].endswith(" us") else f"{error:.2g}"
