"""Configurations of other tools: reduced from public ones with the same keys, ten for each format."""

import json
import re
import shlex
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

import stepcast
from stepcast.cli.main import build_parser, main
from stepcast.cli.options import read_question
from stepcast.frameworks.catalog import load_framework
from stepcast.inputs.configs.keys import DATA, RunConfig, flat
from stepcast.inputs.configs.reader import read_config
from stepcast.inputs.configs.shell import read_flags
from stepcast.inputs.source import FormatError
from stepcast.models.catalog import load_model, model_words
from stepcast.questions.runs import read_run_file, write_command
from stepcast.questions.settle import SettledRun, settle
from tests.cli.test_main import run, run_json
from tests.shared import ROOT

FOLDER = Path(__file__).parent / "configs"

# File | model | some options | some keys without effect, ~ not modelled, ? not recognised.
TABLE = """
examples/configs/megatron-llama3-8b.sh | llama-3-8b | gpus=8 tp=1 seq=8192 global-batch=128 precision=fp8 sharding=zero-1 gradients=bf16 | lr manual-gc save
megatron/mixtral_8x7b.sh | mixtral-8x7b | gpus=8 ep=8 pp=1 precision=bf16 overlap=gradients,parameters | moe-aux-loss-coeff lr
megatron/gpt3_175b.sh | gpt3-175b | gpus=128 tp=8 pp=16 precision=fp16 sharding=none global-batch=1536 execution=eager gradients=fp16 | ~rampup-batch-size adam-beta1
megatron/sc21_figure.sh | megatron-76.1b-l48 | tp=8 pp=8 vpp=3 recompute=full precision=fp16 | DDP-impl
megatron/deepseek_v2_lite.sh | deepseek-v2-lite | gpus=8 ep=8 precision=bf16 dispatcher=alltoall execution=eager |
megatron/aws_llama2_70b.sbatch | configured | gpus=16 tp=4 pp=4 seq=4096 global-batch=2048 precision=fp16 | tokenizer-type train-iters lr
megatron/llm_jp_175b.sh | configured | gpus=512 tp=4 pp=16 global-batch=1728 sequence-parallel=True | train-data-path npernode
megatron/modelopt_qwen3_30b_a3b.sh | qwen3-30b-a3b | micro-batch=1 precision=bf16 dispatcher=alltoall | moe-router-dtype save-interval
megatron/ms_swift_moe.sh | qwen3-30b-a3b | gpus=2 ep=2 seq=2048 lora-rank=8 recompute=full sharding=zero-1 expert-tp=1 dispatcher=alltoall | dataset finetune lr
megatron/functional_test.yaml | configured | tp=2 pp=2 vpp=2 micro-batch=4 sharding=zero-1 | train-iters
nemo/llama3_1_405b.yaml | configured | gpus=4608 tp=8 pp=9 vpp=7 cp=2 sharding=zero-1 precision=bf16 dropout=False | ~model.defer_embedding_wgrad_compute trainer.max_steps model.optim.lr
nemo/llama3_1_70b.yaml | llama-3.1-70b | gpus=512 tp=4 pp=4 vpp=5 cp=2 | exp_manager.create_wandb_logger
nemo/llama3_8b.yaml | llama-3-8b | gpus=8 cp=2 global-batch=128 | run.time_limit
nemo/llama2_7b.yaml | llama-2-7b | gpus=16 tp=2 | model.optim.lr
nemo/gpt3_175b.yaml | gpt3-175b | gpus=1024 tp=4 pp=8 vpp=12 precision=bf16 overlap=gradients,parameters,tensor,tensor-gradients,transfers | model.optim.lr
nemo/gpt3_5b.yaml | gpt3-6.7b-l24 | gpus=128 micro-batch=4 precision=bf16 dropout=True | hydra.searchpath
nemo/gpt3_20b_fp8_performance.yaml | configured | gpus=512 tp=4 precision=fp8 recompute=selective | run.results_dir
nemo/gpt3_70b_fsdp.yaml | mpt-70b | gpus=1024 tp=4 sharding=fsdp precision=bf16 overlap=tensor-gradients | ~model.fsdp_grad_reduce_dtype model.optim.lr
nemo/mixtral_8x7b.yaml | mixtral-8x7b | gpus=64 pp=4 vpp=8 ep=8 | model.moe_grouped_gemm
nemo/starcoder2_3b.yaml | configured | gpus=64 tp=2 seq=16384 precision=bf16 sequence-parallel=False | model.optim.lr
bridge/llama3_8b_override.yaml | llama-3-8b | seq=4096 global-batch=8 gradients=fp32 | optimizer.lr scheduler.lr_warmup_iters
bridge/llama3_8b_fsdp.yaml | llama-3-8b | sharding=zero-3 gradients=fp32 | checkpoint.save
bridge/qwen3_235b_a22b.yaml | qwen3-235b-a22b | expert-tp=1 precision=bf16 dispatcher=deepep sharding=zero-1 | train.manual_gc
bridge/deepseek_v3.yaml | deepseek-v3 | pp=16 vpp=2 ep=64 mtp-layers=1 recompute=selective:latent-up,mlp |
bridge/llama3_70b_perf.yaml | llama-3-70b | tp=4 pp=4 vpp=5 cp=2 precision=fp8 |
bridge/llama31_405b.yaml | llama-3.1-405b | tp=8 pp=8 vpp=8 cp=2 | checkpoint.save
bridge/kimi_k2_l8.yaml | kimi-k2 | ep=8 recompute=full | checkpoint.save
bridge/qwen3_30b_a3b.yaml | qwen3-30b-a3b | ep=8 micro-batch=4 sharding=zero-1 | rng.seed
bridge/distill_3b_1b.yaml | | seq=8192 micro-batch=1 | ~model.teacher
bridge/qwen3_next_finetune.yaml | qwen3-next-80b-a3b | ep=8 overlap=none | peft
torchtitan/llama3_8b.toml | llama-3.1-8b | seq=8192 sharding=fsdp recompute=selective kernels=compiled | optimizer.lr metrics.log_freq
torchtitan/llama3_70b.toml | llama-3.1-70b | tp=8 micro-batch=8 recompute=full | optimizer.lr
torchtitan/autopartition_llama3_70b.toml | llama-3.1-70b | tp=8 recompute=full kernels=plain | validation.enable
torchtitan/llama3_405b.toml | llama-3.1-405b | tp=8 micro-batch=2 precision=fp8 kernels=compiled overlap=gradients,parameters,tensor,transfers | model.tokenizer_path
torchtitan/llama3_70b_8xb200_8k.toml | llama-3.1-70b | gpus=8 accumulation=1 micro-batch=6 | optimizer.lr
torchtitan/deepseek_v3_16b.toml | deepseek-v2-lite | ep=8 | optimizer.lr
torchtitan/deepseek_v3_671b.toml | deepseek-v3 | ep=1 pp=1 kernels=plain | parallelism.pipeline_parallel_schedule
torchtitan/qwen3_32b.toml | qwen3-32b | micro-batch=2 recompute=full precision=bf16 | optimizer.lr
torchtitan/qwen3_next_80b_a3b.toml | qwen3-next-80b-a3b | seq=4096 micro-batch=8 precision=bf16 | quantize.linear.mx.filter_fqns
torchtitan/llama4_17bx16e.toml | llama-4-scout | tp=8 micro-batch=8 kernels=plain precision=bf16 | optimizer.lr
deepspeed/zero2_auto.json | | sharding=zero-2 accumulation=1 precision=fp16 bucket-mb=400.0 optimizer=adamw | scheduler.type optimizer.params.lr ~zero_optimization.allgather_bucket_size
deepspeed/zero3_auto.json | | sharding=zero-3 overlap=gradients,parameters | wall_clock_breakdown
deepspeed/zero3_offload.json | | sharding=zero-3 offload=optimizer overlap=none | ~zero_optimization.offload_param.device
deepspeed/z3_partial_offload.json | | sharding=zero-3 offload=optimizer | zero_force_ds_cpu_optimizer
deepspeed/gbs256_mbs32_zero1.json | | gpus=8 micro-batch=32 global-batch=256 sharding=zero-1 precision=fp16 | prescale_gradients
deepspeed/autotuning_fp16_z1.json | | sharding=zero-1 precision=fp16 | _comment
deepspeed/bigscience_bf16.json | | gpus=16 micro-batch=1 precision=bf16 | steps_per_print
deepspeed/bigscience_fp32.json | | gpus=16 sharding=zero-1 precision=fp32 | steps_per_print
deepspeed/zero_offload_10b.json | | sharding=zero-2 offload=optimizer global-batch=30 bucket-mb=100.0 optimizer=adamw | ?zero_optimization.comm_overlap
deepspeed/autotp.json | | tp=2 sharding=zero-2 overlap=none | zero_allow_untested_optimizer
accelerate/fsdp.yaml | | gpus=8 sharding=fsdp precision=bf16 master-weights=True optimizer=adamw:fp32 | fsdp_config.fsdp_auto_wrap_policy
accelerate/template_fsdp.yaml | | gpus=2 sharding=fsdp precision=bf16 accumulation=1 | fsdp_config.fsdp_use_orig_params
accelerate/latest_fsdp.yaml | | gpus=1 precision=fp32 | fsdp_config.fsdp_transformer_layer_cls_to_wrap
accelerate/fsdp_qlora.yaml | | gpus=2 precision=fp32 offload=optimizer | fsdp_config.fsdp_transformer_layer_cls_to_wrap
accelerate/fsdp2.yaml | | sharding=fsdp reshard=True | debug
accelerate/context_parallel_8gpu.yaml | | gpus=8 cp=8 recompute=full | ~fsdp_config.fsdp_activation_checkpointing_offload
accelerate/tp_hsdp.yaml | | gpus=8 tp=2 sharding=hybrid-fsdp shard=2 | rdzv_backend
accelerate/nd.yaml | | gpus=8 cp=4 sharding=fsdp | debug
accelerate/deepspeed_zero3.yaml | | sharding=zero-3 | deepspeed_config.zero3_init_flag
accelerate/multi_gpu.yaml | | gpus=2 sharding=none precision=autocast-bf16 |
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
    return FORMATS[Path(name).stem.partition("-")[0] if name.startswith("examples/") else name.partition("/")[0]]


def test_ten_of_each_format() -> None:
    files = sorted(path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file())
    assert files == sorted(name for name in KNOWN if not name.startswith("examples/"))
    assert Counter(map(format_of, KNOWN)) == dict.fromkeys(FORMATS.values(), 10)


@pytest.mark.parametrize("name", KNOWN)
def test_a_configuration_names_the_public_one_it_was_reduced_from(name: str) -> None:
    assert len(SOURCE.findall(path_of(name).read_text())) == 1


@pytest.mark.parametrize("name", KNOWN)
def test_every_key_is_in_one_list(name: str) -> None:
    """Used, not set, without effect, not modelled or not recognised: nothing is dropped in silence."""
    found = read_config(path_of(name))
    told = [*found.understood, *found.ignored, *found.not_modelled, *found.unknown, *found.unset]
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
            keys = {key for key in read_flags(text) if not key.startswith("$")}
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
    lists = {"": set(found.ignored), "~": set(found.not_modelled), "?": set(found.unknown)}
    for word in ignored.split():
        mark = word[0] if word[0] in lists else ""
        assert word.removeprefix(mark) in lists[mark]
    assert set(found.unknown) == {word[1:] for word in ignored.split() if word[0] == "?"}
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
def test_a_configuration_is_predicted(capsys: pytest.CaptureFixture[str], name: str, further: tuple[str, ...]) -> None:
    found = run_json(capsys, "predict", "--config", str(FOLDER / name), "--cluster", "dgx-h100", *further)
    assert found["step_s"] > 0
    assert found["config"]["ignored"] == list(read_config(FOLDER / name).ignored)


def test_words_that_are_typed_win(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(FOLDER / "nemo/llama3_8b.yaml")
    found = run_json(capsys, "predict", "--config", file, "--cluster", "dgx-h100", "--cp", "1", "--seq", "4096")
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
    assert read_flags(script)[flag] == value


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("a.yaml", "a: [1, 2", "not valid YAML"),
        ("a.yaml", "- 1\n- 2\n", "holds no YAML mapping"),
        ("a.yaml", "a: 1\n", "unrecognised configuration format"),
        ("a.json", '{"a": 1}', "unrecognised configuration format"),
        ("a.json", '{"a": ', "not valid JSON"),
        ("a.sh", "echo hello\n", "unrecognised configuration format"),
        ("a.sh", 'A="unclosed\n', "not a shell script"),
        ("a.toml", "a = \n", "not valid TOML"),
        ("a.sh", "A=x\n" + "A=$A$A$A$A$A$A$A$A\n" * 20 + "run --x $A", "grow too long"),
        ("a.sh", "A=" + "${a:-" * 150_000, "characters of a launch script: more than 200,000"),
        ("a.sh", "A=" + "`" * 150_001, "characters of a launch script: more than 200,000"),
        ("a.sh", "if " + "x || y && " * 3_000 + "z; then\necho\nfi\n", "unrecognised configuration format"),
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


def test_megatron_swift_has_its_own_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(
        "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B --train_type lora --expert_model_parallel_size 8 "
        "--tensor_model_parallel_size 2 --sequence_parallel true --max_length 4096"
    )
    options = read_config(tmp_path / "run.sh").options
    known: dict[str, object] = {"gpus": 8, "ep": 8, "expert-tp": 1, "dispatcher": "alltoall", "sharding": "zero-1"}
    known |= {"global-batch": 16, "micro-batch": 1, "recompute": "selective", "lora-rank": 8, "seq": 4096}
    assert known.items() <= options.items()


@pytest.mark.parametrize(
    ("options", "model", "padded"),
    [
        ("--tokenizer-model meta-llama/Meta-Llama-3-8B", "llama-3-8b", 129_024),
        ("--tokenizer-model mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1", 32_768),
        ("--tokenizer-model meta-llama/Llama-3.1-8B --make-vocab-size-divisible-by 1", "llama-3.1-8b", 128_256),
        ("--tokenizer-model meta-llama/Llama-3.1-8B --padded-vocab-size 128512", "llama-3.1-8b", 128_512),
    ],
)
def test_the_vocabulary_of_a_tokenizer_is_padded(tmp_path: Path, options: str, model: str, padded: int) -> None:
    """Megatron-LM pads it to a multiple of 128 for each tensor-parallel rank, here 8; models of one size differ."""
    (tmp_path / "run.sh").write_text(
        "pretrain_gpt.py --tensor-model-parallel-size 8 --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 "
        "--num-attention-heads 32 --group-query-attention --num-query-groups 8 --seq-length 8192 --swiglu --bf16 "
        "--position-embedding-type rope --disable-bias-linear --normalization RMSNorm --micro-batch-size 1 "
        f"--untie-embeddings-and-output-weights --tokenizer-type HuggingFaceTokenizer {options}"
    )
    found = read_config(tmp_path / "run.sh")
    words = model_words(found.sizes, [found.model], 8192)
    assert words.partition(":")[0] == model
    assert load_model(words).padded_vocab(8) == padded


@pytest.mark.parametrize(
    ("parallelism", "expected"),
    [
        (
            'data_parallel_replicate_degree = 4\ndata_parallel_shard_degree = 8\nfsdp_reshard_after_forward = "never"',
            "gpus=32 sharding=hybrid-fsdp replicate=4 reshard=False accumulation=1",
        ),
        (
            "data_parallel_shard_degree = 2\ntensor_parallel_degree = 2\npipeline_parallel_degree = 2\n"
            "context_parallel_degree = 2\npipeline_parallel_schedule = '1F1B'\n"
            "pipeline_parallel_microbatch_size = 1",
            "gpus=16 tp=2 pp=2 cp=2 schedule=1f1b micro-batch=1 precision=bf16",
        ),
        # Without FSDP weights are fp32: cast for each use, but not where ranks split the model.
        (
            "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = 1",
            "gpus=8 sharding=none precision=autocast-bf16",
        ),
        (
            "data_parallel_shard_degree = 1\ndata_parallel_replicate_degree = 2\ntensor_parallel_degree = 2",
            "gpus=4 sharding=none precision=fp32",
        ),
        ("data_parallel_shard_degree = 1\ncontext_parallel_degree = 4", "gpus=4 cp=4 sharding=fsdp precision=bf16"),
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


def test_torchtitan_cuts_the_local_batch_for_a_pipeline_that_is_given_on_the_command_line(tmp_path: Path) -> None:
    """torchtitan/distributed/pipeline_parallel.py: local_batch_size / pipeline_parallel_microbatch_size micro-batches."""
    file = tmp_path / "train.toml"
    common = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 8\n[parallelism]\n'
    expected = {
        "": {1: (8, 1), 2: (1, 8)},
        "pipeline_parallel_degree = 4\npipeline_parallel_microbatch_size = 2": {1: (8, 1), 2: (2, 4)},
    }
    for keys, batches in expected.items():
        file.write_text(common + keys)
        for pp, batch in batches.items():
            asked = stepcast.predict(config=str(file), cluster="dgx-h100", gpus=16, pp=pp).to_dict()["strategy"]
            micro_batches = asked["global_batch"] // (16 // pp * asked["micro_batch"])
            assert (asked["micro_batch"], micro_batches) == batch


def test_ddp_of_torchtitan_has_buckets() -> None:
    """Weights, gradients and their copies in buckets are fp32, and so are the moments."""
    common: dict[str, Any] = {
        "model": "llama-3.2-1b",
        "cluster": "dgx-h100",
        "framework": "torchtitan",
        "sharding": "none",
    }
    alone, many = (
        stepcast.predict(**common, precision="autocast-bf16", gpus=gpus, seq=128, accumulation=2).memory[0]
        for gpus in (1, 8)
    )
    assert many.gradients - alone.gradients == pytest.approx(4 * 1.236e9, rel=0.01)


@pytest.mark.parametrize(
    ("stage", "overlaps", "size", "buffers"),
    [
        *((0, True, 5e8, 0), (1, False, 5e8, 1), (2, False, 2e8, 1), (2, True, 5e8, 2), (3, True, 5e8, 1)),
        *((2, True, "auto", 2), (3, True, "auto", 1)),
    ],
)
def test_buffers_of_deepspeed(tmp_path: Path, stage: int, overlaps: bool, size: float | str, buffers: int) -> None:
    """ZeRO 1 and 2 have two where reductions overlap; "auto" is the hidden size squared, here 2,048."""
    zero = {"stage": stage, "overlap_comm": overlaps, "reduce_bucket_size": size}
    (tmp_path / "ds.json").write_text(json.dumps({"bf16": {"enabled": True}, "zero_optimization": zero}))
    common: dict[str, Any] = {"model": "llama-3.2-1b", "cluster": "dgx-h100", "gpus": 8, "seq": 512, "micro_batch": 1}
    memory = stepcast.predict(**common, config=str(tmp_path / "ds.json")).memory[0]
    elements = 2048**2 if size == "auto" else float(size)
    assert memory.communication == pytest.approx(0.3 * 2**30 + buffers * 2 * elements)


@pytest.mark.parametrize(
    ("strategy", "sharding", "reshard"),
    [
        ("1", "fsdp", None),
        ("2", "fsdp", False),
        ("SHARD_GRAD_OP", "fsdp", False),
        ("3", "none", None),
        ("HYBRID_SHARD", "hybrid-fsdp", None),
        ("5", "hybrid-fsdp", False),
    ],
)
def test_strategies_of_fsdp(tmp_path: Path, strategy: str, sharding: str, reshard: bool | None) -> None:
    """Two machines of eight: hybrid strategies have a copy of the states on each."""
    file = tmp_path / "fsdp.yaml"
    file.write_text(
        "distributed_type: FSDP\nnum_processes: 16\nnum_machines: 2\n"
        f"fsdp_config:\n  fsdp_sharding_strategy: {strategy}\n"
    )
    options = read_config(file).options
    assert options["sharding"] == sharding
    assert options.get("reshard") is reshard
    assert options.get("shard") == (8 if sharding == "hybrid-fsdp" else None)


FSDP_1 = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config:\n  fsdp_sharding_strategy: FULL_SHARD\n  "
NEMO = "model:\n  num_layers: 4\n  hidden_size: 1024\n  num_attention_heads: 8\n  encoder_seq_length: 512\n"
TRAINER = "per_device_train_batch_size: 1\nmodel_name_or_path: meta-llama/Llama-3.1-8B\nfsdp: full_shard\n"


@pytest.mark.parametrize(
    ("text", "word", "part"),
    [
        (FSDP_1 + "fsdp_backward_prefetch: BACKWARD_POST", "post", "understood"),
        (FSDP_1 + "fsdp_backward_prefetch_policy: BACKWARD_POST", "post", "understood"),
        (FSDP_1 + "fsdp_backward_prefetch: BACKWARD_PRE", None, "understood"),  # as all profiles of these tools do
        (FSDP_1 + "fsdp_backward_prefetch: NO_PREFETCH", "post", "understood"),
        (FSDP_1 + "fsdp_backward_prefetch: null", "post", "understood"),
        (FSDP_1 + "fsdp_backward_prefetch: BACKWARD_PRO", None, "not_modelled"),
        (
            FSDP_1 + "fsdp_backward_prefetch: BACKWARD_POST\n  fsdp_version: 2",
            None,
            "ignored",
        ),  # FSDP2 has no such choice
        (FSDP_1 + "fsdp_backward_prefetch: BACKWARD_POST\n  fsdp_activation_checkpointing: true", None, "ignored"),
        (FSDP_1.replace("FULL_SHARD", "NO_SHARD") + "fsdp_backward_prefetch: BACKWARD_POST", None, "ignored"),
        (FSDP_1.replace("FULL_SHARD", "SHARD_GRAD_OP") + "fsdp_backward_prefetch: BACKWARD_POST", None, "ignored"),
        (TRAINER + "fsdp_config: {backward_prefetch: backward_post}", "post", "understood"),
        (TRAINER + "fsdp_config: {backward_prefetch: no_prefetch}", "post", "understood"),
        (TRAINER + "fsdp_config: {backward_prefetch: backward_post}\ngradient_checkpointing: true", None, "ignored"),
        (
            "base_model: NousResearch/Llama-3.2-1B\nsequence_len: 1024\nmicro_batch_size: 1\n"
            "fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_backward_prefetch: BACKWARD_POST}",
            "post",
            "understood",
        ),
        (
            TRAINER + "finetuning_type: full\nfsdp_config: {backward_prefetch: backward_post}",
            None,
            "ignored",
        ),  # recomputes
        (
            TRAINER + "finetuning_type: full\ndisable_gradient_checkpointing: true\n"
            "fsdp_config: {backward_prefetch: backward_post}",
            "post",
            "understood",
        ),
    ],
)
def test_when_fsdp_gathers_for_the_backward(tmp_path: Path, text: str, word: str | None, part: str) -> None:
    """Torch's BackwardPrefetch (torch/distributed/fsdp/api.py), which FSDP2 has not."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = read_config(file)
    assert config.options.get("backward-prefetch") == word
    assert any("backward_prefetch" in key for key in getattr(config, part))


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (FSDP_1 + "fsdp_offload_params: false", "post"),
        ("distributed_type: FSDP\nnum_processes: 8", "post"),
        (FSDP_1 + "fsdp_version: 2", None),
        (FSDP_1 + "fsdp_activation_checkpointing: true", None),
        (FSDP_1.replace("FULL_SHARD", "SHARD_GRAD_OP") + "fsdp_offload_params: false", None),
        (TRAINER, None),
        (TRAINER + "fsdp_config: {version: 1}", "post"),
        (TRAINER + "fsdp_config: {version: 1}\ngradient_checkpointing: true", None),
    ],
)
def test_fsdp1_gathers_nothing_ahead_unless_a_file_asks_for_it(tmp_path: Path, text: str, word: str | None) -> None:
    """Accelerate's default is version 1 (utils/dataclasses.py, FullyShardedDataParallelPlugin), that of transformers 5
    is version 2 (training_args.py, _process_fsdp_args); NO_PREFETCH is the default of version 1 in both.
    """
    file = tmp_path / "run.yaml"
    file.write_text(text)
    config = read_config(file)
    assert config.options.get("backward-prefetch") == word
    is_recomputed = "checkpointing: true" in text
    assert any("NO_PREFETCH" in text for text in config.assumed) is (word == "post" or is_recomputed)


