"""Configurations of other tools: reduced from public ones with the same keys, ten for each format."""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import yaml

from stepcast.inputs.configs.keys import flat
from stepcast.inputs.configs.reader import read_config
from stepcast.inputs.configs.shell import flags_of
from stepcast.inputs.errors import FormatError
from stepcast.models.like import model_words
from tests.cli.test_main import run_json
from tests.shared import ROOT

FOLDER = Path(__file__).parent / "configs"

# File | model | some options | some keys that change nothing.
TABLE = """
examples/configs/megatron-llama3-8b.sh | llama-3-8b | gpus=8 tp=1 seq=8192 global-batch=128 precision=fp8 sharding=zero-1 gradients=bf16 | lr manual-gc save
megatron/mixtral_8x7b.sh | mixtral-8x7b | gpus=8 ep=8 pp=1 precision=bf16 overlap=gradients,parameters | moe-aux-loss-coeff lr
megatron/gpt3_175b.sh | gpt3-175b | gpus=128 tp=8 pp=16 precision=fp16 sharding=none global-batch=1536 | rampup-batch-size adam-beta1
megatron/sc21_figure.sh | megatron-76.1b-l48 | tp=8 pp=8 vpp=3 recompute=full precision=fp16 | DDP-impl
megatron/deepseek_v2_lite.sh | deepseek-v2-lite | gpus=8 ep=8 precision=bf16 dispatcher=all-to-all | kv-lora-rank
megatron/aws_llama2_70b.sbatch | llama-2-70b | gpus=16 tp=4 pp=4 seq=4096 global-batch=2048 precision=fp16 | tokenizer-type train-iters lr
megatron/llm_jp_175b.sh | configured | gpus=512 tp=4 pp=16 global-batch=1728 sequence-parallel=True | train-data-path npernode
megatron/modelopt_qwen3_30b_a3b.sh | qwen3-30b-a3b | micro-batch=1 precision=bf16 dispatcher=all-to-all | moe-router-dtype save-interval
megatron/ms_swift_moe.sh | qwen3-30b-a3b | gpus=2 ep=2 seq=2048 lora-rank=8 recompute=full | dataset finetune lr
megatron/functional_test.yaml | configured | tp=2 pp=2 vpp=2 micro-batch=4 sharding=zero-1 | train-iters
nemo/llama3_1_405b.yaml | configured | gpus=4608 tp=8 pp=9 vpp=7 cp=2 sharding=zero-1 precision=bf16 dropout=False | trainer.max_steps model.optim.lr
nemo/llama3_1_70b.yaml | llama-3.1-70b | gpus=512 tp=4 pp=4 vpp=5 cp=2 | exp_manager.create_wandb_logger
nemo/llama3_8b.yaml | llama-3-8b | gpus=8 cp=2 global-batch=128 | run.time_limit
nemo/llama2_7b.yaml | llama-2-7b | gpus=16 tp=2 | model.optim.lr
nemo/gpt3_175b.yaml | gpt3-175b | gpus=1024 tp=4 pp=8 vpp=12 precision=bf16 overlap=gradients,parameters,tensor,tensor-gradients,transfers | model.optim.lr
nemo/gpt3_5b.yaml | gpt3-6.7b-l24 | gpus=128 micro-batch=4 precision=bf16 dropout=True | hydra.searchpath
nemo/gpt3_20b_fp8_performance.yaml | configured | gpus=512 tp=4 precision=fp8 recompute=selective | run.results_dir
nemo/gpt3_70b_fsdp.yaml | mpt-70b | gpus=1024 tp=4 sharding=fsdp precision=bf16 overlap=tensor-gradients | model.optim.lr
nemo/mixtral_8x7b.yaml | mixtral-8x7b | gpus=64 pp=4 vpp=8 ep=8 | model.moe_grouped_gemm
nemo/starcoder2_3b.yaml | configured | gpus=64 tp=2 seq=16384 precision=bf16 sequence-parallel=False | model.optim.lr
bridge/llama3_8b_override.yaml | llama-3-8b | seq=4096 global-batch=8 gradients=fp32 | optimizer.lr scheduler.lr_warmup_iters
bridge/llama3_8b_fsdp.yaml | llama-3-8b | sharding=zero-3 gradients=fp32 | checkpoint.save
bridge/qwen3_235b_a22b.yaml | qwen3-235b-a22b | expert-tp=1 precision=bf16 dispatcher=forwarding sharding=zero-1 | train.manual_gc
bridge/deepseek_v3.yaml | deepseek-v3 | pp=16 vpp=2 ep=64 further-tokens=1 recompute=selective:latent-up,mlp |
bridge/llama3_70b_perf.yaml | llama-3-70b | tp=4 pp=4 vpp=5 cp=2 precision=fp8 |
bridge/llama31_405b.yaml | llama-3.1-405b | tp=8 pp=8 vpp=8 cp=2 | checkpoint.save
bridge/kimi_k2_l8.yaml | kimi-k2 | ep=8 recompute=full | checkpoint.save
bridge/qwen3_30b_a3b.yaml | qwen3-30b-a3b | ep=8 micro-batch=4 sharding=zero-1 | rng.seed
bridge/distill_3b_1b.yaml | | seq=8192 micro-batch=1 | model.teacher
bridge/qwen3_next_finetune.yaml | qwen3-next-80b-a3b | ep=8 overlap=none | peft
torchtitan/llama3_8b.toml | llama-3.1-8b | seq=8192 sharding=fsdp recompute=selective kernels=compiled | optimizer.lr metrics.log_freq
torchtitan/llama3_70b.toml | llama-3.1-70b | tp=8 micro-batch=8 recompute=full | optimizer.lr
torchtitan/autopartition_llama3_70b.toml | llama-3.1-70b | tp=8 recompute=full kernels=plain | validation.enable
torchtitan/llama3_405b.toml | llama-3.1-405b | tp=8 micro-batch=2 precision=fp8 kernels=compiled overlap=gradients,parameters,tensor,transfers | model.tokenizer_path
torchtitan/llama3_70b_8xb200_8k.toml | llama-3.1-70b | gpus=8 global-batch=48 micro-batch=6 | optimizer.lr
torchtitan/deepseek_v3_16b.toml | deepseek-v2-lite | ep=8 | optimizer.lr
torchtitan/deepseek_v3_671b.toml | deepseek-v3 | ep=1 pp=1 kernels=plain | parallelism.pipeline_parallel_schedule
torchtitan/qwen3_32b.toml | qwen3-32b | micro-batch=2 recompute=full precision=bf16 | optimizer.lr
torchtitan/qwen3_next_80b_a3b.toml | qwen3-next-80b-a3b | seq=4096 micro-batch=8 precision=bf16 | quantize.linear.mx.filter_fqns
torchtitan/llama4_17bx16e.toml | llama-4-scout | tp=8 micro-batch=8 kernels=plain precision=bf16 | optimizer.lr
deepspeed/zero2_auto.json | | sharding=zero-2 bucket-mb=400.0 optimizer=adamw | scheduler.type optimizer.params.lr
deepspeed/zero3_auto.json | | sharding=zero-3 | wall_clock_breakdown
deepspeed/zero3_offload.json | | sharding=zero-3 offload=optimizer overlap=none | zero_optimization.offload_param.device
deepspeed/z3_partial_offload.json | | sharding=zero-3 offload=optimizer | zero_force_ds_cpu_optimizer
deepspeed/gbs256_mbs32_zero1.json | | gpus=8 micro-batch=32 global-batch=256 sharding=zero-1 precision=fp16 | prescale_gradients
deepspeed/autotuning_fp16_z1.json | | sharding=zero-1 precision=fp16 | _comment
deepspeed/bigscience_bf16.json | | gpus=16 micro-batch=1 precision=bf16 | steps_per_print
deepspeed/bigscience_fp32.json | | gpus=16 sharding=zero-1 precision=fp32 | steps_per_print
deepspeed/zero_offload_10b.json | | sharding=zero-2 offload=optimizer global-batch=30 bucket-mb=100.0 optimizer=adamw | zero_optimization.comm_overlap
deepspeed/autotp.json | | tp=2 sharding=zero-2 overlap=none | zero_allow_untested_optimizer
accelerate/fsdp.yaml | | gpus=8 sharding=fsdp precision=bf16 | fsdp_config.fsdp_auto_wrap_policy
accelerate/template_fsdp.yaml | | gpus=2 sharding=fsdp precision=bf16 | fsdp_config.fsdp_backward_prefetch
accelerate/latest_fsdp.yaml | | gpus=1 precision=fp32 | fsdp_config.fsdp_transformer_layer_cls_to_wrap
accelerate/fsdp_qlora.yaml | | gpus=2 precision=fp32 offload=optimizer | fsdp_config.fsdp_transformer_layer_cls_to_wrap
accelerate/fsdp2.yaml | | sharding=fsdp reshard=True | debug
accelerate/context_parallel_8gpu.yaml | | gpus=8 cp=8 recompute=full | fsdp_config.fsdp_activation_checkpointing_offload
accelerate/tp_hsdp.yaml | | gpus=8 tp=2 sharding=hybrid-fsdp shard=2 | rdzv_backend
accelerate/nd.yaml | | gpus=8 cp=4 sharding=fsdp | debug
accelerate/deepspeed_zero3.yaml | | sharding=zero-3 | deepspeed_config.zero3_init_flag
accelerate/multi_gpu.yaml | | gpus=2 sharding=none precision=bf16 |
"""
KNOWN: dict[str, tuple[str, str, str]] = {
    file: (model, options, ignored)
    for file, model, options, ignored in (
        tuple(cell.strip() for cell in line.split("|")) for line in TABLE.strip().splitlines()
    )
}
SOURCE = re.compile(r"From the keys of [\w.-]+/[\w.-]+ \S+\.(sh|sbatch|yaml|toml|json)\b")
FORMATS = {
    "megatron": "megatron-lm",
    "nemo": "nemo",
    "bridge": "megatron-bridge",
    "torchtitan": "torchtitan",
    "deepspeed": "deepspeed",
    "accelerate": "accelerate",
}


