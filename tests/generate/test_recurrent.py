"""Gated delta nets, gated attention and Mamba of the first version: layers, FLOPs, memory, what is refused."""

from dataclasses import replace
from typing import Any

import pytest

from stepcast.forecast.predict import predict
from stepcast.generate.flops import model_flops
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.inputs.chakra.record import decode_workload, encode_workload
from stepcast.ir.layers.delta import list_saved as list_delta
from stepcast.ir.layers.kinds import count_saved
from stepcast.ir.layers.selective import list_saved as list_selective
from stepcast.ir.layers.selective import transient_bytes
from stepcast.ir.layers.sizes import Sizes
from stepcast.ir.layout import Group, Layout
from stepcast.ir.legality import check
from stepcast.ir.model import Model
from stepcast.ir.model_parts import FeedForward, LayerParts, Mixer
from stepcast.ir.recurrent import DeltaRule, SelectiveScan
from stepcast.ir.strategy import Strategy, StrategyError
from stepcast.ir.work import Collective, CollectiveKind, Elementwise, Matmul
from stepcast.ir.workload import Block, Layer, Op, Stage, Workload
from stepcast.models.catalog import load_model
from tests.executed import hardware_flops

QWEN, JAMBA = load_model("qwen3-next-80b-a3b"), load_model("jamba-v0.1")
SEQ = 4096


def strategy(**changes: Any) -> Strategy:
    degrees = {key: changes.pop(key) for key in list(changes) if key in Layout.__dataclass_fields__}
    layout = Layout(**degrees)
    micro = changes.pop("micro_batch", 1)
    changes.setdefault("sequence_parallel", layout.tp > 1)
    return Strategy(layout, micro, 4 * layout.dp * micro, changes.pop("seq", SEQ), **changes)


def block(model: Model, prefix: str, **changes: Any) -> dict[str, Layer]:
    """The layers of the first block whose names start so."""
    found: dict[str, Layer] = {}
    for layer in generate(model, strategy(**changes)).stages[0].body_layers():
        if layer.name.startswith(prefix):
            found.setdefault(layer.name, layer)
    return found


def works(ops: tuple[Op, ...], kind: type) -> list[Any]:
    return [op.work for op in ops if isinstance(op.work, kind)]


def test_a_delta_net_is_spelt_out() -> None:
    layers = block(QWEN, "delta")
    assert list(layers) == ["delta norm", "delta in", "delta rule", "delta gate norm", "delta out"]
    (into,) = works(layers["delta in"].forward, Matmul)
    assert (into.m, into.k, into.n) == (SEQ, 2048, 2 * 2048 + 2 * 4096 + 2 * 32)
    (out,) = works(layers["delta out"].forward, Matmul)
    assert (out.k, out.n) == (4096, 2048)
    (rule,) = works(layers["delta rule"].forward, DeltaRule)
    assert rule == DeltaRule(1, SEQ, 32, 128, 128, 64)
    assert works(layers["delta rule"].input_gradient, DeltaRule) == [replace(rule, backward=True)]


def test_keys_are_repeated_for_the_heads_of_values_and_their_gradients_added_up() -> None:
    """16 heads of queries and of keys, 128 wide, become 32; with as many keys as values there is nothing to repeat."""
    layer = block(QWEN, "delta")["delta rule"]
    few, many = (SEQ * 2 * heads * 128 * 2 for heads in (16, 32))
    forward, backward = (
        {op.name: op for op in ops if isinstance(op.work, Elementwise)} for ops in (layer.forward, layer.input_gradient)
    )
    copy, total = forward["repeat keys"].work, backward["sum key gradients"].work
    assert isinstance(copy, Elementwise)
    assert isinstance(total, Elementwise)
    assert (copy.read_bytes, copy.write_bytes, total.read_bytes, total.write_bytes) == (few, many, many, few)
    decay = forward["decay"].work
    assert isinstance(decay, Elementwise)
    assert decay.columns == 2 * 32  # a decay and a strength of each head
    rules = [op.kernels for op in (*layer.forward, *layer.input_gradient) if isinstance(op.work, DeltaRule)]
    assert rules == [8, 12]
    assert QWEN.delta is not None
    alike = block(replace(QWEN, delta=replace(QWEN.delta, key_heads=32)), "delta")["delta rule"]
    assert not any("key" in op.name for op in (*alike.forward, *alike.input_gradient))


