"""Communication volumes against the published formulas, in bytes a rank sends for one training step."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from stepcast.generate.workload import generate
from stepcast.ir.layout import Group, Layout
from stepcast.ir.model import Model, held_shard, pieces
from stepcast.ir.schedules import ScheduleKind
from stepcast.ir.strategy import ContextKind, Objective, Sharding, Strategy
from stepcast.ir.work import Collective, CollectiveKind, Transfer
from stepcast.ir.workload import Workload
from stepcast.models.catalog import load_model

LLAMA = load_model("llama-3.1-8b")
MIXTRAL = load_model("mixtral-8x7b")
BATCH, SEQ = 1, 4096
ELEMENT = 2


def workload(model: Model, micro_batches: int = 2, **changes: Any) -> Workload:
    degrees = {key: changes.pop(key) for key in list(changes) if key in Layout.__dataclass_fields__}
    layout = Layout(**degrees)
    chosen = Strategy(layout, BATCH, BATCH * layout.dp * micro_batches, SEQ, **changes)
    return generate(model, chosen)


def communications(run: Workload, stage: int = 0) -> Iterator[tuple[Collective | Transfer, int]]:
    for layer, count in run.stages[stage].counted_layers(run.micro_batches):
        for op in (*layer.forward, *layer.input_gradient, *layer.weight_gradient):
            if isinstance(op.work, Collective | Transfer):
                yield op.work, count


def sent_bytes(run: Workload, group: Group, stage: int = 0) -> float:
    """Ring algorithms: an all-reduce sends 2 (n-1)/n of the buffer, the others half of it."""
    ranks = run.layout.size(group)
    total = 0.0
    for work, count in communications(run, stage):
        if work.group is not group:
            continue
        if isinstance(work, Transfer):
            total += count * work.size_bytes
        else:
            factor = 2 if work.kind is CollectiveKind.ALL_REDUCE else 1
            total += count * factor * work.total_bytes * (ranks - 1) / ranks
    return total


def kinds(run: Workload, group: Group, stage: int = 0) -> dict[CollectiveKind, int]:
    found: dict[CollectiveKind, int] = {}
    for work, count in communications(run, stage):
        if isinstance(work, Collective) and work.group is group and count > 0:
            found[work.kind] = found.get(work.kind, 0) + count
    return found


def test_tensor_parallel_all_reduces() -> None:
    """Shoeybi et al. 2019, section 3: two all-reduces of b s h in the forward of a layer and two in the backward."""
    run = workload(LLAMA, tp=4, pp=4)
    middle = sent_bytes(run, Group.TP, stage=1)
    layers, buffer = 8, BATCH * SEQ * LLAMA.hidden * ELEMENT
    assert middle == pytest.approx(run.micro_batches * layers * 4 * 2 * 3 / 4 * buffer)


def test_sequence_parallelism_moves_as_much_plus_the_regather() -> None:
    """Korthikanti et al. 2022, section 4.2.2: a reduce-scatter and an all-gather for each all-reduce; the input of
    both column-parallel matmuls is gathered once more for the weight gradient.
    """
    plain = sent_bytes(workload(LLAMA, tp=4, pp=4), Group.TP, stage=1)
    split = sent_bytes(workload(LLAMA, tp=4, pp=4, sequence_parallel=True), Group.TP, stage=1)
    norms = 2 * 8 * 2 * LLAMA.hidden * 4 * 3 / 4  # their gradients are summed over tp once per step, in fp32
    regather = 2 * 8 * 2 * 3 / 4 * BATCH * SEQ * LLAMA.hidden * ELEMENT
    assert split == pytest.approx(plain + regather + norms)


def test_vocabulary_parallel_loss_sends_scalars() -> None:
    """Shoeybi et al. 2019, section 3: b x s numbers instead of b x s x v logits."""
    run = workload(LLAMA, tp=8)
    scalars = [work for work, _ in communications(run) if work.size_bytes == BATCH * SEQ * 4]
    assert len(scalars) == 3


@pytest.mark.parametrize("sharding", [Sharding.NONE, Sharding.ZERO_1])
def test_data_parallel_volume_does_not_depend_on_micro_batches(sharding: Sharding) -> None:
    """Rajbhandari et al. 2020, section 7.1: 2 P for gradients, or P each for gradients and parameters."""
    runs = [workload(LLAMA, micro_batches=n, dp=8, sharding=sharding) for n in (1, 4)]
    weights, gradients = 2 * LLAMA.parameters, 4 * LLAMA.parameters
    whole = 2 * gradients if sharding is Sharding.NONE else gradients + weights
    for run in runs:
        assert sent_bytes(run, Group.DP) == pytest.approx(7 / 8 * whole)


@pytest.mark.parametrize("sharding", [Sharding.ZERO_3, Sharding.FSDP])
@pytest.mark.parametrize("overlapped", [True, False])
def test_fully_sharded_volume(sharding: Sharding, overlapped: bool) -> None:
    """Rajbhandari et al. 2020, section 7.2.2: parameters twice, gradients once, for every micro-batch."""
    from stepcast.ir.strategy import NO_OVERLAP, USUAL_OVERLAP

    overlap = USUAL_OVERLAP if overlapped else NO_OVERLAP
    run = workload(LLAMA, micro_batches=3, dp=8, sharding=sharding, overlap=overlap)
    assert sent_bytes(run, Group.DP) == pytest.approx(3 * 7 / 8 * LLAMA.parameters * (2 * 2 + 4))


def test_hybrid_sharding_reduces_inside_then_across() -> None:
    """Zhao et al., PyTorch FSDP, 2023, section 3.2.2: scatter within the shard group, reduce a shard across."""
    run = workload(LLAMA, micro_batches=1, dp=16, shard=8, sharding=Sharding.HYBRID_FSDP)
    gradients, weights = 4 * LLAMA.parameters, 2 * LLAMA.parameters
    assert sent_bytes(run, Group.SHARD) == pytest.approx(7 / 8 * (gradients + 2 * weights))
    assert sent_bytes(run, Group.REPLICA) == pytest.approx(2 * 1 / 2 * gradients / 8, rel=1e-6)
    assert sent_bytes(run, Group.DP) == 0


def test_ring_attention_passes_keys_and_values() -> None:
    """Liu et al. 2023, section 3: each of cp - 1 steps passes one block of keys and values; the backward passes
    them with their gradients, which then go home.
    """
    run = workload(LLAMA, cp=4, pp=4)
    block = BATCH * SEQ // 4 * 2 * LLAMA.kv_width * ELEMENT
    assert sent_bytes(run, Group.CP, stage=1) == run.micro_batches * 8 * (3 * block + 3 * 2 * block + block)


def test_ulysses_exchanges_queries_keys_values_and_output() -> None:
    """Jacobs et al. 2023, section 3.2: for N tokens, width h and P ranks 4 N h / P per rank and pass (without
    grouped-query attention).
    """
    gpt = load_model("gpt3-6.7b")
    run = generate(gpt, Strategy(Layout(cp=4, pp=4), 1, 2, 2048, context=ContextKind.ALL_TO_ALL))
    per_layer = 4 * 2048 * gpt.hidden * ELEMENT / 4
    layers = gpt.layers // 4
    assert sent_bytes(run, Group.CP, stage=1) == pytest.approx(2 * layers * 2 * per_layer * 3 / 4)


def test_gathered_context_moves_keys_and_values_only() -> None:
    """Llama 3, 2024, section 3.3.2: keys and values are gathered, their gradients reduced and scattered."""
    run = workload(LLAMA, cp=4, pp=4, context=ContextKind.ALL_GATHER)
    whole = BATCH * SEQ * 2 * LLAMA.kv_width * ELEMENT
    assert sent_bytes(run, Group.CP, stage=1) == pytest.approx(run.micro_batches * 8 * 3 * whole * 3 / 4)


def test_experts_exchange_tokens_four_times() -> None:
    """Lepikhin et al., GShard, 2020: dispatch and combine move b s k h each, forward and backward."""
    run = workload(MIXTRAL, ep=8, dp=8, pp=4)
    buffer = BATCH * SEQ * 2 * MIXTRAL.hidden * ELEMENT
    assert sent_bytes(run, Group.EP, stage=1) == pytest.approx(run.micro_batches * 8 * 4 * 7 / 8 * buffer)
    assert kinds(run, Group.EP, stage=1) == {CollectiveKind.ALL_TO_ALL: run.micro_batches * 8 * 4}


def test_imbalance_and_capacity_scale_the_exchange() -> None:
    even = sent_bytes(workload(MIXTRAL, ep=8, dp=8), Group.EP)
    skewed = sent_bytes(workload(MIXTRAL, ep=8, dp=8, expert_imbalance=1.5), Group.EP)
    capped = sent_bytes(workload(MIXTRAL, ep=8, dp=8, expert_imbalance=1.5, expert_capacity=1.25), Group.EP)
    assert skewed == pytest.approx(1.5 * even)
    assert capped == pytest.approx(1.25 * even)


def test_split_experts_gather_their_tokens() -> None:
    run = workload(MIXTRAL, tp=2, ep=4, dp=4, expert_tp=2, sequence_parallel=True)
    assert kinds(run, Group.EXPERT_TP) == {
        CollectiveKind.ALL_GATHER: 2 * 32 * 2,
        CollectiveKind.REDUCE_SCATTER: 2 * 32 * 2,
    }


def test_expert_gradients_have_their_own_group() -> None:
    run = workload(MIXTRAL, ep=4, dp=8, sharding=Sharding.NONE)
    shard = MIXTRAL.shard_of(range(32), ep=4, embedding=True, head=True)
    assert sent_bytes(run, Group.EXPERT_DP) == pytest.approx(2 * 1 / 2 * 4 * shard.experts)
    assert sent_bytes(run, Group.DP) == pytest.approx(2 * 7 / 8 * 4 * shard.dense)


def test_tied_embeddings_are_summed_between_the_ends() -> None:
    gpt = load_model("gpt2-large")
    size = gpt.vocab * gpt.hidden * 4
    assert embedding_sums(gpt, Strategy(Layout(pp=4), 1, 8, 1024)) == [[size], [], [], [size]]
    # Of split gradients each rank sums its share (Megatron-LM, core/distributed/finalize_model_grads.py).
    split = Strategy(Layout(pp=2, dp=4), 1, 8, 1024, sharding=Sharding.ZERO_2)
    assert embedding_sums(gpt, split) == [[size // 4], [size // 4]]


def embedding_sums(model: Model, strategy: Strategy) -> list[list[int]]:
    """Return the bytes that each piece of a pipeline sums between the first and the last stage."""
    run = generate(model, strategy)
    pieces = range(len(run.stages))
    groups = [[work for work, _ in communications(run, piece) if work.group is Group.EMBEDDING] for piece in pieces]
    return [[work.size_bytes for work in piece] for piece in groups]


def test_ends_on_the_same_stage_sum_nothing_between_stages() -> None:
    gpt = load_model("gpt2-large")
    for schedule, layout in ((ScheduleKind.ZB_V, Layout(pp=2, vpp=2)), (ScheduleKind.DUALPIPE, Layout(pp=2))):
        assert not any(embedding_sums(gpt, Strategy(layout, 1, 8, 1024, schedule=schedule)))


def test_a_reward_model_ties_nothing() -> None:
    """Its head returns one number, and reads no word embedding."""
    gpt = load_model("gpt2-large")
    reward = Strategy(Layout(pp=2), 1, 8, 1024, objective=Objective.REWARD)
    assert not any(embedding_sums(gpt, reward))
    held = [held_shard(gpt, reward, piece).total for piece in pieces(gpt, reward)]
    assert sum(held) == gpt.parameters


def test_the_stage_of_further_tokens_has_a_copy_of_the_embedding() -> None:
    """Megatron-LM, core/models/gpt/gpt_model.py: an embedding where mtp_process, too; finalize_model_grads.py sums its
    gradients with those of the first stage.
    """
    model = load_model("deepseek-v3")
    words = model.vocab * model.hidden
    alone, apart = (Strategy(Layout(pp=pp, ep=8, dp=8, expert_tp=1), 1, 64, 4096, mtp_layers=1) for pp in (1, 2))
    held = [
        sum(held_shard(model, strategy, piece).total for piece in pieces(model, strategy))
        for strategy in (alone, apart)
    ]
    assert held[1] - held[0] == words
    assert embedding_sums(model, alone) == [[]]
    assert embedding_sums(model, apart) == [[4 * words], [4 * words]]
    assert embedding_sums(model, replace(apart, mtp_layers=0)) == [[], []]


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_boundary(sequence_parallel: bool) -> None:
    run = workload(LLAMA, tp=4, pp=4, sequence_parallel=sequence_parallel)
    whole = BATCH * SEQ * LLAMA.hidden * ELEMENT
    assert run.boundary_bytes == (whole // 4 if sequence_parallel else whole)
    assert workload(LLAMA, tp=4).boundary_bytes is None
