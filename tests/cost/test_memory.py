"""Memory by its parts: what each strategy saves, against the published formulas."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.cost.memory import memory
from stepcast.cost.memory.stages import default_in_flight
from stepcast.frameworks.catalog import load_framework
from stepcast.hardware.catalog import load_gpu
from stepcast.ir.framework import Framework, Kernels, LossKernel, SelectiveRule
from stepcast.ir.layers.kinds import count_saved
from stepcast.ir.layout import Layout
from stepcast.ir.legality import check, is_legal
from stepcast.ir.strategy import (
    NO_RECOMPUTE,
    Recompute,
    RecomputeKind,
    ScheduleKind,
    Sharding,
    Strategy,
    StrategyError,
    TrainingKind,
)
from stepcast.ir.types import DType
from stepcast.models.catalog import load_model

LLAMA = load_model("llama-3.1-8b")
H100 = load_gpu("h100-sxm")
FULL = Recompute(RecomputeKind.FULL)


def strategy(micro_batches: int = 8, seq: int = 4096, **changes: Any) -> Strategy:
    degrees = {key: changes.pop(key) for key in list(changes) if key in Layout.__dataclass_fields__}
    layout = Layout(**degrees)
    return Strategy(layout, 1, layout.dp * micro_batches, seq, **changes)


@pytest.mark.parametrize(
    ("sharding", "bytes_per_parameter"),
    [
        (Sharding.NONE, 2 + 4 + 12),
        (Sharding.ZERO_1, 2 + 4 + 12 / 8),
        (Sharding.ZERO_2, 2 + (4 + 12) / 8),
        (Sharding.ZERO_3, (2 + 4 + 12) / 8),
        (Sharding.FSDP, (4 + 4 + 8) / 8),
    ],
)
def test_states_per_parameter(sharding: Sharding, bytes_per_parameter: float) -> None:
    """Rajbhandari et al. 2020, figure 1, with fp32 gradients."""
    stage = memory(LLAMA, strategy(dp=8, sharding=sharding), H100)[0]
    states = stage.parameters + stage.gradients + stage.optimizer
    assert states == pytest.approx(bytes_per_parameter * LLAMA.parameters)


def test_stages_of_frozen_layers_have_no_optimizer_states() -> None:
    """The last 12 of 32 layers are half of the third of four stages and all of the fourth."""
    stages = memory(LLAMA, strategy(pp=4, trained_layers=12), H100)
    assert [stage.optimizer for stage in stages[:2]] == [0, 0]
    assert 2 * stages[2].optimizer == stages[3].optimizer > 0


def test_the_first_bf16_optimizer_of_deepspeed_keeps_fp32_weights_whole() -> None:
    """bf16 weight and gradient, fp32 weight and sum of gradients; moments of one parameter in eight."""
    framework = load_framework("megatron-deepspeed-bf16")
    stage = memory(LLAMA, strategy(dp=8, sharding=Sharding.ZERO_1), H100, framework)[0]
    states = stage.parameters + stage.gradients + stage.optimizer
    assert states == pytest.approx((2 + 2 + 4 + 4 + 8 / 8) * LLAMA.parameters)


@pytest.mark.parametrize(
    ("name", "dp", "sharding", "copies"),
    [
        ("pytorch", 8, Sharding.NONE, 2),
        ("pytorch", 8, Sharding.ZERO_1, 2),
        ("pytorch", 8, Sharding.ZERO_2, 1 / 8),
        ("pytorch", 1, Sharding.NONE, 1),
        ("trainer", 8, Sharding.NONE, 2),
        ("deepspeed-transformers", 8, Sharding.NONE, 1),
        ("megatron-core", 8, Sharding.NONE, 1),
    ],
)
def test_buckets_of_ddp_hold_gradients_a_second_time(name: str, dp: int, sharding: Sharding, copies: float) -> None:
    framework = load_framework(name)
    stage = memory(LLAMA, strategy(dp=dp, sharding=sharding), H100, framework)[0]
    assert stage.gradients == pytest.approx(copies * framework.gradient_dtype.bytes * LLAMA.parameters)


def test_deepspeeds_buffer_has_the_size_of_a_bucket() -> None:
    large, plan = load_framework("deepspeed-transformers"), strategy(dp=8, sharding=Sharding.ZERO_3)
    stages = [memory(LLAMA, plan, H100, replace(large, bucket_bytes=size))[0] for size in (10**9, 10**8)]
    assert stages[0].communication - stages[1].communication == pytest.approx(9e8)


def test_a_shard_group_splits_less() -> None:
    inside = memory(LLAMA, strategy(dp=64, shard=8, sharding=Sharding.HYBRID_FSDP), H100)[0]
    assert inside.optimizer == pytest.approx(8 / 8 * LLAMA.parameters)


def test_lora_trains_little() -> None:
    stage = memory(LLAMA, strategy(training=TrainingKind.LORA, lora_rank=16), H100)[0]
    assert stage.parameters > 2 * LLAMA.parameters
    assert stage.gradients + stage.optimizer < 0.02 * 16 * LLAMA.parameters


def test_fp32_has_no_second_copy() -> None:
    stage = memory(LLAMA, strategy(precision=DType.FP32), H100)[0]
    assert stage.parameters + stage.gradients + stage.optimizer == pytest.approx(16 * LLAMA.parameters)


@pytest.mark.parametrize("dropout", [True, False])
@pytest.mark.parametrize(("tp", "split"), [(1, False), (8, False), (8, True)])
def test_activations_are_korthikantis(tp: int, split: bool, dropout: bool) -> None:
    """Korthikanti et al. 2022, equations 1 to 4: s b h (34 + 5 a s / h) with dropout; without its masks
    (s b h for each of two, a s^2 b for the scores) and the dropped-out copies of the scores, and with the softmax
    output kept once (2 a s^2 b), s b h (32 + 2 a s / h). Of the 34, ten are outside the tensor-parallel region.
    """
    model = load_model("megatron-22b")
    chosen = Strategy(Layout(tp=tp), 4, 4, 2048, sequence_parallel=split)
    framework = Framework(flash_attention=False, dropout=dropout)
    kept = count_saved(model, chosen, model.blocks[0], framework).saved
    tokens, hidden, heads = 4 * 2048, model.hidden, model.heads
    whole, square = (10, 5) if dropout else (8, 2)
    outside, inside = whole / (tp if split else 1), (24 + square * heads * 2048 / hidden) / tp
    assert kept == pytest.approx(tokens * hidden * (outside + inside))


def test_full_recompute_keeps_the_input_of_each_layer() -> None:
    stage = memory(LLAMA, strategy(recompute=FULL), H100)[0]
    tokens = 4096
    assert stage.activations == pytest.approx((LLAMA.layers + 2) * tokens * LLAMA.hidden * 2)


def test_selective_recompute_drops_the_scores() -> None:
    model = load_model("gpt3-6.7b")
    usual, unfused = strategy(seq=2048), Framework(flash_attention=False)
    kept = count_saved(model, usual, model.blocks[0], unfused).saved
    selective = replace(usual, recompute=Recompute(RecomputeKind.SELECTIVE))
    assert kept - count_saved(model, selective, model.blocks[0], unfused).saved == 2 * model.heads * 2048**2


def test_flash_attention_keeps_a_number_for_each_row_instead_of_the_square() -> None:
    """Dao et al. 2022, algorithm 1: of the s x s scores of a head only the log-sum-exp of each row, in fp32."""
    model = load_model("gpt3-6.7b")
    unfused, fused = (
        count_saved(model, strategy(seq=2048), model.blocks[0], Framework(flash_attention=flash)).saved
        for flash in (False, True)
    )
    assert unfused - fused == 2 * model.heads * 2048**2 - 4 * model.heads * 2048


def test_torchtitans_selection_keeps_every_second_matmul_and_the_attention() -> None:
    """Its policy saves attention's result with its log-sum-exp, and the outputs of wq, wv, w1 and w2."""
    chosen = strategy(recompute=Recompute(RecomputeKind.SELECTIVE))
    titan = Framework(kernels=Kernels.COMPILED, selective=SelectiveRule.ALTERNATE_MATMULS)
    query, value = LLAMA.heads * LLAMA.head_dim, LLAMA.kv_heads * LLAMA.head_dim
    width = LLAMA.hidden + (query + query + value) + LLAMA.ffn + LLAMA.hidden  # the layer's input first
    assert count_saved(LLAMA, chosen, LLAMA.blocks[0], titan).saved == 4096 * (2 * width + 4 * LLAMA.heads)


