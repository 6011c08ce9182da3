"""Configurations of fine-tuning tools: all are read, mean the same as a hand-written command, and name unknown keys."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import stepcast
from stepcast.cli.main import VERBS, build_parser
from stepcast.cli.options import parse_arguments
from stepcast.cost.memory.piece import loss_bytes
from stepcast.inputs.configs.reader import read_config
from stepcast.inputs.configs.tuning import read
from stepcast.inputs.source import FormatError
from stepcast.questions.question import PredictQuestion
from stepcast.questions.settle import SettledRun, settle

CASES: list[dict[str, Any]] = yaml.safe_load((Path(__file__).parent / "tuning_configs.yaml").read_text())
IDS = [f"{number} {case['tool']}" for number, case in enumerate(CASES)]
PREDICT = build_parser([verb for verb in VERBS if verb.name == "predict"])


def write_case(case: dict[str, Any], folder: Path) -> Path:
    suffix = case.get("suffix", "yaml")
    path = folder / (suffix if "." in suffix else f"run.{suffix}")
    text = case.get("text") or (json.dumps if suffix.endswith("json") else yaml.safe_dump)(case["config"])
    path.write_text(text)
    return path


def ask(*words: str) -> PredictQuestion:
    question: PredictQuestion = parse_arguments(PREDICT, ["predict", *words]).question
    return question


def settle_case(words: str) -> SettledRun:
    return settle(ask(*shlex.split(words), "--cluster", "hgx-h200", *([] if "--gpus" in words else ["--gpus", "8"])))


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_configuration_means_the_hand_written_command(case: dict[str, Any], tmp_path: Path) -> None:
    path = write_case(case, tmp_path)
    expected = settle_case(case["command"])
    words = f"--config {path} {case.get('with', '')}"
    total = expected.strategy.layout.gpus
    read = settle_case(f"{words} --gpus {total} {'--ignore-unknown' if case.get('unknown') else ''}")
    assert read.model == expected.model
    assert read.strategy == expected.strategy
    assert read.framework == expected.framework
    assert read.question.tokens == expected.question.tokens


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_every_key_is_in_one_list(case: dict[str, Any], tmp_path: Path) -> None:
    config = read_config(write_case(case, tmp_path))
    assert config.format == case["tool"]
    assert sorted(config.unknown) == sorted(case.get("unknown", []))
    lists = [config.understood, config.ignored, config.not_modelled, config.unknown, config.unset]
    names = [name for part in lists for name in part]
    assert len(names) == len(set(names))


def test_there_are_sixty_of_them() -> None:
    assert len(CASES) >= 60


@pytest.mark.parametrize(
    "text", ["x = (", "print('nothing to train')", "x" * 3_000_000], ids=["broken", "other", "long"]
)
def test_other_python_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"train\.py"):
        read_config(path)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, {}),
        ({"fsdp": "full_shard"}, {"sharding": "fsdp", "master-weights": True, "optimizer": "adamw:fp32"}),
        ({"fsdp": "shard_grad_op"}, {"sharding": "fsdp", "reshard": False, "master-weights": True}),
    ],
)
def test_weights_that_fsdp_shards_are_fp32(keys: dict[str, object], expected: dict[str, object]) -> None:
    """As accelerate does; without FSDP they are as they were loaded, which the answer states."""
    options = {"model_name_or_path": "Qwen/Qwen2.5-7B", "per_device_train_batch_size": 1, "bf16": True}
    config = read({**options, **keys}, "trainer")
    assert config.options["precision"] == "bf16"
    assert expected.items() <= config.options.items()
    assert any("no dtype" in text for text in config.assumed) == (not keys)


OFFLOAD = {
    "zero_optimization": {"stage": 2, "overlap_comm": True, "offload_optimizer": {"device": "cpu"}},
    "bf16": {"enabled": "auto"},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "optimizer": {"type": "AdamW"},
}
ARGUMENTS = "--model_name_or_path Qwen/Qwen2.5-7B --per_device_train_batch_size 2 --gradient_accumulation_steps 4"


@pytest.mark.parametrize("is_here", [True, False], ids=["next to it", "in the working folder"])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "{base_model: q, micro_batch_size: 2, gradient_accumulation_steps: 4, fp16: true, deepspeed: d.json}"),
        ("run.sh", f"deepspeed --num_gpus 8 train.py {ARGUMENTS} --deepspeed d.json --fp16 --optim adamw_8bit"),
        ("run.sh", f"accelerate launch --config_file a.yaml train.py {ARGUMENTS}"),
        ("run.py", "SFTConfig(per_device_train_batch_size=2, gradient_accumulation_steps=4, fp16=True, deepspeed='d.json')"),
    ],
    ids=["axolotl", "deepspeed", "accelerate", "python"],
)  # fmt: skip
def test_files_that_a_configuration_names_are_read(
    name: str, text: str, is_here: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stage, offload and overlaps come from DeepSpeed's file, and what it leaves open from the configuration."""
    (tmp_path / "configs").mkdir()
    place = tmp_path / "configs" if is_here else tmp_path
    monkeypatch.chdir(tmp_path)
    (place / "d.json").write_text(json.dumps(OFFLOAD))
    accelerate = {"distributed_type": "DEEPSPEED", "mixed_precision": "fp16", "num_processes": 8}
    (place / "a.yaml").write_text(
        yaml.safe_dump({**accelerate, "deepspeed_config": {"deepspeed_config_file": "d.json"}})
    )
    path = tmp_path / "configs" / name
    path.write_text(text)
    config = read_config(path)
    expected = {"sharding": "zero-2", "offload": "optimizer", "overlap": "gradients", "optimizer": "adamw"}
    assert expected.items() <= config.options.items()
    assert [config.options[name] for name in ("micro-batch", "accumulation", "precision")] == [2, 4, "fp16"]
    assert (config.framework, config.unknown) == ("deepspeed-transformers", {})
    assert all("tool's default" in text for text in config.assumed)
    assert any(name.endswith("zero_optimization.stage") for name in config.understood)