@pytest.mark.parametrize(
    ("text", "key", "why"),
    [
        (TRAINER + "gradient_accumulation_steps: four", "gradient_accumulation_steps", "'four' is no number"),
        (TRAINER + "lora_r: eight\nuse_peft: true", "lora_r", "'eight' is no number"),
        (TRAINER + "gradient_accumulation_steps: 2.5", "gradient_accumulation_steps", "'2.5' is no whole number"),
        (TRAINER + "gradient_accumulation_steps: [4]", "gradient_accumulation_steps", "'[4]' is no number"),
        (TRAINER + "optim: foo", "optim", "predicted as AdamW"),
        (FSDP_1.replace("FULL_SHARD", "FULL_SHARDD"), "fsdp_config.fsdp_sharding_strategy", "predicted as FULL_SHARD"),
        ("distributed_type: FSPD\nnum_processes: 8", "distributed_type", "without sharding"),
        ("distributed_type: FSDP\nmixed_precision: bf61", "mixed_precision", "bf16"),
        (NEMO + "trainer: {precision: half}", "trainer.precision", "fp32"),
        (NEMO + "  optim: {name: lion}", "optim.name", "AdamW"),
        (NEMO + "  recompute_granularity: some", "recompute_granularity", "without recomputation"),
        (NEMO + "  num_moe_experts: 8\n  moe_token_dispatcher_type: all", "moe_token_dispatcher_type", "dispatcher"),
    ],
)
def test_values_that_are_not_understood_are_reported(tmp_path: Path, text: str, key: str, why: str) -> None:
    """Each is predicted by a default, which a warning states."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    reasons = read_config(file).not_modelled
    assert why in next(reason for name, reason in reasons.items() if name.endswith(key))


# ---- the same as a command line -----------------------------------------------------------------------

MODELS = {"deepspeed": "llama-3.2-1b", "accelerate": "qwen2.5-7b", "distill_3b_1b": "llama-3.2-1b"}
GPUS = {
    "bridge/deepseek_v3.yaml": 1024,
    "bridge/llama31_405b.yaml": 128,
    "torchtitan/llama3_405b.toml": 256,
    "deepspeed/zero_offload_10b.json": 2,
    "megatron/functional_test.yaml": 8,
    "nemo/gpt3_70b_fsdp.yaml": 64,
    "bridge/llama3_8b_override.yaml": 8,
    "bridge/llama3_8b_fsdp.yaml": 8,
    "bridge/distill_3b_1b.yaml": 8,
}


def further_words(name: str) -> list[str]:
    """What a file leaves out: a model where it names none, and GPUs."""
    config, words = read_config(path_of(name)), ["--cluster", "dgx-h100"]
    for part, model in MODELS.items():
        words += ["--model", model] if part in name else []
    if "gpus" not in config.options or name in GPUS:
        words += ["--gpus", str(GPUS.get(name, 64))]
    return [*words, "--ignore-unknown"] if config.unknown else words


def asked_of(words: list[str]) -> SettledRun:
    parser = build_parser(load=True)
    return settle(read_question(parser.parse_args(words))[0])


@pytest.mark.parametrize("name", KNOWN)
def test_a_file_and_its_command_line_ask_for_the_same(name: str) -> None:
    """Model, cluster, strategy and software are equal, and a prediction depends on nothing else."""
    parser = build_parser(load=True)
    args = parser.parse_args(["predict", "--config", str(path_of(name)), *further_words(name)])
    by_file = settle(read_question(args)[0])
    command = shlex.split(write_command(by_file))
    assert command[:2] == ["stepcast", "predict"]
    assert not [word for word in command if word.startswith("--config")]
    by_command = asked_of(command[1:])
    for part in ("model", "cluster", "strategy", "framework", "options"):
        assert getattr(by_file, part) == getattr(by_command, part), part


@pytest.mark.parametrize(
    "name",
    [
        "examples/configs/megatron-llama3-8b.sh",
        "megatron/mixtral_8x7b.sh",
        "nemo/llama3_8b.yaml",
        "bridge/qwen3_30b_a3b.yaml",
        "torchtitan/llama3_8b.toml",
        "deepspeed/zero3_offload.json",
        "accelerate/fsdp.yaml",
    ],
)
def test_a_file_and_its_command_line_give_the_same_bits(capsys: pytest.CaptureFixture[str], name: str) -> None:
    by_file = run_json(capsys, "predict", "--config", str(path_of(name)), *further_words(name))
    by_command = run_json(capsys, *shlex.split(by_file["config"]["command"])[1:])
    assert by_file["step_s"].hex() == by_command["step_s"].hex()
    assert by_file["memory_bytes"] == by_command["memory_bytes"]


# ---- keys ---------------------------------------------------------------------------------------------

GPT = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --bf16 --micro-batch-size 1 "


def read_text(tmp_path: Path, text: str, name: str = "a.sh") -> RunConfig:
    (tmp_path / name).write_text(text)
    return read_config(tmp_path / name)


def test_nemo_adds_up_gradients_as_its_file_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.yaml"
    asked = ("predict", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "8", "--no-gradient-accumulation-fusion")
    _, out, _ = run(capsys, *asked, "--framework", "nemo", "--emit", "nemo")
    path.write_text(out[out.index("trainer:") :])
    assert yaml.safe_load(path.read_text())["model"]["gradient_accumulation_fusion"] is False
    assert read_config(path).options["gradient-accumulation-fusion"] is False


@pytest.mark.parametrize(
    "text", ['[model]\nname = "llama3"\nflavor = "8B"', "[parallelism]\ntensor_parallel_degree = 2"]
)
def test_torchtitans_main_tables_may_be_missing(text: str, tmp_path: Path) -> None:
    assert read_text(tmp_path, text, "job.toml").format == "torchtitan"


def test_a_misspelt_argument_is_an_error_with_the_right_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} --tensor-model-paralel-size 8")
    words = ["predict", "--config", str(file), "--cluster", "dgx-h100"]
    assert main(words) == 2
    message = capsys.readouterr().err
    assert "'--tensor-model-paralel-size' (did you mean '--tensor-model-parallel-size'?)" in message
    found = run_json(capsys, *words, "--ignore-unknown")
    assert found["config"]["unknown"] == {"tensor-model-paralel-size": "tensor-model-parallel-size"}
    assert found["strategy"]["tp"] == 1
    assert any("unrecognised keys left out: tensor-model-paralel-size" in note for note in found["warnings"])


def test_the_library_takes_configurations(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} --no-rope-fusion --lerning-rate 1")
    with pytest.raises(ValueError, match="lerning"):
        stepcast.predict(config=str(file), cluster="dgx-h100")
    found = stepcast.predict(config=str(file), cluster="dgx-h100", ignore_unknown=True)
    assert found.step_s > 0
    assert any("no-rope-fusion not modelled" in note for note in found.report.warnings)


@pytest.mark.parametrize(
    ("name", "text", "key", "near"),
    [
        (
            "a.yaml",
            "distributed_type: FSDP\nfsdp_config:\n  fsdp_sharding_stategy: FULL_SHARD",
            "fsdp_config.fsdp_sharding_stategy",
            "fsdp_config.fsdp_sharding_strategy",
        ),
        (
            "a.json",
            '{"zero_optimization": {"stage": 3, "overlap_com": true}}',
            "zero_optimization.overlap_com",
            "zero_optimization.overlap_comm",
        ),
        (
            "a.toml",
            '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_paralel_degree = 2\n',
            "parallelism.tensor_paralel_degree",
            "parallelism.tensor_parallel_degree",
        ),
        (
            "a.yaml",
            "trainer: {num_nodes: 1, devices: 8}\nmodel: {num_layers: 2, micro_batch_sise: 1}",
            "model.micro_batch_sise",
            "model.micro_batch_size",
        ),
    ],
)
def test_misspelt_keys_have_a_nearest_name(tmp_path: Path, name: str, text: str, key: str, near: str) -> None:
    assert read_text(tmp_path, text, name).unknown == {key: near}


def test_ignore_unknown_needs_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "llama-3.2-1b", "--gpu", "h200", "--ignore-unknown"]) == 2
    assert "--ignore-unknown has no effect" in capsys.readouterr().err


@pytest.mark.parametrize("tool", ["megatron", "nemo", "deepspeed", "accelerate", "torchtitan"])
def test_lists_of_keys_have_a_source_and_do_not_overlap(tool: str) -> None:
    table = tomllib.loads((DATA / f"{tool}.toml").read_text())
    assert table["source"]
    own = {*table["no_effect"].split(), *table.get("read", "").split()}
    reasons = [name for entry in table["not_modelled"] for name in entry["keys"].split()]
    assert len(reasons) == len(set(reasons))
    assert not own & set(reasons)


# ---- Megatron-LM --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # Decoder layers between bars: 7 + 2 x 8 + 9 = 32.
        (
            "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et*7|(t*8|)*2,t*9,L'",
            "stage-layers=7,8,8,9",
        ),
        # Eight stages on two ranks: four chunks each.
        (
            "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E|(t*6|)*5tt|L'",
            "vpp=4 stage-layers=0,6,6,6,6,6,2,0",
        ),
        # 32 - 6 - 8 = 18 for two ranks between.
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6 "
            "--decoder-last-pipeline-num-layers 8",
            "stage-layers=6,9,9,8",
        ),
        ("--pipeline-model-parallel-size 3 --decoder-last-pipeline-num-layers 10", "stage-layers=11,11,10"),
        # 32 + 2 = 34 places in two stages, of which the first and the last hold no layer.
        (
            "--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split "
            "--account-for-loss-in-pipeline-split",
            "stage-layers=16,16",
        ),
        ("--main-grads-dtype bf16 --use-precision-aware-optimizer", "gradients=bf16"),
        ("--exp-avg-dtype fp8 --exp-avg-sq-dtype fp8", "optimizer=adamw:fp8"),
        ("--exp-avg-dtype bf16", "optimizer=adamw:fp32 ~exp-avg-dtype"),
        ("--context-parallel-size 2 --cp-comm-type a2a", "cp-comm=a2a"),
        ("--context-parallel-size 2 --cp-comm-type allgather", "cp-comm=allgather"),
        ("--context-parallel-size 4 --cp-comm-type a2a+p2p", "cp-comm=p2p ~cp-comm-type"),
        ("--use-distributed-optimizer --num-distributed-optimizer-instances 4", "sharding=zero-1 replicate=4"),
        (
            "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
            "--num-distributed-optimizer-instances 2",
            "sharding=hybrid-fsdp replicate=2",
        ),
        # DistributedDataParallelConfig: no_shard is the default, and only Megatron-FSDP reads the strategy.
        ("--use-megatron-fsdp", "sharding=none"),
        ("--use-distributed-optimizer --data-parallel-sharding-strategy no_shard", "sharding=zero-1"),
        ("--num-experts 8 --moe-token-dispatcher-type allgather", "dispatcher=allgather"),
        (
            "--num-experts 8 --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
            "dispatcher=hybridep",
        ),
        ("--num-experts 8 --overlap-moe-expert-parallel-comm", "overlap=experts"),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 3", "recompute=block:3"),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "recompute=full"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
            "recompute=full ~recompute-num-layers",
        ),
        ("", "execution=eager dropout=True accumulation=1"),
        ("--enable-cuda-graph", "execution=graphs"),
        ("--cuda-graph-impl local --num-experts 8", "execution=partial-graphs"),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration --num-experts 8", "execution=graphs"),
        ("--attention-dropout 0 --hidden-dropout 0", "dropout=False"),
        ("--tensor-model-parallel-size 2", "sequence-parallel=False"),
        ("--attention-backend unfused", "flash-attention=False"),
        ("--no-gradient-accumulation-fusion", "gradient-accumulation-fusion=False"),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", "loss=engine"),
    ],
)
def test_arguments_of_megatron_act_or_are_reported(tmp_path: Path, flags: str, expected: str) -> None:
    found = read_text(tmp_path, f"python pretrain_gpt.py {GPT} {flags}")
    said = {key: str(value) for key, value in found.options.items()}
    for word in expected.split():
        key, _, value = word.partition("=")
        if word.startswith("~"):
            assert word[1:] in found.not_modelled
        else:
            assert said[key] == value, key
    assert not found.unknown


@pytest.mark.parametrize(
    "flags",
    [
        "--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout 'Et|tL'",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Ex|tL'",
        "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'E|((t*999999)*999999)*9|L'",
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 6",
    ],
)
def test_stages_that_megatron_refuses_are_refused(tmp_path: Path, flags: str) -> None:
    with pytest.raises(FormatError):
        read_text(tmp_path, f"python pretrain_gpt.py {GPT} {flags}")


def test_a_layout_of_stages_is_predicted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A stage of 14 layers runs longer than one of 8, so the uneven pipeline is slower."""
    seconds = []
    for layout in ("Et*8|t*8|t*8|t*8L", "Et*5|t*6|t*7|t*14L"):
        file = tmp_path / "a.sh"
        file.write_text(
            f"torchrun --nproc_per_node 8 pretrain_gpt.py {GPT} --global-batch-size 32 "
            f"--pipeline-model-parallel-size 4 --pipeline-model-parallel-layout '{layout}'"
        )
        seconds.append(run_json(capsys, "predict", "--config", str(file), "--cluster", "dgx-h100")["step_s"])
    assert seconds[1] > 1.4 * seconds[0]


