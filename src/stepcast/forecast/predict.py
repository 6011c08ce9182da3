"""A model under a strategy, by a framework, on a cluster: workload, simulated step and memory."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice

from stepcast.cost import host as host_costs
from stepcast.cost.band import band_of
from stepcast.cost.calibration import Calibration
from stepcast.cost.compute import LoadPricer, cool_seconds, load_of, make_pricer
from stepcast.cost.fits import ComputeFit, default_dispatch, default_fit
from stepcast.cost.memory import StageMemory, memory, verdict_of
from stepcast.cost.pace import apply_pace, convert_for_kernel, pace_of, slow_for_kernel
from stepcast.cost.power import Load
from stepcast.cost.price import Price, PriceSource
from stepcast.cost.pricing import ComputePrice
from stepcast.forecast.options import DEFAULTS, Options
from stepcast.forecast.prediction import Prediction
from stepcast.forecast.simulate import PacedCompute, prepare
from stepcast.generate.flops import model_flops
from stepcast.generate.workload import generate
from stepcast.hardware import Cluster, Gpu
from stepcast.ir.framework import MEGATRON_CORE, AttentionKernel, Execution, Framework, Kernels, Modules, SsmKernels
from stepcast.ir.layers.attention_core import recomputes_in_vain
from stepcast.ir.layers.experts import exchange_routing
from stepcast.ir.layout import Group
from stepcast.ir.model import Model, describe_split, pieces_of_stages
from stepcast.ir.model_parts import Mixer
from stepcast.ir.schedules import SCHEDULES, ScheduleKind, default_schedule
from stepcast.ir.step import StepReport, Throughput
from stepcast.ir.strategy import Objective, Strategy
from stepcast.ir.types import ByIdentity, FactDict, assign, pick, replace
from stepcast.ir.work import (
    COMPUTING,
    Collective,
    CollectiveKind,
    Communication,
    Compute,
    GroupedMatmul,
    HostUpdate,
    Matmul,
    Work,
)
from stepcast.ir.workload import Layer, Manner, Stage, Workload
from stepcast.simulation.costs import IssueSeconds
from stepcast.simulation.messages import Send
from stepcast.units import TFLOPS, US, format_bytes

WELL_CHECKED_GPUS = 6144
"""The most GPUs of the published runs of many sources; a handful (Llama 3 405B, MegaScale, Nemotron-4) go on to 16,384
(data/published)."""
SELDOM_MEASURED = {
    Mixer.DELTA: "delta nets were measured on an H200 with 4 and 8 heads alone",
    Mixer.SELECTIVE: "the selective scan of Mamba-1 blocks was measured on an H200 alone",
}
"""Mixers with few measured kernels and no published run."""
GPU_VENDORS = ("nvidia", "amd")  # whose software the frameworks are
SCAN_LIBRARIES = {
    Mixer.MAMBA: "mamba-ssm and causal-conv1d",
    Mixer.SELECTIVE: "mamba-ssm and causal-conv1d",
    Mixer.DELTA: "flash-linear-attention and causal-conv1d",
}
"""The libraries whose kernels the fits were measured with."""
TOGETHER = 32
"""Strategies that are predicted together."""
OWN_FROZEN = 1000
"""Objects that Python itself may have frozen when it started: 375 in 3.12."""
Spent = tuple[float, float]
"""Seconds that clocks decide, and seconds of other kernels."""


def predict(
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    framework: Framework = MEGATRON_CORE,
    options: Options = DEFAULTS,
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict one training step of *model* under *strategy*, run by *framework* on *cluster*."""
    with _pause_collection():
        return _predict_all(model, cluster, [strategy], framework, options, calibration)[0]


def _predict_all(
    model: Model,
    cluster: Cluster,
    strategies: Sequence[Strategy],
    framework: Framework,
    options: Options,
    calibration: Calibration | None,
) -> list[Prediction]:
    """Predict a step for each strategy. All pass one phase before the next one begins: its code and data then stay in
    the caches of the processor, which saves a tenth of the time.
    """
    prepared = []
    for strategy, workload in [(strategy, generate(model, strategy, framework)) for strategy in strategies]:
        idle = strategy.zero_gradients == 1
        compute = compute_pricer(workload, cluster, calibration, framework.attention, idle, strategy.schedule)
        chosen = apply_host_pace(_set_options(options, model, strategy, framework, cluster), calibration)
        prepared.append(prepare(workload, cluster, chosen, compute))
    for prediction in prepared:
        _ = prediction.simulated_s  # what cannot run fails now
    for prediction, strategy in zip(prepared, strategies, strict=True):
        assign(prediction, "memory", stage_memory(model, strategy, cluster.gpu, framework))
        assign(prediction, "band", band_of(model, cluster, strategy, framework))
        assign(prediction, "finish", partial(_complete_report, model, cluster, strategy, framework))
    return prepared


