"""Rules of configurations: which keys have an effect under which, and what a tool refuses."""

import json
from pathlib import Path

import pytest

from stepcast.inputs import table
from stepcast.inputs.configs.keys import RunConfig
from stepcast.inputs.configs.reader import read_config
from stepcast.inputs.configs.rl import read_rl_text
from stepcast.inputs.source import FormatError
from stepcast.ir.model import Model

GPT = "python pretrain_gpt.py --num-layers 4 --hidden-size 1024 --num-attention-heads 8 --seq-length 512"
TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n[activation_checkpoint]\nselective_ac_option = "2"\n'
BRIDGE = "train: {micro_batch_size: 1}\nddp: {}\nmodel:\n  moe_token_dispatcher_type: flex\n"


def read(tmp_path: Path, name: str, text: str) -> RunConfig:
    (tmp_path / name).write_text(text)
    return read_config(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "key", "part"),
    [
        ("a.sh", f"{GPT} --context-parallel-size 2 --cp-comm-type a2a", "cp-comm-type", "understood"),
        ("a.sh", f"{GPT} --context-parallel-size 1 --cp-comm-type a2a", "cp-comm-type", "ignored"),
        ("a.sh", f"{GPT} --cp-comm-type a2a", "cp-comm-type", "ignored"),
        # torchtitan/config/job_config.py: the mode is selective unless it is set.
        ("a.toml", TITAN, "activation_checkpoint.selective_ac_option", "not_modelled"),
        ("a.toml", TITAN + 'mode = "selective"\n', "activation_checkpoint.selective_ac_option", "not_modelled"),
        ("a.toml", TITAN + 'mode = "full"\n', "activation_checkpoint.selective_ac_option", "ignored"),
        # A file of Megatron-Bridge may leave its model, and with it the experts, to a recipe.
        ("a.yaml", BRIDGE + "  expert_model_parallel_size: 8\n", "model.moe_token_dispatcher_type", "understood"),
        ("a.yaml", BRIDGE, "model.moe_token_dispatcher_type", "ignored"),
        ("a.sh", f"{GPT} --recompute-granularity selective --recompute-modules mlp", "recompute-modules", "understood"),
        ("a.sh", f"{GPT} --recompute-granularity full --recompute-modules mlp", "recompute-modules", "ignored"),
        ("a.sh", f"{GPT} --recompute-modules mlp", "recompute-modules", "ignored"),
    ],
)
def test_keys_have_an_effect_under_the_value_or_the_default_of_others(
    name: str, text: str, key: str, part: str, tmp_path: Path
) -> None:
    config = read(tmp_path, name, text)
    assert [part for part in ("understood", "ignored", "not_modelled") if key in getattr(config, part)] == [part]


def test_experts_of_a_recipe_are_dispatched_as_its_file_says(tmp_path: Path) -> None:
    text = BRIDGE + "  expert_model_parallel_size: 8\n  cuda_graph_impl: local\n  cuda_graph_scope: attn\n"
    options = read(tmp_path, "a.yaml", text).options
    assert (options["dispatcher"], options["execution"]) == ("deepep", "partial-graphs")


@pytest.mark.parametrize("key", ["fsdp_config: {fsdp_version: 2}", "deepspeed_config: {zero_stage: 3}"])
def test_accelerate_needs_its_kind_of_training(key: str, tmp_path: Path) -> None:
    """accelerate, commands/config/config_args.py, process_config: a file without distributed_type is a ValueError."""
    with pytest.raises(FormatError, match=r"a\.yaml: accelerate refuses a file without distributed_type"):
        read(tmp_path, "a.yaml", f"num_processes: 8\nmixed_precision: bf16\n{key}\n")


def test_options_of_another_kind_of_training_have_no_effect(tmp_path: Path) -> None:
    """accelerate, commands/launch.py and utils/launch.py: FSDP's are passed on under use_fsdp alone."""
    own = "fsdp_config: {fsdp_offload_params: true, fsdp_activation_checkpointing: true, fsdp_sharding_strategy: '2'}"
    text = f"num_processes: 8\nmixed_precision: bf16\n{own}\ndeepspeed_config: {{zero_stage: 3}}\ndistributed_type: "
    config = read(tmp_path, "a.yaml", text + "MULTI_GPU")
    assert config.options["sharding"] == "none"
    assert not {"offload", "recompute", "reshard"} & {*config.options}
    keys = {f"fsdp_config.fsdp_{name}" for name in ("offload_params", "activation_checkpointing", "sharding_strategy")}
    assert {*keys, "deepspeed_config.zero_stage"} <= {*config.ignored}
    config = read(tmp_path, "a.yaml", text + "FSDP")
    expected = {"sharding": "fsdp", "offload": "optimizer", "recompute": "full", "reshard": False}
    assert expected.items() <= config.options.items()
    assert "deepspeed_config.zero_stage" in config.ignored
    config = read(tmp_path, "a.yaml", text + "DEEPSPEED")
    assert config.options["sharding"] == "zero-3"
    assert not {"offload", "recompute", "reshard"} & {*config.options}


