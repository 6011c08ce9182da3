"""Configurations of other tools: reduced from public ones with the same keys, ten for each format."""

from pathlib import Path

import pytest

from stepcast.inputs.configs.reader import read_config
from stepcast.inputs.configs.shell import flags_of
from stepcast.inputs.errors import FormatError
from stepcast.models.like import model_words
from tests.cli.test_main import run_json

FOLDER = Path(__file__).parent / "configs"

# File -> model, some options in a line, and keys that change nothing.
KNOWN: dict[str, tuple[str, str, str]] = {
    "megatron/llama3_8b_h100_fp8.sh": (
        "llama-3-8b",
        "gpus=8 tp=1 seq=8192 global-batch=128 precision=fp8 sharding=zero-1 gradients=bf16",
        "lr manual-gc save",
    ),
    "megatron/mixtral_8x7b.sh": (
        "mixtral-8x7b",
        "gpus=8 ep=8 pp=1 precision=bf16 overlap=gradients,parameters",
        "moe-aux-loss-coeff lr",
    ),
    "megatron/gpt3_175b.sh": (
        "gpt3-175b",
        "gpus=128 tp=8 pp=16 precision=fp16 sharding=none global-batch=1536",
        "rampup-batch-size adam-beta1",
    ),
    "megatron/sc21_figure.sh": (
        "megatron-76.1b-l48",
        "tp=8 pp=8 vpp=3 recompute=full precision=fp16",
        "DDP-impl",
    ),
    "megatron/deepseek_v2_lite.sh": (
        "deepseek-v2-lite",
        "gpus=8 ep=8 precision=bf16 dispatcher=all-to-all",
        "kv-lora-rank",
    ),
    "megatron/llama2_70b.args": (
        "llama-2-70b",
        "tp=8 pp=4 vpp=5 sequence-parallel=True recompute=selective",
        "tokenizer-type lr",
    ),
    "megatron/qwen3_30b_a3b.args": (
        "qwen3-30b-a3b",
        "ep=8 recompute=selective:expert-activation,norms dispatcher=forwarding",
        "moe-router-dtype",
    ),
    "megatron/slurm_405b.sh": (
        "llama-3.1-405b",
        "gpus=8192 tp=8 pp=16 overlap=gradients,parameters,tensor,tensor-gradients,transfers",
        "exit-interval",
    ),
    "megatron/functional_test.yaml": (
        "configured",
        "tp=2 pp=2 vpp=2 micro-batch=4 sharding=zero-1",
        "train-iters",
    ),
    "megatron/nemotron_fsdp.sh": ("llama-3-8b", "gpus=16 sharding=zero-3 recompute=block:4", "ckpt-format"),
    "nemo/llama3_1_405b.yaml": (
        "configured",
        "gpus=4608 tp=8 pp=9 vpp=7 cp=2 sharding=zero-1 precision=bf16 dropout=False",
        "trainer.max_steps model.optim.lr",
    ),
    "nemo/llama3_1_70b.yaml": (
        "llama-3.1-70b",
        "gpus=512 tp=4 pp=4 vpp=5 cp=2",
        "exp_manager.create_wandb_logger",
    ),
    "nemo/llama3_8b.yaml": ("llama-3-8b", "gpus=8 cp=2 global-batch=128", "run.time_limit"),
    "nemo/llama2_7b.yaml": ("llama-2-7b", "gpus=16 tp=2", "model.optim.lr"),
    "nemo/gpt3_175b.yaml": (
        "gpt3-175b",
        "gpus=1024 tp=4 pp=8 vpp=12 overlap=gradients,parameters,tensor,tensor-gradients,transfers",
        "model.optim.lr",
    ),
    "nemo/gpt3_5b.yaml": ("gpt3-6.7b-l24", "gpus=128 micro-batch=4", "model.optim.lr"),
    "nemo/gpt3_20b_fp8.yaml": ("configured", "gpus=64 precision=fp8 micro-batch=2", "model.optim.lr"),
    "nemo/gpt3_40b.yaml": ("megatron-39.1b", "gpus=512 tp=8 recompute=selective", "model.optim.lr"),
    "nemo/mixtral_8x7b.yaml": ("mixtral-8x7b", "gpus=64 pp=4 vpp=8 ep=8", "model.moe_grouped_gemm"),
    "nemo/starcoder2_3b.yaml": ("configured", "gpus=8 precision=fp16 sharding=none", "model.optim.lr"),
    "bridge/llama3_8b_override.yaml": (
        "llama-3-8b",
        "seq=4096 global-batch=8 gradients=fp32",
        "optimizer.lr scheduler.lr_warmup_iters",
    ),
    "bridge/llama3_8b_fsdp.yaml": ("llama-3-8b", "sharding=zero-3 gradients=fp32", "checkpoint.save"),
    "bridge/qwen3_235b_a22b.yaml": (
        "qwen3-235b-a22b",
        "expert-tp=1 precision=bf16 dispatcher=forwarding sharding=zero-1",
        "train.manual_gc",
    ),
    "bridge/deepseek_v3.yaml": (
        "deepseek-v3",
        "pp=16 vpp=2 ep=64 further-tokens=1 recompute=selective:latent-up,mlp",
        "",
    ),
    "bridge/llama3_70b_perf.yaml": ("llama-3-70b", "tp=4 pp=4 vpp=5 cp=2 precision=fp8", ""),
    "bridge/llama31_405b.yaml": ("llama-3.1-405b", "tp=8 pp=8 vpp=8 cp=2", "checkpoint.save"),
    "bridge/kimi_k2_l8.yaml": ("kimi-k2", "ep=8 recompute=full", "checkpoint.save"),
    "bridge/qwen3_30b_a3b.yaml": ("qwen3-30b-a3b", "ep=8 micro-batch=4 sharding=zero-1", "rng.seed"),
    "bridge/distill_3b_1b.yaml": ("", "seq=8192 micro-batch=1", "model.teacher"),
    "bridge/qwen3_next_finetune.yaml": ("", "ep=8 overlap=none", "peft"),
    "torchtitan/llama3_8b.toml": (
        "llama-3.1-8b",
        "seq=8192 sharding=fsdp recompute=selective kernels=compiled",
        "optimizer.lr metrics.log_freq",
    ),
    "torchtitan/llama3_70b.toml": ("llama-3.1-70b", "tp=8 micro-batch=8 recompute=full", "optimizer.lr"),
    "torchtitan/llama3_405b.toml": ("llama-3.1-405b", "tp=8 precision=fp8", "optimizer.lr"),
    "torchtitan/llama3_70b_8xb200_8k.toml": (
        "llama-3.1-70b",
        "gpus=8 global-batch=48 micro-batch=6",
        "optimizer.lr",
    ),
    "torchtitan/deepseek_v3_16b.toml": ("deepseek-v2-lite", "ep=8", "optimizer.lr"),
    "torchtitan/deepseek_v3_671b.toml": (
        "deepseek-v3",
        "ep=1 pp=1",
        "parallelism.pipeline_parallel_schedule",
    ),
    "torchtitan/qwen3_8b.toml": ("qwen3-8b", "gpus=16 global-batch=32 recompute=none", "optimizer.lr"),
    "torchtitan/llama4_17bx16e.toml": ("llama-4-scout", "tp=8 ep=8 kernels=plain", "optimizer.lr"),
    "torchtitan/llama3_8b_hsdp.toml": (
        "llama-3.1-8b",
        "gpus=32 sharding=hybrid-fsdp shard=8 reshard=False global-batch=64",
        "optimizer.lr",
    ),
    "torchtitan/llama3_pp_cp.toml": (
        "llama-3.1-8b",
        "gpus=16 tp=2 pp=2 cp=2 schedule=1f1b micro-batch=1",
        "optimizer.lr",
    ),
    "deepspeed/zero2_auto.json": (
        "",
        "sharding=zero-2 bucket-mb=400.0 optimizer=adamw",
        "scheduler.type optimizer.params.lr",
    ),
    "deepspeed/zero3_auto.json": ("", "sharding=zero-3", "wall_clock_breakdown"),
    "deepspeed/zero3_offload.json": (
        "",
        "sharding=zero-3 offload=optimizer micro-batch=2 precision=bf16",
        "zero_optimization.offload_param.device",
    ),
    "deepspeed/zero1.json": (
        "",
        "sharding=zero-1 gpus=128 global-batch=512 gradients=fp32",
        "steps_per_print",
    ),
    "deepspeed/ds_chat.json": ("", "sharding=none gpus=8 precision=fp16", "hybrid_engine.enabled"),
    "deepspeed/bloom_176b.json": ("bloom-176b", "gpus=1024 micro-batch=2 sharding=none", "steps_per_print"),
    "deepspeed/cpu_offload_ratio.json": ("", "offload=optimizer=0.3", "optimizer.params.lr"),
    "deepspeed/old_offload.json": (
        "",
        "sharding=zero-2 offload=optimizer overlap=none",
        "zero_allow_untested_optimizer",
    ),
    "deepspeed/autotp.json": ("", "tp=4 gpus=64", ""),
    "deepspeed/fp32_plain.json": ("", "precision=fp32 bucket-mb=1000.0", "tensorboard.enabled"),
    "accelerate/fsdp.yaml": ("", "gpus=8 sharding=fsdp precision=bf16", "fsdp_config.fsdp_auto_wrap_policy"),
    "accelerate/fsdp_checkpointing.yaml": ("", "recompute=full", "debug"),
    "accelerate/fsdp_offload.yaml": ("", "offload=optimizer", "debug"),
    "accelerate/fsdp_qlora.yaml": (
        "",
        "gpus=2 precision=fp32",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
    ),
    "accelerate/fsdp_numbers.yaml": ("", "gpus=4 sharding=fsdp", "debug"),
    "accelerate/fsdp_grad_op.yaml": ("", "gpus=16 sharding=zero-2", "debug"),
    "accelerate/fsdp_hybrid.yaml": ("", "gpus=32 sharding=hybrid-fsdp shard=8", "debug"),
    "accelerate/fsdp2.yaml": ("", "sharding=fsdp reshard=True", "debug"),
    "accelerate/deepspeed_zero3.yaml": ("", "sharding=zero-3", "deepspeed_config.zero3_init_flag"),
    "accelerate/multi_gpu.yaml": ("", "sharding=none precision=fp16 kernels=compiled", "gpu_ids"),
}
FORMATS = {
    "megatron": "megatron-lm",
    "nemo": "nemo",
    "bridge": "megatron-bridge",
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
}


