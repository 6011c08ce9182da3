"""What others chose, beside what a search finds: ``python -m benchmarks.published_choices [WORD ...]``.

Runs of Megatron-LM's tables, NeMo recipes and MLPerf layouts come from the published sets beside the
repository; Llama 3 and DeepSeek-V3 from their reports. Each is priced as it ran. The search keeps what was no
choice of layout: model, GPUs, batch, precision, software and its overlap, how states are sharded; it leaves the
usual reserve of memory free and tries only what the software has; where that captures CUDA graphs, a fifth of the
activations stays free for them as well (NVIDIA/NeMo docs/source/features/optimizations/cudagraphs.md: "increases the
memory usage of activations by ~20%"). WORD: only runs with it in their name.
"""

import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.frameworks.catalog import load_profile, missing_features, settle
from stepcast.hardware import Cluster, load_cluster
from stepcast.ir.framework import Execution, Framework
from stepcast.ir.layout import Layout
from stepcast.ir.model import Model
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import Strategy, recompute_of, recompute_word
from stepcast.models.catalog import load_model
from stepcast.searching.best import search_parts, usable_memory_bytes
from stepcast.searching.space import SearchAxes, SpacePart, build_space
from stepcast.units import GIB
from stepcast.validate.published.comparison import records_of
from stepcast.validate.published.setup import read_setup
from tests.shared import DATA

# Searched; all other fields of a strategy stay as they ran.
SEARCHED = {"layout", "micro_batch", "global_batch", "seq", "sequence_parallel", "schedule", "sharding"}
SEARCHED |= {"recompute", "precision", "stage_layers"}
PARTS = 3
LONG = 8192  # tokens, from which sequences are split


@dataclass(frozen=True)
class Choice:
    """A published run in our nouns."""

    name: str
    model: Model
    cluster: Cluster
    strategy: Strategy
    framework: Framework
    schedules: tuple[ScheduleKind, ...] = (ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED)
    # Where pairs of micro-batches leave bounds loose: the values near theirs.
    near: Mapping[str, Any] = field(default_factory=dict)
    reserve: float | None = None


# Runs of the published set, by what is the same in their rows.
NEMO = {"framework": "NeMo (dgxc recipe)", "gpu": "H100-SXM-80GB"}
SELECTIVE = {"table": "Recompute-T5", "recompute": "selective(attn)"}
ROWS: Mapping[str, Mapping[str, str]] = {
    "Megatron-LM GPT-3 175B": {**SELECTIVE, "model": "gpt3-175b"},
    "Megatron-LM 530B": {**SELECTIVE, "model": "megatron-530b"},
    "NeMo Llama 3.1 405B": {**NEMO, "model": "llama3-405b", "num_gpus": "512.0", "precision": "fp8"},
    "NeMo Nemotron-4 340B": {**NEMO, "model": "nemotron4-340b", "num_gpus": "256.0", "precision": "bf16"},
    "NeMo Nemotron-4 15B": {**NEMO, "model": "nemotron4-15b", "num_gpus": "64.0", "precision": "bf16"},
}


def choices() -> Iterator[Choice]:
    reported = list(_reported())
    yield reported[0]
    records = records_of(str(DATA / "published"))
    for name, wanted in ROWS.items():
        rows = [row for row in records if all((row.get(key) or "") == word for key, word in wanted.items())]
        yield _row(f"{name}, {int(float(rows[0]['num_gpus'] or 0)):,} GPUs", rows[0])
    for row in records_of(str(DATA / "mlperf")):
        if row.get("bench") in ("gpt3", "llama31_405b") and row.get("gpu_in_catalogue") != "0":
            name = f"MLPerf {row['bench']}, {row['num_gpus']} {row['gpu']}, {row['precision']}"
            yield _row(name, {**row, "table": row.get("bench")})
    yield from reported[1:]


def _row(name: str, record: Mapping[str, Any]) -> Choice:
    setup = read_setup(record)
    return Choice(name, setup.model, setup.cluster, setup.strategy, setup.framework)


def _reported() -> Iterator[Choice]:
    """Llama 3 (2024), table 4; DeepSeek-V3 (2024), sections 3.2 and 4.2."""
    yield _made(
        "Llama 3.1 405B, 16,384 H100", "llama-3.1-405b", "dgx-h100", "megatron-core",
        Layout(tp=8, pp=16, vpp=8, dp=128), 1, 2048, 8192, sharding="zero-2", schedule="interleaved",
    )  # fmt: skip
    found = _made(
        "DeepSeek-V3, 2,048 H800", "deepseek-v3", "h800-node", "hai-llm",
        Layout(pp=16, dp=128, ep=64, expert_tp=1), 1, 15360, 4096, sharding="zero-1", schedule="dualpipe",
        precision="fp8", recompute="selective:norms,latent-up,expert-activation", mtp_layers=1,
        fp8_parameters=True,
    )  # fmt: skip
    near: dict[str, Any] = {"tp": (1, 2), "pp": (8, 16), "vpp": (1, 2), "ep": (32, 64, 128), "micro_batch": (1, 2)}
    words = ("none", "selective:norms,latent-up,expert-activation", "selective:norms,latent-up,experts", "full")
    near["recompute"] = tuple(map(recompute_of, words))
    yield replace(found, schedules=(ScheduleKind.ONE_F_ONE_B, ScheduleKind.DUALPIPE), near=near, reserve=0.05)


