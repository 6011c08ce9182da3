"""Time and memory agree on what sharded ranks gather, keep and reduce."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.cost.memory import memory
from stepcast.generate.workload import generate
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.framework import Framework, Kernels
from stepcast.ir.layout import Group, Layout
from stepcast.ir.legality import is_legal
from stepcast.ir.model import Model
from stepcast.ir.sharding import Gathered, Reduced, plan_of
from stepcast.ir.strategy import NO_OVERLAP, USUAL_OVERLAP, ScheduleKind, Sharding, Strategy
from stepcast.ir.types import DType
from stepcast.ir.work import Collective, CollectiveKind, Elementwise
from stepcast.ir.workload import Workload
from stepcast.models.catalog import load_model

LLAMA = load_model("llama-3.1-8b")
MIXTRAL = load_model("mixtral-8x7b")
H100, B200 = load_gpu("h100-sxm"), load_gpu("b200")
DENSE = (Group.DP, Group.SHARD)
EXPERTS = (Group.EXPERT_DP, Group.EXPERT_SHARD)


def strategy(micro_batches: int = 4, seq: int = 1024, **changes: Any) -> Strategy:
    degrees = {key: changes.pop(key) for key in list(changes) if key in Layout.__dataclass_fields__}
    layout = Layout(**degrees)
    return Strategy(layout, 1, layout.dp * micro_batches, seq, **changes)


def carried(run: Workload, kind: CollectiveKind, groups: tuple[Group, ...], stage: int = 0) -> int:
    """Bytes of all buffers that the collectives of a step fill or empty on one stage."""
    return sum(
        count * op.work.total_bytes
        for layer, count in run.stages[stage].counted_layers(run.micro_batches)
        for op in (*layer.forward, *layer.input_gradient, *layer.weight_gradient)
        if isinstance(op.work, Collective) and op.work.kind is kind and op.work.group in groups
    )


def gathered(model: Model, chosen: Strategy, groups: tuple[Group, ...] = DENSE) -> int:
    return carried(generate(model, chosen), CollectiveKind.ALL_GATHER, groups)


def reduced(model: Model, chosen: Strategy, groups: tuple[Group, ...] = DENSE) -> int:
    return carried(generate(model, chosen), CollectiveKind.REDUCE_SCATTER, groups)


# ---- experts in hybrid sharding ----------------------------------------------------------------------


@pytest.mark.parametrize("ep", [1, 2, 8])
def test_hybrid_sharding_keeps_a_copy_of_the_experts_in_every_shard(ep: int) -> None:
    """32 ranks hold four copies of all states, 16 bytes for each parameter over eight ranks."""
    chosen = strategy(dp=32, ep=ep, shard=8, sharding=Sharding.HYBRID_FSDP)
    stage = memory(MIXTRAL, chosen, H100)[0]
    states = stage.parameters + stage.gradients + stage.optimizer
    assert states == pytest.approx(16 * MIXTRAL.parameters / 8, rel=1e-3 if ep == 1 else 0.35)
    whole = memory(MIXTRAL, strategy(dp=32, ep=ep, sharding=Sharding.FSDP), H100)[0]
    assert whole.optimizer < stage.optimizer


@pytest.mark.parametrize("sharding", [Sharding.HYBRID_FSDP, Sharding.ZERO_1])
def test_experts_are_reduced_inside_a_shard_then_across(sharding: Sharding) -> None:
    chosen = strategy(dp=32, ep=2, shard=8, micro_batches=1, sharding=sharding)
    run = generate(MIXTRAL, chosen)
    experts = MIXTRAL.shard_of(range(32), tp=1, ep=2, expert_tp=1, embedding=True, head=True).experts
    assert carried(run, CollectiveKind.REDUCE_SCATTER, (Group.EXPERT_SHARD,)) == 4 * experts
    assert carried(run, CollectiveKind.ALL_REDUCE, (Group.EXPERT_REPLICA,)) == pytest.approx(4 * experts / 4)
    passes = 2 if sharding is Sharding.HYBRID_FSDP else 1
    assert carried(run, CollectiveKind.ALL_GATHER, (Group.EXPERT_SHARD,)) == passes * 2 * experts
    assert not carried(run, CollectiveKind.REDUCE_SCATTER, (Group.EXPERT_DP,))


@given(
    tp=st.sampled_from([1, 2]),
    dp=st.sampled_from([4, 8]),
    ep=st.sampled_from([1, 2, 4]),
    shard=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
)
def test_the_ranks_of_a_shard_split_its_experts(tp: int, dp: int, ep: int, shard: int, pp: int) -> None:
    """A shard's ranks hold all experts among them, so nothing is gathered from outside."""
    layout = Layout(tp=tp, dp=dp, ep=ep, shard=shard, pp=pp, expert_tp=1)
    if layout.expert_dp % layout.copies:
        return
    layout = Layout(tp=tp, dp=dp, ep=ep, shard=shard, pp=pp, expert_tp=1)
    copies = [set(ranks) for ranks in layout.groups("shard")]
    for family in (Group.EXPERT_SHARD, Group.EXPERT_REPLICA):
        groups = layout.groups(family)
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(layout.gpus))
        assert {len(ranks) for ranks in groups} == {layout.size(family)}
    first = set(range(layout.shard_size * tp))  # tensor ranks lie next to each other
    assert first == set().union(*(copy for copy in copies if copy & set(range(tp))))
    assert all(set(layout.group("expert-shard", rank)) <= first for rank in first)