LITE = (
    "--num-layers 27 --hidden-size 2048 --num-attention-heads 16 --ffn-hidden-size 10944 --num-experts 64 "
    "--moe-router-topk 6 --moe-ffn-hidden-size 1408 --swiglu --multi-latent-attention --v-head-dim 128 --kv-lora-rank "
)


@pytest.mark.parametrize(("rank", "model"), [(512, "deepseek-v2-lite"), (256, "configured")])
def test_latent_sizes_are_compared(tmp_path: Path, rank: int, model: str) -> None:
    found = read_text(tmp_path, f"python pretrain_gpt.py {LITE}{rank}")
    words = model_words(found.sizes, [], 4096)
    assert words.partition(":")[0] == model
    latent = load_model(words).latent
    assert latent is not None
    assert (latent.kv_rank, latent.nope_dim, latent.rope_dim, latent.query_rank) == (rank, 128, 64, 0)


@pytest.mark.parametrize(
    ("flags", "groups"), [("--moe-router-num-groups 8 --moe-router-group-topk 3", (8, 3)), ("", (1, 1))]
)
def test_routing_is_limited_as_the_script_says(tmp_path: Path, flags: str, groups: tuple[int, int]) -> None:
    found = read_text(tmp_path, f"python pretrain_gpt.py {LITE}512 {flags}")
    experts = load_model(model_words(found.sizes, [], 4096)).experts
    assert experts is not None
    assert (experts.groups, experts.top_groups) == groups
    assert not found.not_modelled