_MEMORY: ByIdentity[tuple[StageMemory, ...]] = ByIdentity(2048)


def stage_memory(model: Model, strategy: Strategy, gpu: Gpu, framework: Framework) -> tuple[StageMemory, ...]:
    """Return the memory of each stage, computed once for the same objects: a search asks before it predicts."""
    return _MEMORY.get((model, strategy, gpu, framework), lambda: memory(model, strategy, gpu, framework))


def predict_many(
    model: Model,
    cluster: Cluster,
    strategies: Iterable[Strategy],
    framework: Framework = MEGATRON_CORE,
    options: Options = DEFAULTS,
    calibration: Calibration | None = None,
) -> Iterator[Prediction]:
    """Yield one prediction for each strategy, as ``predict`` makes them."""
    left = iter(strategies)
    while block := list(islice(left, TOGETHER)):
        try:
            with _pause_collection(keeps=True):
                predictions = _predict_all(model, cluster, block, framework, options, calibration)
        except Exception:  # one of them fails, after those before it
            yield from (predict(model, cluster, strategy, framework, options, calibration) for strategy in block)
            continue
        yield from predictions


@contextmanager
def _pause_collection(keeps: bool = False) -> Iterator[None]:
    """Python's search for garbage in circles takes a fifth of the time of many predictions, which leave hardly any. So
    that it does not search all that a block *keeps* afterwards either, it is moved to the oldest generation.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            if keeps and gc.get_freeze_count() <= OWN_FROZEN:  # others may have frozen their objects for good
                gc.freeze()
                gc.unfreeze()
            gc.enable()


# Options and prices that follow from the strategy and the framework.


def manner_of(model: Model, strategy: Strategy, framework: Framework = MEGATRON_CORE) -> Manner:
    """Return how a step of *model* under *strategy* runs, for a workload that is simulated elsewhere."""
    options = _set_options(DEFAULTS, model, strategy, framework)
    return Manner(
        schedule=str(options.schedule),
        messages=str(options.send or ""),
        alone=options.contention,
        pairs=options.pairs,
        once_per_node=options.once_per_node or 0,
    )


def _set_options(
    options: Options, model: Model, strategy: Strategy, framework: Framework, cluster: Cluster | None = None
) -> Options:
    """Return *options* with what follows from the run."""
    return replace(
        options,
        schedule=options.schedule or str(strategy.schedule),
        pairs=strategy.pairs_micro_batches,
        contention=not options.ideal_communication,
        issue_s=options.issue_s if framework.execution is Execution.GRAPHS else _issue_s(framework, strategy, cluster),
        ahead=framework.runs_ahead,
        once_per_node=(model.experts and exchange_routing(model, strategy, framework)) or options.once_per_node,
        send=Send.BLOCKING if _stops_for_transfers(strategy) else options.send,
    )


def _stops_for_transfers(strategy: Strategy) -> bool:
    """Transfers of stages that run ahead of their receivers overlap whatever the strategy says."""
    stops = strategy.layout.vpp == 1 and SCHEDULES[strategy.schedule].stops
    return stops and not strategy.overlap.transfers


def apply_host_pace(options: Options, calibration: Calibration | None, fitted: float = 1.0) -> Options:
    """Return *options* with the host that *calibration* was measured on; *fitted*: the pace of the host that the
    seconds of *options* were fitted on.
    """
    issue_s = options.issue_s
    if issue_s is None or calibration is None or calibration.pace == 1.0:
        return options
    pace = calibration.pace / fitted
    paces = host_costs.MEASURED_PACES
    return replace(options, issue_s=partial(_paced_issue_s, issue_s, 0.0, pace), host_paces=paces)


@lru_cache(maxsize=256)
def issue_s_of(framework: Framework, tensor_us: float = 0.0, pace: float = 1.0) -> IssueSeconds:
    """Return the seconds in which the host issues a work, by the modules that the framework is written in; *tensor_us*
    more for tensor-parallel collectives, and *pace* times as long.
    """
    if tensor_us or pace != 1.0:
        return partial(_paced_issue_s, issue_s_of(framework), tensor_us, pace)
    if framework.modules is not Modules.TORCH:
        # Every kernel is counted; all experts are one product.
        kind = "compiled" if framework.kernels is Kernels.COMPILED else "dispatch"
        return partial(_dispatch_s, str(framework.modules), kind)
    if framework.listed_gathers:
        return _listed_issue_s
    return _engine_issue_s if framework.kernels is Kernels.FUSED else _eager_issue_s


def _paced_issue_s(issue_s: IssueSeconds, tensor_us: float, pace: float, work: Work, backward: bool) -> float:
    is_tensor = isinstance(work, Collective) and work.group is Group.TP
    return pace * (issue_s(work, backward) + (tensor_us * US if is_tensor else 0.0))


def _issue_s(framework: Framework, strategy: Strategy, cluster: Cluster | None) -> IssueSeconds:
    """Return the seconds of issuing a work, those of the code around tensor-parallel collectives included."""
    layout = strategy.layout
    more_us, gpus = framework.tensor_issue_us, cluster.node.gpus if cluster else 0
    if gpus:
        more_us += framework.spanning_issue_us * ((layout.tp - 1) // gpus)
    if layout.pp > 1 and layout.gpus > gpus:
        more_us += framework.crossing_issue_us * layout.tp
    pace = host_costs.HOST_PACE.get(cluster.gpu.name, 1.0) if cluster else 1.0
    return issue_s_of(framework, more_us if layout.tp > 1 else 0.0, pace)


def _dispatch_s(modules: str, kind: str, work: Work, backward: bool) -> float:
    """A collective is issued like a heavy kernel."""
    dispatch = default_dispatch(modules, kind)
    if isinstance(work, HostUpdate | Communication):
        return dispatch.backward_heavy_s if backward else dispatch.heavy_s
    return dispatch.issue_s(work, backward)


def _eager_issue_s(work: Work, backward: bool) -> float:
    """Eager PyTorch."""
    issue_s = _dispatch_s("torch", "dispatch", work, backward)
    if isinstance(work, GroupedMatmul):
        separate_s = host_costs.SEPARATE_ISSUE_S + work.dtype.scaled * host_costs.EXPERT_SCALED_S
        issue_s += work.groups * (host_costs.EXPERT_ISSUE_S + work.separate * separate_s)
    return issue_s


def _engine_issue_s(work: Work, backward: bool) -> float:
    """Transformer Engine's modules take longer for products, most for those of scaled formats."""
    issue_s = _eager_issue_s(work, backward)
    if isinstance(work, Matmul | GroupedMatmul):
        issue_s += host_costs.MODULE_ISSUE_S
        if isinstance(work, Matmul):
            issue_s += host_costs.SCALED_ISSUE_S.get(work.dtype, 0.0)
    return issue_s


