"""``stepcast list formats|gpus|clusters|models``."""

import argparse
from typing import Any

from stepcast.cli.output import print_json, terminal_width
from stepcast.report.text import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=list(LISTED), help="what to list")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    rows = LISTED[args.what]()
    if args.json:
        print_json({args.what: rows})
    else:
        headers = list(rows[0])
        print(table(headers, [[row[name] for name in headers] for row in rows], terminal_width()))
    return 0


def _formats() -> list[dict[str, Any]]:
    from stepcast.inputs.table import FORMATS
    from stepcast.outputs.table import TARGETS

    written = {target.name: target.title for target in TARGETS}
    rows = [
        {
            "format": entry.name,
            "holds": entry.gives,
            "read": "yes",
            "written": "yes" if entry.name in written else "no",
            "what it is": entry.title,
        }
        for entry in FORMATS
    ]
    read = {entry.name for entry in FORMATS}
    return rows + [
        {
            "format": target.name,
            "holds": target.takes or "anything",
            "read": "no",
            "written": "yes",
            "what it is": target.title,
        }
        for target in TARGETS
        if target.name not in read
    ]


def _gpus() -> list[dict[str, Any]]:
    from stepcast.cli.hardware import gpu_rows

    return gpu_rows()


def _clusters() -> list[dict[str, Any]]:
    from stepcast.cli.hardware import cluster_rows

    return cluster_rows()


def _models() -> list[dict[str, Any]]:
    from stepcast.models.catalog import load_model, model_names

    return [
        {
            "model": model.name,
            "parameters": f"{model.parameters:,}",
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "kv": model.kv_heads,
            "experts": model.experts.count if model.experts else "-",
            "vocab": model.vocab,
        }
        for model in map(load_model, model_names())
    ]


LISTED = {"formats": _formats, "gpus": _gpus, "clusters": _clusters, "models": _models}