def test_ten_of_each_format() -> None:
    files = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
    assert files == sorted(KNOWN)
    assert {
        folder: sum(file.startswith(f"{folder}/") for file in files) for folder in FORMATS
    } == dict.fromkeys(FORMATS, 10)


@pytest.mark.parametrize("name", KNOWN)
def test_a_configuration_is_understood(name: str) -> None:
    model, options, ignored = KNOWN[name]
    found = read_config(FOLDER / name)
    assert found.format == FORMATS[name.partition("/")[0]]
    stem = Path(name).name.partition(".")[0]
    words = model_words(found.sizes, [found.model, stem], int(found.options.get("seq", 0)))
    assert words.partition(":")[0] == model
    said = {key: str(value) for key, value in found.options.items()}
    for pair in options.split():
        key, _, value = pair.partition("=")
        assert said[key] == value, key
    assert set(ignored.split()) <= set(found.ignored)
    assert not set(found.understood) & set(found.ignored)


@pytest.mark.parametrize(
    ("name", "further"),
    [
        ("megatron/llama3_8b_h100_fp8.sh", ()),
        ("megatron/gpt3_175b.sh", ()),
        ("nemo/llama3_1_405b.yaml", ()),
        ("nemo/starcoder2_3b.yaml", ()),
        ("bridge/deepseek_v3.yaml", ("--gpus", "1024")),
        ("bridge/llama3_8b_override.yaml", ("--gpus", "8")),
        ("torchtitan/llama3_pp_cp.toml", ()),
        ("torchtitan/llama3_70b.toml", ("--gpus", "256")),
        ("deepspeed/zero1.json", ("--model", "llama-3.1-8b")),
        ("accelerate/fsdp_hybrid.yaml", ("--model", "qwen2.5-7b")),
    ],
)
def test_a_configuration_is_predicted(
    capsys: pytest.CaptureFixture[str], name: str, further: tuple[str, ...]
) -> None:
    found = run_json(capsys, "predict", "--config", str(FOLDER / name), "--cluster", "dgx-h100", *further)
    assert found["step_s"] > 0
    assert found["config"]["ignored"] == list(read_config(FOLDER / name).ignored)


