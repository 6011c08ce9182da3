"""Predictions of captured programs, for the verbs that make them."""

import argparse
from typing import Any

from stepcast.cli.engine import engine_of
from stepcast.cli.progress import open_source
from stepcast.forecast.captured import CapturedSharding, Spread, predict_captured
from stepcast.forecast.predict import compute_pricer
from stepcast.forecast.simulate import Prediction
from stepcast.generate.written import recorded
from stepcast.hardware import Cluster, load_cluster
from stepcast.inputs.table import read_as_one
from stepcast.ir.captured import Captured
from stepcast.ir.workload import Workload

# Options of predict that a captured program cannot take, since it says these itself.
ITS_OWN = (
    *("model", "seq", "micro_batch", "precision", "recompute", "framework", "vpp", "offload", "optimizer"),
    *(
        "expert_tp",
        "flash_attention",
        "to_workload",
        "tokens",
        "price",
        "currency",
        "overlap",
        "training",
        "lora_rank",
    ),
)
SPLITS = {
    "cp": "context parallelism needs attention that was written for it",
    "ep": "expert parallelism needs experts that were written for it",
}


def read_captured(path: str) -> Captured:
    _, document = read_as_one([open_source(path)])
    if not isinstance(document, Captured):
        raise ValueError(f"{path}: is no captured program; 'stepcast capture ... -o FILE' writes one")
    return document


def place_of(args: argparse.Namespace) -> Cluster:
    """The cluster that --cluster names, or one of the GPUs that --gpu does."""
    if (args.cluster is None) == (args.gpu is None):
        raise ValueError("give one of --gpu G and --cluster C: where the captured program runs")
    return load_cluster(args.cluster or f"generic:gpu={args.gpu}", getattr(args, "set", []))


def predicted(captured: Captured, args: argparse.Namespace) -> tuple[Prediction, dict[str, Any]]:
    """The step that *args* ask for, and what was asked."""
    for name, why in SPLITS.items():
        if (getattr(args, name, None) or 1) > 1:
            raise ValueError(f"--{name}: {why}; --gpus, --tp, --pp and --sharding fsdp are possible")
    pp, tp = getattr(args, "pp", None) or 1, getattr(args, "tp", None) or 1
    gpus = args.gpus or 1
    if gpus % (pp * tp):
        raise ValueError(f"{gpus} GPUs are not a multiple of tp x pp = {tp * pp}")
    dp = gpus // (pp * tp)
    given = getattr(args, "global_batch", None)
    batches, rest = divmod(given or captured.batch * dp, captured.batch * dp)
    if rest or not batches:
        raise ValueError(
            f"--global-batch {given}: the program was captured with a batch of {captured.batch} and runs on "
            f"{dp} replicas; give a multiple of {captured.batch * dp}"
        )
    sharding = getattr(args, "sharding", None) or "none"
    if sharding not in list(CapturedSharding):
        raise ValueError(f"--sharding {sharding}: of a captured program it is none or fsdp")
    cluster = place_of(args)
    schedule = getattr(args, "schedule", None)
    spread = Spread(
        dp,
        pp,
        batches,
        CapturedSharding(sharding),
        str(schedule) if schedule else None,
        tp,
        getattr(args, "zero_gradients", None) or 0.0,
    )
    prediction = predict_captured(captured, cluster, spread, engine=engine_of(args))
    asked = {
        "model": captured.name,
        "parameters": captured.parameters,
        "cluster": cluster.name,
        "framework": "captured",
        "gpu": cluster.gpu.name,
        "gpus_per_node": cluster.node.gpus,
        "strategy": {**spread.layout.facts(), "sharding": sharding},
    }
    return prediction, asked


def captured_facts(captured: Captured) -> dict[str, Any]:
    """What was captured, in the words of the JSON contract."""
    from dataclasses import asdict

    memory = captured.memory
    return {
        "kind": "captured",
        "name": captured.name,
        "parameters": captured.parameters,
        "flops": captured.flops(),
        "matmul_flops": captured.flops(attention=False),
        "peak_memory_bytes": memory.peak,
        "memory_bytes": {**asdict(memory), "peak": memory.peak},
        "ops": captured.ops,
        "tokens": captured.tokens,
        "batch": captured.batch,
        "precision": str(captured.precision),
        "compiled": captured.compiled,
        "facts": dict(captured.facts),
        "body": [
            {"repeat": block.repeat, "layers": [layer.name for layer in block.layers]}
            for block in captured.stage.body
        ],
    }


def as_workload(captured: Captured, args: argparse.Namespace) -> Workload:
    """*captured* with the times of its kernels on the GPU of *args*, for formats that hold times."""
    if not args.gpu:
        raise ValueError(f"{args.to} holds times, and a captured program has none: give --gpu G as well")
    price = compute_pricer(captured.workload, load_cluster(f"generic:gpu={args.gpu}"))
    return recorded(captured.workload, lambda work: price(work).seconds)  # type: ignore[arg-type]
