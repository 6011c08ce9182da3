"""Steps of RL post-training: composition, modes, search, configurations."""

from pathlib import Path
from typing import Any

import pytest

import stepcast
from stepcast.hardware.catalog import data_names
from stepcast.inputs.configs.rl import read_rl_text, read_rl_values
from stepcast.inputs.source import FormatError
from stepcast.rl.step import count_tensors, load_profile
from tests.cli.test_main import run, run_json

pytestmark = pytest.mark.slow

SMALL: Any = {"cluster": "dgx-h100", "prompts": 16, "group": 8, "response_length": "lognormal:mean=800,cv=0.8,max=4096"}
STEP = ("rl", "qwen3-0.6b", "--cluster", "dgx-h100", "--gpus", "8")


def test_rewards_wait_for_tools() -> None:
    def reward_s(latency: str) -> float:
        return stepcast.predict_rl("qwen3-0.6b", gpus=8, **SMALL, reward_latency=latency).phases_s["reward"]

    assert reward_s("1500") == pytest.approx(1.5)
    assert 0 <= reward_s("lognormal:mean=1500,cv=1,max=9000") <= 9.0
    with pytest.raises(ValueError, match="'soon' is no length"):
        reward_s("soon")


def test_a_colocated_step_is_the_sum_of_its_phases() -> None:
    step = stepcast.predict_rl("qwen3-0.6b", gpus=8, **SMALL)
    assert step.step_s == pytest.approx(sum(step.phases_s.values()))
    assert set(step.phases_s) > {"generation", "old log-probabilities", "reference", "update", "weight sync", "offload"}
    assert list(step.idle_shares()) == ["all"]


def test_other_spreads_are_steps_of_their_own() -> None:
    """The longest of 16 sequences on 8 ranks decides the update, and is shorter where lengths vary less."""
    lengths = "lognormal:mean=800,cv={},max=4096"
    steps = {
        cv: stepcast.predict_rl("qwen3-0.6b", gpus=8, train_batch=16, **SMALL | {"response_length": lengths.format(cv)})
        for cv in (0.8, 0.3)
    }
    assert steps[0.3].phases_s["update"] < 0.9 * steps[0.8].phases_s["update"]
    assert steps[0.8].to_dict()["sensitivity_s"]["cv 0.3"] == pytest.approx(steps[0.3].step_s)


def test_warnings_of_the_rollout_and_of_training_are_passed_on() -> None:
    step = stepcast.predict_rl("qwen3-0.6b", gpus=8, **SMALL | {"response_length": "100000"})
    warnings = step.to_dict()["warnings"]
    assert "requests of 100,256 tokens are longer than the 40,960 of qwen3-0.6b" in warnings
    assert "sequences of 100,288 tokens are longer than the 40,960 of qwen3-0.6b" in warnings


def test_hosts_that_are_not_described_take_no_time() -> None:
    step = stepcast.predict_rl("qwen3-0.6b", gpus=8, **SMALL | {"cluster": "dgx-b200"})
    assert "offload" not in step.phases_s
    assert any("hosts of dgx-b200" in text for text in step.assumptions)


def test_asynchronous_pools_overlap_and_the_slower_one_decides() -> None:
    split = stepcast.predict_rl("qwen3-0.6b", gpus=4, rollout_gpus=4, mode="split", **SMALL)
    overlapped = stepcast.predict_rl("qwen3-0.6b", gpus=4, rollout_gpus=4, mode="async", **SMALL)
    assert overlapped.step_s == pytest.approx(max(overlapped.train_pool_s, overlapped.rollout_pool_s))
    assert overlapped.step_s < split.step_s
    assert min(overlapped.idle_shares().values()) == pytest.approx(0.0)
    older = stepcast.predict_rl("qwen3-0.6b", gpus=4, rollout_gpus=4, staleness=4, **SMALL)
    assert older.phases_s["generation"] < overlapped.phases_s["generation"]  # the tail of one batch hides in the next


def test_algorithms_differ_in_their_passes() -> None:
    grpo, ppo, dapo = (
        stepcast.predict_rl("qwen3-0.6b", gpus=8, algorithm=name, **SMALL) for name in ("grpo", "ppo", "dapo")
    )
    assert ppo.phases_s["update"] > grpo.phases_s["update"]
    assert "critic values" in ppo.phases_s
    assert "reference" not in dapo.phases_s
    assert dapo.phases_s["generation"] > grpo.phases_s["generation"]


@pytest.mark.parametrize("name", data_names("rl_software"))
def test_profiles_state_their_sources(name: str) -> None:
    assert load_profile(name).sources


@pytest.mark.parametrize(("software", "gpus", "tp"), [("verl", 8, 2), ("verl", 1, 1), ("nemo-rl", 8, 1)])
def test_engines_are_as_wide_as_their_software_makes_them(software: str, gpus: int, tp: int) -> None:
    asked = {**SMALL, "gpus": gpus, "software": software}
    assert stepcast.predict_rl("qwen3-0.6b", **asked).placement.rollout.tp == tp
    assert stepcast.predict_rl("qwen3-0.6b", **asked, gen_tp=1).placement.rollout.tp == 1