def path_of(name: str) -> Path:
    return (ROOT if name.startswith("examples/") else FOLDER) / name


def format_of(name: str) -> str:
    return FORMATS[
        Path(name).stem.partition("-")[0] if name.startswith("examples/") else name.partition("/")[0]
    ]


def test_ten_of_each_format() -> None:
    files = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
    assert files == sorted(name for name in KNOWN if not name.startswith("examples/"))
    assert Counter(map(format_of, KNOWN)) == dict.fromkeys(FORMATS.values(), 10)


@pytest.mark.parametrize("name", KNOWN)
def test_a_configuration_names_the_public_one_it_was_reduced_from(name: str) -> None:
    assert len(SOURCE.findall(path_of(name).read_text())) == 1


@pytest.mark.parametrize("name", KNOWN)
def test_every_key_is_understood_ignored_or_not_set(name: str) -> None:
    """Each in one list: nothing is dropped in silence."""
    found = read_config(path_of(name))
    told = [*found.understood, *found.ignored, *found.unset]
    assert len(told) == len(set(told))
    text = path_of(name).read_text()
    keys: set[str]
    match Path(name).suffix:
        case ".json":
            keys = set(flat(json.loads(text)))
        case ".toml":
            keys = set(flat(tomllib.loads(text)))
        case ".yaml":
            table = yaml.safe_load(text)
            arguments = table.get("MODEL_ARGS") or {}
            keys = {str(key).lstrip("-") for key in arguments} or set(flat(table))
        case _:
            keys = {key for key in flags_of(text) if not key.startswith("$")}
    assert set(told) == keys