# ---- fp8 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", [Sharding.FSDP, Sharding.ZERO_3])
def test_quantised_weights_are_split_like_the_others(sharding: Sharding) -> None:
    model = load_model("llama-3.1-70b")
    fp8, bf16 = (
        memory(model, strategy(dp=64, sharding=sharding, precision=precision), H100)[0]
        for precision in (DType.FP8, DType.BF16)
    )
    assert fp8.parameters == bf16.parameters
    layer = model.shard_of(range(1), embedding=False, head=False).quantised
    assert 0 < fp8.temporary - bf16.temporary <= 2 * layer  # of one layer, in both orientations


@pytest.mark.parametrize(("gpu", "copies"), [(H100, 2), (B200, 1)])
@pytest.mark.parametrize("sharding", [Sharding.ZERO_1, Sharding.NONE])
def test_parameters_in_fp8_have_no_copy_in_bf16(gpu: Any, copies: int, sharding: Sharding) -> None:
    """Hopper multiplies fp8 in one orientation alone and keeps a transposed copy."""
    kept, beside = (
        memory(LLAMA, strategy(dp=8, sharding=sharding, precision=DType.FP8, fp8_parameters=on), gpu)[0]
        for on in (True, False)
    )
    matrices = LLAMA.shard_of(range(32), embedding=False, head=False).quantised
    wide = LLAMA.parameters - matrices
    assert matrices == pytest.approx(LLAMA.parameters - 2 * 128256 * 4096, rel=1e-3)
    assert kept.parameters == copies * matrices + 2 * wide
    assert beside.parameters == kept.parameters + 2 * matrices
    assert (kept.optimizer, kept.gradients) == (beside.optimizer, beside.gradients)


@pytest.mark.parametrize("sharding", [Sharding.ZERO_1, Sharding.ZERO_3, Sharding.FSDP])
def test_parameters_in_fp8_travel_in_one_byte(sharding: Sharding) -> None:
    narrow, wide = (
        gathered(LLAMA, strategy(dp=8, sharding=sharding, precision=DType.FP8, fp8_parameters=on))
        for on in (True, False)
    )
    matrices = LLAMA.shard_of(range(32), embedding=False, head=False).quantised
    assert wide / (2 * LLAMA.parameters) * matrices == pytest.approx(wide - narrow)


def test_mxfp8_parameters_are_made_of_gathered_bf16_ones() -> None:
    """Megatron-Core's --reuse-grad-buf-for-mxfp8-param-ag."""
    runs = [strategy(dp=8, sharding=Sharding.ZERO_1, precision=DType.MXFP8, fp8_parameters=on) for on in (0, 1)]
    assert gathered(LLAMA, runs[0]) == gathered(LLAMA, runs[1])
    kept = memory(LLAMA, runs[1], B200)[0].parameters
    assert kept == pytest.approx(2 * LLAMA.parameters, rel=1e-3)


