"""The shape of generated workloads: stages, blocks, recomputation, what overlaps with what."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.generate.workload import generate
from stepcast.ir.framework import Framework, Kernels, SelectiveRule
from stepcast.ir.layout import Group, Layout
from stepcast.ir.legality import is_legal
from stepcast.ir.model import spread_layers
from stepcast.ir.model_parts import FeedForward
from stepcast.ir.strategy import (
    NO_OVERLAP,
    Overlap,
    Recompute,
    RecomputeKind,
    Sharding,
    Strategy,
    StrategyError,
    TrainingKind,
)
from stepcast.ir.types import DType
from stepcast.ir.work import Attention, Collective, Elementwise, ElementwiseKind, GroupedMatmul, Matmul
from stepcast.ir.workload import FIRST, LAST, Layer, Op, Role, Stage, Workload
from stepcast.models.catalog import load_model
from tests.software import software

LLAMA = load_model("llama-3.1-8b")


def run_of(model_name: str = "llama-3.1-8b", micro_batches: int = 4, seq: int = 2048, **changes: Any) -> Workload:
    degrees = {key: changes.pop(key) for key in list(changes) if key in Layout.__dataclass_fields__}
    layout, framework = Layout(**degrees), software(changes)
    strategy = Strategy(layout, 1, layout.dp * micro_batches, seq, **changes)
    return generate(load_model(model_name), strategy, framework)


def ops_of(layer: Layer) -> tuple[Op, ...]:
    return (*layer.forward, *layer.input_gradient, *layer.weight_gradient)


def all_ops(stage: Stage, micro_batch: int | None = None) -> list[Op]:
    return [op for layer in stage.body_layers(micro_batch) for op in ops_of(layer)]


def test_stages_hold_their_layers_once() -> None:
    run = run_of(pp=4)
    assert len(run.stages) == 4
    assert [max(block.repeat for block in stage.body) for stage in run.stages] == [8, 8, 8, 8]
    assert run.stages[1] is run.stages[2]
    first, last = run.stages[0].body_layers(), run.stages[-1].body_layers()
    assert first[0].name == "embedding"
    assert [layer.name for layer in last[-3:]] == ["final norm", "head", "loss"]


def test_a_dense_layer_is_spelt_out() -> None:
    stage = run_of(pp=4, tp=2, sequence_parallel=True).stages[1]
    names = [layer.name for layer in stage.body[0].layers]
    assert names == [
        "attention norm",
        "attention qkv",
        "attention core",
        "attention output",
        "mlp norm",
        "mlp up",
        "mlp down",
    ]
    matmuls = {op.name: op.work for op in all_ops(stage) if isinstance(op.work, Matmul)}
    tokens, hidden = 2048, LLAMA.hidden
    assert matmuls["qkv"] == Matmul(tokens, (4096 + 2 * 1024) // 2, hidden)
    assert matmuls["up"] == Matmul(tokens, 2 * 14336 // 2, hidden)
    assert matmuls["down"] == Matmul(tokens, hidden, 14336 // 2)
    assert matmuls["down input gradient"] == Matmul(tokens, 14336 // 2, hidden)
    assert matmuls["down weight gradient"] == Matmul(14336 // 2, hidden, tokens)
    core = next(op.work for op in all_ops(stage) if isinstance(op.work, Attention))
    assert (core.heads, core.kv_heads, core.query_len, core.causal) == (16, 4, 2048, True)


def test_repeating_patterns_are_folded() -> None:
    stage = run_of("gemma-3-12b").stages[0]
    assert stage.body_layer_count > 48 * 7
    assert sum(len(block.layers) for block in stage.body) < stage.body_layer_count / 3


def test_full_recompute_runs_the_forward_again_before_the_backward() -> None:
    plain, full = run_of(pp=4), run_of(pp=4, recompute=Recompute(RecomputeKind.FULL))
    layers = full.stages[1].body[0].layers
    forward = [op.work for layer in plain.stages[1].body[0].layers for op in layer.forward]
    again = [op.work for op in layers[-1].input_gradient if op.name.startswith("recompute ")]
    assert again == forward


def test_selective_recompute_repeats_the_core_alone() -> None:
    stage = run_of(pp=4, recompute=Recompute(RecomputeKind.SELECTIVE)).stages[1]
    repeated = {layer.name for layer in stage.body_layers() for op in ops_of(layer) if "recompute" in op.name}
    assert repeated == {"attention core"}


def test_torchtitans_selective_recompute_repeats_every_second_matmul() -> None:
    """torchtitan keeps attention and the outputs of query, value, gate and down projections."""
    recompute = Recompute(RecomputeKind.SELECTIVE)
    titan: dict[str, Any] = {"kernels": Kernels.COMPILED, "selective": SelectiveRule.ALTERNATE_MATMULS}
    layers = run_of(pp=4, recompute=recompute, **titan).stages[1].body[0].layers
    again = {op.name: op.work for layer in layers for op in ops_of(layer) if op.name.startswith("recompute ")}
    assert not any(isinstance(work, Attention) for work in again.values())
    widths = {name: work.n for name, work in again.items() if isinstance(work, Matmul)}
    assert widths == {"recompute qkv": 1024, "recompute output": 4096, "recompute up": 14336}


def test_block_recompute_takes_the_first_layers() -> None:
    stage = run_of(pp=4, recompute=Recompute(RecomputeKind.BLOCK, 3)).stages[1]
    assert [block.repeat for block in stage.body] == [3, 5]


def test_gradients_are_reduced_beside_the_last_backward() -> None:
    run = run_of(dp=8, micro_batches=4)
    stage = run.stages[0]
    assert [which for which, _ in stage.varied] == [LAST]
    reductions = [op for op in all_ops(stage, LAST) if isinstance(op.work, Collective)]
    assert reductions
    assert not any(op.blocking for op in reductions)
    assert sum(op.work.total_bytes for op in reductions if isinstance(op.work, Collective)) == 4 * LLAMA.parameters
    assert not [op for op in all_ops(stage, FIRST) if isinstance(op.work, Collective)]


def test_without_overlap_the_step_ends_with_the_reductions() -> None:
    stage = run_of(dp=8, sharding=Sharding.ZERO_1, overlap=NO_OVERLAP).stages[0]
    assert stage.varied == ()
    assert [layer.name for layer in stage.epilogue] == ["gradients", "optimizer", "parameters"]
    assert all(op.blocking for layer in stage.epilogue for op in ops_of(layer))


def test_no_overlap_overlaps_nothing() -> None:
    degrees = {"tp": 2, "dp": 4, "ep": 4, "expert_tp": 1, "sequence_parallel": True}
    for sharding in Sharding:
        shard = {"shard": 2} if sharding is Sharding.HYBRID_FSDP else {}
        run = run_of("qwen3-30b-a3b", sharding=sharding, overlap=NO_OVERLAP, **degrees, **shard)
        ops = [op for stage in run.stages for batch in (FIRST, LAST) for op in all_ops(stage, batch)]
        assert {op.work.group for op in ops if isinstance(op.work, Collective)} >= {Group.TP, Group.EP}
        assert all(op.blocking for op in ops)


def test_parameters_are_gathered_before_they_are_used() -> None:
    """ZeRO-1: every gather of the first micro-batch is waited for by the layer that needs it."""
    stage = run_of(dp=8, sharding=Sharding.ZERO_1).stages[0]
    ops = all_ops(stage, FIRST)
    gathers = [op.name for op in ops if "all-gather parameters" in op.name]
    waited = [name for op in ops for name in op.after]
    assert gathers
    assert sorted(gathers) == sorted(waited)
    at = {op.name: index for index, op in reversed(list(enumerate(ops)))}
    assert all(at[name] < index for index, op in enumerate(ops) for name in op.after)


def test_fsdp_asks_for_the_next_layer_while_one_runs() -> None:
    stage = run_of(dp=8, sharding=Sharding.FSDP).stages[0]
    forward = [op for layer in stage.body_layers() for op in layer.forward]
    gathers = [op for op in forward if isinstance(op.work, Collective)]
    assert len(gathers) == 34  # embedding, 32 layers, head
    assert sum(name.startswith("dp all-gather forward") for op in forward for name in op.after) == 34


def test_every_wait_is_for_an_earlier_op() -> None:
    """In the order in which a stage runs them: forward, then backward."""
    cases: tuple[dict[str, Any], ...] = (
        {"tp": 4, "sequence_parallel": True, "recompute": Recompute(RecomputeKind.FULL)},
        {"tp": 4, "sequence_parallel": True, "overlap": Overlap(tensor=True)},
        {"cp": 4, "recompute": Recompute(RecomputeKind.SELECTIVE)},
        {"dp": 8, "sharding": Sharding.FSDP},
        {"tp": 2, "kernels": Kernels.PLAIN},
    )
    for changes in cases:
        stage = run_of(seq=4096, **changes).stages[0]
        layers = stage.body_layers()
        order = [op for layer in layers for op in layer.forward]
        order += [op for layer in reversed(layers) for op in (*layer.input_gradient, *layer.weight_gradient)]
        seen: set[str] = set()
        for op in order:
            assert set(op.after) <= seen, (changes, op)
            if not op.blocking:
                seen.add(op.name)


def test_lora_trains_adapters_alone() -> None:
    run = run_of(training=TrainingKind.LORA, lora_rank=16, dp=8)
    stage = run.stages[0]
    weights = [op for layer in stage.body_layers() for op in layer.weight_gradient]
    assert weights
    assert all("lora" in op.name for op in weights)
    update = next(op.work for layer in stage.epilogue for op in layer.forward if op.name == "update")
    assert isinstance(update, Elementwise)
    # Rank times inputs plus outputs of qkv, output, up and down, in every layer.
    widths = (4096 + 6144) + (4096 + 4096) + (4096 + 28672) + (14336 + 4096)
    assert update.elements == 32 * 16 * widths


@pytest.mark.parametrize(
    ("precision", "read", "written"),
    [(DType.BF16, 4 + 4 + 4 + 4, 4 + 4 + 4 + 2), (DType.FP32, 4 + 4 + 4 + 4, 4 + 4 + 4)],
)
def test_adam_reads_and_writes_its_moments(precision: DType, read: int, written: int) -> None:
    """Kingma and Ba 2015, algorithm 1, in fp32: gradient, weight and two moments are read, all but the
    gradient are written, and in mixed precision the bf16 copy of the weight too."""
    stage = run_of(precision=precision).stages[0]
    update = next(op.work for layer in stage.epilogue for op in layer.forward if op.name == "update")
    assert isinstance(update, Elementwise)
    assert update.elements == LLAMA.parameters
    assert (update.read_bytes, update.write_bytes) == (read * LLAMA.parameters, written * LLAMA.parameters)


def test_experts_are_grouped() -> None:
    model = load_model("deepseek-v3")
    strategy = Strategy(Layout(ep=64, pp=16, dp=128), 1, 1920, 4096, stage_layers=spread_layers(61, 16))
    run = generate(model, strategy)
    grouped = [op.work for op in all_ops(run.stages[5]) if isinstance(op.work, GroupedMatmul)]
    assert {work.groups for work in grouped} == {4}
    assert {work.m for work in grouped} == {4096 * 8}
    assert sum(block.feed_forward is FeedForward.EXPERTS for block in model.blocks) == 58


def test_an_illegal_strategy_is_refused() -> None:
    with pytest.raises(StrategyError, match="tp 3 does not divide heads 32"):
        run_of(tp=3)


def test_plain_kernels_are_not_fused() -> None:
    fused, plain = run_of().stages[0], run_of(kernels=Kernels.PLAIN).stages[0]

    def rotaries(stage: Stage) -> int:
        return sum(isinstance(op.work, Elementwise) and op.work.kind is ElementwiseKind.ROTARY for op in all_ops(stage))

    assert rotaries(plain) > 4 * rotaries(fused)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(["llama-3.2-1b", "gpt2-large", "mixtral-8x7b", "deepseek-v2", "gemma-2-9b"]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 4]),
    sharding=st.sampled_from(list(Sharding)),
    recompute=st.sampled_from([RecomputeKind.NONE, RecomputeKind.SELECTIVE, RecomputeKind.FULL]),
    flash=st.booleans(),
    kernels=st.sampled_from(list(Kernels)),
    rule=st.sampled_from(list(SelectiveRule)),
)
def test_every_legal_strategy_generates(
    name: str,
    tp: int,
    pp: int,
    cp: int,
    dp: int,
    sharding: Sharding,
    recompute: RecomputeKind,
    flash: bool,
    kernels: Kernels,
    rule: SelectiveRule,
) -> None:
    model = load_model(name)
    layout = Layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=dp if model.experts else 1, expert_tp=1 if model.experts else 0)
    layers = spread_layers(model.layers, pp)
    strategy = Strategy(
        layout,
        1,
        8 * dp,
        1024,
        sequence_parallel=tp > 1,
        sharding=sharding,
        recompute=Recompute(recompute),
        stage_layers=layers,
    )
    framework = Framework(flash_attention=flash, kernels=kernels, selective=rule)
    if not is_legal(model, strategy, framework):
        return
    run = generate(model, strategy, framework)
    assert run == generate(model, strategy, framework)
    for stage in run.stages:
        for which, _ in stage.varied:
            pairs = list(zip(stage.body_layers(), stage.body_layers(which), strict=True))
            assert all(usual.name == other.name for usual, other in pairs)
            assert any(usual != other for usual, other in pairs)
        for layer in stage.body_layers():
            # A forward runs each op once: names tell them apart.
            names = [op.name for op in layer.forward]
            assert len(names) == len(set(names)), names


def test_a_large_model_stays_folded() -> None:
    """Neither stages that are alike nor layers nor replicas are written out one by one."""
    strategy = Strategy(
        Layout(tp=8, pp=16, dp=128),
        1,
        2048,
        8192,
        sequence_parallel=True,
        sharding=Sharding.ZERO_1,
        stage_layers=spread_layers(126, 16),
    )
    run = generate(load_model("llama-3.1-405b"), strategy)
    distinct = {id(stage): stage for stage in run.stages}.values()
    assert len(distinct) == 3  # the first, the last, and one for all between
    assert sum(len(block.layers) for stage in distinct for block in stage.body) < 126


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-v3", "nemotron-h-8b", "gemma-3-27b", "gpt-oss-20b"])
def test_every_layer_says_what_it_is(name: str) -> None:
    """Rules go by the role, which no renaming touches; a role nobody gives would leave its rules without effect."""
    model = load_model(name)
    further = min(1, model.next_token_layers)
    stage = generate(model, Strategy(Layout(dp=8), 1, 32, 2048, mtp_layers=further)).stages[0]
    layers = (*stage.body_layers(), *stage.epilogue)
    assert all(layer.role is not None and layer.name == layer.role for layer in layers)
    assert {layer.role for layer in layers} >= {Role.EMBEDDING, Role.HEAD, Role.LOSS, Role.OPTIMIZER}
