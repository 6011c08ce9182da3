"""Multi-token prediction: a module and the head once more for each further token."""

from dataclasses import replace

import pytest

from stepcast.cost.memory import memory
from stepcast.forecast.predict import predict
from stepcast.generate.flops import model_flops
from stepcast.generate.workload import generate
from stepcast.hardware.catalog import load_cluster
from stepcast.ir.layout import Layout
from stepcast.ir.legality import check
from stepcast.ir.model import held_shard, pieces
from stepcast.ir.model_parts import FeedForward, Mixer
from stepcast.ir.strategy import Sharding, Strategy, StrategyError
from stepcast.ir.workload import Role
from stepcast.models.catalog import load_model
from tests.executed import hardware_flops

DEEPSEEK, LLAMA = load_model("deepseek-v3"), load_model("llama-3.1-8b")
STRATEGY = Strategy(Layout(ep=8, dp=8, expert_tp=1), 1, 16, 4096)
FURTHER = replace(STRATEGY, mtp_layers=1)


def test_a_further_token_runs_a_block_a_projection_and_the_head() -> None:
    plain, further = (model_flops(DEEPSEEK, 4096, 16, mtp_layers=tokens) for tokens in (0, 1))
    one_more = model_flops(DEEPSEEK.with_layers(62), 4096, 16) - plain
    matrices = 6.0 * 16 * 4096 * (2 * DEEPSEEK.hidden**2 + DEEPSEEK.vocab * DEEPSEEK.hidden)
    assert further - plain == pytest.approx(one_more + matrices)


def test_workloads_execute_what_the_model_asks_for() -> None:
    asked = [model_flops(DEEPSEEK, 4096, 16, causal=True, mtp_layers=n) for n in (0, 1)]
    executed = [hardware_flops(generate(DEEPSEEK, strategy)) for strategy in (STRATEGY, FURTHER)]
    assert executed[1] / executed[0] == pytest.approx(asked[1] / asked[0], rel=0.003)


def test_the_last_stage_holds_the_module_however_often_it_runs() -> None:
    alone = replace(STRATEGY, layout=Layout())
    for model in (DEEPSEEK, load_model("nemotron3-super")):
        held = [held_shard(model, replace(alone, mtp_layers=n), pieces(model, alone)[-1]).total for n in (0, 1, 2)]
        assert held[1] - held[0] == model.next_token_parameters
        assert held[2] == held[1]
        assert model.next_token_layers == 1


def test_a_hybrids_module_has_a_block_for_each_half() -> None:
    halves = [(block.mixer, block.feed_forward) for block in load_model("nemotron3-super").next_token_blocks]
    assert halves == [(Mixer.ATTENTION, FeedForward.NONE), (Mixer.NONE, FeedForward.EXPERTS)]


def test_the_head_of_a_module_adds_gradients_as_the_head_before_it_does() -> None:
    """Whatever ranks share gradients, both run the same matmuls on the same weights."""
    for sharding in (Sharding.NONE, Sharding.ZERO_1, Sharding.FSDP):
        for global_batch in (8, 16):
            strategy = replace(FURTHER, global_batch=global_batch, sharding=sharding)
            layers = [layer for block in generate(DEEPSEEK, strategy).stages[0].body for layer in block.layers]
            first, second = [layer for layer in layers if layer.role is Role.HEAD]
            names = [[op.name for op in layer.weight_gradient if "accumulate" in op.name] for layer in (first, second)]
            assert names[0] == names[1], (sharding, global_batch)


def test_time_and_memory_grow_on_the_last_stage_alone() -> None:
    layout = Layout(pp=4, ep=8, dp=8, expert_tp=1)
    layers = (16, 16, 16, 13)
    cluster = load_cluster("dgx-b200")
    four = replace(STRATEGY, layout=layout, global_batch=64, stage_layers=layers)
    plain, further = (predict(DEEPSEEK, cluster, replace(four, mtp_layers=n)).report for n in (0, 1))
    busy = [(one.busy_s, two.busy_s) for one, two in zip(plain.stages, further.stages, strict=True)]
    # How long stages wait for slow GPUs depends on which of them have as much work as the longest.
    assert all(two == pytest.approx(one, rel=0.02) for one, two in busy[:-1])
    assert busy[-1][1] > busy[-1][0] * 1.05
    # Three layers fewer leave room for the module: the step hardly grows.
    assert plain.step_s <= further.step_s < 1.05 * plain.step_s
    held = [memory(DEEPSEEK, replace(four, mtp_layers=n), cluster.gpu) for n in (0, 1)]
    assert [one.total == two.total for one, two in zip(*held, strict=True)] == [True, True, True, False]


def test_models_without_such_a_module_are_refused() -> None:
    check(DEEPSEEK, FURTHER)
    with pytest.raises(StrategyError, match="has no multi-token prediction"):
        check(LLAMA, Strategy(Layout(), 1, 1, 4096, mtp_layers=1))