def test_a_window_is_that_of_the_script(tmp_path: Path) -> None:
    found = read_text(tmp_path, f"python pretrain_gpt.py {GPT} --ffn-hidden-size 14336 --window-size 1024,0")
    window = load_model(model_words(found.sizes, [], 2048)).window
    assert window is not None
    assert window.size == 1025  # itself and the 1,024 before it


# ---- batches ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rounds", "sequences"), [(1, 64), (2, 128), (16, 1024)])
def test_deepspeed_accumulates_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], rounds: int, sequences: int
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 1,
                "gradient_accumulation_steps": rounds,
                "bf16": {"enabled": True},
                "zero_optimization": {"stage": 3},
            }
        )
    )
    words = ("--model", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "64")
    found = run_json(capsys, "predict", "--config", str(file), *words)
    assert found["strategy"]["global_batch"] == sequences
    typed = run_json(capsys, "predict", "--config", str(file), *words, "--global-batch", "256")
    assert typed["strategy"]["global_batch"] == 256


DEEPSPEED_BATCHES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def words_of_batches(tmp_path: Path, sizes: tuple[object, ...], words: str) -> list[str]:
    """Return the arguments that predict a DeepSpeed file with batches of these *sizes*."""
    file = tmp_path / "ds.json"
    stated = {name: size for name, size in zip(DEEPSPEED_BATCHES, sizes, strict=True) if size is not None}
    file.write_text(json.dumps({**stated, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}))
    return f"predict --config {file} --model llama-3.2-1b --cluster dgx-h100 {words}".split()