def test_the_parts_that_recurrent_layers_save() -> None:
    """Of a delta net for each token in bf16: the convolution's input (8,192), the gate and the values (4,096 each), a
    strength for each head; queries, keys and values for 32 heads of 128 and their squares of 64 tokens; what the
    out-projection reads. In fp32: six numbers for each head.

    Jamba normalises time step, B and C, which are then saved twice.
    """
    strategy_, nothing = strategy(), FeedForward.NONE
    delta = sum(tensor.size_bytes for tensor in list_delta(Sizes(QWEN, strategy_), LayerParts(Mixer.DELTA, nothing)))
    assert delta == SEQ * ((8192 + 2 * 4096 + 32 + 3 * 4096 + 32 * 64 + 4096) * 2 + 6 * 32 * 4)
    assert JAMBA.selective is not None
    plain = replace(JAMBA, selective=replace(JAMBA.selective, normed=False))
    parts = LayerParts(Mixer.SELECTIVE, nothing)
    twice, once = (
        sum(tensor.size_bytes for tensor in list_selective(Sizes(model, strategy_), parts)) for model in (JAMBA, plain)
    )
    assert twice - once == SEQ * (256 + 2 * 16) * 2
    # Backward there are gradients of the channels, their time steps, the gate and the projection of both halves.
    assert transient_bytes(Sizes(JAMBA, strategy_), parts) == SEQ * 5 * 8192 * 2


