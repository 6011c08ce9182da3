"""``stepcast simulate --engine simai``: a workload priced as SimAI-analytical prices it."""

import argparse
from typing import Any

from stepcast.cli.output import print_json, print_warnings, terminal_width
from stepcast.cost.simai import SimaiOverlap, SimaiPrice, SimaiSystem, simai_price
from stepcast.ir.facts import find_doubts
from stepcast.ir.workload import Workload
from stepcast.units import US, format_percent
from stepcast.views.text import table

PARTS = ("dp", "dp_ep", "tp", "ep", "pp", "bubble", "compute", "total")
PRICED = ("tp", "ep", "dp", "dp_ep")


def run_simai(workload: Workload, args: argparse.Namespace) -> int:
    system = SimaiSystem(args.nvlink_gb_per_s, args.nic_gb_per_s, args.gpus_per_server, args.nics_per_server)
    price = simai_price(workload, args.gpus, system, _overlap(args.overlap))
    warnings = [*workload.warnings, *price.warnings]
    found = _facts(price, warnings)
    warnings += find_doubts(found)
    if args.json:
        print_json(found)
        return 0
    rows = [
        (part.replace("_", "-"), f"{seconds / US:,.0f}", format_percent(seconds / price.total_s))
        for part in PARTS
        if (seconds := getattr(price, f"{part}_s"))
    ]
    print(table(("SimAI's part", "us", "share"), rows, terminal_width()))
    print_warnings(warnings)
    return 0


def _overlap(entries: list[str]) -> SimaiOverlap:
    ratios: dict[str, float] = {}
    for entry in entries:
        name, _, ratio = entry.partition("=")
        try:
            ratios[name] = float(ratio)
        except ValueError:
            raise ValueError(f"--overlap {entry!r}: expected GROUP=RATIO, such as tp=0.5") from None
        if name not in PRICED:
            raise ValueError(f"--overlap {entry!r}: expected one of {', '.join(PRICED)}")
    return SimaiOverlap(**ratios)


def _facts(price: SimaiPrice, warnings: list[str]) -> dict[str, Any]:
    """SimAI's own parts, and the same in the words of the JSON contract."""
    parts_s = {part: getattr(price, f"{part}_s") for part in PARTS}
    return {
        "engine": "simai",
        "step_s": price.total_s,
        "breakdown_s": {
            "compute": price.compute_s,
            "tp": price.tp_s,
            "cp": 0.0,
            "ep": price.ep_s,
            "dp": price.dp_s + price.dp_ep_s,
            "pp": price.pp_s,
            "bubble": price.bubble_s,
            "optimizer": 0.0,
            "other": 0.0,
        },
        "simai_s": parts_s,
        "warnings": warnings,
    }
