"""``stepcast list formats|gpus|clusters|models|frameworks|failures``."""

import argparse
from collections.abc import Callable
from typing import Any

from stepcast.cli.options import add_options
from stepcast.cli.output import print_json, terminal_width
from stepcast.views.text import table

Facts = dict[str, Any]
Listing = tuple[list[Facts], Callable[[Facts], Facts]]
"""What there is, with numbers as numbers, and how one of it looks as a row for a person."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(
        parser,
        """
        what    what to list
        --json
        """,
        what={"choices": list(LISTED), "metavar": "|".join(LISTED)},
    )


def run(args: argparse.Namespace) -> int:
    found, row = LISTED[args.what]()
    if args.json:
        print_json({args.what: found})
        return 0
    rows = list(map(row, found))
    headers = list(rows[0])
    cells = [[each[name] for name in headers] for each in rows]
    print(table(headers, cells, terminal_width(), whole=(0,)))
    return 0


def _formats() -> Listing:
    from stepcast.inputs.table import FORMATS
    from stepcast.outputs.table import TARGETS

    written = {target.name for target in TARGETS}
    found: list[Facts] = [
        {
            "format": entry.name,
            "holds": entry.gives,
            "read": True,
            "written": entry.name in written,
            "title": entry.title,
        }
        for entry in FORMATS
    ]
    read = {entry.name for entry in FORMATS}
    found += [
        {
            "format": target.name,
            "holds": target.takes or "anything",
            "read": False,
            "written": True,
            "title": target.title,
        }
        for target in TARGETS
        if target.name not in read
    ]
    return found, _format_row


def _format_row(found: Facts) -> Facts:
    return {
        "format": found["format"],
        "holds": found["holds"],
        "read": "yes" if found["read"] else "no",
        "written": "yes" if found["written"] else "no",
        "what it is": found["title"],
    }


def _gpus() -> Listing:
    from stepcast.hardware.facts import all_gpus
    from stepcast.report.hardware import gpu_row

    return all_gpus(), gpu_row


def _clusters() -> Listing:
    from stepcast.hardware.facts import all_clusters
    from stepcast.report.hardware import cluster_row

    return all_clusters(), cluster_row


def _frameworks() -> Listing:
    from stepcast.cli.frameworks import all_frameworks, framework_row

    return all_frameworks(), framework_row


def _failures() -> Listing:
    from stepcast.goodput.operation import failure_names, load_failures

    found: list[Facts] = []
    for name in failure_names():
        failures, restart = load_failures(name)
        between = {part: getattr(failures, f"{part}_s") for part in ("gpu", "node", "link")}
        found.append(
            {
                "failures": name,
                **{f"{part}_s": value if value < float("inf") else None for part, value in between.items()},
                "restart_s": restart.total_s,
                "description": failures.description,
                "sources": dict(failures.sources),
            }
        )
    return found, _failure_row


def _failure_row(found: Facts) -> Facts:
    from stepcast.units import HOUR

    shown = {part: found[f"{part}_s"] for part in ("gpu", "node", "link")}
    hours = {f"{part} h": f"{value / HOUR:,.0f}" if value else "-" for part, value in shown.items()}
    return {"failures": found["failures"], **hours, "what it is": found["description"]}


def _models() -> Listing:
    from stepcast.models.catalog import load_model, model_names

    found: list[Facts] = [
        {
            "model": model.name,
            "parameters": model.parameters,
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "experts": model.experts.count if model.experts else 0,
            "vocab": model.vocab,
        }
        for model in map(load_model, model_names())
    ]
    return found, _model_row


def _model_row(found: Facts) -> Facts:
    """Rounded and without the vocabulary, so that it fits 80 columns; --json has all of it."""
    shown = {name.removesuffix("_heads"): value for name, value in found.items() if name != "vocab"}
    return shown | {"parameters": _short(found["parameters"]), "experts": found["experts"] or "-"}


def _short(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.0f} M"


LISTED: dict[str, Callable[[], Listing]] = {
    "formats": _formats,
    "gpus": _gpus,
    "clusters": _clusters,
    "models": _models,
    "frameworks": _frameworks,
    "failures": _failures,
}