@pytest.mark.parametrize(
    ("sizes", "words", "expected"),
    [
        ((64, 2, 4), "", (64, 2, 4)),
        ((64, 2, 4), "--gpus 8", (64, 2, 4)),
        ((64, 2, 4), "--gpus 16 --tp 2", (64, 2, 4)),
        ((64, 2, None), "--gpus 16", (64, 2, 2)),
        ((64, None, 4), "--gpus 8", (64, 2, 4)),
        ((64, None, None), "--gpus 8", (64, 8, 1)),
        ((64, "auto", "auto"), "--gpus 8", (64, 1, 8)),
        ((None, 2, 4), "--gpus 16", (128, 2, 4)),
        ((64, 2, 4), "--gpus 16 --accumulation 4", (128, 2, 4)),
        ((64, 2, 4), "--gpus 16 --global-batch 96", (96, 2, 3)),
        ((64, 2, 4), "--gpus 8 --micro-batch 4", (64, 4, 2)),
        ((64, None, 1), "--gpus 8 --micro-batch 1", (64, 1, 8)),
    ],
)
def test_batches_of_deepspeed_follow_from_each_other(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sizes: tuple[object, ...],
    words: str,
    expected: tuple[int, int, int],
) -> None:
    """Two of the sizes give the third, and one alone means no accumulation (DeepSpeed, deepspeed/runtime/config.py,
    _set_batch_related_parameters); an option replaces what it contradicts.
    """
    strategy = run_json(capsys, *words_of_batches(tmp_path, sizes, words))["strategy"]
    assert (strategy["global_batch"], strategy["micro_batch"], strategy["micro_batches"]) == expected