@pytest.mark.parametrize(("threshold", "steps"), [(0.0, 1), (0.5, 1), (1.0, 1), (1.5, 2), (2.0, 2), (3.0, 3)])
def test_a_staleness_threshold_of_verl_is_a_share_of_stale_batches(threshold: float, steps: int) -> None:
    """verl, fully_async_policy: the rollouter is at most 1 + staleness_threshold batches ahead of the trainer."""
    text = f"rollout.nnodes=1 rollout.n_gpus_per_node=8 async_training.staleness_threshold={threshold}"
    config = read_rl_text(f"python -m verl.trainer.main_ppo actor_rollout_ref.rollout.n=8 {text}")
    assert (config.choices["mode"], config.choices["staleness"]) == ("async", steps)


@pytest.mark.parametrize("value", ["true", "false", "eight", "2.5", "-1"])
def test_numbers_of_rl_are_numbers(value: str) -> None:
    grpo = {"num_generations": "8", "per_device_train_batch_size": "4", "vllm_mode": "server"}
    for key in ("num_generations", "per_device_train_batch_size"):
        text = "\n".join(f"{name}: {number}" for name, number in {**grpo, key: value}.items())
        with pytest.raises(FormatError, match=f"{key}: expected a whole number"):
            read_rl_text(text, "a.yaml")


def test_an_array_that_no_command_uses_has_no_effect(tmp_path: Path) -> None:
    """bash: words of an array count where it is expanded, and an empty assignment may end a script."""
    text = f'OWN=(--tensor-model-parallel-size 2)\nOTHER=(--tensor-model-parallel-size 8)\n{GPT} "${{OWN[@]}}"\nLAST='
    assert read(tmp_path, "a.sh", text).options["tp"] == 2