def _listed_issue_s(work: Work, backward: bool) -> float:
    """Modules of Megatron-LM whose weights are gathered part by part."""
    if isinstance(work, Collective) and work.kind is CollectiveKind.ALL_GATHER:
        return host_costs.PART_ISSUE_S
    return _engine_issue_s(work, backward)


def compute_pricer(
    workload: Workload,
    cluster: Cluster,
    calibration: Calibration | None = None,
    attention: AttentionKernel = AttentionKernel.CURRENT,
    idle: bool = False,
    schedule: ScheduleKind | None = None,
) -> ComputePrice:
    """Return the price of computation as part of a long step on the cluster's GPU, with *attention* of its generation;
    *idle*: its backward multiplies zeros, which takes next to no power.
    """
    gpu, fit = cluster.gpu, default_fit()
    load = _find_load(workload.stages[len(workload.stages) // 2], gpu, fit, idle)
    current = make_pricer(gpu, fit, load)
    pace = pace_of(workload.layout, workload.micro_batches, _stage_seconds(workload, current, schedule))
    if calibration is None and attention is AttentionKernel.CURRENT:
        return PacedCompute(current, pace)

    def price(work: Compute) -> Price:
        work = convert_for_kernel(work, attention)
        base = current(work) if calibration is None else calibration.price(work, gpu, fit, load)
        return apply_pace(slow_for_kernel(base, work, attention, gpu.architecture), work, pace)

    return price


def _find_load(stage: Stage, gpu: Gpu, fit: ComputeFit, idle: bool) -> Load:
    """Return the load of a stage, as far as prices depend on it; an *idle* one draws power in its forward alone."""
    matrix_s = total_s = energy_s = 0.0
    for block in stage.body:
        own_s = _COOL.get((block.layers, gpu, fit), partial(_cool_seconds, block.layers, gpu, fit, idle), idle)
        matrix_s += block.repeat * own_s[0]
        total_s += block.repeat * own_s[1]
        energy_s += block.repeat * own_s[2]
    return load_of(matrix_s, total_s, energy_s, gpu, fit).decisive


def _cool_seconds(layers: Sequence[Layer], gpu: Gpu, fit: ComputeFit, idle: bool) -> tuple[float, float, float]:
    matrix_s, total_s, energy_s = cool_seconds(_WORKS.of(layers, _count_works, False), gpu, fit)
    return matrix_s, total_s, cool_seconds(_count_works(layers, True), gpu, fit)[2] if idle else energy_s


def _stage_seconds(workload: Workload, pricer: LoadPricer, schedule: ScheduleKind | None) -> tuple[Spent, ...]:
    """Return for each pipeline stage the seconds of a micro-batch that clocks decide, and those of other kernels."""
    layout = workload.layout
    if workload.uniform or layout.pp == 1:
        return ()
    spent: dict[int, Spent] = {}
    pieces = list(map(id, workload.stages))
    for key, stage in dict(zip(pieces, workload.stages, strict=True)).items():
        blocks_s = [(_BLOCKS_S.of(block.layers, _spend, pricer), block.repeat) for block in stage.body]
        spent[key] = _add([(clocked_s * repeat, other_s * repeat) for (clocked_s, other_s), repeat in blocks_s])
    stages = pieces_of_stages(schedule or default_schedule(layout.vpp), layout.pp, layout.vpp)
    own = [tuple([pieces[piece] for piece in places]) for places in stages]
    sums = {keys: _add([spent[key] for key in keys]) for keys in dict.fromkeys(own)}
    return tuple([sums[keys] for keys in own])


def _add(parts: Sequence[Spent]) -> Spent:
    return sum([clocked_s for clocked_s, _ in parts]), sum([other_s for _, other_s in parts])


def _spend(layers: Sequence[Layer], pricer: LoadPricer) -> Spent:
    clocked_s = other_s = 0.0
    for work, number in _WORKS.of(layers, _count_works, False).items():
        own_s = pricer.spend(work)
        clocked_s += number * own_s[0]
        other_s += number * own_s[1]
    return clocked_s, other_s


_COOL: ByIdentity[tuple[float, float, float]] = ByIdentity(4096)
_BLOCKS_S: ByIdentity[Spent] = ByIdentity(4096)


def _count_works(layers: Sequence[Layer], forward: bool) -> dict[Compute, int]:
    """Return what *layers* compute, and how often; only in the *forward* if asked."""
    ops = [op for layer in layers for op in (layer.forward if forward else layer.all_ops)]
    return dict(Counter([op.work for op in ops if type(op.work) in COMPUTING]))  # type: ignore[misc]


_WORKS: ByIdentity[dict[Compute, int]] = ByIdentity(4096)


# The report of a model.


def _complete_report(
    model: Model,
    cluster: Cluster,
    strategy: Strategy,
    framework: Framework,
    report: StepReport,
    stages: Sequence[StageMemory],
) -> StepReport:
    """Return *report* with what the model, its strategy and its framework add to it."""
    split = describe_split(model, strategy)
    host = _host_facts(stages, cluster, strategy)
    run = {"model": model.name, "framework": framework.name, **pick(model, "parameters layers hidden")}
    run |= {**pick(strategy, "seq micro_batch global_batch"), "precision": str(strategy.precision)}
    return replace(
        report,
        throughput=throughput(model, cluster, strategy, report.step_s),
        run={**report.run, **run},
        memory_bytes={**memory_facts(stages), **host},
        warnings=(*report.warnings, *_find_warnings(report, host, model, cluster, strategy, framework)),
        assumptions=(*((split,) if split else ()), *_scan_assumptions(model, framework), *report.assumptions),
    )


def throughput(model: Model, cluster: Cluster, strategy: Strategy, step_s: float) -> Throughput:
    """Return the throughput of a step of *step_s*."""
    # What the model needs: a causal mask leaves half of the attention square, as Megatron-LM counts today.
    terms = pick(strategy, "mtp_layers lora_rank lora_targets processed_share document trained_layers")
    reference = strategy.objective is Objective.DPO
    flops = model_flops(model, strategy.seq, strategy.global_batch, causal=True, reference=reference, **terms)
    per_gpu = strategy.filled * flops / step_s / strategy.layout.gpus
    return Throughput(
        tokens_per_s=strategy.tokens / step_s,
        tflops_per_gpu=per_gpu / TFLOPS,
        mfu=per_gpu / cluster.gpu.matrix_peak_flops(str(strategy.precision)),
    )


def _find_warnings(
    report: StepReport, host: FactDict, model: Model, cluster: Cluster, strategy: Strategy, framework: Framework
) -> list[str]:
    warnings, gpu, precision = [], cluster.gpu, str(strategy.precision)
    used = gpu.runs_as(precision)
    if used != precision:
        warnings.append(
            f"{gpu.name} has no {precision} matrix units: matrix products run as {used}; "
            f"it has {', '.join(gpu.matrix_flops)}"
        )
    if strategy.layout.pp > 1 and not strategy.overlap.transfers and not _stops_for_transfers(strategy):
        warnings.append(
            f"stages of schedule {strategy.schedule} run ahead of their receivers: transfers overlap all the same"
        )
    if recomputes_in_vain(model, strategy, framework):
        warnings.append(
            "recompute selective takes time and saves no memory here: it recomputes core attention, and fused "
            "attention stores no scores; use recompute none, or name other modules"
        )
    offloaded = host.get("host")
    if offloaded and offloaded["node"] > offloaded["capacity"]:
        warnings.append(
            f"{format_bytes(offloaded['node'])} are offloaded to the host of each node, which has "
            f"{format_bytes(offloaded['capacity'])}: lower --offload"
        )
    if PriceSource.SCALED in (report.sources.get("matmul"), report.sources.get("groupedmatmul")):
        unmeasured = f"nobody measured {used} products on {gpu.name} or its kind: "
        if gpu.vendor in GPU_VENDORS:
            warnings.append(f"{unmeasured}their times are scaled from other GPUs; 'stepcast profile' measures yours")
        else:
            warnings.append(
                f"{unmeasured}times and software are taken as a GPU's; see 'Other accelerators' in docs/clusters.md"
            )
    if strategy.layout.gpus > WELL_CHECKED_GPUS:
        warnings.append(
            f"{strategy.layout.gpus:,} GPUs: few published runs have more than {WELL_CHECKED_GPUS:,}, so "
            "this is less sure than a smaller run ('stepcast validate' shows them)"
        )
    if strategy.seq > model.max_seq:
        warnings.append(f"sequences of {strategy.seq:,} tokens are longer than the {model.max_seq:,} of {model.name}")
    mixers = {block.mixer for block in model.block_kinds}
    rare = [text for mixer, text in SELDOM_MEASURED.items() if mixer in mixers]
    return warnings + [f"{text}; no published run has such layers" for text in rare]


def _scan_assumptions(model: Model, framework: Framework) -> list[str]:
    """Name the kernels that run the layers that carry a state along the sequence."""
    mixers = {block.mixer for block in model.block_kinds}
    libraries = dict.fromkeys(name for mixer, name in SCAN_LIBRARIES.items() if mixer in mixers)
    if not libraries:
        return []
    if framework.ssm_kernels is SsmKernels.EAGER:
        return [
            "Mamba-2 layers run as PyTorch operations (--ssm-kernels eager), without mamba-ssm; estimates "
            "were 7 to 12 % above six such scans measured on an H200, which the interval does not count"
        ]
    text = f"state-space layers run the fused kernels of {' and '.join(libraries)}"
    if framework.modules is Modules.TRANSFORMERS:
        text += ", if they are installed; transformers falls back to PyTorch operations without them, many "
        text += "times slower" + (" (--ssm-kernels eager)" if Mixer.MAMBA in mixers else "")
    return [text]


def memory_facts(stages: Sequence[StageMemory]) -> FactDict:
    """Return the fullest stage in the words of the JSON contract, with every stage."""
    fullest = max(stages, key=lambda stage: stage.total)
    return {
        **fullest.parts,
        **pick(fullest, "total low high level=band.level allocated reserved capacity"),
        "fits": all(stage.fits for stage in stages),
        "verdict": str(verdict_of(stages)),
        **pick(fullest, "free stage"),
        "stages": [{"stage": stage.stage, **stage.parts, "total": stage.total} for stage in stages],
    }


def _host_facts(stages: Sequence[StageMemory], cluster: Cluster, strategy: Strategy) -> FactDict:
    """Return what is offloaded to the hosts, for the GPU and the node that need the most there."""
    most, node = max(stage.host for stage in stages), cluster.node
    if not most or node.host is None:
        return {}
    gpus = min(node.gpus, strategy.layout.gpus)
    return {"host": {"gpu": most, "node": most * gpus, "capacity": node.host.memory_bytes}}
