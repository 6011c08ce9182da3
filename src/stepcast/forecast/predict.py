"""A model under a strategy, by a framework, on a cluster: workload, simulated step and memory."""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from stepcast.cost.band import band_of
from stepcast.cost.calibration import Calibration
from stepcast.cost.compute import counted_load, priced_once
from stepcast.cost.fits import default_dispatch, default_fit
from stepcast.cost.host import EXPERT_ISSUE_S, MODULE_ISSUE_S, PART_ISSUE_S, SCALED_ISSUE_S
from stepcast.cost.memory import StageMemory, memory, verdict_of
from stepcast.cost.pace import apply_pace, convert_for_kernel, pace_of, slow_for_kernel
from stepcast.cost.power import Load
from stepcast.cost.price import Price, PriceSource
from stepcast.cost.pricing import ComputePrice
from stepcast.forecast.options import DEFAULTS, Options
from stepcast.forecast.prediction import Prediction
from stepcast.forecast.simulate import prepare, simulate, simulate_together
from stepcast.generate.flops import model_flops
from stepcast.generate.workload import generate
from stepcast.hardware import Cluster
from stepcast.ir.framework import (
    MEGATRON_CORE,
    AttentionKernel,
    Dispatcher,
    Execution,
    Framework,
    Kernels,
    Modules,
    SsmKernels,
)
from stepcast.ir.identity import ByIdentity
from stepcast.ir.layers.attention_core import recomputes_in_vain
from stepcast.ir.model import Model
from stepcast.ir.model_parts import Mixer
from stepcast.ir.schedules import SCHEDULES
from stepcast.ir.stages import describe_split
from stepcast.ir.step import StepReport, Throughput
from stepcast.ir.strategy import Strategy
from stepcast.ir.work import Collective, CollectiveKind, Communication, Compute, GroupedMatmul, HostUpdate, Matmul, Work
from stepcast.ir.workload import Block, Layer, Manner, Workload
from stepcast.simulation.messages import Send
from stepcast.units import TFLOPS, format_bytes

# Where a forecast leaves what it was checked against, and says so.

# The most GPUs of the published runs of many sources; a handful of rows (Llama 3 405B, MegaScale,
# Nemotron-4) go on to 16,384 (data/published).
WELL_CHECKED_GPUS = 6144
# Mixers of whose kernels little was measured, and of which no published run is known.
SELDOM = {
    Mixer.DELTA: "delta nets were measured on an H200 with 4 and 8 heads alone",
    Mixer.SELECTIVE: "the selective scan of Mamba-1 blocks was measured on an H200 alone",
}


def beyond_checked(model: Model, strategy: Strategy) -> list[str]:
    """Warnings of sizes beyond those of the runs that forecasts are compared with."""
    found = []
    if strategy.layout.gpus > WELL_CHECKED_GPUS:
        found.append(
            f"{strategy.layout.gpus:,} GPUs: few published runs have more than {WELL_CHECKED_GPUS:,}, so "
            "this is less sure than a smaller run ('stepcast validate' shows them)"
        )
    if strategy.seq > model.max_seq:
        found.append(f"sequences of {strategy.seq:,} tokens are longer than the {model.max_seq:,} of {model.name}")
    mixers = {block.mixer for block in model.blocks}
    found += [f"{told}; no published run has such layers" for mixer, told in SELDOM.items() if mixer in mixers]
    return found


# How long the host takes to issue each work, by the modules that a framework is written in.


def issue_s_of(framework: Framework) -> Callable[[Work, bool], float]:
    """Of a work, and whether it is of the backward."""
    if framework.modules is Modules.TRANSFORMERS:
        return partial(_written_issue_s, "compiled" if framework.kernels is Kernels.COMPILED else "dispatch")
    if framework.listed_gathers:
        return _listed_issue_s
    return _engine_issue_s if framework.kernels is Kernels.FUSED else _eager_issue_s


def _listed_issue_s(work: Work, backward: bool) -> float:
    """Modules of Megatron-LM, whose weights are gathered part by part."""
    if isinstance(work, Collective) and work.kind is CollectiveKind.ALL_GATHER:
        return PART_ISSUE_S
    return _engine_issue_s(work, backward)


def _written_issue_s(kind: str, work: Work, backward: bool) -> float:
    """Modules of which every kernel is counted; all experts are one product."""
    dispatch = default_dispatch("transformers", kind)
    if isinstance(work, HostUpdate | Communication):
        return dispatch.backward_heavy_s if backward else dispatch.heavy_s
    return dispatch.issue_s(work, backward)


