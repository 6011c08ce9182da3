"""What must hold between forecasts, whatever they are of."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import stepcast
from stepcast.cost.memory import memory
from stepcast.forecast.options import Options
from stepcast.forecast.predict import compute_pricer, predict
from stepcast.forecast.simulate import simulate
from stepcast.generate.flops import model_flops
from stepcast.generate.workload import generate
from stepcast.hardware import Cluster
from stepcast.ir.layout import Group
from stepcast.ir.model import pieces
from stepcast.ir.step import StepReport
from stepcast.ir.strategy import Recompute, RecomputeKind, ScheduleKind, Sharding
from stepcast.ir.work import Collective
from tests.executed import hardware_flops
from tests.forecast.strategies import CLUSTERS, Case, cases

FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
ROUNDING = 1 + 1e-9


def report_of(case: Case) -> StepReport:
    return predict(case.model, case.cluster, case.strategy, case.framework).report


def total_bytes(case: Case) -> float:
    return max(stage.total for stage in memory(case.model, case.strategy, case.cluster.gpu, case.framework))


def faster(cluster: Cluster, what: str, factor: float) -> Cluster:
    node = cluster.node
    gpu, fabric = node.gpu, node.fabric
    match what:
        case "links":
            assert node.nic is not None
            link, nic = (
                replace(each, bandwidth_bytes_per_s=each.bandwidth_bytes_per_s * factor)
                for each in (fabric.link, node.nic)
            )
            return replace(cluster, node=replace(node, fabric=replace(fabric, link=link), nic=nic))
        case "memory":
            rate = gpu.memory_bandwidth_bytes_per_s * factor
            gpu = replace(gpu, memory_bandwidth_bytes_per_s=rate)
        case _:
            matrix, vector = (
                {name: flops * factor for name, flops in each.items()} for each in (gpu.matrix_flops, gpu.vector_flops)
            )
            gpu = replace(gpu, matrix_flops=matrix, vector_flops=vector)
    return replace(cluster, node=replace(node, gpu=gpu))


@FEW
@given(case=cases())
def test_parts_sum_to_the_step_and_none_is_negative(case: Case) -> None:
    report = report_of(case)
    assert min(report.breakdown_s.values()) >= 0
    assert sum(report.breakdown_s.values()) == pytest.approx(report.step_s, rel=1e-12)
    for stage in report.stages:
        assert min(stage.busy_s, stage.exposed_s, stage.host_s, stage.bubble_s) >= 0
    for exposure in report.communication_s.values():
        assert 0 <= exposure.exposed_s <= exposure.total_s * ROUNDING
    assert report.low_s <= report.step_s <= report.high_s


@FEW
@given(case=cases())
def test_no_more_is_needed_than_runs_and_no_more_runs_than_can(case: Case) -> None:
    strategy = case.strategy
    needed = model_flops(
        case.model,
        strategy.seq,
        strategy.global_batch,
        causal=True,
        lora_rank=strategy.lora_rank,
        processed_share=strategy.processed_share,
    )
    # Rows of experts are whole numbers.
    assert needed <= hardware_flops(generate(case.model, strategy, case.framework)) * (1 + 1e-3)
    throughput = report_of(case).throughput
    assert throughput is not None
    assert 0 < throughput.mfu <= 1


@FEW
@given(case=cases(), what=st.sampled_from(("links", "memory", "flops")), factor=st.sampled_from((1.1, 2.0)))
def test_faster_hardware_is_never_slower(case: Case, what: str, factor: float) -> None:
    before, after = report_of(case), report_of(replace(case, cluster=faster(case.cluster, what, factor)))
    assert after.step_s <= before.step_s * ROUNDING


LESS_WORK: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # What is changed for less work -> (less, more).
    "recompute": ({"recompute": "none"}, {"recompute": "selective"}),
    "recompute more": ({"recompute": "selective"}, {"recompute": "full"}),
    "sequence": ({"seq": 2048}, {"seq": 4096}),
    "vocabulary": ({"model": "layers=8"}, {"model": "layers=8,vocab=400000"}),
    "layers": ({"model": "layers=8"}, {"model": "layers=16"}),
    "micro-batches": ({"global_batch": 256}, {"global_batch": 512}),
    "network": ({"set": ["node.nic.bandwidth=100 GB/s"]}, {"set": ["node.nic.bandwidth=10 GB/s"]}),
}


@settings(FEW, max_examples=40)
@given(
    model=st.sampled_from(("llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite")),
    schedule=st.sampled_from(tuple(ScheduleKind)),
    pp=st.sampled_from((1, 2, 4)),
    tp=st.sampled_from((1, 2)),
    cp=st.sampled_from((1, 2)),
    ep=st.sampled_from((1, 4, 8)),
    execution=st.sampled_from(("graphs", "eager")),
    paired=st.booleans(),
    what=st.sampled_from(tuple(LESS_WORK)),
)
def test_less_work_is_never_slower(
    model: str, schedule: ScheduleKind, pp: int, tp: int, cp: int, ep: int, execution: str, paired: bool, what: str
) -> None:
    """Also where a forward and a backward share a GPU, whose order is chosen anew for other work."""
    choices: dict[str, Any] = {"gpus": 64, "tp": tp, "cp": cp, "pp": pp, "ep": 1 if model.startswith("llama") else ep}
    choices |= {"execution": execution, "global_batch": 256, "seq": 2048}
    chunks = schedule in (ScheduleKind.INTERLEAVED, ScheduleKind.ZB_V, ScheduleKind.V_HALF, ScheduleKind.V_MIN)
    if pp > 1:
        choices |= {"schedule": str(schedule), "vpp": 2 if chunks else 1}
    if paired and choices["ep"] > 1 and (pp == 1 or schedule is ScheduleKind.INTERLEAVED):
        choices["overlap"] = "gradients,parameters,experts"

    def step_s(change: dict[str, Any]) -> float:
        named = f"{model}:{change.get('model', 'layers=8')}"
        rest = {name: value for name, value in change.items() if name != "model"}
        return stepcast.predict(named, "dgx-h100", **(choices | rest)).step_s

    less, more = LESS_WORK[what]
    assert step_s(less) <= step_s(more) * ROUNDING


@FEW
@given(case=cases())
def test_contention_has_a_limit(case: Case) -> None:
    workload = generate(case.model, case.strategy, case.framework)
    compute = compute_pricer(workload, case.cluster)
    schedule = str(case.strategy.schedule)
    alone, overlapped = (
        simulate(workload, case.cluster, Options(schedule=schedule, contention=contention), compute)
        for contention in (False, True)
    )
    takes = overlapped.step.prices.takes
    assert takes is not None
    shares: dict[Group, float] = {}
    for work, _ in overlapped.step.works:
        if isinstance(work, Collective):
            shares[work.group] = max(takes(work.kind, work.group), shares.get(work.group, 0.0))
    limit = 1 + sum(shares.values())
    assert alone.report.step_s <= overlapped.report.step_s * ROUNDING
    assert overlapped.report.step_s <= alone.report.step_s * limit * ROUNDING
    parts = [each.report.breakdown_s["compute"] for each in (alone, overlapped)]
    assert parts[1] <= parts[0] * limit * ROUNDING


@FEW
@given(case=cases())
def test_memory_falls_with_what_is_split_or_computed_again(case: Case) -> None:
    strategy = case.strategy
    stages = [Sharding.NONE, Sharding.ZERO_1, Sharding.ZERO_2]
    # Under ZeRO-3 two layers are there as a whole, which in a model of eight takes some ranks to make up for;
    # a pipeline keeps all of a stage's.
    if strategy.layout.dp * strategy.layout.cp >= 8 and strategy.layout.pp == 1:
        stages.append(Sharding.ZERO_3)
    plain = replace(case, strategy=replace(strategy, sharding=Sharding.NONE)).with_layout(shard=0)
    sharded = [replace(plain, strategy=replace(plain.strategy, sharding=stage)) for stage in stages]
    sizes = [total_bytes(each) for each in sharded if each.legal]
    # Split gradients are whole for one layer while it runs: of adapters that is more than what they save.
    assert all(later <= earlier * 1.001 for earlier, later in pairwise(sizes))
    kinds = (RecomputeKind.NONE, RecomputeKind.SELECTIVE, RecomputeKind.FULL)
    again = [replace(case, strategy=replace(strategy, recompute=Recompute(kind))) for kind in kinds]
    # Of tensors: the allocator of a step that recomputes holds more than it needs (docs/memory.md).
    allocated = [
        max(stage.allocated for stage in memory(each.model, each.strategy, each.cluster.gpu, each.framework))
        for each in again
    ]
    assert allocated == sorted(allocated, reverse=True)


@FEW
@given(case=cases())
def test_memory_does_not_rise_with_tensor_parallelism(case: Case) -> None:
    """At the same dp, so that states are split among as many."""
    more = case.with_layout(tp=2 * case.strategy.layout.tp)
    more = replace(more, strategy=replace(more.strategy, sequence_parallel=True))
    assume(more.legal)
    assert total_bytes(more) <= total_bytes(case) * ROUNDING


@FEW
@given(case=cases(), schedule=st.sampled_from((ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)))
def test_memory_does_not_rise_with_stages(case: Case, schedule: ScheduleKind) -> None:
    """Of the schedules whose stages hold no more when there are more of them: others have a last stage that
    keeps more logits, more chunks under way, or two copies of the weights. FSDP keeps a stage's weights
    gathered from one micro-batch to the next. A first cut may cost: a copy of tied embeddings, micro-batches
    under way where there was one.
    """
    assume(not case.strategy.sharding.splits_parameters)
    plan = replace(case.strategy, schedule=schedule)
    two, four = (replace(case, strategy=plan).with_layout(pp=pp, vpp=1) for pp in (2, 4))
    assume(two.legal and four.legal)
    assert total_bytes(four) <= total_bytes(two) * ROUNDING


@settings(FEW, max_examples=10)
@given(case=cases())
def test_two_spellings_of_one_strategy_are_one_forecast(case: Case) -> None:
    strategy, layout = case.strategy, case.strategy.layout
    spellings = [
        replace(strategy, stage_layers=tuple(len(piece.layers) for piece in pieces(case.model, strategy))),
        replace(strategy, recompute=Recompute(RecomputeKind.SELECTIVE, modules=strategy.recompute.selected))
        if strategy.recompute.kind is RecomputeKind.SELECTIVE
        else strategy,
        replace(strategy, layout=replace(layout, expert_tp=layout.expert_tp_size)),
        replace(strategy, layout=replace(layout, shard=layout.shard or layout.shard_size))
        if strategy.sharding is not Sharding.NONE
        else strategy,
    ]
    spelled = [replace(case, strategy=spelling) for spelling in spellings]
    limit = case.framework.bucket_parameters(strategy, first_piece=True)
    if layout.pp == 1 and not strategy.sharding.splits_gradients:
        said = 0 if limit is None else limit * int(case.framework.gradient_dtype.bytes)
        spelled.append(replace(case, framework=replace(case.framework, bucket_bytes=said)))
    found = report_of(case)
    for one in spelled:
        other = report_of(one)
        assert (other.step_s, other.breakdown_s) == (found.step_s, found.breakdown_s)


def test_every_cluster_is_drawn_from() -> None:
    assert len({cluster.gpu.name for cluster in CLUSTERS}) == 3
