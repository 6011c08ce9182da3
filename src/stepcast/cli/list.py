"""``stepcast list formats|gpus|clusters|models|frameworks|failures|prices``."""

import argparse
from collections.abc import Callable

from stepcast.cli.documents import load_lazily
from stepcast.cli.output import show_view
from stepcast.hardware.catalog import data_names
from stepcast.ir.facts import FactDict, pick


def run(args: argparse.Namespace) -> int:
    from stepcast.views.documents import list_view

    show_view(args, list_view(args.what, LISTED[args.what]()))
    return 0


def _formats() -> list[FactDict]:
    from stepcast.inputs.table import FORMATS
    from stepcast.outputs.table import TARGETS

    read, written = {entry.name for entry in FORMATS}, {target.name for target in TARGETS}
    rows = [(entry.name, entry.gives, entry.title) for entry in FORMATS]
    rows += [(target.name, target.takes or "anything", target.title) for target in TARGETS if target.name not in read]
    return [
        {"format": name, "holds": holds, "read": name in read, "written": name in written, "title": title}
        for name, holds, title in rows
    ]


def _gpus() -> list[FactDict]:
    from stepcast.cost.serving import cost_evidence
    from stepcast.hardware import load_gpu
    from stepcast.hardware.facts import all_gpus

    return [{**facts, "costs": cost_evidence(load_gpu(facts["gpu"]))} for facts in all_gpus()]


def _frameworks() -> list[FactDict]:
    from stepcast.frameworks.catalog import load_profile, profile_facts

    return [{"framework": name, **profile_facts(load_profile(name))} for name in data_names("frameworks")]


def _failures() -> list[FactDict]:
    from stepcast.goodput.operation import load_failures

    rows: list[FactDict] = []
    for name in data_names("failures"):
        failures, restart = load_failures(name)
        between = pick(failures, "gpu_s node_s link_s").items()
        times_s = {part: value if value < float("inf") else None for part, value in between}
        about = {"restart_s": restart.total_s, "description": failures.description, "sources": dict(failures.sources)}
        rows.append({"failures": name, **times_s, **about})
    return rows


def _models() -> list[FactDict]:
    from stepcast.models.catalog import load_model, model_names

    rows = []
    for model in map(load_model, model_names()):
        sizes = pick(model, "model=name parameters layers hidden heads kv_heads")
        rows.append({**sizes, "experts": model.experts.count if model.experts else 0, "vocab": model.vocab})
    return rows


LISTED: dict[str, Callable[[], list[FactDict]]] = {
    "formats": _formats,
    "gpus": _gpus,
    "clusters": load_lazily("hardware.facts:all_clusters"),
    "models": _models,
    "frameworks": _frameworks,
    "failures": _failures,
    "prices": load_lazily("questions.settle:list_prices"),
}