def _engine_issue_s(work: Work, backward: bool) -> float:
    """Transformer Engine's modules, which take longer over products, most over those of scaled formats."""
    issue_s = _eager_issue_s(work, backward)
    if isinstance(work, Matmul | GroupedMatmul):
        issue_s += MODULE_ISSUE_S + (SCALED_ISSUE_S if work.dtype.scaled else 0.0)
    return issue_s


def _eager_issue_s(work: Work, backward: bool) -> float:
    """What eager PyTorch takes on the host; a collective is issued like a heavy kernel."""
    dispatch = default_dispatch()
    if isinstance(work, GroupedMatmul):
        return dispatch.issue_s(work, backward) + work.groups * EXPERT_ISSUE_S
    if isinstance(work, HostUpdate | Communication):
        return dispatch.backward_heavy_s if backward else dispatch.heavy_s
    return dispatch.issue_s(work, backward)


GPU_VENDORS = ("nvidia", "amd")  # whose software the frameworks are

# The libraries whose kernels the fits were measured with.
SCAN_LIBRARIES = {
    Mixer.MAMBA: "mamba-ssm and causal-conv1d",
    Mixer.SELECTIVE: "mamba-ssm and causal-conv1d",
    Mixer.DELTA: "flash-linear-attention and causal-conv1d",
}


def predict(
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    framework: Framework = MEGATRON_CORE,
    options: Options = DEFAULTS,
    calibration: Calibration | None = None,
) -> Prediction:
    """One training step of *model* under *strategy*, run by *framework* on *cluster*."""
    return _predicted(simulate, model, cluster, strategy, framework, options, calibration)


def _predicted(
    run: Callable[[Workload, Cluster, Options, ComputePrice], Prediction],
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    framework: Framework,
    options: Options,
    calibration: Calibration | None,
) -> Prediction:
    workload = generate(model, strategy, framework)
    idle = strategy.zero_gradients == 1
    compute = compute_pricer(workload, cluster, calibration, framework.attention, idle)
    options = at_pace(_as_strategy_says(options, model, strategy, framework), calibration)
    prediction = run(workload, cluster, options, compute)
    return replace(
        prediction,
        memory=memory(model, strategy, cluster.gpu, framework),
        band=band_of(model, cluster, strategy, framework),
        finish=lambda report, stages: _with_model(report, stages, model, cluster, strategy, framework),
    )


def predict_many(
    model: Model,
    cluster: Cluster,
    strategies: Iterable[Strategy],
    framework: Framework = MEGATRON_CORE,
    options: Options = DEFAULTS,
    calibration: Calibration | None = None,
) -> Iterator[Prediction]:
    """One prediction for each strategy, as ``predict`` makes them: what they share is worked out once, and
    some are simulated together before the first of them is given.
    """
    left, failed, more = iter(strategies), None, True
    while more:
        block: list[Prediction] = []
        with _uncollected():
            try:
                for strategy in islice(left, TOGETHER):
                    one = _predicted(prepare, model, cluster, strategy, framework, options, calibration)
                    one.price()
                    block.append(one)
            except Exception as error:
                failed = error
            more = len(block) == TOGETHER
            run = simulate_together(block)
        for each in run:
            _ = each.step_s  # what cannot run is told in its turn
            yield each
        if failed:
            raise failed


TOGETHER = 256
"""Strategies that are simulated together; more take more memory and hardly less time."""