@pytest.mark.parametrize(("loss", "held"), [(LossKernel.IN_PLACE, 2 + 4), (LossKernel.COMPILED, 2 + 4 + 4)])
def test_megatrons_loss_holds_the_logits_in_bf16_and_in_fp32(loss: LossKernel, held: int) -> None:
    """Megatron-LM's vocab_parallel_cross_entropy: the projection's logits, ``logits.float()``, and these less
    their maximum, which become the softmax: in place since Megatron-Core 0.9. The loss of a long sequence is
    the fullest moment of few layers.
    """
    model, framework = LLAMA.with_layers(1), Framework(loss=loss)
    short, long = (memory(model, strategy(seq=seq), H100, framework)[0].temporary for seq in (8192, 16384))
    assert long - short == pytest.approx(8192 * LLAMA.vocab * held)


def test_sequence_parallelism_gathers_what_a_matmul_needs() -> None:
    """Korthikanti et al. 2022, section 4.2.2: a rank holds s / tp of each input, gathers all of it for the
    matmul, and holds all of its gradient before that is scattered. Of the messages between stages, one in and
    one out, it needs its part alone.
    """
    chosen = strategy(tp=8, pp=2)
    whole = 4096 * LLAMA.hidden * 2
    plain, split = (
        memory(LLAMA, replace(chosen, sequence_parallel=split), H100)[0].temporary for split in (False, True)
    )
    assert split - plain == pytest.approx(2 * whole + 2 * (whole / 8 - whole))


