"""Forecasts of splits that do not come out even: stages without layers, kv heads that ranks share."""

from typing import Any

import pytest

from stepcast import Layout, Strategy, load_cluster, load_model, predict
from stepcast.cli.main import main
from stepcast.cost.memory import memory
from stepcast.generate.workload import generate
from stepcast.ir.layout import Group
from stepcast.ir.strategy import ScheduleKind, StrategyError
from stepcast.ir.work import Attention, Collective, CollectiveKind, Matmul

H100 = load_cluster("dgx-h100")
LARGE = load_model("llama-3.1-405b")
SMALL = load_model("llama-3.1-8b")  # 32 layers, 32 heads, 8 kv heads of 128


def strategy(global_batch: int = 64, **degrees: Any) -> Strategy:
    layout = Layout(**degrees)
    schedule = ScheduleKind.INTERLEAVED if layout.vpp > 1 else ScheduleKind.ONE_F_ONE_B
    return Strategy(layout, 1, global_batch, 4096, sequence_parallel=layout.tp > 1, schedule=schedule)


def test_126_layers_run_on_128_pieces_with_embedding_and_loss_alone() -> None:
    forecast = predict(LARGE, H100, strategy(tp=8, pp=16, vpp=8)).report
    assert forecast.assumptions[0] == "126 layers over 128 pieces as 0, 126 x 1, 0 (--stage-layers)"
    first, *middle, last = (stage.busy_s for stage in forecast.stages)
    assert all(busy == pytest.approx(middle[0]) for busy in middle)
    # Seven layers of eight, and the embedding's or the loss's work beside them.
    assert middle[0] * 7 / 8 < first < last < middle[0]


def test_an_empty_end_piece_holds_the_embedding_or_the_loss() -> None:
    stages = memory(LARGE, strategy(tp=8, pp=16, vpp=8), H100.gpu)
    layer = LARGE.shard_of(range(1), tp=8).total
    ends = LARGE.vocab * LARGE.hidden // 8
    assert stages[0].parameters == 2 * (7 * layer + ends)
    assert stages[1].parameters == 2 * 8 * layer
    assert stages[15].parameters == pytest.approx(2 * (7 * layer + ends), rel=1e-4)  # and the last norm


def test_every_split_multiplies_the_same() -> None:
    def flops(plan: Strategy) -> float:
        return sum(
            op.work.flops
            for stage in generate(SMALL, plan).stages
            for block in stage.body
            for layer in [*block.layers] * block.repeat
            for op in (*layer.forward, *layer.input_gradient, *layer.weight_gradient)
            if isinstance(op.work, Matmul)
        )

    whole = flops(strategy())
    for degrees in ({"pp": 3}, {"pp": 33}, {"pp": 34}, {"pp": 17, "vpp": 2}):
        assert flops(strategy(global_batch=68, **degrees)) == pytest.approx(whole)


@pytest.mark.parametrize("layers", ["16,0,16,0", "0,16,16,0", "0,0,0,32"])
def test_stages_may_hold_no_layer(layers: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Megatron-Core: ``E||t|L`` is a legal pipeline_model_parallel_layout."""
    words = f"--model llama-3.1-8b --cluster dgx-h100 --gpus 16 --tp 2 --pp 4 --stage-layers {layers} --json"
    for sharding in ("zero-1", "fsdp"):
        assert main(["predict", *words.split(), "--sharding", sharding]) == 0
        assert '"fits": true' in capsys.readouterr().out


def test_tensor_ranks_share_kv_heads() -> None:
    plan = strategy(tp=16)
    works = [op.work for op in generate(SMALL, plan).stages[0].body[1].layers[1].forward]
    (product,) = (work for work in works if isinstance(work, Matmul))
    assert product.n == (32 + 2 * 8) * 128 // 16  # the projection is split whatever its heads
    gathers = [work for work in works if isinstance(work, Collective)]
    assert [work.kind for work in gathers] == [CollectiveKind.ALL_GATHER] * 2
    assert gathers[1].size_bytes == 4096 * (32 + 2 * 8) * 128 * 2
    assert gathers[1].group is Group.TP
    cores = [
        op.work
        for layer in generate(SMALL, plan).stages[0].body[1].layers
        for op in layer.forward
        if isinstance(op.work, Attention)
    ]
    assert {(core.heads, core.kv_heads) for core in cores} == {(2, 1)}


def test_shared_kv_heads_cost_time_and_memory() -> None:
    """Half of the heads and weights, but as many keys and values, and their projection of all ranks."""
    eight, sixteen = (memory(SMALL, strategy(tp=tp), H100.gpu)[0] for tp in (8, 16))
    assert sixteen.parameters == pytest.approx(eight.parameters / 2, rel=1e-3)
    assert eight.activations / 2 < sixteen.activations < eight.activations
    assert sixteen.temporary > eight.temporary / 2
    many = predict(load_model("llama-2-7b"), H100, strategy(tp=16)).report  # 32 kv heads
    few = predict(SMALL, H100, strategy(tp=16)).report
    sums = [report.communication_s["tp"].total_s for report in (many, few)]
    assert sums[1] > 1.2 * sums[0]


def test_kv_heads_that_ranks_cannot_share_are_refused() -> None:
    model = load_model("qwen2.5-7b")  # 28 heads, 4 kv heads
    predict(model, H100, strategy(tp=4))
    with pytest.raises(StrategyError, match="tp 14 does not divide kv heads 4: the nearest legal tp is 4"):
        predict(model, H100, Strategy(Layout(tp=14), 1, 4, 4096))


def test_experts_on_tensor_ranks_need_sequence_parallelism(capsys: pytest.CaptureFixture[str]) -> None:
    """Each of them would be multiplied with the same tokens by every rank; Megatron-Core refuses to train."""
    words = ["--model", "mixtral-8x7b", "--cluster", "dgx-h100", "--gpus", "8", "--tp", "8"]
    assert main(["predict", *words, "--no-sequence-parallel"]) == 2
    message = capsys.readouterr().err
    assert message == ("stepcast: experts with tp 8 need sequence parallelism: switch it on, or use tp 1\n")
    assert main(["predict", *words]) == 0
