"""Phases of an RL step by hand: each from the prediction of its optimizer step, its rollout and the profile."""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import stepcast
from stepcast.cost.host import copy_bytes_per_s
from stepcast.generation.engine import GenerationLayout, load_engine
from stepcast.generation.lengths import Lengths
from stepcast.inputs.configs.rl import read_rl_values
from stepcast.inputs.source import FormatError
from stepcast.rl.question import ask_rl, build_rl, read_task, search_rl
from stepcast.rl.step import (
    RlMode,
    RlPlacement,
    RlStep,
    RlTask,
    TrainingForecast,
    count_tensors,
    forecast_step,
    forecast_training,
    load_profile,
    sync_seconds,
)

MODEL, CLUSTER, ENGINE = stepcast.load_model("qwen3-0.6b"), stepcast.load_cluster("dgx-h100"), load_engine("vllm")
PROFILE = load_profile("nemo-rl")
TASK = RlTask(16, 8, Lengths(256.0), Lengths(1024.0), 128)
COLOCATED = RlPlacement(RlMode.COLOCATED, 8, GenerationLayout(replicas=8), (("recompute", "full"),))
ASYNC = replace(COLOCATED, mode=RlMode.ASYNC, staleness=1)


@lru_cache
def training_of(recompute: str = "full") -> TrainingForecast:
    place = replace(COLOCATED, training=(("recompute", recompute),))
    return forecast_training(MODEL, CLUSTER, PROFILE, TASK, place)


def step_of(place: RlPlacement = COLOCATED, cluster: stepcast.Cluster = CLUSTER, **changes: Any) -> RlStep:
    task = replace(TASK, **changes)
    return forecast_step(MODEL, cluster, PROFILE, ENGINE, task, place, training_of())


SEARCHED = {"model": "qwen3-0.6b", "cluster": "dgx-h100", "gpus": 8, "mode": "async", "tp": 1, "pp": 1, "gen_tp": 1}

# The batch, padded to its longest sequence of 256 + 1,024 tokens, moves to the GPUs for each pass.
MOVED_S = PROFILE.padded_token_s * 128 * 1280


@pytest.mark.parametrize(("recompute", "passes"), [("full", 4), ("none", 3)])
def test_a_pass_for_log_probabilities_is_the_forward_of_the_step(recompute: str, passes: int) -> None:
    """A backward is two forwards, and recomputing all activations one more; gradients and the update are left out."""
    training = training_of(recompute)
    parts = training.prediction.breakdown_s
    assert parts["dp"] > 0 < parts["optimizer"]
    layers_s = training.prediction.step_s - parts["dp"] - parts["optimizer"]
    assert training.forward_s == pytest.approx(layers_s / passes)


def test_the_phases_of_a_step() -> None:
    """One optimizer step on all responses; moments and gradients go to the host and back, at the pace of all GPUs."""
    training, step = training_of(), step_of(reference=True)
    memory, host = training.memory, CLUSTER.node.host
    assert host is not None
    passes_s = training.forward_s + MOVED_S
    assert step.phases_s == {
        "generation": pytest.approx(step.generation.seconds),
        "reward": 0.0,
        "old log-probabilities": pytest.approx(passes_s),
        "reference": pytest.approx(passes_s),
        "update": pytest.approx(training.prediction.step_s + MOVED_S),
        "weight sync": sync_seconds(MODEL, CLUSTER, PROFILE, COLOCATED),
        "overhead": pytest.approx(4.0 + 0.002 * 128),
        "offload": pytest.approx(2 * (memory["optimizer"] + memory["gradients"]) / copy_bytes_per_s(host, 8)),
    }
    busy_s = step.step_s - step.phases_s["overhead"]
    assert step.idle_shares()["all"] == pytest.approx(1 - busy_s / step.step_s)
    assert step.tokens_per_s_per_gpu == pytest.approx(128 * 1280 / step.step_s / 8)
    assert step.generation.engine is ENGINE  # without what the rollout adds


def test_a_critic_is_updated_too_and_epochs_repeat_updates() -> None:
    update_s = training_of().prediction.step_s
    assert step_of(critic=True).phases_s["update"] == pytest.approx(2 * update_s + MOVED_S)
    assert step_of(epochs=3).phases_s["update"] == pytest.approx(3 * update_s + MOVED_S)
    assert step_of(oversampling=1.5).generation.task.requests == 192


def test_fewer_gpus_than_a_node_has_copy_over_fewer_links() -> None:
    """Two GPUs share a host's memory of 80 GB/s, and each copies at 40 GB/s; eight would copy at 10 GB/s."""
    assert CLUSTER.node.host is not None
    host = replace(CLUSTER.node.host, memory_bandwidth_bytes_per_s=80e9)
    slow = replace(CLUSTER, node=replace(CLUSTER.node, host=host))
    moved = training_of().memory["optimizer"] + training_of().memory["gradients"]
    two = replace(COLOCATED, train_gpus=2, rollout=GenerationLayout(replicas=2))
    assert step_of(two, slow).phases_s["offload"] == pytest.approx(2 * moved / 40e9)