@pytest.mark.parametrize("name", KNOWN)
def test_a_configuration_is_understood(name: str) -> None:
    model, options, ignored = KNOWN[name]
    found = read_config(path_of(name))
    assert found.format == format_of(name)
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
        ("megatron/aws_llama2_70b.sbatch", ()),
        ("megatron/ms_swift_moe.sh", ()),
        ("megatron/gpt3_175b.sh", ()),
        ("nemo/llama3_1_405b.yaml", ()),
        ("nemo/starcoder2_3b.yaml", ()),
        ("bridge/deepseek_v3.yaml", ("--gpus", "1024")),
        ("bridge/llama3_8b_override.yaml", ("--gpus", "8")),
        ("torchtitan/qwen3_next_80b_a3b.toml", ("--gpus", "64")),
        ("torchtitan/llama3_70b.toml", ("--gpus", "256")),
        ("deepspeed/bigscience_bf16.json", ("--model", "llama-3.2-1b")),
        ("accelerate/tp_hsdp.yaml", ("--model", "qwen2.5-7b")),
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
        (': "${A:=5}"\nrun --x $A', "x", "5"),
        ("#SBATCH --nodes=4\nrun --x $SLURM_NNODES", "x", "4"),
        ("#SBATCH -N 4\nN=$SLURM_JOB_NUM_NODES\nrun --x $((N * 8))", "x", "32"),
        ("#SBATCH --gres=gpu:h100:8\nrun --x $SLURM_GPUS_ON_NODE", "x", "8"),
        ("A=$(nproc)\nrun --x $A", "x", "$UNKNOWN"),
        ("A=1\nif [ $A = 2 ] && [ $A = 1 ] || [ $A = 1 ] && [ -n a ]; then run --x 1; fi", "x", "1"),
        ("A=1\nif [ $A = 1 ] && [ $A = 2 ] || [ $A = 3 ]; then run --x 1; else run --x 2; fi", "x", "2"),
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
        ("a.sh", "A=" + "${a:-" * 150_000, "characters of a launch script: more than 200,000"),
        ("a.sh", "A=" + "`" * 150_001, "characters of a launch script: more than 200,000"),
        ("a.sh", "if " + "x || y && " * 3_000 + "z; then\necho\nfi\n", "no configuration that is known"),
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
    with pytest.raises(FormatError, match="aliases stand for too much"):
        read_config(tmp_path / "a.yaml")


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        (
            "data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 8\n"
            'fsdp_reshard_after_forward = "never"',
            "gpus=32 sharding=hybrid-fsdp shard=8 reshard=False global-batch=64",
        ),
        (
            "data_parallel_shard_degree = 2\ntensor_parallel_degree = 2\npipeline_parallel_degree = 2\n"
            "context_parallel_degree = 2\npipeline_parallel_schedule = '1F1B'\n"
            "pipeline_parallel_microbatch_size = 1",
            "gpus=16 tp=2 pp=2 cp=2 schedule=1f1b micro-batch=1",
        ),
    ],
)
def test_degrees_of_torchtitan(tmp_path: Path, parallelism: str, expected: str) -> None:
    file = tmp_path / "train.toml"
    file.write_text(
        f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\n[parallelism]\n{parallelism}\n'
    )
    said = {key: str(value) for key, value in read_config(file).options.items()}
    for pair in expected.split():
        key, _, value = pair.partition("=")
        assert said[key] == value, key


@pytest.mark.parametrize(
    ("strategy", "sharding"), [("1", "fsdp"), ("2", "zero-2"), ("SHARD_GRAD_OP", "zero-2"), ("3", "none")]
)
def test_old_names_of_fsdp_strategies(tmp_path: Path, strategy: str, sharding: str) -> None:
    file = tmp_path / "fsdp.yaml"
    file.write_text(f"distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_strategy: {strategy}\n")
    assert read_config(file).options["sharding"] == sharding