@pytest.mark.parametrize(
    ("sizes", "words", "problem"),
    [
        ((64, 2, 4), "--gpus 16", "64 is not micro-batch 2 x accumulation 4 x dp 16 = 128, .* use --gpus 8 or --accumulation 2 or --global-batch 128"),
        ((64, 2, 4), "--tp 2", "x dp 4 = 32, .* use --gpus 16 or --accumulation 8 or --global-batch 32"),
        ((64, 1, 4), "--gpus 8", "micro-batch 1 x accumulation 4 x dp 8 = 32, .* use --gpus 16"),
        ((10, 4, 1), "", "10 is not micro-batch 4 .* use --global-batch 8"),
        ((64, None, 3), "--gpus 8", "64 is not micro-batch 2 x accumulation 3 x dp 8 = 48, .* use --accumulation 4"),
        ((64, 0, 4), "--gpus 8", "train_micro_batch_size_per_gpu 0: expected a whole number from 1"),
        ((64, 2, -1), "--gpus 8", "gradient_accumulation_steps -1: expected a whole number from 1"),
    ],
)  # fmt: skip
def test_batches_of_deepspeed_that_contradict_the_gpus_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], sizes: tuple[object, ...], words: str, problem: str
) -> None:
    """As DeepSpeed refuses them (deepspeed/runtime/config.py, _batch_assertion)."""
    status, _, error = run(capsys, *words_of_batches(tmp_path, sizes, words))
    assert status == 2
    assert re.search(rf"ds\.json: .*{problem}", error), error


@pytest.mark.parametrize("more", [{"sequence_parallel_size": 2}, {"elasticity": {"enabled": True}}])
def test_batches_of_deepspeed_that_depend_on_more_get_a_warning(tmp_path: Path, more: dict[str, object]) -> None:
    """Ranks that share a sequence are no data-parallel ranks; elastic training replaces the batch."""
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({**dict(zip(DEEPSPEED_BATCHES, (64, 2, 4), strict=True)), **more}))
    found = read_config(file)
    assert found.options["global-batch"] == 64
    assert "accumulation" not in found.options
    assert found.not_modelled


def test_torchtitan_takes_the_ranks_that_are_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 64 GPUs two hold each copy's tensors, eight copies of the states are split over four ranks each."""
    file = tmp_path / "train.toml"
    file.write_text(
        '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 2\nseq_len = 4096\n[parallelism]\n'
        "data_parallel_replicate_degree = 8\ndata_parallel_shard_degree = -1\ntensor_parallel_degree = 2\n"
    )
    words = ("predict", "--config", str(file), "--cluster", "dgx-h100", "--gpus", "64")
    found = run_json(capsys, *words)
    assert found["strategy"]["global_batch"] == 2 * 32
    args = build_parser(load=True).parse_args(list(words))
    layout = settle(read_question(args)[0]).strategy.layout
    assert (layout.dp, layout.shard_size, layout.copies) == (32, 4, 8)


def test_accelerate_accumulates_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "llama-3.2-1b", "--cluster", "dgx-h100")
    found = run_json(capsys, "predict", "--config", str(FOLDER / "accelerate/fsdp.yaml"), *words)
    assert found["strategy"]["global_batch"] == 8
    assert any("gradient accumulation of 1" in note for note in found["config"]["assumed"])


def test_accumulation_and_global_batch_must_agree(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "8", "--accumulation", "4"]
    assert run_json(capsys, *words)["strategy"]["global_batch"] == 32
    assert main([*words, "--global-batch", "64"]) == 2
    assert "means a global batch of 32" in capsys.readouterr().err


# ---- precision, and whose software --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("formats", "precision"),
    [
        ({"bf16": {"enabled": "auto"}}, None),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}, None),
        ({"fp16": {"enabled": "auto"}}, "fp16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({}, "fp32"),
    ],
)
def test_auto_is_taken_for_the_format_of_the_gpu(
    tmp_path: Path, formats: dict[str, object], precision: str | None
) -> None:
    text = json.dumps({**formats, "zero_optimization": {"stage": 2}})
    found = read_text(tmp_path, text, "ds.json")
    assert found.options.get("precision") == precision
    assert any("auto" in note and (precision or "bf16") in note for note in found.assumed) == ("auto" in text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("ds.json", '{"bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}'),
        ("axolotl.yaml", "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 512\nbf16: auto\n"),
        ("accelerate.yaml", "distributed_type: MULTI_GPU\nnum_processes: 1\n"),
    ],
)
def test_formats_left_open_are_those_of_the_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, text: str
) -> None:
    """A V100 has no bf16 (NVIDIA V100 data sheet); Axolotl then switches fp16 on (utils/config/__init__.py)."""
    (tmp_path / name).write_text(text)
    words = ["predict", "--config", str(tmp_path / name), "--model", "llama-3.2-1b", "--seq", "512", "--gpus", "1"]
    for gpu, precision in (("v100-sxm-32gb", "fp16"), ("h100", "bf16")):
        assert run_json(capsys, *words, "--gpu", gpu)["strategy"]["precision"] == precision


def test_deepspeed_is_software_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    """Flash attention, no dropout and no recomputation: as fast as transformers but for its gathers."""
    words = ("--model", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "64", "--seq", "4096")
    file = str(FOLDER / "deepspeed/zero3_auto.json")
    found = run_json(capsys, "predict", "--config", file, *words)
    plain = run_json(
        capsys, "predict", "--framework", "transformers", "--sharding", "zero-3", "--accumulation", "1", *words
    )
    assert found["framework"] == "deepspeed-transformers"
    assert found["strategy"]["recompute"] == "none"
    assert found["step_s"] == pytest.approx(plain["step_s"], rel=0.1)
    software = load_framework("deepspeed-transformers")
    assert software.flash_attention
    assert not software.dropout
    # fp32 weights and two moments, 12 bytes a parameter, split over 64 ranks.
    states = found["memory_bytes"]["optimizer"]
    assert states == pytest.approx(12 * found["parameters"] / 64, rel=0.02)


def test_fsdp_of_accelerate_keeps_fp32_states(capsys: pytest.CaptureFixture[str]) -> None:
    """Of each parameter 4 bytes of weight, 4 of gradient and 8 of moments, split over 8 ranks."""
    words = ("--model", "llama-3.2-1b", "--cluster", "dgx-h100")
    found = run_json(capsys, "predict", "--config", str(FOLDER / "accelerate/fsdp.yaml"), *words)
    memory = found["memory_bytes"]
    share = found["parameters"] / 8
    assert memory["optimizer"] == pytest.approx(8 * share, rel=0.02)
    assert memory["parameters"] == pytest.approx(4 * share, rel=0.02)
    assert memory["gradients"] == pytest.approx(4 * share, rel=0.02)
    assert found["strategy"]["precision"] == "bf16"


@pytest.mark.parametrize(
    ("converters", "precision"),
    [("[]", "bf16"), ('["float8"]', "fp8"), ('["quantize.linear.float8"]', "fp8"), ('["mx"]', "mxfp8")],
)
def test_float8_needs_its_converter(tmp_path: Path, converters: str, precision: str) -> None:
    text = (
        f'[model]\nname = "llama3"\nflavor = "8B"\nconverters = {converters}\n[training]\nseq_len = 4096\n'
        "[float8]\nenable_fsdp_float8_all_gather = true\n"
    )
    found = read_text(tmp_path, text, "a.toml")
    assert found.options["precision"] == precision
    gathers = "float8.enable_fsdp_float8_all_gather"
    assert (gathers in found.not_modelled) == (precision == "fp8")


def test_a_loss_on_whole_logits_is_reported(tmp_path: Path) -> None:
    text = (
        '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = {}\n'
        "disable_loss_parallel = true\n"
    )
    key = "parallelism.disable_loss_parallel"
    assert key in read_text(tmp_path, text.format(2), "a.toml").not_modelled
    assert key in read_text(tmp_path, text.format(1), "a.toml").ignored