@pytest.mark.parametrize(
    ("keys", "reported"), [("tp = 2\non = false", True), ("tp = 2\non = true", False), ("tp = 1\non = false", False)]
)
def test_a_loss_on_whole_logits_is_reported_by_either_key(keys: str, reported: bool, tmp_path: Path) -> None:
    names = keys.replace("tp =", "tensor_parallel_degree =").replace("on =", "enable_loss_parallel =")
    config = read(tmp_path, "a.toml", f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{names}\n')
    assert ("parallelism.enable_loss_parallel" in config.not_modelled) is reported


@pytest.mark.parametrize(
    ("flags", "execution", "reported"),
    [
        ("--cuda-graph-impl local", "graphs", False),
        ("--cuda-graph-impl local --cuda-graph-scope full", "graphs", False),
        ("--cuda-graph-impl local --cuda-graph-scope attn", "graphs", True),
        ("--cuda-graph-impl local --cuda-graph-scope attn --num-experts 8", "partial-graphs", False),
        ("--cuda-graph-impl none", "eager", False),
    ],
)
def test_scopes_of_cuda_graphs_are_predicted_or_reported(
    flags: str, execution: str, reported: bool, tmp_path: Path
) -> None:
    config = read(tmp_path, "a.sh", f"{GPT} {flags}")
    assert config.options["execution"] == execution
    assert ("cuda-graph-scope" in config.not_modelled) is reported


@pytest.mark.parametrize(
    ("flags", "dispatcher"),
    [
        ("--num-experts 8 --expert-model-parallel-size 8", "allgather"),  # Megatron-LM's default
        ("--num-experts 8 --tensor-model-parallel-size 2", "allgather"),
        ("--num-experts 8 --tensor-model-parallel-size 2 --expert-tensor-parallel-size 1", None),
        ("--tensor-model-parallel-size 2", None),
    ],
)
def test_tokens_are_gathered_for_experts_unless_arguments_say_more(
    flags: str, dispatcher: str | None, tmp_path: Path
) -> None:
    assert read(tmp_path, "a.sh", f"{GPT} {flags}").options.get("dispatcher") == dispatcher


def test_sizes_of_deepspeed_that_follow_from_others_are_not_assumed(tmp_path: Path) -> None:
    """train_batch_size is micro-batch x accumulation x GPUs (deepspeed.ai/docs/config-json)."""
    text = '{"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 4%s}'
    for more, assumed in ((', "train_batch_size": 64', False), ("", True)):
        config = read(tmp_path, "a.json", text % more)
        assert any("train_micro_batch_size_per_gpu" in note for note in config.assumed) is assumed


@pytest.mark.parametrize(
    ("copies", "split", "expected"),
    [(1, 8, {"sharding": "fsdp"}), (2, 4, {"sharding": "hybrid-fsdp", "shard": 4}), (8, 1, {"sharding": "none"})],
)
def test_copies_of_accelerate_share_shards(
    copies: int, split: int, expected: dict[str, object], tmp_path: Path
) -> None:
    names = "parallelism_config_dp_replicate_size", "parallelism_config_dp_shard_size"
    sizes = f"{{{names[0]}: {copies}, {names[1]}: {split}}}"
    text = f"distributed_type: FSDP\nnum_processes: 8\nparallelism_config: {sizes}\n"
    options = read(tmp_path, "a.yaml", text).options
    assert {name: options[name] for name in ("sharding", "shard") if name in options} == expected


def test_two_copies_of_torchtune_are_two(tmp_path: Path) -> None:
    text = (
        "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\ntokenizer: {_component_: x, max_seq_len: 1024}\n"
        "batch_size: 1\ndata_parallel_shard_dim: 4\ndata_parallel_replicate_dim: "
    )
    two, one = (read(tmp_path, "a.yaml", text + copies).options for copies in "21")
    assert (two["sharding"], two["replicate"]) == ("hybrid-fsdp", 2)
    assert (one["sharding"], "replicate" in one) == ("fsdp", False)


def test_a_model_of_simumax_may_have_two_experts(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "head_num": 4, "kv_head_num": 4, "head_size": 16, "layer_num": 2, "vocab_size": 128}
    sizes |= {"intermediate_size": 128, "use_swiglu": True, "topk": 1}
    for experts in (1, 2):
        (tmp_path / "model.json").write_text(json.dumps({**sizes, "expert_num": experts, "moe_ffn_hidden_size": 128}))
        model: Model = table.read(tmp_path / "model.json")
        assert (model.experts.count if model.experts else 1) == experts


def test_a_global_batch_of_one_sequence_is_stated(tmp_path: Path) -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n[training]\nlocal_batch_size = 1\n'
    options = read(tmp_path, "a.toml", f"{text}global_batch_size = 1\n").options
    assert (options["global-batch"], "accumulation" in options) == (1, False)
    options = read(tmp_path, "a.toml", f"{text}global_batch_size = -1\n").options  # torchtitan's default
    assert ("global-batch" in options, options["accumulation"]) == (False, 1)


@pytest.mark.parametrize(("name", "schedule", "reported"), [("1F1B", "1f1b", False), ("Custom", None, True)])
def test_schedules_of_torchtitan_that_are_not_known_are_reported(
    name: str, schedule: str | None, reported: bool, tmp_path: Path
) -> None:
    keys = f'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "{name}"\n'
    config = read(tmp_path, "a.toml", f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{keys}')
    assert config.options.get("schedule") == schedule
    assert ("parallelism.pipeline_parallel_schedule" in config.not_modelled) is reported


def test_megatron_swift_has_defaults_of_experts_where_they_are_spread(tmp_path: Path) -> None:
    """A dense model has no dispatcher, though Megatron-Swift's arguments have defaults of one."""
    text = "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-8B --tensor_model_parallel_size 2"
    dense, spread = (read(tmp_path, "a.sh", f"{text} {more}") for more in ("", "--expert_model_parallel_size 4"))
    assert not {"dispatcher", "expert-tp"} & {*dense.options}
    assert (spread.options["dispatcher"], spread.options["expert-tp"]) == ("alltoall", 1)
    assert dense.options["sharding"] == spread.options["sharding"] == "zero-1"


def test_the_configuration_of_a_launcher_holds_that_of_training(tmp_path: Path) -> None:
    """NeMo-Framework-Launcher, launcher_scripts/conf: the keys of training are below training."""
    model = {"num_layers": 4, "hidden_size": 1024, "num_attention_heads": 8, "encoder_seq_length": 512}
    model |= {"tensor_model_parallel_size": 2, "micro_batch_size": 1, "global_batch_size": 8}
    run = {"trainer": {"devices": 8, "num_nodes": 1}, "model": model}
    plain = read(tmp_path, "a.yaml", json.dumps(run))
    whole = read(tmp_path, "b.yaml", json.dumps({"stages": ["training"], "training": run, "cluster_type": "bcm"}))
    assert whole.options == plain.options
    assert (plain.options["tp"], plain.options["gpus"]) == (2, 8)
    other = read(tmp_path, "c.yaml", json.dumps({**run, "training": {"steps": 10}}))
    assert other.options == plain.options
