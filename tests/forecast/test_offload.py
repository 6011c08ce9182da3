"""A step whose states or activations are kept on the host: its copies, its time, its warnings."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepcast.forecast.predict import predict
from stepcast.frameworks.catalog import load_framework
from stepcast.generate.workload import generate
from stepcast.hardware import load_cluster
from stepcast.ir.framework import MEGATRON_CORE, Framework, Optimizer, OptimizerKind
from stepcast.ir.layers.kinds import count_saved
from stepcast.ir.layout import HostWay, Layout
from stepcast.ir.strategy import Offload, ScheduleKind, Sharding, Strategy, StrategyError
from stepcast.ir.types import DType
from stepcast.ir.work import HostCopy
from stepcast.models.catalog import load_model

MODEL, CLUSTER = load_model("llama-3.1-8b"), load_cluster("dgx-h100")
PLAIN = Strategy(Layout(dp=8), 1, 32, 4096, sharding=Sharding.ZERO_1)
FAST = load_cluster("dgx-h100", ["node.host.link.bandwidth=1e6 TB/s", "node.host.memory_bandwidth=1e6 TB/s"])


def copied_bytes(strategy: Strategy, framework: Framework = MEGATRON_CORE) -> dict[HostWay, int]:
    """Of one rank of each stage, in a step."""
    found: Counter[HostWay] = Counter()
    for stage in generate(MODEL, strategy, framework).stages:
        for layer, count in stage.counted_layers(strategy.micro_batches):
            for op in layer.all_ops:
                if isinstance(op.work, HostCopy):
                    found[op.work.way] += count * op.work.size_bytes
    return dict(found)


def step_s(strategy: Strategy, framework: Framework = MEGATRON_CORE) -> float:
    return predict(MODEL, CLUSTER, strategy, framework).step_s


def test_an_offloaded_optimizer_takes_the_hosts_memory() -> None:
    """30 bytes a parameter of all eight GPUs at 0.46 of 614.4 GB/s, where the GPU's update took next to
    nothing; copies run beside it, but for the first and the last."""
    gained = step_s(replace(PLAIN, offload=Offload(optimizer=1))) - step_s(PLAIN)
    assert gained == pytest.approx(30 * MODEL.parameters / (0.46 * 614.4e9), rel=0.03)


def test_gradients_go_out_and_weights_come_back() -> None:
    """Megatron-Core copies fp32 gradients and bf16 weights; DeepSpeed 16-bit gradients of each micro-batch;
    FSDP fp32 gradients, and fp32 weights for every pass, and updates them where they are."""
    own, offload = MODEL.parameters / 8, Offload(optimizer=1)
    moved = copied_bytes(replace(PLAIN, offload=offload))
    assert moved == pytest.approx({HostWay.OUT: 4 * own, HostWay.IN: 2 * own}, rel=1e-6)
    strategy = replace(PLAIN, sharding=Sharding.ZERO_2, offload=offload)
    moved = copied_bytes(strategy, load_framework("megatron-deepspeed"))
    assert moved == pytest.approx({HostWay.OUT: 4 * 4 * own, HostWay.IN: 2 * own}, rel=1e-3)
    strategy = replace(PLAIN, sharding=Sharding.FSDP, offload=offload)
    moved = copied_bytes(strategy, load_framework("torchtitan"))
    assert moved == pytest.approx({HostWay.OUT: 4 * 4 * own, HostWay.IN: 4 * 2 * 4 * own}, rel=1e-3)


def test_activations_of_each_micro_batch_go_and_return() -> None:
    strategy = replace(PLAIN, offload=Offload(activations=0.5))
    kept = count_saved(MODEL, strategy, MODEL.blocks[0]).saved
    size = 16 * kept * strategy.micro_batches
    assert copied_bytes(strategy) == pytest.approx({HostWay.OUT: size, HostWay.IN: size})


@pytest.mark.parametrize("layout", [Layout(dp=8), Layout(pp=4, dp=2), Layout(tp=2, pp=2, vpp=2, dp=2)])
def test_a_link_that_is_fast_enough_costs_nothing(layout: Layout) -> None:
    schedule = ScheduleKind.INTERLEAVED if layout.vpp > 1 else ScheduleKind.ONE_F_ONE_B
    strategy = replace(PLAIN, layout=layout, schedule=schedule, sequence_parallel=layout.tp > 1)
    usual = predict(MODEL, FAST, strategy).step_s
    moved = predict(MODEL, FAST, replace(strategy, offload=Offload(activations=1))).step_s
    assert usual <= moved <= 1.01 * usual


def test_a_slow_link_is_what_the_step_waits_for() -> None:
    """Every byte out and back; the two directions run beside one another at most."""
    slow = load_cluster("dgx-h100", ["node.host.link.bandwidth=1 GB/s", "node.host.link.efficiency=1"])
    strategy = replace(PLAIN, offload=Offload(activations=1))
    sizes = copied_bytes(strategy)
    assert predict(MODEL, slow, strategy).step_s >= sizes[HostWay.OUT] / 1e9


def test_deepspeed_hides_gradients_behind_the_backward() -> None:
    strategy = replace(PLAIN, sharding=Sharding.ZERO_2, offload=Offload(optimizer=1))
    report = predict(MODEL, CLUSTER, strategy, load_framework("deepspeed-zero")).report
    out = report.communication_s["to-host"]
    assert out.exposed_s < 0.1 * out.total_s


@settings(deadline=None, max_examples=20)
@given(st.floats(0, 1), st.floats(0, 1))
def test_offloading_is_never_faster(optimizer: float, activations: float) -> None:
    usual, moved = step_s(PLAIN), step_s(replace(PLAIN, offload=Offload(optimizer, activations)))
    assert moved >= usual * (1 - 1e-9)


def test_a_host_that_is_too_small_is_told() -> None:
    small = load_cluster("dgx-h100", ["node.host.memory=100 GB"])
    strategy = replace(PLAIN, offload=Offload(optimizer=1))
    report = predict(MODEL, small, strategy).report
    assert report.memory_bytes is not None
    host = report.memory_bytes["host"]
    assert host["node"] == pytest.approx(16 * MODEL.parameters)
    assert any("offloaded to the host of each node, which has 93.13 GiB" in each for each in report.warnings)
    fits = predict(MODEL, CLUSTER, strategy).report
    assert not any("offloaded to the host" in each for each in fits.warnings)


@pytest.mark.parametrize(
    ("strategy", "framework", "message"),
    [
        (PLAIN, replace(MEGATRON_CORE, optimizer=Optimizer(OptimizerKind.MUON)), "no host updates muon"),
        (PLAIN, load_framework("pytorch"), "sharding is zero-1: choose fsdp or zero-3"),
        (
            replace(PLAIN, sharding=Sharding.FSDP, offload=Offload(optimizer=0.5)),
            load_framework("torchtitan"),
            "offloads the optimizer as a whole",
        ),
    ],
)
def test_what_no_software_does_is_refused(strategy: Strategy, framework: Framework, message: str) -> None:
    if not strategy.offload.optimizer:
        strategy = replace(strategy, offload=Offload(optimizer=1))
    with pytest.raises(StrategyError, match=message):
        generate(MODEL, strategy, framework)


@pytest.mark.parametrize("name", ["trainer", "torchtitan", "pytorch-fsdp"])
@pytest.mark.parametrize("precision", [DType.BF16, DType.FP32])
def test_one_gpu_fetches_the_weights_that_fsdp_keeps_on_the_host(name: str, precision: DType) -> None:
    strategy = replace(PLAIN, layout=Layout(), sharding=Sharding.FSDP, offload=Offload(1.0), precision=precision)
    framework = load_framework(name)
    copied = copied_bytes(strategy, framework)
    width = 4 if framework.keeps_fp32_weights(strategy) else strategy.weights.bytes
    # For the forward and the backward of each of 32 micro-batches.
    assert copied[HostWay.IN] == pytest.approx(2 * 32 * MODEL.parameters * width, rel=0.1)