SIZES = "--num-layers 30 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --micro-batch-size 1 --bf16"


@pytest.mark.parametrize(
    ("flags", "parameters"),
    [
        # BLOOM 7B1 has these sizes, but five times the vocabulary and no learned positions.
        ("--vocab-size 50304", 30 * (12 * 4096**2 + 13 * 4096) + (50304 + 2048 + 2) * 4096),
        # Gated MLPs four times as wide, LLaMA's norms and positions.
        (
            "--vocab-size 64000 --swiglu --ffn-hidden-size 16384 --untie-embeddings-and-output-weights "
            "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear",
            30 * ((4 + 3 * 4) * 4096**2 + 2 * 4096) + (2 * 64000 + 1) * 4096,
        ),
        # Megatron-LM's width without --ffn-hidden-size, embeddings shared with the output projection.
        (
            "--vocab-size 64000 --swiglu --hidden-size 4352 --num-attention-heads 34 --max-position-embeddings 4096",
            30 * (4 * 4352**2 + 3 * 4352 * 11584 + 9 * 4352 + 2 * 11584) + (64000 + 4096 + 2) * 4352,
        ),
        # Llama 2 7B has the sizes of the first layers; biases of the queries, keys and values alone, norms of heads.
        (
            "--vocab-size 32000 --swiglu --ffn-hidden-size 11008 --use-rotary-position-embeddings "
            "--normalization RMSNorm --disable-bias-linear --add-qkv-bias --qk-layernorm",
            30 * (4 * 4096**2 + 3 * 4096 * 11008 + 5 * 4096 + 2 * 128) + (32000 + 1) * 4096,
        ),
        # Qwen 3 0.6B has these sizes, but wider heads.
        (
            "--num-layers 28 --hidden-size 1024 --num-attention-heads 16 --ffn-hidden-size 3072 --vocab-size 151936 "
            "--squared-relu --position-embedding-type none --disable-bias-linear",
            28 * (4 * 1024**2 + 2 * 1024 * 3072 + 4 * 1024) + (151936 + 2) * 1024,
        ),
    ],
)
def test_the_model_of_a_script_is_what_its_arguments_say(tmp_path: Path, flags: str, parameters: int) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} {flags}")
    assert stepcast.predict(config=str(path), cluster="dgx-h100").facts()["parameters"] == parameters


def test_a_vocabulary_that_a_file_leaves_open_is_stated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"torchrun --nproc_per_node 8 pretrain_gpt.py {SIZES} --swiglu --ffn-hidden-size 16384")
    found = run_json(capsys, "predict", "--config", str(path), "--cluster", "dgx-h100")
    assert "a vocabulary of 32,000 tokens, which the file does not state" in found["config"]["assumed"]


def test_layers_of_a_virtual_stage_count_embedding_and_loss(tmp_path: Path) -> None:
    path = tmp_path / "run.sh"
    flags = "--pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2"
    path.write_text(f"pretrain_gpt.py {SIZES} {flags}")
    with pytest.raises(FormatError, match="30 layers are not a multiple of 4 pipeline stages times 2"):
        read_config(str(path))
    accounts = "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split"
    path.write_text(f"pretrain_gpt.py {SIZES} {flags} {accounts}")
    options = read_config(str(path)).options
    assert options["vpp"] == 4
    assert options["stage-layers"] == ",".join(["1", *["2"] * 14, "1"])


@pytest.mark.parametrize(
    ("words", "routed", "local"),
    [
        ("--moe-layer-freq 1", "1" * 8, ""),
        ("--moe-layer-freq 2", "10101010", ""),
        ("--moe-layer-freq 3", "10010010", ""),
        ('--moe-layer-freq "([0]*3+[1]*5)"', "00011111", ""),
        ('--moe-layer-freq "([0]*1+[1]*7)"', "01111111", ""),
        ('--moe-layer-freq "([1]+[0]*3)*2"', "10001000", ""),
        ("--moe-layer-freq [1,0,1,1,0,0,1,1]", "10110011", ""),
        ("--moe-layer-freq [0,1,0,1,0,1,0,1]", "01010101", ""),
        ("--window-size 127,0", "1" * 8, "1" * 8),
        ("--window-size 127,0 --window-attn-skip-freq 2", "1" * 8, "10101010"),
        ("--window-size 127,0 --window-attn-skip-freq 6", "1" * 8, "11111011"),
        ("--window-size 127,0 --window-attn-skip-freq [0,1,1,1,0,1,1,1]", "1" * 8, "01110111"),
        ("--window-size 127,0 --window-attn-skip-freq 1", "1" * 8, ""),
    ],
)
def test_layers_with_experts_and_windows_are_those_of_the_script(
    words: str, routed: str, local: str, tmp_path: Path
) -> None:
    """megatron/core: moe_layer_freq N is one layer in N from the first, window_attn_skip_freq N is full at each N-th."""
    sizes = "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 2048 --num-experts 4"
    found = read_text(tmp_path, f"python pretrain_gpt.py {sizes} --seq-length 512 {words}")
    model = load_model(model_words(found.sizes, [], 512))
    assert model.experts is not None
    assert "".join(str(int(model.experts.is_expert_layer(layer))) for layer in range(8)) == routed
    window = model.window
    assert (window is None) == (not local)
    if window is not None:
        assert window.size == 128
        assert "".join(str(int(window.size_at(layer) is not None)) for layer in range(8)) == local


@pytest.mark.parametrize("words", ["[0,1]", "x", "0", "-1", "[1]*99999999", "(" * 300, "__import__('os')"])
def test_patterns_that_are_not_of_this_model_are_refused(words: str, tmp_path: Path) -> None:
    path = tmp_path / "model_config.yaml"
    path.write_text(json.dumps({"MODEL_ARGS": {"--num-layers": 8, "--num-experts": 4, "--moe-layer-freq": words}}))
    with pytest.raises(ValueError, match=r"moe-layer-freq|layers"):
        read_config(path)


@pytest.mark.parametrize(
    ("words", "vocab"),
    [
        ("--vocab-size 50257", 50304),
        ("--vocab-size 50257 --tensor-model-parallel-size 8", 51200),
        ("--vocab-size 128256 --tensor-model-parallel-size 8", 129024),
        ("--vocab-size 131072 --tokenizer-type NullTokenizer --tensor-model-parallel-size 4", 131584),
        ("--vocab-size 32003 --make-vocab-size-divisible-by 1", 32003),
        ("--vocab-size 32000 --padded-vocab-size 40000", 40000),
    ],
)
def test_megatron_pads_the_vocabulary(words: str, vocab: int, tmp_path: Path) -> None:
    found = read_text(tmp_path, f"python pretrain_gpt.py {GPT} {words}")
    model = load_model(model_words(found.sizes, [], 2048))
    assert model.padded_vocab(int(found.options.get("tp", 1))) == vocab


def test_interleaved_stages_of_torchtitan_are_two_for_each_rank(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    parallelism = 'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "Interleaved1F1B"'
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{parallelism}\n[training]\nlocal_batch_size = 8\n'
    path.write_text(f'{text}mixed_precision_reduce = "bfloat16"\n')
    config = read_config(str(path))
    assert "reduced in fp32" in config.not_modelled["training.mixed_precision_reduce"]
    step = stepcast.predict(config=str(path), cluster="dgx-h100", gpus=8)
    assert (step.facts()["strategy"]["schedule"], step.facts()["strategy"]["vpp"]) == ("interleaved", 2)


def test_zero_bubble_with_several_stages_of_torchtitan_is_stated(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    parallelism = 'pipeline_parallel_degree = 4\npipeline_parallel_schedule = "InterleavedZeroBubble"'
    path.write_text(f'[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\n{parallelism}\n')
    config = read_config(str(path))
    assert config.options["schedule"] == "zb-h1"
    assert any("InterleavedZeroBubble is predicted as zb-h1" in text for text in config.assumed)


@pytest.mark.parametrize(
    ("flags", "kv_heads"),
    [
        ("--num-query-groups 4", 32),
        ("--group-query-attention --num-query-groups 4", 4),
        ("--group-query-attention", 1),
        ("", 32),
    ],
)
def test_query_groups_of_a_script_count_with_their_switch(tmp_path: Path, flags: str, kv_heads: int) -> None:
    """As in Megatron-LM, training/arguments.py: core_transformer_config_from_args, and the default of one group."""
    path = tmp_path / "run.sh"
    path.write_text(f"pretrain_gpt.py {SIZES} {flags}")
    config = read_config(str(path))
    assert config.sizes["kv_heads"] == kv_heads
    assert any("--num-query-groups has no effect" in text for text in config.assumed) == flags.startswith("--num")


TITAN = '[model]\nname = "llama3"\nflavor = "8B"\n'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('[optimizer]\nimplementation = "fused"', "seq=2048 micro-batch=8 precision=bf16 optimizer=adamw"),
        ('[optimizer]\nimplementation = "foreach"', "~optimizer.implementation"),
        ("[optimizer]\nfused = false", "~optimizer.fused"),
        ('[training]\ndtype = "bfloat16"', "master-weights=False gradients=bf16 optimizer=adamw:bf16"),
        ('[training]\nmixed_precision_param = "float32"', "precision=fp32"),
        ('[activation_checkpoint]\nmode = "memory_budget"', "~activation_checkpoint.mode"),
    ],
)
def test_formats_and_optimizers_of_torchtitan_act_or_are_reported(tmp_path: Path, text: str, expected: str) -> None:
    found = read_text(tmp_path, f"{TITAN}[parallelism]\ntensor_parallel_degree = 1\n{text}\n", "a.toml")
    reported = {f"~{key}" for key in found.not_modelled}
    assert set(expected.split()) <= {*(f"{key}={value}" for key, value in found.options.items()), *reported}
    assert bool(reported) == expected.startswith("~")