# ---- gathered once, or for every micro-batch ---------------------------------------------------------


@pytest.mark.parametrize(
    ("pp", "reshard", "gathers", "reductions"),
    [
        (1, None, 8, 4),  # FSDP2: forward and backward of four micro-batches
        (1, False, 4, 4),  # kept from a forward to its backward
        (2, None, 1, 1),  # torchtitan's default with a pipeline
        (2, True, 8, 4),  # Megatron-FSDP
    ],
)
@pytest.mark.parametrize("overlapped", [True, False])
def test_how_often_a_step_gathers_and_reduces(
    pp: int, reshard: bool | None, gathers: int, reductions: int, overlapped: bool
) -> None:
    overlap = USUAL_OVERLAP if overlapped else NO_OVERLAP
    chosen = strategy(dp=8, pp=pp, sharding=Sharding.FSDP, reshard=reshard, overlap=overlap)
    held = LLAMA.shard_of(range(32 // pp), embedding=True, head=pp == 1).total
    assert gathered(LLAMA, chosen) == gathers * 2 * held
    assert reduced(LLAMA, chosen) == reductions * 4 * held


def test_what_is_not_freed_stays_in_memory() -> None:
    def temporary(**changes: Any) -> float:
        return memory(LLAMA, strategy(dp=8, sharding=Sharding.FSDP, **changes), H100)[0].temporary

    held = LLAMA.shard_of(range(16), embedding=True, head=False).total
    ends = 128256 * 4096
    # Weights of the stage, not of the embedding and the next unit alone; gradients beyond the rank's share.
    kept, freed = temporary(pp=2), temporary(pp=2, reshard=True)
    assert kept - freed == pytest.approx(2 * held + 4 * held * 7 / 8 - 2 * 2 * ends)
    kept, freed = temporary(reshard=False), temporary()
    assert kept - freed == pytest.approx(2 * LLAMA.parameters - 2 * 2 * ends, rel=1e-5)


def test_zero_2_in_a_pipeline_reduces_every_micro_batch() -> None:
    """Megatron-FSDP's optim_grads: gradients that are split cannot be summed before they are reduced."""
    chosen = strategy(dp=8, pp=2, sharding=Sharding.ZERO_2)
    held = LLAMA.shard_of(range(16), embedding=True, head=False).total
    assert (gathered(LLAMA, chosen), reduced(LLAMA, chosen)) == (2 * held, 4 * 4 * held)
    assert memory(LLAMA, chosen, H100)[0].gradients == pytest.approx(4 * held / 8)


# ---- one rank ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", [Sharding.ZERO_1, Sharding.ZERO_2, Sharding.ZERO_3])
@pytest.mark.parametrize("shape", [{}, {"pp": 2}, {"dp": 8, "shard": 1}, {"cp": 2, "shard": 1}])
@pytest.mark.parametrize("kernels", list(Kernels))
def test_one_rank_shares_with_nobody(sharding: Sharding, shape: dict[str, int], kernels: Kernels) -> None:
    alone = strategy(sharding=sharding, **shape)
    plain = strategy(sharding=Sharding.NONE, **{**shape, "shard": 0})
    framework = Framework(kernels=kernels)
    assert memory(LLAMA, alone, H100, framework) == memory(LLAMA, plain, H100, framework)
    assert generate(LLAMA, alone, framework).stages == generate(LLAMA, plain, framework).stages


def test_context_ranks_split_states() -> None:
    alone, split = (memory(LLAMA, strategy(cp=cp, sharding=Sharding.ZERO_3), H100)[0] for cp in (1, 4))
    assert split.optimizer == pytest.approx(alone.optimizer / 4)
    assert gathered(LLAMA, strategy(cp=4, sharding=Sharding.ZERO_3)) == 4 * 2 * 2 * LLAMA.parameters


def test_fsdp_casts_where_there_is_nothing_to_gather() -> None:
    """The weights that it keeps are the optimizer's, in fp32."""
    chosen = strategy(sharding=Sharding.FSDP)
    assert gathered(LLAMA, chosen) == 0
    casts = [
        op.work.write_bytes
        for layer in generate(LLAMA, chosen).stages[0].body_layers()
        for op in (*layer.forward, *layer.input_gradient)
        if op.name.endswith("parameters cast") and isinstance(op.work, Elementwise)
    ]
    assert sum(casts) == 2 * 2 * LLAMA.parameters


def test_all_forwards_first_hold_all_micro_batches_without_a_pipeline() -> None:
    first, in_turn = (
        memory(LLAMA, strategy(dp=8, schedule=schedule), H100)[0]
        for schedule in (ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B)
    )
    assert first.activations == pytest.approx(4 * in_turn.activations)


# ---- both from one source ----------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    experts=st.booleans(),
    dp=st.sampled_from([1, 2, 8]),
    cp=st.sampled_from([1, 2]),
    pp=st.sampled_from([1, 2]),
    ep=st.sampled_from([1, 2]),
    shard=st.sampled_from([0, 1, 2]),
    sharding=st.sampled_from(list(Sharding)),
    reshard=st.sampled_from([None, True, False]),
    fp8=st.booleans(),
    kernels=st.sampled_from(list(Kernels)),
)
def test_time_and_memory_agree(
    experts: bool,
    dp: int,
    cp: int,
    pp: int,
    ep: int,
    shard: int,
    sharding: Sharding,
    reshard: bool | None,
    fp8: bool,
    kernels: Kernels,
) -> None:
    """What a step gathers are the weights that no rank keeps whole, as often as they are freed; what it reduces
    by scattering are the gradients of which a rank keeps a part, as often as it does not keep them whole.
    """
    model = MIXTRAL if experts else LLAMA
    chosen = strategy(
        micro_batches=3,
        dp=dp,
        cp=cp,
        pp=pp,
        ep=ep if experts else 1,
        shard=shard,
        sharding=sharding,
        reshard=reshard,
        precision=DType.FP8 if fp8 else DType.BF16,
        fp8_parameters=fp8,
    )
    framework = Framework(kernels=kernels)
    if not is_legal(model, chosen):
        return
    plan, layout = plan_of(chosen, framework), chosen.layout
    held = model.shard_of(range(32 // pp), tp=1, ep=layout.ep, expert_tp=1, embedding=True, head=pp == 1)
    stage = memory(model, chosen, H100, framework)[0]
    run = generate(model, chosen, framework)
    times = {
        Gathered.NEVER: 0,
        Gathered.AFTER_UPDATE: 1,
        Gathered.ONCE: 1,
        Gathered.EACH_MICRO_BATCH: 3,
        Gathered.EACH_PASS: 6,
    }[plan.gathered]
    rounds = 1 if plan.reduced is Reduced.ONCE else 3
    optimizer = gradients = collected = 0.0
    for part, groups, count in ((plan.dense, DENSE, held.dense), (plan.experts, EXPERTS, held.experts)):
        split = part.ways > 1
        element = 1 if fp8 else 2
        wide = held.unquantised if groups is DENSE else 0
        travels = element * (count - wide) + 2 * wide
        assert carried(run, CollectiveKind.ALL_GATHER, groups) == times * travels * split
        assert carried(run, CollectiveKind.REDUCE_SCATTER, groups) == rounds * 4 * count * split
        assert part.ways * part.copies == layout.size(groups[0])
        optimizer += (8 if sharding in (Sharding.FSDP, Sharding.HYBRID_FSDP) else 12) * count / part.ways
        gradients += 4 * count / (part.ways if plan.splits_gradients else 1)
        collected += travels * part.collected
    assert (stage.gradients, stage.optimizer) == pytest.approx((gradients, optimizer))
    match plan.gathered:
        case Gathered.NEVER | Gathered.AFTER_UPDATE:  # whole all the time
            assert stage.parameters >= (1 if fp8 else 2) * held.total
            assert collected == 0
        case Gathered.ONCE | Gathered.EACH_MICRO_BATCH:  # whole at the fullest moment
            assert stage.temporary >= collected > 0
        case Gathered.EACH_PASS:  # never all of them
            more = memory(model, replace(chosen, reshard=False), H100, framework)[0]
            assert stage.temporary < more.temporary
