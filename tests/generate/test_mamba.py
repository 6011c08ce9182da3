"""Mamba-2 blocks in workloads: shapes on a rank, collectives, FLOPs, stages, legality, a whole forecast."""

from dataclasses import replace
from typing import Any

import pytest

from stepcast.forecast.predict import predict
from stepcast.generate.flops import model_flops
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.ir.framework import Framework, SelectiveRule
from stepcast.ir.layout import Group, Layout
from stepcast.ir.legality import check, is_legal
from stepcast.ir.model import Model
from stepcast.ir.recurrent import Scan
from stepcast.ir.strategy import Recompute, RecomputeKind, Strategy, StrategyError
from stepcast.ir.work import Collective, CollectiveKind, Elementwise, Matmul
from stepcast.ir.workload import Layer, Op
from stepcast.models.catalog import load_model
from tests.executed import hardware_flops

H8B = load_model("nemotron-h-8b")  # hidden 4096; 128 heads of 64, state 128, 8 groups: inner 8192
SEQ = 4096


def strategy(seq: int = SEQ, micro_batch: int = 1, **changes: Any) -> Strategy:
    degrees = {key: changes.pop(key) for key in list(changes) if key in Layout.__dataclass_fields__}
    layout = Layout(**degrees)
    return Strategy(layout, micro_batch, 4 * layout.dp * micro_batch, seq, **changes)


def block(**changes: Any) -> dict[str, Layer]:
    """The layers of the first Mamba block."""
    stage = generate(H8B, strategy(**changes)).stages[0]
    found: dict[str, Layer] = {}
    for layer in stage.body_layers():
        if layer.name.startswith("mamba"):
            found.setdefault(layer.name, layer)
    return found


def works(ops: tuple[Op, ...], kind: type) -> list[Any]:
    return [op.work for op in ops if isinstance(op.work, kind)]


def test_a_block_is_spelt_out() -> None:
    layers = block()
    assert list(layers) == ["mamba norm", "mamba in", "mamba scan", "mamba group norm", "mamba out"]
    (into,) = works(layers["mamba in"].forward, Matmul)
    assert (into.m, into.k, into.n) == (SEQ, 4096, 2 * 8192 + 2 * 8 * 128 + 128)
    (out,) = works(layers["mamba out"].forward, Matmul)
    assert (out.m, out.k, out.n) == (SEQ, 8192, 4096)
    (scan,) = works(layers["mamba scan"].forward, Scan)
    assert scan == Scan(1, SEQ, 128, 64, 128, 8, 128)
    (convolution,) = works(layers["mamba scan"].forward, Elementwise)
    assert (convolution.rows, convolution.columns) == (SEQ, 8192 + 2 * 8 * 128)
    (norm,) = works(layers["mamba group norm"].forward, Elementwise)
    assert (norm.rows, norm.columns) == (SEQ * 8, 1024)


def test_the_backward_runs_the_convolution_again_and_its_own_scan() -> None:
    layer = block()["mamba scan"]
    assert [op.name for op in layer.input_gradient] == ["convolution again", "scan gradient", "convolution gradient"]
    assert works(layer.input_gradient, Scan) == [replace(works(layer.forward, Scan)[0], backward=True)]


