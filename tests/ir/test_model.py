"""Model: counts per part and per rank, kinds of layers, and what it refuses."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepcast.ir.architecture import WeightPart
from stepcast.ir.model import Model
from stepcast.ir.model_parts import (
    Biases,
    Experts,
    FeedForward,
    Hybrid,
    Latent,
    Mixer,
    Norm,
    NormKind,
    Position,
    PositionKind,
    Window,
)

GPT = Model(
    "gpt",
    layers=40,
    hidden=5120,
    heads=40,
    kv_heads=40,
    head_dim=128,
    ffn=20480,
    vocab=50257,
    max_seq=2048,
    tied=True,
    gated=False,
    norm=Norm(NormKind.LAYER, bias=True),
    biases=Biases(qkv=True, attention_output=True, mlp=True),
    position=Position(PositionKind.LEARNED, 2048),
    vocab_multiple=128,
)
LLAMA = Model("llama", 4, 256, 8, 2, 32, 512, 1000, 2048)


def test_megatron_stage_counts_of_a_two_way_tensor_parallel_run() -> None:
    """The per-rank element counts that the traced 8-GPU Megatron run reports."""
    assert GPT.padded_vocab(tp=2) == 50432
    assert GPT.shard_of(range(10), tp=2, embedding=True).total == 1_712_942_080
    assert GPT.shard_of(range(10, 20), tp=2).total == 1_573_350_400
    assert GPT.shard_of(range(30, 40), tp=2, head=True).total == 1_702_466_560


def test_a_stage_with_both_ends_holds_tied_weights_once() -> None:
    embedding = GPT.padded_vocab() * GPT.hidden
    apart = GPT.shard_of(range(20), embedding=True).total + GPT.shard_of(range(20, 40), head=True).total
    assert apart - GPT.shard_of(range(40), embedding=True, head=True).total == embedding


def test_parts_of_a_dense_layer() -> None:
    assert LLAMA.layer_parameters(0) == {
        WeightPart.ATTENTION: 2 * 256 * 256 + 2 * 256 * 64,
        WeightPart.MLP: 3 * 256 * 512,
        WeightPart.NORM: 2 * 256,
    }
    assert LLAMA.embedding_parameters == LLAMA.head_parameters == 256_000
    layers = sum(sum(LLAMA.layer_parameters(layer).values()) for layer in range(4))
    assert LLAMA.parameters == layers + 256_000 * 2 + 256
    assert replace(LLAMA, tied=True).head_parameters == 0


def test_key_and_value_projections_are_split_beyond_their_heads() -> None:
    """Megatron-Core splits the whole projection by columns and gathers its result."""
    two, four = (LLAMA.shard_of(range(1), tp=tp).total for tp in (2, 4))
    query_output_mlp, kv, norms = 2 * 256 * 256 + 3 * 256 * 512, 2 * 256 * 64, 512
    assert two == query_output_mlp // 2 + kv // 2 + norms
    assert four == query_output_mlp // 4 + kv // 4 + norms


def test_experts_split_over_ep_and_expert_tp() -> None:
    model = replace(LLAMA, experts=Experts(count=8, top_k=2, ffn=128, shared_ffn=64, shared_gate=True))
    one = 3 * 256 * 128
    shard = model.shard_of(range(2), tp=2, ep=4)
    assert shard.experts == 2 * 2 * one // 2
    assert model.shard_of(range(2), tp=2, ep=4, expert_tp=1).experts == 2 * 2 * one
    assert shard.dense == model.shard_of(range(2), tp=2).dense
    parts = model.layer_parameters(0)
    assert parts[WeightPart.EXPERTS] == 8 * one
    assert parts[WeightPart.ROUTER] == 8 * 256
    assert parts[WeightPart.SHARED_EXPERTS] == 3 * 256 * 64 + 256
    assert model.parameters - model.active_parameters == 4 * 6 * one


def test_first_dense_layers_and_pattern() -> None:
    model = replace(LLAMA, experts=Experts(8, 2, 128, first_dense=1, pattern=(False, True)))
    kinds = [block.feed_forward for block in model.blocks]
    assert kinds == [FeedForward.DENSE, FeedForward.EXPERTS] * 2
    assert model.expert_layers == 2


def test_window_pattern_repeats() -> None:
    model = replace(LLAMA, window=Window(128, (True, True, False)))
    assert [block.window for block in model.blocks] == [128, 128, None, 128]


def test_hybrid_blocks() -> None:
    hybrid = Hybrid("M*-M", mamba_heads=8, mamba_head_dim=64, state=16, groups=2)
    model = replace(LLAMA, hybrid=hybrid, gated=False)
    assert [block.mixer for block in model.blocks] == [Mixer.MAMBA, Mixer.ATTENTION, Mixer.NONE, Mixer.MAMBA]
    inner, states = 512, 2 * 2 * 16
    assert sum(model.layer_parameters(0).values()) == (
        256 * (2 * inner + states + 8) + (inner + states) * 5 + 3 * 8 + inner + inner * 256 + 256
    )


@given(tp=st.sampled_from([1, 2, 4, 8]), cut=st.integers(0, 40))
def test_stages_add_up(tp: int, cut: int) -> None:
    whole = GPT.shard_of(range(40), tp=tp).total
    assert GPT.shard_of(range(cut), tp=tp).total + GPT.shard_of(range(cut, 40), tp=tp).total == whole


@given(tp=st.sampled_from([2, 4, 8]))
def test_tensor_parallel_ranks_hold_every_weight_and_the_replicated_ones_again(tp: int) -> None:
    replicated = 6 * GPT.hidden  # two norms with bias, two row-parallel biases
    spread = tp * GPT.shard_of(range(1), tp=tp).total
    assert spread - GPT.shard_of(range(1)).total == (tp - 1) * replicated


def test_with_layers_and_with_max_seq() -> None:
    assert GPT.with_layers(10).shard_of(range(10)).total == GPT.shard_of(range(10)).total
    longer = GPT.with_max_seq(4096)
    assert longer.parameters - GPT.parameters == 2048 * GPT.hidden
    assert LLAMA.with_max_seq(8192).parameters == LLAMA.parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 0}, "layers must be a whole number of at least 1"),
        ({"layers": 4.0}, "layers must be a whole number"),
        ({"hidden": True}, "hidden must be a whole number"),
        ({"layers": 10**6}, "layers must be at most"),
        ({"vocab": 2**40}, "vocab must be at most"),
        ({"kv_heads": 3}, "heads 8 is not a multiple of kv_heads 3"),
        ({"ffn": 0}, "ffn must be at least 1"),
        ({"shared_norm": True}, "only a parallel block"),
        ({"name": ""}, "needs a name"),
        ({"attention_softcap": float("nan")}, "attention_softcap must be a finite number"),
        ({"experts": Experts(8, 2, 128, first_dense=4)}, "none of the 4 layers has experts"),
        ({"latent": Latent(64, 32, 16, 32)}, "head_dim must be nope_dim + rope_dim = 48"),
        ({"hybrid": Hybrid("MM", 8, 64, 16, 2)}, "2 letters for 4 layers"),
        ({"hybrid": Hybrid("MMME", 8, 64, 16, 2)}, "needs experts"),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        replace(LLAMA, **changes)  # type: ignore[arg-type]


def test_parts_refuse_nonsense() -> None:
    with pytest.raises(ValueError, match="top_k 9 exceeds the 8 experts"):
        Experts(8, 9, 128)
    with pytest.raises(ValueError, match="RMS norm has no bias"):
        Norm(NormKind.RMS, bias=True)
    with pytest.raises(ValueError, match="learned positions"):
        Position(PositionKind.ROTARY, 2048)
    with pytest.raises(ValueError, match="unknown letters"):
        Hybrid("MX", 8, 64, 16, 2)
    with pytest.raises(ValueError, match="reach outside"):
        LLAMA.shard_of(range(2, 9))