def test_context_parallelism_splits_the_tokens() -> None:
    whole = count_saved(LLAMA, strategy(seq=8192), LLAMA.blocks[0]).saved
    assert count_saved(LLAMA, strategy(seq=8192, cp=4), LLAMA.blocks[0]).saved == pytest.approx(whole / 4)


@pytest.mark.parametrize(
    ("schedule", "vpp", "expected"),
    [
        (ScheduleKind.GPIPE, 1, ((16,), (16,), (16,), (16,))),
        (ScheduleKind.ONE_F_ONE_B, 1, ((4,), (3,), (2,), (1,))),
        (ScheduleKind.INTERLEAVED, 2, ((7, 4), (5, 4), (4, 3), (4, 1))),
        (ScheduleKind.ZB_H1, 1, ((4,),) * 4),
        (ScheduleKind.ZB_H2, 1, ((7,),) * 4),
        (ScheduleKind.ZB_V, 2, ((7, 1), (6, 2), (5, 3), (4, 4))),
        (ScheduleKind.DUALPIPE, 1, ((4, 1), (3, 2), (2, 3), (1, 4))),
    ],
)
def test_in_flight(schedule: ScheduleKind, vpp: int, expected: tuple[tuple[int, ...], ...]) -> None:
    chosen = strategy(micro_batches=16, pp=4, vpp=vpp, schedule=schedule)
    assert default_in_flight(chosen) == expected
    check(LLAMA, chosen)
    assert len(memory(LLAMA, chosen, H100)) == 4


def test_in_flight_counts_are_taken_as_given() -> None:
    chosen = strategy(pp=4)
    more = memory(LLAMA, chosen, H100, in_flight=[(8,), (8,), (8,), (8,)])
    usual = memory(LLAMA, chosen, H100)
    assert more[1].activations == pytest.approx(usual[1].activations * 8 / 3)
    with pytest.raises(StrategyError, match="for 2 stages, but pp is 4"):
        memory(LLAMA, chosen, H100, in_flight=[(1,), (1,)])


def test_dualpipe_holds_two_pieces() -> None:
    single = memory(LLAMA, strategy(micro_batches=16, pp=4), H100)
    both = memory(LLAMA, strategy(micro_batches=16, pp=4, schedule=ScheduleKind.DUALPIPE), H100)
    assert both[1].parameters == pytest.approx(single[1].parameters + single[2].parameters)


def test_expert_parallelism_spreads_the_experts() -> None:
    model = load_model("mixtral-8x7b")
    shard = model.shard_of(range(32), ep=8, embedding=True, head=True)
    stage = memory(model, strategy(ep=8, dp=8), H100)[0]
    assert stage.parameters == 2 * shard.total


def test_what_does_not_fit_says_by_how_much() -> None:
    stage = memory(load_model("llama-3.1-70b"), strategy(), H100)[0]
    assert not stage.fits
    assert stage.free < 0
    assert stage.free == stage.capacity - stage.total
    assert memory(load_model("llama-3.2-1b"), strategy(), H100)[0].fits


@settings(max_examples=80, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 4]),
    sharding=st.sampled_from(list(Sharding)),
    recompute=st.sampled_from([NO_RECOMPUTE, FULL]),
    kernels=st.sampled_from(list(Kernels)),
    seq=st.sampled_from([1024, 8192]),
)
def test_parts_add_up_and_grow_with_the_sequence(
    tp: int, pp: int, dp: int, sharding: Sharding, recompute: Recompute, kernels: Kernels, seq: int
) -> None:
    chosen = strategy(
        tp=tp, pp=pp, dp=dp, sharding=sharding, recompute=recompute, seq=seq,
        sequence_parallel=tp > 1,
    )  # fmt: skip
    if not is_legal(LLAMA, chosen):
        return
    framework = Framework(kernels=kernels)
    longer = memory(LLAMA, replace(chosen, seq=2 * seq), H100, framework)
    for stage, other in zip(memory(LLAMA, chosen, H100, framework), longer, strict=True):
        assert sum(stage.parts.values()) == pytest.approx(stage.total)
        assert all(part >= 0 for part in stage.parts.values())
        assert stage.allocated <= stage.reserved <= stage.total
        assert other.total >= stage.total


def test_nanotron_holds_two_tensors_of_all_tokens_for_each_layer_where_memory_is_free() -> None:
    """16 layers of 2,048 tokens x 2,048 in bf16, less the quarter that each of 4 tensor parallel ranks has anyway."""
    model, nanotron = load_model("llama-3.2-1b"), load_framework("nanotron")
    without = replace(nanotron, overhead=replace(nanotron.overhead, exchanged_tensors=0.0))
    for parallel, tensors in ((True, 2), (False, 0)):
        chosen = Strategy(Layout(tp=4), 1, 1, 2048, sequence_parallel=parallel)
        held, usual = (memory(model, chosen, H100, each)[0] for each in (nanotron, without))
        assert held.temporary - usual.temporary == pytest.approx(tensors * 16 * 2048 * 2048 * 2 * 3 / 4)
        small = replace(H100, memory_bytes=int(usual.high))
        assert memory(model, chosen, small, nanotron)[0].temporary == pytest.approx(usual.temporary)