@pytest.mark.parametrize("file", ["missing.json", "folder.json"])
def test_files_that_are_not_there_are_guessed_by_their_name(file: str, tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    path = tmp_path / "run.yaml"
    path.write_text(f"{{base_model: q, micro_batch_size: 1, deepspeed: {file}}}")
    config = read_config(path)
    assert config.options["sharding"] == "zero-3"
    assert any(f"{file}: no such file here" in text for text in config.assumed)


@pytest.mark.parametrize(
    ("words", "sharding", "framework"),
    [
        ("accelerate launch --config_file accelerate_configs/deepspeed_zero2.yaml trl/scripts/sft.py", "zero-2", "deepspeed-transformers"),
        ("accelerate launch --config_file accelerate_configs/fsdp2.yaml examples/scripts/dpo.py", "fsdp", "trainer"),
        ("trl sft --accelerate_config zero3", "zero-3", "deepspeed-transformers"),
        ("trl reward --accelerate_config multi_gpu", "none", "trainer"),
    ],
)  # fmt: skip
def test_launches_of_trl_name_its_files_and_have_its_defaults(
    words: str, sharding: str, framework: str, tmp_path: Path
) -> None:
    """trl, docs/source/clis.md and accelerate_configs/; sequences have 1,024 tokens (trainer/sft_config.py)."""
    path = tmp_path / "run.sh"
    path.write_text(f"{words} {ARGUMENTS} --bf16")
    config = read_config(path)
    assert (config.options["sharding"], config.framework, config.options["seq"]) == (sharding, framework, 1024)
    assert not config.unknown
    assert not config.not_modelled
    assert any(f"taken for sharding {sharding} by its name" in text for text in config.assumed)


@pytest.mark.parametrize("text", ['{"x": ', "[1]", '{"x": "' + "y" * 2_000_000 + '"}'], ids=["cut", "list", "large"])
def test_damaged_files_are_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(text)
    path = tmp_path / "run.yaml"
    path.write_text("{base_model: q, micro_batch_size: 1, deepspeed: ds.json}")
    with pytest.raises(FormatError, match=r"ds\.json: "):
        read_config(path)


def test_a_file_that_names_itself_ends(tmp_path: Path) -> None:
    path = tmp_path / "self.yaml"
    path.write_text("{base_model: q, micro_batch_size: 1, distributed_type: FSDP, config_file: self.yaml}")
    assert read_config(path).format == "axolotl"


@pytest.mark.parametrize(
    ("tool", "keys", "expected"),
    [
        ("trainer", {"num_train_epochs": 1}, {"micro-batch": 8}),
        (
            "trainer",
            {"num_train_epochs": 1, "trainer_kind": "sft"},
            {"micro-batch": 8, "seq": 1024, "recompute": "full"},
        ),
        (
            "trainer",
            {"max_length": 512, "gradient_checkpointing": False},
            {"micro-batch": 8, "seq": 512, "recompute": "none"},
        ),
        ("trainer", {"peft_type": "LORA", "r": 8}, {}),
        ("llama-factory", {"finetuning_type": "full"}, {"micro-batch": 8, "seq": 2048, "recompute": "full"}),
        ("axolotl", {"base_model": "q"}, {"micro-batch": 1, "seq": 512}),
        (  # batch_size is that of a GPU
            "axolotl",
            {"base_model": "q", "micro_batch_size": 2, "batch_size": 8},
            {"micro-batch": 2, "seq": 512, "accumulation": 4},
        ),
        ("axolotl", {"base_model": "q", "micro_batch_size": 4, "sequence_len": 128}, {"micro-batch": 4, "seq": 128}),
    ],
)
def test_defaults_are_those_of_the_tool(tool: str, keys: dict[str, object], expected: dict[str, object]) -> None:
    config = read(keys, tool)
    names = ("micro-batch", "seq", "recompute", *({"accumulation"} & expected.keys()))
    assert "global-batch" not in config.options
    assert {name: config.options[name] for name in names if name in config.options} == expected


@pytest.mark.parametrize(
    ("tokens", "precision", "lora_rank", "loss", "peak"),
    [
        (4096, "bf16", 0, "chunked", 4.342e9),
        (16384, "bf16", 0, "chunked", 4.543e9),
        (8192, "bf16", 8, "chunked", 3.358e9),
        (8192, "autocast-bf16", 0, "chunked", 6.577e9),
        (8192, "bf16", 0, "chunked-fp32", 5.528e9),
        (8192, "bf16", 8, "chunked-fp32", 2.764e9),
    ],
)
def test_chunked_losses_take_what_was_measured(
    tokens: int, precision: str, lora_rank: int, loss: str, peak: float
) -> None:
    """Peaks of a loss in chunks of 256 tokens on an H200, for 4,096 inputs and 128,256 tokens of vocabulary."""
    run = settle(
        ask(*f"--model llama-3.1-8b-l1 --gpu h200 --framework trainer --seq {tokens} --loss {loss}".split()).change(
            {"precision": precision, "lora_rank": lora_rank, "micro_batch": 1}
        )
    )
    assert loss_bytes(run.model, run.strategy, framework=run.framework) == pytest.approx(peak, rel=0.01)


def test_a_chunked_loss_casts_its_weights_for_every_part() -> None:
    """331 ms in place of 49 for 8,192 tokens on an H200 (bf16 weights, autocast)."""
    usual: dict[str, Any] = {"model": "llama-3.1-8b-l2", "gpu": "h200", "framework": "trainer", "seq": 8192}
    full, chunked = (stepcast.predict(**usual, accumulation=1, loss=loss).step_s for loss in ("in-place", "chunked"))
    assert chunked - full == pytest.approx(0.282, rel=0.15)


LAUNCH = "accelerate launch --num_processes 8 --mixed_precision bf16"
SCRIPT = "train.py --model_name_or_path q --per_device_train_batch_size 2 --gradient_accumulation_steps 4"


@pytest.mark.parametrize(
    ("options", "framework", "expected"),
    [
        ("--use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP", "trainer", {"sharding": "fsdp"}),
        ("--use_fsdp --fsdp_sharding_strategy SHARD_GRAD_OP", "trainer", {"sharding": "fsdp", "reshard": False}),
        ("--use_fsdp --fsdp_sharding_strategy FULL_SHARD", "trainer", {"backward-prefetch": "post"}),
        (
            "--use_deepspeed --zero_stage 3 --gradient_clipping 1.0 --offload_optimizer_device cpu",
            "deepspeed-transformers",
            {"sharding": "zero-3", "offload": "optimizer", "clipping": True},
        ),
        ("--use_deepspeed", "deepspeed-transformers", {"sharding": "zero-2"}),
    ],
)
def test_options_of_accelerate_launch_are_read_as_its_file(
    options: str, framework: str, expected: dict[str, object], tmp_path: Path
) -> None:
    """accelerate, commands/launch.py."""
    path = tmp_path / "run.sh"
    path.write_text(f"{LAUNCH} {options} {SCRIPT}")
    config = read_config(path)
    assert (config.framework, config.unknown, config.not_modelled) == (framework, {}, {})
    assert {"gpus": 8, "micro-batch": 2, "accumulation": 4, **expected}.items() <= config.options.items()
    assert config.options["precision"] == "bf16"


@pytest.mark.parametrize(
    ("sizes", "problem"),
    [
        ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}, ""),
        ({"train_micro_batch_size_per_gpu": "auto"}, ""),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu 4, and the arguments 2"),
        ({"gradient_accumulation_steps": 1}, "gradient_accumulation_steps 1, and the arguments 4"),
    ],
)
def test_batches_of_deepspeed_and_of_trainer_agree(sizes: dict[str, object], problem: str, tmp_path: Path) -> None:
    """transformers, integrations/deepspeed.py, trainer_config_process: mismatches raise a ValueError."""
    (tmp_path / "ds.json").write_text(json.dumps({**sizes, "zero_optimization": {"stage": 2}}))
    path = tmp_path / "run.sh"
    path.write_text(f"deepspeed --num_gpus 8 {SCRIPT} --deepspeed {tmp_path / 'ds.json'}")
    if problem:
        with pytest.raises(FormatError, match=rf"run.sh: deepspeed has {problem}: make them agree"):
            read_config(path)
    else:
        assert read_config(path).options["accumulation"] == 4


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"gradient_accumulation_steps": "auto"}, {"global-batch": 64, "accumulation": 4, "gpus": 8}),
        ({"gradient_accumulation_steps": 4, "elasticity": {"enabled": True}}, {"accumulation": 4}),
    ],
)
def test_a_batch_of_deepspeed_meets_that_of_trainer(
    sizes: dict[str, object], expected: dict[str, object], tmp_path: Path
) -> None:
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, **sizes}
    (tmp_path / "ds.json").write_text(json.dumps({**batch, "zero_optimization": {"stage": 2}}))
    path = tmp_path / "run.sh"
    path.write_text(f"deepspeed --num_gpus 8 {SCRIPT} --deepspeed {tmp_path / 'ds.json'}")
    assert expected.items() <= read_config(path).options.items()
    path.write_text(f"deepspeed {SCRIPT} --deepspeed {tmp_path / 'ds.json'}")
    assert ("gpus" in read_config(path).options) is ("elasticity" in sizes)


def test_options_of_fsdp_may_be_json_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    text = f"torchrun --nproc_per_node 8 {SCRIPT} --fsdp full_shard --fsdp_config"
    path.write_text(f"{text} '{{\"version\": 1}}'")
    assert read_config(path).options["backward-prefetch"] == "post"
    path.write_text(f"{text} missing.json")
    assert "no such file" in read_config(path).not_modelled["fsdp_config"]


def test_lengths_of_models_are_lengths_of_sequences(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{LAUNCH} {SCRIPT} --model_max_length 1024")
    config = read_config(path)
    assert (config.options["seq"], config.unknown) == (1024, {})