def test_words_that_are_typed_win(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(FOLDER / "nemo/llama3_8b.yaml")
    found = run_json(
        capsys, "predict", "--config", file, "--cluster", "dgx-h100", "--cp", "1", "--seq", "4096"
    )
    assert (found["strategy"]["cp"], found["strategy"]["seq"]) == (1, 4096)
    assert found["strategy"]["global_batch"] == 128


def test_variables_of_somewhere_else_are_named() -> None:
    found = read_config(FOLDER / "bridge/qwen3_235b_a22b.yaml")
    assert "model.tensor_model_parallel_size" in found.unset
    assert "tp" not in found.options


@pytest.mark.parametrize(
    ("script", "flag", "value"),
    [
        ("A=3\nrun --x $A", "x", "3"),
        ("A=${A:-4}\nrun --x ${A}", "x", "4"),
        ("A=2\nB=$((A * 3 + 1))\nrun --x $B", "x", "7"),
        ("A=8\nB=$(( $A / 2 ))\nrun --x=$B", "x", "4"),
        ('ARGS="--x 1 \\\n --y 2"\nrun $ARGS', "y", "2"),
        ("ARGS=(--x 1)\nARGS+=(--x 2)\nrun ${ARGS[@]}", "x", "2"),
        ('D=b\nif [ "$D" = "a" ]; then\nX=1\nelse\nX=2\nfi\nrun --x $X', "x", "2"),
        ('D=a\nif [[ $D == "a" ]]; then\nX=1\nelif [[ $D == b ]]; then\nX=2\nfi\nrun --x $X', "x", "1"),
        ("# --x 1\nrun --x 2 # --x 3", "x", "2"),
        ("--x 1\n--y", "y", True),
        ("run --x $UNDEFINED", "x", "$UNDEFINED"),
        ("A=$(nproc)\nrun --x $A", "x", "$UNKNOWN"),
    ],
)
def test_scripts_are_read_without_being_run(script: str, flag: str, value: str | bool) -> None:
    assert flags_of(script)[flag] == value


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.yaml", "a: [1, 2", "not valid YAML"),
        ("a.yaml", "- 1\n- 2\n", "holds no YAML mapping"),
        ("a.yaml", "a: 1\n", "no configuration that is known"),
        ("a.json", '{"a": 1}', "no configuration that is known"),
        ("a.json", '{"a": ', "not valid JSON"),
        ("a.sh", "echo hello\n", "no configuration that is known"),
        ("a.sh", 'A="unclosed\n', "not a shell script"),
        ("a.toml", "a = \n", "not valid TOML"),
        ("a.sh", "A=x\n" + "A=$A$A$A$A$A$A$A$A\n" * 20 + "run --x $A", "grow too long"),
    ],
)
def test_what_is_no_configuration_is_one_line(tmp_path: Path, name: str, text: str, problem: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=problem) as caught:
        read_config(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_yaml_that_repeats_itself_ends(tmp_path: Path) -> None:
    lines = ["a0: &a0 {x: 1}"] + [
        f"a{n}: &a{n} {{{', '.join(f'k{m}: *a{n - 1}' for m in range(9))}}}" for n in range(1, 9)
    ]
    (tmp_path / "a.yaml").write_text("\n".join(["distributed_type: FSDP", *lines]))
    with pytest.raises(FormatError, match="more than 20,000 keys"):
        read_config(tmp_path / "a.yaml")