def test_asynchronous_pools_wait_for_the_weights_and_only_one_of_them_for_rewards() -> None:
    step = step_of(ASYNC, reward_s=3.0)
    phases = step.phases_s
    assert step.rollout_pool_s == pytest.approx(phases["generation"] + 3.0 + phases["weight sync"])
    trained = ("old log-probabilities", "update", "weight sync", "overhead")
    assert step.train_pool_s == pytest.approx(sum(phases[name] for name in trained))
    assert step.step_s == max(step.rollout_pool_s, step.train_pool_s)


@pytest.mark.parametrize(("changes", "ahead"), [({"staleness": 4}, 4), ({"partial_rollout": True}, 8), ({}, 1)])
def test_batches_in_a_row_share_one_tail_and_one_last_reward(changes: dict[str, Any], ahead: int) -> None:
    """Rewards that take 1.5 s each delay as many batches as run in a row once."""
    step = step_of(replace(ASYNC, **changes), reward_latency=Lengths(1500.0))
    assert step.generation.task.requests == 128 * ahead
    assert step.generation.seconds is not None
    assert step.phases_s["generation"] == pytest.approx(step.generation.seconds / ahead)
    assert step.phases_s["reward"] == pytest.approx(1.5 / ahead)


def test_weights_are_sent_over_nvlink_within_a_scale_up_domain_and_over_nics_beyond() -> None:
    """1.2 GB of weights at four links of a GPU, after gathering and converting each tensor by itself."""
    rack, alone = stepcast.load_cluster("gb200-nvl72"), replace(COLOCATED, mode=RlMode.SPLIT, train_gpus=16)
    size, tensors = MODEL.parameters * 2, count_tensors(MODEL)
    assert rack.node.nic is not None
    for gpus, link in ((16, rack.node.fabric.link), (72, rack.node.nic)):
        place = replace(alone, train_gpus=gpus)
        assert sync_seconds(MODEL, rack, PROFILE, place, in_buckets=True) == pytest.approx(
            size / (4 * link.bandwidth_bytes_per_s)
        )
    one_by_one, in_buckets = (sync_seconds(MODEL, rack, PROFILE, alone, way) for way in (False, True))
    assert one_by_one - in_buckets == pytest.approx(tensors * PROFILE.tensor_s)
    together = sync_seconds(MODEL, rack, PROFILE, replace(alone, mode=RlMode.COLOCATED))
    assert together - in_buckets == pytest.approx(tensors * PROFILE.colocated_tensor_s)


def test_gated_experts_have_three_matrices_each() -> None:
    """Qwen3 30B-A3B: 48 layers of 128 experts with gate, up and down, and nine other tensors or fewer."""
    others = count_tensors(stepcast.load_model("qwen3-30b-a3b")) - 48 * 128 * 3
    assert 0 < others < 48 * 12


def test_a_slower_host_serves_each_sequence_more_slowly() -> None:
    """NeMo RL on GB200: 70 us of CPU time for each sequence and step on x86 are 175 us on Grace."""
    texts = [" ".join(step_of(cluster=stepcast.load_cluster(name)).assumptions) for name in ("gb200-nvl72", "dgx-h100")]
    assert "takes 175.00 us of CPU time for each running sequence" in texts[0]
    assert "takes 70.00 us of CPU time for each running sequence" in texts[1]


def test_a_replica_has_no_more_sequences_than_its_share() -> None:
    """20 sequences of 1,280 tokens on 8 ranks are 3 on each, though 4,096 tokens would hold as many and 8,192 six."""
    place = replace(COLOCATED, pack_tokens=8192)
    task = replace(TASK, train_batch=20)
    wide, narrow = (
        forecast_training(MODEL, CLUSTER, PROFILE, task, replace(place, pack_tokens=tokens)).prediction
        for tokens in (8192, 3840)
    )
    assert wide.step_s == narrow.step_s


def test_packs_are_as_long_as_the_longest_response() -> None:
    """Responses of 1,024 tokens and at most 3,840: a pack holds three sequences of 1,280, as one that is stated."""
    task = replace(TASK, response=Lengths(1024.0, "lognormal", 0.5, most=3840.0))
    own, stated, single = (
        forecast_training(MODEL, CLUSTER, PROFILE, task, replace(COLOCATED, pack_tokens=tokens)).prediction.step_s
        for tokens in (0, 3840, 1280)
    )
    assert own == stated != single


def test_experts_are_not_split_by_tensor_ranks_unless_stated() -> None:
    """Megatron's RL recipes set the expert tensor parallelism to 1."""
    model, task = stepcast.load_model("qwen3-30b-a3b"), replace(TASK, prompts=2)
    given = (("tp", 2), ("ep", 4), ("recompute", "full"))
    default, apart, split = (
        forecast_training(model, CLUSTER, PROFILE, task, replace(COLOCATED, training=options)).prediction.step_s
        for options in (given, (*given, ("expert_tp", 1)), (*given, ("expert_tp", 2)))
    )
    assert default == apart != split


