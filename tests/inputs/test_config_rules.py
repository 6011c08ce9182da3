"""Rules of configurations: which keys have an effect under which, and what a tool refuses."""

from pathlib import Path

import pytest

from stepcast.inputs.configs.keys import RunConfig
from stepcast.inputs.configs.reader import read_config
from stepcast.inputs.configs.rl import read_rl_text
from stepcast.inputs.source import FormatError

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


@pytest.mark.parametrize("value", ["true", "false", "eight", "2.5", "-1"])
def test_numbers_of_rl_are_numbers(value: str) -> None:
    grpo = {"num_generations": "8", "per_device_train_batch_size": "4", "vllm_mode": "server"}
    for key in ("num_generations", "per_device_train_batch_size"):
        text = "\n".join(f"{name}: {number}" for name, number in {**grpo, key: value}.items())
        with pytest.raises(FormatError, match=f"{key}: expected a whole number"):
            read_rl_text(text, "a.yaml")