def test_experts_are_tensors_of_their_own() -> None:
    assert count_tensors(stepcast.load_model("qwen3-30b-a3b")) > 48 * 128 * 3
    assert count_tensors(stepcast.load_model("llama-3.1-8b")) == 32 * 9 + 3


def test_the_search_ranks_modes_and_prints_options_that_reproduce_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--prompts", "16", "--response-length", "lognormal:mean=800,max=4096")
    found = run_json(capsys, *STEP, *words, "--search", "--tp", "1", "--pp", "1", "--price", "2")
    times = [row["step_s"] for row in found["rows"]]
    assert times == sorted(times)
    assert {row["mode"] for row in found["rows"]} == {"colocated", "async"}
    for mode in ("colocated", "async"):
        best = next(row for row in found["rows"] if row["mode"] == mode)
        again = run_json(capsys, "rl", "qwen3-0.6b", "--cluster", "dgx-h100", *words, *best["options"].split())
        assert again["step_s"] == pytest.approx(best["step_s"])
        assert again["phases_s"] == pytest.approx(best["phases_s"])


def test_the_search_keeps_the_training_options_and_shows_the_best_of_each_mode(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Options of split steps have no staleness, which only async has; the terminal shows 10 rows and other modes."""
    words = ("--prompts", "16", "--framework", "fsdp", "--sharding", "zero-3")
    split = run_json(capsys, *STEP, *words, "--search", "--mode", "split")["rows"][0]
    assert "sharding zero-3" in split["training"]
    again = run_json(capsys, "rl", "qwen3-0.6b", "--cluster", "dgx-h100", "--prompts", "16", *split["options"].split())
    assert again["step_s"] == pytest.approx(split["step_s"])
    assert again["training_layout"]["framework"] == "fsdp"
    _, out, _ = run(capsys, *STEP, "--prompts", "16", "--search")
    assert "colocated" in out
    assert "async" in out


def test_a_step_that_does_not_fit_says_so_beside_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "rl", "qwen3-30b-a3b", "--cluster", "dgx-h100", "--gpus", "8")
    line = next(line for line in out.splitlines() if line.startswith("memory"))
    assert line.endswith("training DOES NOT FIT")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--rollout-gpus", "8", "--mode", "colocated"), "no effect"),
        (("--mode", "async"), "needs --rollout-gpus"),
        (("--staleness", "2"), "needs async"),
        (("--gen-tp", "16"), "not a multiple"),
        (("--tp", "3"), "not a multiple"),
        (("--oversampling", "0.5"), "at least 1"),
        (("--software", "mine"), "unknown RL software"),
        (("--response-length", "long"), "no length"),
        (("--price", "2"), "--price has no effect"),
        (("--currency", "EUR"), "--currency has no effect"),
        (("--search", "--currency", "EUR"), "--currency has no effect"),
        (("--search", "--rollout-gpus", "4"), "divides --gpus itself"),
        (("--search", "--steps", "100"), "ranks single steps"),
        (("--search", "--gen-ep", "2"), "(--gen-tp)"),
        (("--search", "--mode", "colocated", "--staleness", "2"), "needs async"),
    ],
)
def test_steps_without_an_answer_are_refused(
    words: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, err = run(capsys, *STEP, *words)
    assert status != 0
    assert problem in " ".join(err.split())


VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_batch_size=16 \\
  data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen3-0.6B actor_rollout_ref.rollout.n=8 \\
  actor_rollout_ref.actor.ppo_mini_batch_size=8 trainer.nnodes=1 trainer.n_gpus_per_node=8 trainer.logger=console
"""
OPENRLHF = """openrlhf.cli.train_ppo_ray --pretrain Qwen/Qwen3-0.6B --rollout_batch_size 16 --n_samples_per_prompt 8
  --train_batch_size 64 --vllm_num_engines 4 --actor_num_gpus_per_node 4 --generate_max_len 1024 --zero_stage 3"""
NEMO = """
grpo: {num_prompts_per_step: 16, num_generations_per_prompt: 8}
policy:
  model_name: Qwen/Qwen3-0.6B
  train_global_batch_size: 64
  max_total_sequence_length: 1024
  sequence_packing: {train_mb_tokens: "${mul:${policy.max_total_sequence_length}, 2}"}
  generation: {colocated: {enabled: true}, vllm_cfg: {tensor_parallel_size: 1, gpu_memory_utilization: 0.6}}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
TRL = (
    '{"model_name_or_path": "Qwen/Qwen3-0.6B", "num_generations": 8, "max_completion_length": 1024, "num_processes": 8}'
)


@pytest.mark.parametrize(("text", "name", "tool"), [
    (VERL, "run.sh", "verl"), (OPENRLHF, "run.sh", "openrlhf"), (NEMO, "grpo.yaml", "nemo-rl"), (TRL, "grpo.json", "trl"),
])  # fmt: skip
def test_configurations_of_rl_software_are_read(
    text: str, name: str, tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / name
    file.write_text(text)
    facts = run_json(capsys, "rl", "--config", str(file), "--cluster", "dgx-h100")
    assert facts["config"]["tool"] == tool == facts["software"]
    assert facts["model"] == "qwen3-0.6b"
    assert facts["step_s"] > 0
    assert run_json(capsys, "rl", "--config", str(file), "--cluster", "dgx-h100", "--prompts", "64")["responses"] == 512


@pytest.mark.parametrize(
    ("options", "algorithm", "phases"),
    [
        ("", "ppo", {"critic values", "reference"}),
        ("--critic_pretrain Qwen/Qwen3-0.6B --init_kl_coef 0", "ppo", {"critic values"}),
        ("--advantage_estimator reinforce_baseline", "rloo", {"reference"}),
        ("--advantage_estimator dr_grpo --init_kl_coef 0", "grpo", set()),
        ("--advantage_estimator mine", "ppo", {"critic values", "reference"}),
    ],
)
def test_openrlhf_has_a_critic_and_a_reference_unless_it_says_otherwise(
    options: str, algorithm: str, phases: set[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"{OPENRLHF} {options}")
    facts = run_json(capsys, "rl", "--config", str(file), "--cluster", "dgx-h100")
    assert facts["algorithm"] == algorithm
    assert {name for name in ("critic values", "reference") if facts["phases_s"].get(name)} == phases
    assert any("'mine' is not known" in text for text in facts["assumptions"]) == ("mine" in options)


def test_the_batch_of_trl_follows_the_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each of 4 GPUs has 8 completions in 2 accumulated batches: 64, of 8 prompts."""
    file = tmp_path / "grpo.yaml"
    file.write_text("model_name_or_path: Qwen/Qwen3-0.6B\nnum_generations: 8\ngradient_accumulation_steps: 2\n")
    facts = run_json(capsys, "rl", "--config", str(file), "--cluster", "dgx-h100", "--gpus", "4")
    assert facts["responses"] == 64
    assert "at most 256" in facts["response"]
    assert any("use_vllm is off" in text for text in facts["assumptions"])
    assert not any("prompts are a quarter" in text for text in facts["assumptions"])


@pytest.mark.parametrize(("is_megatron", "tp", "framework"), [(False, 2, "pytorch-fsdp"), (True, 4, None)])
def test_nemo_rl_trains_with_the_backend_that_is_enabled(is_megatron: bool, tp: int, framework: str | None) -> None:
    backends = {
        "policy.dtensor_cfg": {"enabled": not is_megatron, "tensor_parallel_size": 2},
        "policy.megatron_cfg": {"enabled": is_megatron, "tensor_model_parallel_size": 4},
        "policy.generation": {"max_new_tokens": 512},
    }
    keys = {f"{table}.{key}": value for table, entries in backends.items() for key, value in entries.items()}
    config = read_rl_values({**keys, "policy.max_total_sequence_length": 1024})
    assert (config.choices["tp"], config.choices.get("framework")) == (tp, framework)
    assert config.choices["max_response"] == 512
    assert any(
        key.startswith("policy.dtensor_cfg." if is_megatron else "policy.megatron_cfg.") for key in config.unread
    )


def test_references_and_unread_keys() -> None:
    config = read_rl_text(NEMO, "x.yaml")
    assert config.choices["pack_tokens"] == 2048
    assert read_rl_text(VERL).unread == ("trainer.logger",)


@pytest.mark.parametrize(
    "text", ["", "{", "{}", "hello", VERL.replace("rollout.n=8", "rollout.n=eight"), VERL.replace("=16", "=-16")]
)
def test_damaged_configurations_are_refused(text: str) -> None:
    with pytest.raises(FormatError):
        read_rl_text(text)


VERL_LOG = "".join(
    f"(TaskRunner pid=9) step:{step} - actor/pg_loss:0.01 - timing_s/gen:{30 + step} - timing_s/old_log_prob:np.float64(8.0)"
    f" - timing_s/update_actor:2e1 - timing_s/step:{60 + step} - perf/throughput:900.5 - response_length/mean:1200.0\n"
    for step in range(1, 8)
)
NEMO_RL_LOG = "".join(
    f"========================= Step {step}/100 =========================\nTiming:\n  \u2022 Total step time: {60 + step}.50s\n"
    f"  \u2022 generation: {30 + step}.10s (50.0%)\n  \u2022 policy_training: 20.00s (30.0%)\n"
    for step in range(1, 8)
)


@pytest.mark.parametrize(
    ("text", "kind", "generation"),
    [(VERL_LOG, "verl-log", "generation_s"), (NEMO_RL_LOG, "nemo-rl-log", "generation_s")],
)
def test_logs_of_rl_runs_are_analyzed(
    text: str, kind: str, generation: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").write_text(text)
    facts = run_json(capsys, "analyze", str(tmp_path / "log"))
    assert facts["format"] == kind
    assert facts["step_s"] == pytest.approx(65, abs=1)
    assert facts[generation] == pytest.approx(34, abs=1)