def test_channels_of_a_mamba_block_get_gradients_from_two_sides() -> None:
    """The projection to time step, B and C and the scan both read the channels: their gradients are added."""
    steps = block(JAMBA, "mamba")["mamba steps"]
    assert "channel gradient" in [op.name for op in steps.input_gradient]


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_ranks_share_the_heads_of_a_delta_net(tp: int) -> None:
    layers = block(QWEN, "delta", tp=tp)
    (rule,) = works(layers["delta rule"].forward, DeltaRule)
    assert (rule.seq, rule.heads) == (SEQ, 32 // tp)
    (into,) = works(layers["delta in"].forward, Matmul)
    assert into.n == (2 * 2048 + 2 * 4096 + 2 * 32) // tp
    kinds = [work.kind for work in works(layers["delta out"].forward, Collective)]
    assert kinds == [CollectiveKind.REDUCE_SCATTER]


def test_context_parallel_ranks_exchange_positions_for_heads() -> None:
    layer = block(QWEN, "delta", cp=4)["delta rule"]
    (rule,) = works(layer.forward, DeltaRule)
    assert (rule.seq, rule.heads) == (SEQ, 8)
    there, back = works(layer.forward, Collective)
    assert (there.kind, there.group) == (CollectiveKind.ALL_TO_ALL, Group.CP)
    assert (there.size_bytes, back.size_bytes) == (SEQ // 4 * 12352 * 2, SEQ // 4 * 4096 * 2)


def test_attention_is_projected_with_its_gate() -> None:
    layers = block(QWEN, "attention")
    assert "attention gate" in layers
    (qkv,) = works(layers["attention qkv"].forward, Matmul)
    assert qkv.n == 2 * 16 * 256 + 2 * 2 * 256


def test_a_mamba_block_of_the_first_version_is_spelt_out() -> None:
    layers = block(JAMBA, "mamba")
    assert list(layers) == ["mamba norm", "mamba in", "mamba steps", "mamba scan", "mamba out"]
    (into,) = works(layers["mamba in"].forward, Matmul)
    assert (into.k, into.n) == (4096, 2 * 8192)
    low, high = works(layers["mamba steps"].forward, Matmul)
    assert ((low.k, low.n), (high.k, high.n)) == ((8192, 256 + 32), (256, 8192))
    (scan,) = works(layers["mamba scan"].forward, SelectiveScan)
    assert scan == SelectiveScan(1, SEQ, 8192, 16)


def by_hand(model: Model) -> float:
    """FLOPs of one sequence's forward: two for each weight that multiplies a token; attention's square; the
    delta rule's 6 K V with squares of 64 tokens (Yang et al. 2024, section 3.3); 7 for each state of a scan.
    """
    if model is QWEN:
        expert = 3 * 2048 * 512
        moe = 2048 * 512 + 11 * expert + 2048
        delta = 2048 * 12352 + 4096 * 2048 + moe
        attention = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048 + moe
        rule = 32 * (6 * 128 * 128 + 2 * 64 * (3 * 128 + 2 * 128))
        weights = 36 * delta + 12 * attention + 2048 * 151936
        return SEQ * (2.0 * weights + 36 * rule + 12 * 2 * SEQ * 16 * 512)
    mlp, moe = 3 * 4096 * 14336, 2 * 3 * 4096 * 14336 + 4096 * 16
    scan = 4096 * 16384 + 8192 * 288 + 256 * 8192 + 8192 * 4096
    attention = 4096 * 4096 * 2 + 2 * 4096 * 1024
    weights = 28 * scan + 4 * attention + 16 * mlp + 16 * moe + 4096 * 65536
    return SEQ * (2.0 * weights + 28 * 7 * 8192 * 16 + 4 * 2 * SEQ * 32 * 256)


@pytest.mark.parametrize("model", [QWEN, JAMBA], ids=lambda model: str(model.name))
def test_flops_are_those_counted_by_hand(model: Model) -> None:
    assert model_flops(model, SEQ, 1) == pytest.approx(3 * by_hand(model), rel=1e-12)


@pytest.mark.parametrize("model", [QWEN, JAMBA], ids=lambda model: str(model.name))
def test_ranks_execute_what_the_model_asks_for(model: Model) -> None:
    """But for half of attention's square, and backward kernels that do more than twice their forward."""
    executed = hardware_flops(generate(model, strategy()))
    assert executed == pytest.approx(model_flops(model, SEQ, 4, causal=True), rel=0.04)


@pytest.mark.parametrize(
    ("model", "changes", "reason"),
    [
        (JAMBA, {"tp": 2}, "tp 2 cannot split Mamba-1 blocks"),
        (JAMBA, {"cp": 2}, "cp 2 cannot split Mamba-1 blocks"),
        (QWEN, {"tp": 32}, "tp 32 does not divide"),
        (QWEN, {"tp": 8, "cp": 4}, "cp 4 does not divide the 2 key heads of delta nets on a tensor rank"),
    ],
)
def test_what_software_cannot_split_is_refused(model: Model, changes: dict[str, int], reason: str) -> None:
    with pytest.raises(StrategyError, match=reason):
        check(model, strategy(**changes))


@pytest.mark.parametrize(("model", "mixer"), [(QWEN, "delta"), (JAMBA, "selective")])
def test_what_a_layer_keeps_grows_with_its_tokens(model: Model, mixer: str) -> None:
    kind = next(block for block in model.blocks if block.mixer == mixer)
    once, twice = (count_saved(model, strategy(micro_batch=micro), kind).saved for micro in (1, 2))
    assert twice == pytest.approx(2 * once, rel=1e-9)
    # At least the projection's input and what the projections give and take, in bf16.
    wide = 12352 - 64 + 4096 if model is QWEN else 2 * 8192 + 8192
    assert once > SEQ * 2 * (2 * model.hidden + wide)


def test_delta_nets_keep_a_share_on_each_tensor_rank() -> None:
    kind = next(block for block in QWEN.blocks if block.mixer == "delta")
    whole, shared = (count_saved(QWEN, strategy(tp=tp), kind) for tp in (1, 8))
    assert shared.saved < whole.saved
    assert shared.transient < whole.transient


@pytest.mark.parametrize(("model", "changes"), [(QWEN, {"tp": 2, "ep": 8, "dp": 32}), (JAMBA, {"ep": 8, "dp": 64})])
def test_a_whole_step_is_forecast(model: Model, changes: dict[str, int]) -> None:
    report = predict(model, load_cluster("dgx-h100"), strategy(**changes))
    assert report.step_s > 0
    longer = predict(model, load_cluster("dgx-h100"), strategy(**changes, seq=2 * SEQ))
    assert 1.5 < longer.step_s / report.step_s < 2.6


@pytest.mark.parametrize(
    "work", [DeltaRule(1, SEQ, 32, 128, 128, 64, True), SelectiveScan(2, SEQ, 8192, 16)], ids=["delta", "scan"]
)
def test_they_travel_through_chakra(work: DeltaRule | SelectiveScan) -> None:
    workload = Workload((Stage((Block((Layer("mixer", (Op("", work),)),)),)),))
    assert decode_workload(encode_workload(workload)) == workload