@contextmanager
def _uncollected() -> Iterator[None]:
    """Python looks for garbage in circles whenever much is made, a fifth of the time of many forecasts; what
    they make has hardly any. So that it does not look through all of it afterwards either, it is told as old.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if not gc.get_freeze_count():  # others may have taken what they have out for good
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def _with_model(
    report: StepReport,
    stages: Sequence[StageMemory],
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    framework: Framework,
) -> StepReport:
    """*report* with what the model, its strategy and its framework add to it."""
    split = describe_split(model, strategy)
    host = _host_facts(stages, cluster, strategy)
    return replace(
        report,
        throughput=throughput(model, cluster, strategy, report.step_s),
        run={**report.run, **_run_facts(model, strategy, framework)},
        memory_bytes={**memory_facts(stages), **host},
        warnings=(
            *report.warnings,
            *_precision_warnings(cluster, str(strategy.precision)),
            *_transfer_warnings(strategy),
            *_recompute_warnings(model, strategy, framework),
            *_host_warnings(host),
            *_scaled_warnings(report, cluster, str(strategy.precision)),
            *beyond_checked(model, strategy),
        ),
        assumptions=(
            *((split,) if split else ()),
            *_scan_assumptions(model, framework),
            *report.assumptions,
            *((report.residual.describe(framework.name),) if report.residual else ()),
        ),
    )


def throughput(model: Model, cluster: Cluster, strategy: Strategy, step_s: float) -> Throughput:
    """What a step of *step_s* amounts to."""
    # What the model needs: a causal mask leaves half of the attention square, as Megatron-LM counts today.
    flops = model_flops(
        model,
        strategy.seq,
        strategy.global_batch,
        causal=True,
        further_tokens=strategy.further_tokens,
        lora_rank=strategy.lora_rank,
        kept_share=strategy.kept_share,
    )
    per_gpu = flops / step_s / strategy.layout.gpus
    return Throughput(
        tokens_per_s=strategy.tokens / step_s,
        tflops_per_gpu=per_gpu / TFLOPS,
        mfu=per_gpu / cluster.gpu.matrix_peak_flops(str(strategy.precision)),
    )


def _run_facts(model: Model, strategy: Strategy, framework: Framework) -> dict[str, Any]:
    return {
        "model": model.name,
        "framework": framework.name,
        "parameters": model.parameters,
        "layers": model.layers,
        "hidden": model.hidden,
        "seq": strategy.seq,
        "micro_batch": strategy.micro_batch,
        "global_batch": strategy.global_batch,
        "precision": str(strategy.precision),
    }


def manner_of(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> Manner:
    """How a step of *model* under *strategy* runs, for a workload that is simulated elsewhere."""
    options = _as_strategy_says(DEFAULTS, model, strategy, framework)
    return Manner(
        schedule=str(options.schedule),
        messages=str(options.send or ""),
        alone=options.contention,
        pairs=options.pairs,
        once_per_node=options.once_per_node or 0,
    )


def _as_strategy_says(options: Options, model: Model, strategy: Strategy, framework: Framework) -> Options:
    experts = model.experts if framework.dispatcher is Dispatcher.DEEPEP else None
    return replace(
        options,
        schedule=options.schedule or str(strategy.schedule),
        pairs=strategy.pairs_micro_batches,
        contention=not options.ideal_communication,
        issue_s=options.issue_s if framework.execution is Execution.GRAPHS else issue_s_of(framework),
        ahead=framework.runs_ahead,
        once_per_node=experts.routing if experts else options.once_per_node,
        send=Send.BLOCKING if _stops_for_transfers(strategy) else options.send,
    )


def at_pace(options: Options, calibration: Calibration | None) -> Options:
    """*options* with the host that *calibration* was measured on."""
    issue_s = options.issue_s
    if issue_s is None or calibration is None or calibration.pace == 1.0:
        return options
    pace = calibration.pace
    return replace(options, issue_s=lambda work, backward: pace * issue_s(work, backward))


def _stops_for_transfers(strategy: Strategy) -> bool:
    """Transfers of stages that run ahead of their receivers overlap whatever the strategy says."""
    stops = strategy.layout.vpp == 1 and SCHEDULES[strategy.schedule].stops
    return stops and not strategy.overlap.transfers


def _transfer_warnings(strategy: Strategy) -> list[str]:
    if strategy.layout.pp == 1 or strategy.overlap.transfers or _stops_for_transfers(strategy):
        return []
    return [f"stages of schedule {strategy.schedule} run ahead of their receivers: transfers overlap all the same"]


def _precision_warnings(cluster: Cluster, precision: str) -> list[str]:
    """A format that the GPU does not multiply in runs as another, and MFU is counted against that one."""
    used = cluster.gpu.runs_as(precision)
    if used == precision:
        return []
    return [
        f"{cluster.gpu.name} has no {precision} matrix units: matrix products run as {used}; "
        f"it has {', '.join(cluster.gpu.matrix_flops)}"
    ]


def _recompute_warnings(model: Model, strategy: Strategy, framework: Framework) -> list[str]:
    if not recomputes_in_vain(model, strategy, framework):
        return []
    return [
        "recompute selective takes time and saves no memory here: it recomputes core attention, and fused "
        "attention stores no scores; use recompute none, or name other modules"
    ]


def _scan_assumptions(model: Model, framework: Framework) -> list[str]:
    """Say which kernels run the layers that carry a state along the sequence."""
    mixers = {block.mixer for block in model.blocks}
    libraries = dict.fromkeys(name for mixer, name in SCAN_LIBRARIES.items() if mixer in mixers)
    if not libraries:
        return []
    if framework.ssm_kernels is SsmKernels.EAGER:
        return [
            "Mamba-2 layers run as PyTorch operations (--ssm-kernels eager), without mamba-ssm; estimates "
            "were 7 to 12 % above six such scans measured on an H200, which the interval does not count"
        ]
    found = [f"state-space layers run the fused kernels of {' and '.join(libraries)}"]
    if framework.modules is Modules.TRANSFORMERS:
        found[0] += ", if they are installed; transformers falls back to PyTorch operations without them, many "
        found[0] += "times slower" + (" (--ssm-kernels eager)" if Mixer.MAMBA in mixers else "")
    return found


def _scaled_warnings(report: StepReport, cluster: Cluster, precision: str) -> list[str]:
    if PriceSource.SCALED not in (report.sources.get("matmul"), report.sources.get("groupedmatmul")):
        return []
    told = f"nobody measured {cluster.gpu.runs_as(precision)} products on {cluster.gpu.name} or its kind: "
    if cluster.gpu.vendor not in GPU_VENDORS:
        return [f"{told}times and software are taken as a GPU's; see 'Other accelerators' in docs/clusters.md"]
    return [f"{told}their times are scaled from other GPUs; 'stepcast profile' measures yours"]


def memory_facts(stages: Sequence[StageMemory]) -> dict[str, Any]:
    """The fullest stage in the words of the JSON contract, and every stage beside it."""
    fullest = max(stages, key=lambda stage: stage.total)
    return {
        **fullest.parts,
        "total": fullest.total,
        "low": fullest.low,
        "high": fullest.high,
        "level": fullest.band.level,
        "allocated": fullest.allocated,
        "reserved": fullest.reserved,
        "capacity": fullest.capacity,
        "fits": all(stage.fits for stage in stages),
        "verdict": str(verdict_of(stages)),
        "free": fullest.free,
        "stage": fullest.stage,
        "stages": [{"stage": stage.stage, **stage.parts, "total": stage.total} for stage in stages],
    }


def _host_facts(stages: Sequence[StageMemory], cluster: Cluster, strategy: Strategy) -> dict[str, Any]:
    """What is offloaded to the hosts, by the GPU and the node that need the most there."""
    most, node = max(stage.host for stage in stages), cluster.node
    if not most or node.host is None:
        return {}
    gpus = min(node.gpus, strategy.layout.gpus)
    return {"host": {"gpu": most, "node": most * gpus, "capacity": node.host.memory_bytes}}


def _host_warnings(facts: dict[str, Any]) -> list[str]:
    host = facts.get("host")
    if not host or host["node"] <= host["capacity"]:
        return []
    return [
        f"{format_bytes(host['node'])} are offloaded to the host of each node, which has "
        f"{format_bytes(host['capacity'])}: lower --offload"
    ]


def compute_pricer(
    workload: Workload,
    cluster: Cluster,
    calibration: Calibration | None = None,
    attention: AttentionKernel = AttentionKernel.CURRENT,
    idle: bool = False,
) -> ComputePrice:
    """Prices computation as part of a long step on the cluster's GPU, with *attention* of its generation;
    *idle*: its backward multiplies zeros, which takes next to no power.
    """
    gpu, fit = cluster.gpu, default_fit()
    body = workload.stages[len(workload.stages) // 2].body
    made_of, repeats = [block.layers for block in body], [block.repeat for block in body]

    def counted() -> Load:
        return counted_load(_works(body), gpu, fit, drawing=_works(body, forward=True) if idle else None)

    load = _LOADS.get((gpu, fit, *made_of), counted, idle, *repeats)
    current, pace = priced_once(gpu, fit, load), pace_of(workload.layout, workload.micro_batches)
    if calibration is None and attention is AttentionKernel.CURRENT:
        return current if pace == 1.0 else lambda work: apply_pace(current(work), work, pace)

    def price(work: Compute) -> Price:
        work = convert_for_kernel(work, attention)
        found = current(work) if calibration is None else calibration.price(work, gpu, fit, load)
        return apply_pace(slow_for_kernel(found, work, attention, gpu.architecture), work, pace)

    return price


_LOADS: ByIdentity[Load] = ByIdentity(4096)
_COUNTED: ByIdentity[Counter[Compute]] = ByIdentity(4096)


def _works(body: Sequence[Block], forward: bool = False) -> Counter[Compute]:
    """What the layers of *body* compute, and how often; in *forward* alone, if told."""
    works: Counter[Compute] = Counter()
    for block in body:
        counted = _COUNTED.get((block.layers,), partial(_computing, block.layers, forward), forward)
        for work, count in counted.items():
            works[work] += count * block.repeat
    return works


def _computing(layers: Sequence[Layer], forward: bool) -> Counter[Compute]:
    ops = [op for layer in layers for op in (layer.forward if forward else layer.all_ops)]
    return Counter([op.work for op in ops if isinstance(op.work, Compute)])
