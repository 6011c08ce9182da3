"""Which strategies are consistent, which suit a model, and what the messages say."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.ir.framework import Framework
from stepcast.ir.layout import Layout
from stepcast.ir.legality import check, is_legal, nearest_divisor
from stepcast.ir.model import pieces, pieces_of_stage, spread_layers
from stepcast.ir.strategy import (
    ContextKind,
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

LLAMA = load_model("llama-3.1-8b")  # 32 layers, 32 heads, 8 kv heads, ffn 14336
MIXTRAL = load_model("mixtral-8x7b")


def strategy(micro_batch: int = 1, global_batch: int = 64, seq: int = 4096, **changes: Any) -> Strategy:
    degrees = {key: changes.pop(key) for key in list(changes) if key in Layout.__dataclass_fields__}
    return Strategy(Layout(**degrees), micro_batch, global_batch, seq, **changes)


ILLEGAL: list[tuple[str, dict[str, Any], str]] = [
    (
        "ulysses and shared heads",
        {"tp": 16, "cp": 2, "context": ContextKind.ALL_TO_ALL},
        "cp 2 does not divide the 1 kv heads of a tensor rank, which a2a exchanges: the nearest legal cp is 1",
    ),
    ("tp not dividing", {"tp": 3}, "tp 3 does not divide heads 32: the nearest legal tp is 2"),
    ("sp without tp", {"sequence_parallel": True}, "sequence parallelism needs tp > 1"),
    ("sp and seq", {"tp": 8, "sequence_parallel": True, "seq": 4100}, "multiple of tp x cp = 8: use 4096"),
    (
        "sp, cp and seq",
        {"tp": 8, "cp": 2, "sequence_parallel": True, "seq": 4104},
        "multiple of tp x cp = 16: use 4096",
    ),
    ("cp and seq", {"cp": 4, "seq": 4100}, "multiple of 2 x cp = 8"),
    ("ulysses and heads", {"tp": 4, "cp": 4, "context": ContextKind.ALL_TO_ALL}, "the nearest legal cp is 2"),
    ("too many stages", {"pp": 64}, "cannot fill pp x vpp = 64 pieces: use at most 34"),
    (
        "recompute beside an empty stage",
        {"pp": 2, "stage_layers": (32, 0), "recompute": Recompute(RecomputeKind.BLOCK, 33)},
        "exceeds the 32 layers of a stage",
    ),
    ("stage layers", {"pp": 2, "stage_layers": (10, 10)}, "10+10 = 20, but the model has 32"),
    ("vpp without pp", {"vpp": 2}, "needs pp > 1: use vpp 1"),
    ("vpp and 1f1b", {"pp": 4, "vpp": 2}, "schedule 1f1b runs 1 chunk(s) a stage, not vpp 2"),
    ("interleaved", {"pp": 4, "schedule": ScheduleKind.INTERLEAVED}, "needs vpp of 2 or more"),
    (
        "interleaved batches",
        {"pp": 4, "vpp": 2, "schedule": ScheduleKind.INTERLEAVED, "global_batch": 6},
        "6 micro-batches to be a multiple of pp 4: the nearest is 8",
    ),
    ("dualpipe odd", {"pp": 1, "dp": 1, "schedule": ScheduleKind.DUALPIPE}, ""),
    ("dualpipe batches", {"pp": 4, "schedule": ScheduleKind.DUALPIPE, "global_batch": 6}, "at least 2 x pp = 8"),
    ("hybrid without shard", {"dp": 16, "sharding": Sharding.HYBRID_FSDP}, "try --shard 8"),
    ("shard", {"dp": 8, "shard": 3, "sharding": Sharding.FSDP}, "shard 3 does not divide dp x cp = 8"),
    ("ep without experts", {"ep": 2}, "ep 2 needs experts"),
    (
        "recompute block",
        {"pp": 16, "recompute": Recompute(RecomputeKind.BLOCK, 3)},
        "recompute block 3 exceeds the 2 layers of a stage",
    ),
]


@pytest.mark.parametrize(("name", "changes", "message"), ILLEGAL, ids=[name for name, _, _ in ILLEGAL])
def test_illegal_strategies_name_the_rule_and_a_legal_value(name: str, changes: dict[str, Any], message: str) -> None:
    chosen = strategy(**changes)
    if not message:
        check(LLAMA, chosen)
        return
    with pytest.raises(StrategyError) as caught:
        check(LLAMA, chosen)
    assert message in str(caught.value)
    assert not is_legal(LLAMA, chosen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ep": 3, "dp": 3, "global_batch": 63}, "ep 3 does not divide 8 experts: the nearest legal ep is 2"),
        ({"ep": 8, "dp": 4}, "does not divide tp x cp x dp = 4: the nearest legal ep is 4"),
        (
            {"ep": 8, "dp": 4, "tp": 2, "sequence_parallel": True},
            "8 x 2 does not divide tp x cp x dp = 8: the nearest legal ep is 4, or do not split experts .--expert-tp 1.",
        ),
        ({"ep": 2, "tp": 2, "dp": 2}, "experts with tp 2 need sequence parallelism"),
        ({"tp": 2}, "experts with tp 2 need sequence parallelism: switch it on, or use tp 1"),
        (
            {"ep": 8, "dp": 32, "shard": 2, "sharding": Sharding.ZERO_1},
            "makes 16 copies .* 4 replicas of each expert: the nearest legal shard is 8",
        ),
        (
            {"ep": 4, "dp": 96, "shard": 3, "sharding": Sharding.ZERO_1, "global_batch": 96},
            "makes 32 copies .* 24 replicas of each expert: the nearest legal shard is 4",
        ),
    ],
)
def test_experts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        check(MIXTRAL, strategy(**changes))


def test_tensor_ranks_divide_kv_heads_or_share_them() -> None:
    """28 heads and 4 kv heads: seven ranks would have parts of a kv head."""
    qwen = replace(load_model("qwen2.5-7b"), ffn=18816)
    for tp, legal in ((2, True), (4, True), (7, False), (14, False), (28, True)):
        assert is_legal(qwen, strategy(tp=tp)) == legal
    with pytest.raises(StrategyError, match="tp 7 does not divide kv heads 4: the nearest legal tp is 4"):
        check(qwen, strategy(tp=7))


def test_experts_spread_over_tensor_ranks_when_each_is_whole() -> None:
    """Megatron-Core: expert_tp x ep x expert_dp = tp x cp x dp."""
    chosen = strategy(tp=2, dp=4, ep=8, expert_tp=1, sequence_parallel=True)
    check(MIXTRAL, chosen)
    assert chosen.layout.expert_dp == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"global_batch": 100, "dp": 8}, "global batch 100 is not a multiple of micro-batch x dp = 1 x 8 = 8"),
        ({"precision": DType.INT8}, "precision int8 cannot train"),
        ({"lora_rank": 8}, "goes with training 'lora'"),
        ({"expert_imbalance": 0.5}, "1 \\(even\\) or more"),
        ({"pp": 4, "stage_layers": (8, 8)}, "need pp x vpp = 4 numbers"),
        ({"pp": 2, "stage_layers": (33, -1)}, "0 layers or more, not -1"),
        ({"fp8_parameters": True}, "go with precision fp8 or mxfp8, not bf16"),
    ],
)
def test_inconsistent_strategies(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        strategy(**changes)


def test_ring_attention_needs_flash_attention() -> None:
    with pytest.raises(StrategyError, match="ring attention needs flash attention"):
        check(LLAMA, strategy(cp=2), framework=Framework(flash_attention=False))
    assert not is_legal(LLAMA, strategy(cp=2), Framework(flash_attention=False))
    assert is_legal(LLAMA, strategy(cp=2, context=ContextKind.ALL_GATHER), Framework(flash_attention=False))


def test_buckets_hold_something() -> None:
    with pytest.raises(ValueError, match="at least 1 byte"):
        Framework(bucket_bytes=-1)


def test_lora_rank() -> None:
    chosen = strategy(training=TrainingKind.LORA, lora_rank=8192)
    with pytest.raises(StrategyError, match="exceeds hidden 4096"):
        check(LLAMA, chosen)


@given(st.integers(1, 200), st.integers(1, 64))
def test_even_layers_add_up_and_differ_little(layers: int, count: int) -> None:
    if layers + 2 < count:
        with pytest.raises(StrategyError):
            spread_layers(layers, count)
        return
    sizes = spread_layers(layers, count)
    assert sum(sizes) == layers
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 2
    assert count == 1 or 0 not in sizes[1:-1]


def test_llama_405b_is_split_as_published() -> None:
    """Llama 3 (2024), section 3.3.2: 126 layers, one fewer on the first and the last stage."""
    assert spread_layers(126, 16) == (7, *(8,) * 14, 7)


def test_the_loss_then_the_embedding_have_a_piece_to_themselves() -> None:
    """Megatron-Core counts both as layers (account_for_embedding_in_pipeline_split and its sibling)."""
    assert spread_layers(126, 127) == (*(1,) * 126, 0)
    assert spread_layers(126, 128) == (0, *(1,) * 126, 0)


def test_the_last_piece_makes_room_for_mtp_layers() -> None:
    assert spread_layers(61, 16) == (2, *(4,) * 14, 3)
    assert spread_layers(61, 16, mtp_layers=1) == (3, 5, *(4,) * 13, 1)


def test_pieces_of_a_stage() -> None:
    looped = strategy(pp=4, vpp=2, schedule=ScheduleKind.INTERLEAVED)
    assert [pieces_of_stage(looped, stage) for stage in range(4)] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    vee = replace(looped, schedule=ScheduleKind.ZB_V)
    assert [pieces_of_stage(vee, stage) for stage in range(4)] == [(0, 7), (1, 6), (2, 5), (3, 4)]
    both = strategy(pp=4, schedule=ScheduleKind.DUALPIPE)
    assert [pieces_of_stage(both, stage) for stage in range(4)] == [(0, 3), (1, 2), (2, 1), (3, 0)]


def test_pieces_cover_the_model() -> None:
    parts = pieces(LLAMA, strategy(pp=4, stage_layers=(7, 9, 9, 7)))
    assert [layer for piece in parts for layer in piece.layers] == list(range(32))
    assert [piece.embedding for piece in parts] == [True, False, False, False]
    assert [piece.head for piece in parts] == [False, False, False, True]


@given(st.integers(1, 10_000), st.integers(1, 200))
def test_nearest_divisor_is_a_divisor(number: int, wanted: int) -> None:
    found = nearest_divisor(number, wanted)
    assert number % found == 0
    assert all(abs(found - wanted) <= abs(ways - wanted) for ways in range(1, 2 * wanted) if number % ways == 0)


def test_a_model_without_attention_has_no_heads_to_share() -> None:
    """Its 128 Mamba heads and 8 groups decide, whatever the number of attention heads that it names."""
    model = replace(load_model("codestral-mamba-7b"), heads=3, kv_heads=3)
    assert is_legal(model, Strategy(Layout(tp=4), 1, 8, 2048))
    assert not is_legal(model, Strategy(Layout(tp=3), 1, 8, 2048))
