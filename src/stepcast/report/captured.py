"""A captured program as text."""

from collections.abc import Mapping
from typing import Any

from stepcast.report.text import facts, table
from stepcast.units import format_bytes, format_count, format_short_count

MOST_ROWS = 16
PARTS = ("parameters", "gradients", "optimizer", "activations", "temporary")


def captured_text(found: Mapping[str, Any], width: int) -> str:
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