@pytest.mark.parametrize(
    ("name", "text", "tool"),
    [
        ("run.yaml", "step_scheduler: {global_batch_size: 64}\nmodel: {_target_: nemo_automodel.NeMoAutoModelForCausalLM}", "NeMo AutoModel"),
        ("run.py", "import nemo_run as run\nfrom nemo.collections import llm\nrecipe = llm.llama3_8b.pretrain_recipe()", "NeMo or Megatron-Bridge"),
        ("run.sh", "sh megatron_gpt.sh -m 13 --world_size 8 --tensor_model_parallel_size 2 --frame Megatron", "AICB"),
    ],
    ids=["automodel", "recipe", "aicb"],
)  # fmt: skip
def test_configurations_that_are_not_read_are_named_with_what_to_do(
    name: str, text: str, tool: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(FormatError, match=rf"{name}: is a .* of {tool}, .*--model"):
        read_config(tmp_path / name)


def test_names_of_keys_are_one_line(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "prescale_gradie\\nts": true}')
    with pytest.raises(ValueError, match=r"deepspeed has no 'prescale_gradie\\nts' \(did you mean"):
        read_run_file(None, str(file))


def test_lists_of_layers_hold_numbers_alone(tmp_path: Path) -> None:
    file = tmp_path / "run.sh"
    file.write_text("torchrun pretrain_gpt.py --num-layers 4 --num-experts 8 --moe-layer-freq '([0,None]*2)'\n")
    with pytest.raises(FormatError, match=r"moe-layer-freq .* is neither a number nor a list of layers"):
        read_config(file)


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.yaml", "base_model: meta-llama/Llama-3.2-1B\ndatasets: []\nmicro_batch_size: 0", "micro_batch_size 0"),
        ("a.yaml", "base_model: meta-llama/Llama-3.2-1B\ndatasets: []\nmicro_batch_size: -1", "micro_batch_size -1"),
        ("a.yaml", TRAINER.replace(": 1\n", ": 0\n"), "per_device_train_batch_size 0"),
        ("a.yaml", TRAINER + "gradient_accumulation_steps: 0", "gradient_accumulation_steps 0"),
        ("a.yaml", "distributed_type: FSDP\ngradient_accumulation_steps: 0", "gradient_accumulation_steps 0"),
        ("a.toml", '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 0', "training.local_batch_size 0"),
        ("a.toml", '[model]\nname = "llama3"\nflavor = "8B"\n[parallelism]\ntensor_parallel_degree = 0', "parallelism.tensor_parallel_degree 0"),
        ("a.yaml", NEMO + "  micro_batch_size: 0", "model.micro_batch_size 0"),
        ("a.yaml", TRAINER + "finetuning_type: lora\nlora_rank: 0", "lora_rank 0"),
        *(
            ("a.sh", f"pretrain_gpt.py {SIZES} --seq-length 2048 --{flag}", flag)
            for flag in ("num-layers -3", "hidden-size 0", "num-attention-heads 0", "ffn-hidden-size -1", "kv-channels -64",
                         "vocab-size -5", "seq-length 0", "micro-batch-size 0", "global-batch-size -1", "num-experts -8",
                         "tensor-model-parallel-size 0", "mtp-num-layers -2", "recompute-num-layers -2")
        ),
    ],
)  # fmt: skip
def test_sizes_below_one_are_refused_by_name(tmp_path: Path, name: str, text: str, key: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(FormatError, match=rf"{name}: {key}: expected a whole number from \d"):
        read_config(file)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.sh", "--optimizer sgd", {"optimizer": "sgd-momentum"}),
        ("a.sh", "--optimizer sgd --sgd-momentum 0.0", {"optimizer": "sgd"}),
        ("a.sh", "--optimizer dist_muon", {"optimizer": "muon", "sharding": "zero-1"}),
        ("a.sh", "--optimizer muon --use-distributed-optimizer", {"optimizer": "muon", "sharding": "zero-1"}),
        ("a.yaml", NEMO + "  optim: {name: sgd, momentum: 0.9}", {"optimizer": "sgd-momentum"}),
        ("a.yaml", NEMO + "  optim: {name: adafactor}", {"optimizer": "adafactor"}),
        ("a.yaml", NEMO + "  optim: {name: distributed_fused_adam}", {"sharding": "zero-1"}),
    ],
)
def test_optimizers_of_megatron_and_nemo(tmp_path: Path, name: str, text: str, expected: dict[str, str]) -> None:
    """Megatron-LM, training/arguments.py: sgd_momentum is 0.9; dist_muon is Muon with the distributed optimizer."""
    config = read_text(tmp_path, f"pretrain_gpt.py {SIZES} {text}" if name == "a.sh" else text, name)
    names = ("optimizer", "sharding")
    assert {name: word for name in names if (word := config.options.get(name, "none")) != "none"} == expected
    assert not config.not_modelled


def test_references_to_keys_of_the_same_table_are_their_values(tmp_path: Path) -> None:
    """As NeMo's examples have them (megatron_gpt_config.yaml)."""
    config = read_text(tmp_path, NEMO + "  max_position_embeddings: ${.encoder_seq_length}", "a.yaml")
    assert (config.sizes["seq"], config.not_modelled) == (512, {})


@pytest.mark.parametrize(("switch", "sharding"), [("true", "zero-1"), ("false", "none")])
def test_a_switch_of_zero_is_its_first_stage(tmp_path: Path, switch: str, sharding: str) -> None:
    """deepspeed/runtime/zero/config.py, read_zero_config_deprecated."""
    config = read_text(tmp_path, f'{{"train_batch_size": 8, "zero_optimization": {switch}}}', "a.json")
    assert (config.options["sharding"], config.unknown) == (sharding, {})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.sh", f"srun --nodes 4 --gpus-per-node 8 python pretrain_gpt.py {SIZES}", {"gpus": 32}),
        ("a.sh", f"srun --nodes 4 torchrun --nproc-per-node 4 pretrain_gpt.py {SIZES}", {"gpus": 16}),
        ("a.yaml", NEMO + "trainer: {devices: -1, num_nodes: 2, precision: bf16}", {}),
        ("a.yaml", NEMO + "trainer: {devices: 4, num_nodes: 2, precision: bf16}", {"gpus": 8}),
    ],
)
def test_gpus_of_launchers(tmp_path: Path, name: str, text: str, expected: dict[str, int]) -> None:
    """Those of srun count where torchrun names none; -1 means all that a node has (NeMo's trainer.devices)."""
    options = read_text(tmp_path, text, name).options
    assert {name: options[name] for name in ("gpus",) if name in options} == expected


@pytest.mark.parametrize(("layers", "word"), [(2, "block:2"), (0, "none")])
def test_a_block_of_no_layers_recomputes_nothing(tmp_path: Path, layers: int, word: str) -> None:
    flags = f"--recompute-granularity full --recompute-method block --recompute-num-layers {layers}"
    assert read_text(tmp_path, f"pretrain_gpt.py {SIZES} {flags}").options["recompute"] == word