def test_a_batch_holds_no_more_than_the_responses() -> None:
    assert read_task(build_rl({"prompts": 4, "group": 8, "train_batch": 1000})).train_batch == 32


@pytest.mark.parametrize(("key", "mean"), [("max_total_sequence_length", (4096 - 256) // 2), ("generation", 2048)])
def test_responses_are_half_of_what_a_configuration_leaves_them(key: str, mean: int, tmp_path: Path) -> None:
    """A limit of prompt and response together leaves 4,096 less a prompt of 256 tokens."""
    limit = "generation: {max_new_tokens: 4096}" if key == "generation" else f"{key}: 4096"
    file = tmp_path / "grpo.yaml"
    file.write_text(f"grpo: {{num_prompts_per_step: 16}}\npolicy:\n  model_name: Qwen/Qwen3-0.6B\n  {limit}\n")
    assert f"mean={mean}," in ask_rl({}, config=str(file))[0].response_length


def test_nodes_that_generate_do_not_train() -> None:
    """NeMo RL: 4 nodes of 8 GPUs of which one generates leave 24 that train; staleness is of asynchronous steps."""
    apart = {
        "cluster.num_nodes": 4,
        "cluster.gpus_per_node": 8,
        "policy.generation.colocated.enabled": False,
        "policy.generation.colocated.resources.num_nodes": 1,
        "grpo.async_grpo.max_trajectory_age_steps": 2,
    }
    choices = read_rl_values(apart).choices
    assert (choices["mode"], choices["gpus"], choices["rollout_gpus"]) == ("split", 24, 8)
    assert "staleness" not in choices
    overlapped = read_rl_values({**apart, "grpo.async_grpo.enabled": True}).choices
    assert (overlapped["mode"], overlapped["staleness"]) == ("async", 2)


def test_the_longest_response_of_a_rank_decides_its_update() -> None:
    """On 8 ranks, 16 responses of which one is far longer than the mean take as long as that one, if it is longer than
    the mean share of a rank.
    """
    lengths = Lengths(1024.0, "lognormal", 1.5, most=16_384.0)
    drawn = 256 + lengths.draw(16)
    longer = drawn.max() / (drawn.sum() / 8)
    assert longer > 1.5
    moved_s = PROFILE.padded_token_s * 128 * (float(lengths.draw(128).max()) + 256)
    update_s = step_of(response=lengths, train_batch=16).phases_s["update"] - moved_s
    assert update_s == pytest.approx(training_of().prediction.step_s * 8 * longer)


def test_a_run_of_steps_takes_gpu_hours_and_money() -> None:
    """A search shares the price of all GPUs out to the tokens of a step, prompts included."""
    asked: dict[str, Any] = {"prompts": 16, "group": 8, "response_length": "1024", "price": 2.0}
    step = stepcast.predict_rl("qwen3-0.6b", "dgx-h100", gpus=4, rollout_gpus=4, steps=100, **asked)
    run, hours = step.to_dict()["run"], 100 * step.step_s / 3600
    assert (run["days"], run["gpu_hours"]) == (pytest.approx(hours / 24), pytest.approx(8 * hours))
    assert run["cost"] == pytest.approx(2.0 * 8 * hours)
    row = next(row for row in search_rl(build_rl({**asked, **SEARCHED}))["rows"] if row["mode"] == "async")
    tokens = 128 * (256 + 1024)
    assert row["cost_per_million_tokens"] == pytest.approx(row["step_s"] / 3600 * 8 * 2.0 / tokens * 1e6)


def test_what_several_keys_of_a_tool_say_together() -> None:
    """OpenRLHF's models share GPUs if they are colocated; 4 GPUs of TRL train on 8 sequences in each of 2 batches."""
    openrlhf = {"rollout-batch-size": "16", "actor-num-gpus-per-node": "4", "vllm-num-engines": "2"}
    assert (read_rl_values(openrlhf).choices["gpus"], read_rl_values(openrlhf).choices["rollout_gpus"]) == (4, 2)
    two_nodes = {**openrlhf, "actor-num-nodes": "2", "ref-num-nodes": "2"}
    assert read_rl_values(two_nodes).choices["gpus"] == 8
    assert "rollout_gpus" not in read_rl_values({**openrlhf, "colocate-all-models": True}).choices
    trl = {"num_generations": 8, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    assert read_rl_values(trl, 4).choices["train_batch"] == 64
    with pytest.raises(FormatError, match="expected a whole number"):
        read_rl_values({"actor_rollout_ref.rollout.n": 8, "trainer.nnodes": 10**10})


def test_lengths_that_were_assumed_are_stated_and_measured_ones_are_not(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("500\n700\n900\n")
    asked: dict[str, Any] = {"prompts": 16, "group": 8}
    for lengths, stated in (("lognormal:mean=700,max=2048", True), (str(tmp_path / "lengths.txt"), False)):
        step = stepcast.predict_rl("qwen3-0.6b", "dgx-h100", gpus=4, response_length=lengths, **asked)
        assert any(text.startswith("response lengths: ") for text in step.assumptions) is stated