def _made(
    name: str,
    model: str,
    cluster: str,
    profile: str,
    layout: Layout,
    micro_batch: int,
    global_batch: int,
    seq: int,
    **said: Any,
) -> Choice:
    from stepcast.ir.strategy import Sharding
    from stepcast.ir.types import DType

    machine, found = load_cluster(cluster), load_model(model)
    given = {
        **said,
        "sharding": Sharding(said["sharding"]),
        "schedule": ScheduleKind(said["schedule"]),
        "precision": DType(said.get("precision", "bf16")),
        "recompute": recompute_of(said.get("recompute", "none")),
    }
    settled = settle(load_profile(profile), found, machine.gpu.name, layout, given)
    return Choice(name, found, machine, settled.strategy(layout, micro_batch, global_batch, seq), settled.framework)


def _missing(choice: Choice, strategy: Strategy) -> set[str]:
    return set(missing_features(load_profile(choice.framework.name), strategy, choice.framework))


def graph_pools_bytes(choice: Choice, strategy: Strategy) -> float:
    """Return the memory that CUDA graphs keep allocated for temporary tensors."""
    stages = memory(choice.model, strategy, choice.cluster.gpu, choice.framework)
    return 0.2 * max(stage.activations for stage in stages) if choice.framework.execution is Execution.GRAPHS else 0.0


def compare(choice: Choice) -> None:
    model, cluster, theirs = choice.model, choice.cluster, choice.strategy
    began = time.process_time()
    priced = predict(model, cluster, theirs, choice.framework)
    used = max(stage.total for stage in memory(model, theirs, cluster.gpu, choice.framework))
    layers = {each for each in range(1, model.layers + 1) if model.layers % each == 0}
    axes = SearchAxes(
        gpus=(theirs.layout.gpus,),
        cp=(1, 2, 4) if theirs.seq >= LONG else (1,),
        ep=tuple(2**power for power in range(3, 8)) if model.experts else (1,),
        expert_tp=(1,),
        vpp=tuple(sorted({1, 2, 3, 4, 5, 6, 7, 8, 12} | (layers & set(range(13))) | {theirs.layout.vpp})),
        micro_batch=tuple(each for each in (1, 2, 4) if theirs.global_batch % each == 0),
        schedule=choice.schedules,
        sharding=(theirs.sharding,),
        sequence_parallel=(True,),
        precision=(theirs.precision,),
    )
    axes = replace(axes, **choice.near)
    common = {each.name: getattr(theirs, each.name) for each in fields(theirs) if each.name not in SEARCHED}
    space = build_space(model, axes, theirs.global_batch, theirs.seq, cluster.domain_gpus, common)
    searched = [SpacePart(space, choice.framework, np.arange(len(space)))]
    usable = usable_memory_bytes(cluster.gpu.memory_bytes, None, choice.reserve)
    found = search_parts(searched, cluster, top=1, most_bytes=usable, looks_around=False)
    pools = graph_pools_bytes(choice, found.best[0].strategy)
    if found.best[0].memory_bytes + pools > usable:
        found = search_parts(searched, cluster, top=1, most_bytes=usable - pools, looks_around=False)
    best = found.best[0]
    report = predict(model, cluster, best.strategy, choice.framework).report
    ratio = priced.step_s / best.step_s
    low, high = priced.report.low_s / priced.step_s - 1, priced.report.high_s / priced.step_s - 1
    columns = (
        choice.name,
        _words(theirs),
        f"{priced.step_s:.2f} s, {used / GIB:.0f} GiB",
        _words(best.strategy),
        f"{best.step_s:.2f} s, {best.memory_bytes / GIB:.0f} GiB",
        f"{100 * (ratio - 1):+.1f} %",
        f"{100 * low:+.0f} to {100 * high:+.0f} %",
        # The published run shows that its software has what the profile may not list.
        "; ".join(sorted(_missing(choice, best.strategy) - _missing(choice, theirs))) or "yes",
    )
    print("|", " | ".join(columns), "|")
    parts = {name: seconds - report.breakdown_s[name] for name, seconds in priced.report.breakdown_s.items()}
    largest = sorted(parts.items(), key=lambda each: -abs(each[1]))[:PARTS]
    told = ", ".join(f"{name} {seconds:+.2f} s" for name, seconds in largest)
    counts, took_s = found.counts, time.process_time() - began
    told += f"; {counts.considered:,} candidates, {counts.simulated} simulated, {took_s:.0f} s"
    print(f"    theirs - ours: {told}", file=sys.stderr, flush=True)


def _words(strategy: Strategy) -> str:
    layout = strategy.layout
    words = [f"{name} {getattr(layout, name)}" for name in ("tp", "cp", "ep", "pp", "vpp") if getattr(layout, name) > 1]
    words += [f"mb {strategy.micro_batch}"] if strategy.micro_batch > 1 else []
    words += [str(strategy.schedule)] if strategy.schedule is ScheduleKind.DUALPIPE else []
    words += [f"recompute {recompute_word(strategy.recompute)}"] if strategy.recompute.kind != "none" else []
    return ", ".join(words) or "dp"


def run() -> None:
    print("| run | theirs | our price | ours | our price | theirs over ours | our band | realisable |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for choice in choices():
        if all(word.lower() in choice.name.lower() for word in sys.argv[1:]):
            compare(choice)


if __name__ == "__main__":
    run()