def test_context_ranks_beyond_the_groups_convolve_a_copy_of_one() -> None:
    """16 ranks share 8 groups of B and C, so that each has one of 128 states."""
    (convolution,) = (op.work for op in block(cp=16)["mamba scan"].forward if op.name == "convolution")
    assert isinstance(convolution, Elementwise)
    assert (convolution.rows, convolution.columns) == (SEQ, 8192 // 16 + 2 * 128)


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_tensor_ranks_share_heads_and_groups(tp: int) -> None:
    layers = block(tp=tp, sequence_parallel=True)
    (scan,) = works(layers["mamba scan"].forward, Scan)
    assert (scan.seq, scan.heads, scan.groups) == (SEQ, 128 // tp, 8 // tp)
    (into,) = works(layers["mamba in"].forward, Matmul)
    assert into.n == (2 * 8192 + 2 * 8 * 128 + 128) // tp
    collectives = {
        (name, work.kind)
        for name, layer in layers.items()
        for work in works(layer.forward + layer.input_gradient, Collective)
    }
    assert collectives == {
        ("mamba in", CollectiveKind.ALL_GATHER),
        ("mamba in", CollectiveKind.REDUCE_SCATTER),
        ("mamba out", CollectiveKind.REDUCE_SCATTER),
        ("mamba out", CollectiveKind.ALL_GATHER),
    }


def test_context_parallel_ranks_exchange_positions_for_heads() -> None:
    layer = block(cp=4)["mamba scan"]
    (scan,) = works(layer.forward, Scan)
    assert (scan.seq, scan.heads, scan.groups) == (SEQ, 32, 2)
    there, back = works(layer.forward, Collective)
    assert (there.kind, there.group) == (CollectiveKind.ALL_TO_ALL, Group.CP)
    assert there.size_bytes == SEQ // 4 * (2 * 8192 + 2 * 8 * 128 + 128) * 2
    assert back.size_bytes == SEQ // 4 * 8192 * 2
    assert len(works(layer.input_gradient, Collective)) == 2


def test_groups_that_cannot_be_shared_are_sent_to_every_rank() -> None:
    layer = block(cp=16)["mamba scan"]
    (scan,) = works(layer.forward, Scan)
    assert (scan.heads, scan.groups) == (8, 1)
    assert works(layer.forward, Collective)[0].size_bytes == SEQ // 16 * (2 * 8192 + 2 * 16 * 128 + 128) * 2


def test_several_sequences_are_turned_around() -> None:
    names = [op.name for op in block(micro_batch=2)["mamba scan"].forward]
    assert names == ["transpose", "convolution", "scan", "transpose back"]


def by_hand(model: Model, seq: int, batch: int) -> float:
    """FLOPs of a forward: 2 per weight of a matrix, attention's square, and the scan in chunks of 128.

    Scan: Dao and Gu 2024, section 6, for each head, token and element of its width p: 2n into the state, 2n out
    of it and half of 2 x 128 within the chunk; for each group 2 x 128 n per token for C B^T.
    """
    hybrid = model.hybrid
    assert hybrid is not None
    h, inner, n, groups = model.hidden, hybrid.inner, hybrid.state, hybrid.groups
    counts = {letter: hybrid.pattern.count(letter) for letter in "M*-"}
    mamba = 2 * h * (2 * inner + 2 * groups * n + hybrid.mamba_heads) + 2 * inner * h
    mamba += inner * (4 * n + 128) + groups * 2 * 128 * n
    wide = model.heads * model.head_dim
    attention = 2 * h * (2 * wide + 2 * model.kv_heads * model.head_dim) + 4 * seq * wide
    mlp = 4 * h * model.ffn
    per_token = counts["M"] * mamba + counts["*"] * attention + counts["-"] * mlp + 2 * h * model.vocab
    return float(batch * seq * per_token)


@pytest.mark.parametrize("name", ["nemotron-h-8b", "nemotron-h-56b", "nemotron-nano-9b-v2"])
def test_flops_are_those_counted_by_hand(name: str) -> None:
    model = load_model(name)
    assert model_flops(model, SEQ, 3) == pytest.approx(3 * by_hand(model, SEQ, 3), rel=1e-12)


@pytest.mark.parametrize("layout", [{}, {"tp": 4, "sequence_parallel": True}, {"pp": 2}, {"dp": 2}])
def test_ranks_together_execute_the_same(layout: dict[str, Any]) -> None:
    plan, framework = strategy(**layout), Framework(flash_attention=False)
    found = hardware_flops(generate(H8B, plan, framework)) / plan.global_batch
    alone = hardware_flops(generate(H8B, strategy(), framework)) / 4
    assert found == pytest.approx(alone, rel=1e-12)
    # The backward of a scan executes a little more than twice its forward: 5/2 through states, 3 of the rest.
    scans = 24 * (Scan(1, SEQ, 128, 64, 128, 8, 128, True).flops - 2 * Scan(1, SEQ, 128, 64, 128, 8, 128).flops)
    assert found == pytest.approx(model_flops(H8B, SEQ, 1) + scans, rel=1e-12)


def test_stages_follow_the_pattern() -> None:
    run = generate(H8B, strategy(pp=4))
    for index, stage in enumerate(run.stages):
        letters = H8B.hybrid.pattern[13 * index : 13 * index + 13] if H8B.hybrid else ""
        names = [layer.name for layer in stage.body_layers()]
        assert names.count("mamba scan") == letters.count("M")
        assert names.count("attention core") == letters.count("*")
        assert names.count("mlp up") == letters.count("-")


def test_layers_of_mixer_and_feed_forward() -> None:
    names = [layer.name for layer in generate(load_model("bamba-9b"), strategy()).stages[0].body_layers()]
    assert (names.count("mamba scan"), names.count("attention core"), names.count("mlp up")) == (29, 3, 32)
    names = [
        layer.name
        for layer in generate(load_model("granite-4.0-h-small"), strategy(dp=4, ep=4)).stages[0].body_layers()
    ]
    assert (names.count("mamba scan"), names.count("experts up")) == (36, 40)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 16}, "tp 16 does not divide 8 Mamba groups"),
        ({"cp": 256, "seq": 8192}, "cp 256 does not divide the 128 Mamba heads of a tensor rank"),
    ],
)
def test_illegal_splits_name_the_rule(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        check(H8B, strategy(**changes))


def test_groups_bound_tensor_parallelism() -> None:
    with pytest.raises(StrategyError, match="tp 2 does not divide 1 Mamba groups: the nearest legal tp is 1"):
        check(load_model("bamba-9b"), strategy(tp=2))
    hybrid = H8B.hybrid
    assert hybrid is not None
    odd = replace(H8B, hybrid=replace(hybrid, mamba_heads=120, groups=4))
    with pytest.raises(StrategyError, match="tp 8 does not divide 4 Mamba groups"):
        check(odd, strategy(tp=8))
    six = replace(H8B, hybrid=replace(hybrid, mamba_heads=120, groups=6))
    with pytest.raises(StrategyError, match="cp 4 neither divides nor is a multiple of the 6 Mamba groups"):
        check(six, strategy(cp=4))


def test_no_attention_no_rule_about_its_heads() -> None:
    mamba = load_model("codestral-mamba-7b")
    assert is_legal(mamba, strategy(tp=8, sequence_parallel=True))
    assert not is_legal(mamba, strategy(tp=16, sequence_parallel=True))


def test_full_recomputation_scans_twice_and_selective_once() -> None:
    def scans(kind: RecomputeKind, rule: SelectiveRule = SelectiveRule.MODULES) -> int:
        plan = strategy(recompute=Recompute(kind))
        layers = generate(H8B, plan, Framework(selective=rule)).stages[0].body_layers()
        every = [op for layer in layers for op in layer.forward + layer.input_gradient]
        return sum(isinstance(op.work, Scan) and not op.work.backward for op in every)

    assert scans(RecomputeKind.NONE) == 24
    assert scans(RecomputeKind.SELECTIVE) == 24
    assert scans(RecomputeKind.SELECTIVE, SelectiveRule.ALTERNATE_MATMULS) == 24
    assert scans(RecomputeKind.FULL) == 48


def test_a_hybrid_is_forecast() -> None:
    plan = strategy(tp=4, dp=2, pp=2, sequence_parallel=True)
    report = predict(H8B, load_cluster("dgx-h100"), plan).report
    assert report.sources["scan"] == "fitted"
    assert report.throughput is not None
    assert 0.1 < report.throughput.mfu < 0.6
    assert sum(report.breakdown_s.values()) == pytest.approx(report.step_s)
    twice = predict(H8B, load_cluster("dgx-h100"), replace(plan, seq=2 * SEQ)).report
    assert 1.7 < twice.step_s / report.step_s < 2.2


def test_a_hybrid_of_550_billion_is_forecast() -> None:
    plan = strategy(seq=8192, tp=2, ep=64, dp=128, expert_tp=1, sequence_parallel=True)
    model, cluster = load_model("nemotron-3-ultra-550b-a55b"), load_cluster("gb200-nvl72")
    four, eight = (
        predict(model, cluster, replace(plan, global_batch=batch * plan.layout.dp)).report.step_s for batch in (4, 8)
    )
    assert 1.5 < eight / four < 2  # the optimizer and the last sum of gradients come once
