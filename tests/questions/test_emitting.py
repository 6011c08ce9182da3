"""``--emit``: a run written as a configuration of another tool reads back as the same run."""

import json
from pathlib import Path

import pytest

from stepcast.cli.main import main
from stepcast.outputs.configs import WRITERS
from tests.megatron_parser import failed_checks, parse_script

pytestmark = pytest.mark.slow

ENDINGS = {tool: ending for tool, (ending, _) in WRITERS.items()}
SAME = ("step_s", "memory_bytes", "breakdown_s")
RUNS = [
    ("megatron", "llama-3.1-70b --cluster dgx-h100 --gpus 64 --tp 8 --pp 2 --vpp 2"),
    ("megatron", "gpt3-175b --cluster dgx-a100 --gpus 512 --tp 8 --pp 16 --recompute full"),
    ("megatron", "mixtral-8x7b --cluster dgx-h100 --gpus 64 --ep 8 --dispatcher deepep --recompute selective:experts"),
    (
        "megatron",
        f"deepseek-v3 --cluster dgx-h100 --gpus 1024 --ep 64 --pp 16 --precision fp8 --stage-layers 3,{'4,' * 14}2",
    ),
    ("megatron", "llama-3.1-8b --cluster dgx-h100 --gpus 32 --cp 4 --seq 65536 --sharding fsdp"),
    ("megatron", "llama-3.1-405b --cluster dgx-b200 --gpus 256 --tp 8 --pp 8 --precision mxfp8"),
    *(
        ("megatron", f"llama-3.2-1b --cluster dgx-h100 --gpus 8 {words}")
        for words in (
            *("--optimizer sgd", "--optimizer sgd-momentum", "--optimizer adamw:bf16", "--optimizer adamw:fp8 --tp 2"),
            *("--optimizer muon", "--optimizer muon --sharding none --pp 2"),
        )
    ),
    *(
        ("nemo", f"llama-3.2-1b --cluster dgx-h100 --gpus 8 --framework {words}")
        for words in ("nemo --optimizer sgd", "nemo --optimizer sgd-momentum", "megatron-bridge --optimizer muon")
    ),
    ("nemo", "llama-3.1-70b --cluster dgx-h100 --gpus 64 --tp 4 --pp 4 --framework nemo"),
    ("megatron", "llama-3.1-70b --cluster dgx-h100 --gpus 64 --tp 4 --pp 4 --vpp 7 --global-batch 512"),
    ("nemo", "qwen3-30b-a3b --cluster dgx-h100 --gpus 16 --framework megatron-bridge --ep 8"),
    ("torchtitan", "llama-3.1-70b --cluster dgx-h100 --gpus 128 --framework torchtitan --tp 8 --recompute full"),
    ("torchtitan", "llama-3.1-8b --cluster dgx-h100 --gpus 64 --framework torchtitan --sharding hybrid-fsdp --shard 8"),
    ("torchtitan", "llama-3.1-8b --cluster dgx-h100 --gpus 64 --framework torchtitan --pp 4 --global-batch 64 --cp 2"),
    ("deepspeed", "llama-3.1-8b --cluster dgx-h100 --gpus 16 --framework deepspeed-transformers --sharding zero-3"),
    (
        "deepspeed",
        "llama-2-13b --cluster dgx-a100 --gpus 8 --framework deepspeed-transformers --sharding zero-2 --accumulation 4 "
        "--offload optimizer",
    ),
    ("accelerate", "llama-3.1-8b --cluster dgx-h100 --gpus 8 --framework transformers --sharding fsdp"),
    (
        "accelerate",
        "llama-3.1-8b --cluster dgx-h100 --gpus 8 --framework transformers --sharding fsdp --backward-prefetch post",
    ),
    (
        "accelerate",
        "llama-3.1-8b --cluster dgx-h100 --gpus 16 --framework transformers --sharding hybrid-fsdp --shard 8 "
        "--backward-prefetch post",
    ),
    ("accelerate", "llama-3.2-1b --cluster dgx-h100 --gpus 8 --framework transformers --precision autocast-bf16"),
    ("accelerate", "llama-3.1-8b --cluster dgx-h100 --gpus 8 --framework deepspeed-transformers --sharding zero-3"),
    # What no tool has a key for, and batches of pairs.
    ("megatron", "llama-3.2-1b --cluster dgx-h100 --gpus 8 --lengths mean=600,max=2048 --batching grouped"),
    (
        "megatron",
        "llama-3.2-1b --cluster dgx-h100 --gpus 16 --engine fluid --set node.nics=4 --set node.nic.latency=9us",
    ),
    ("megatron", "mixtral-8x7b --cluster dgx-h100 --gpus 16 --ep 8 --expert-load power-law:1.2 --expert-replicas 2"),
    ("deepspeed", "llama-3.2-1b --cluster dgx-h100 --gpus 8 --framework deepspeed-transformers --task dpo"),
    ("megatron", "llama-3.2-1b --cluster dgx-h100 --gpus 8 --no-master-weights"),
    ("torchtitan", "llama-3.1-8b --cluster dgx-h100 --gpus 8 --framework torchtitan --no-clipping"),
]


# Rank 1 of the searches of benchmarks/ten_searches.py, and layouts with flags that those do not need.
WINNERS = [
    "llama-3.1-8b --gpus 16 --global-batch 32 --seq 8192 --sharding fsdp",
    "llama-3.1-70b --gpus 64 --tp 2 --global-batch 256 --seq 4096 --sharding fsdp",
    "llama-3.1-70b --gpus 1024 --tp 4 --cp 2 --pp 4 --vpp 7 --global-batch 1024 --seq 8192 --no-sequence-parallel",
    "llama-3.1-405b --gpus 512 --tp 4 --cp 4 --pp 32 --vpp 4 --global-batch 256 --seq 8192 --precision fp8",
    "gpt3-175b --gpus 1024 --tp 8 --pp 4 --vpp 12 --micro-batch 3 --global-batch 1536 --seq 2048",
    "deepseek-v3 --gpus 256 --ep 8 --pp 32 --expert-tp 1 --global-batch 2048 --seq 4096 --recompute full",
    "mixtral-8x7b --gpus 64 --cp 2 --ep 8 --expert-tp 1 --global-batch 256 --seq 8192",
    "qwen3-30b-a3b --gpus 32 --expert-tp 1 --micro-batch 4 --global-batch 256 --seq 4096 --sharding fsdp",
    "llama-3.1-8b --gpus 64 --pp 2 --vpp 2 --global-batch 128 --seq 8192",
    "llama-3.1-8b --gpus 16 --global-batch 64 --sharding zero-2",
    "mixtral-8x7b --gpus 16 --ep 8 --dispatcher hybridep --global-batch 32 --recompute selective:norms,experts",
    "mixtral-8x7b --gpus 16 --ep 8 --dispatcher allgather --global-batch 32 --sharding zero-3 --seq 65536",
]


# The framework whose configuration each tool reads, and the reasons for which it has none of a winner.
FRAMEWORKS = {
    "megatron": "megatron-core",
    "torchtitan": "torchtitan",
    "nemo": "nemo",
    "deepspeed": "deepspeed-transformers",
    "accelerate": "transformers",
}
REFUSALS = (" has no ", "nearest legal cp is 2", "use --framework deepspeed-transformers")


@pytest.mark.parametrize("tool", WRITERS)
@pytest.mark.parametrize("words", WINNERS)
def test_a_winner_is_written_for_each_tool_or_refused_in_a_line(
    words: str, tool: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, where = str(tmp_path / f"run{ENDINGS[tool]}"), ["--cluster", "dgx-h100", "--json"]
    asked = ["predict", *words.split(), *where, "--framework", FRAMEWORKS[tool], "--emit", f"{tool}={file}"]
    status, captured = main(asked), capsys.readouterr()
    if status == 2 and tool not in ("megatron", "nemo"):
        assert any(reason in captured.err for reason in REFUSALS), captured.err
        assert captured.err.count("\n") == 1
        return
    wanted = json.loads(captured.out)
    assert wanted["emitted"]["lost"] == []
    assert main(["predict", "--config", file, *where, *wanted["emitted"]["remaining"]]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [read[name] for name in SAME] == [wanted[name] for name in SAME]
    if tool == "megatron":
        assert "--gradient-accumulation-fusion" not in wanted["emitted"]["remaining"]  # FSDP2 has none
        script, gpus = Path(file).read_text(), int(words.split("--gpus ")[1].split()[0])
        assert list(failed_checks(parse_script(script), gpus, script)) == []


@pytest.mark.parametrize(("tool", "words"), RUNS)
def test_a_configuration_reads_back_to_the_same_bits(
    tool: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / f"run{ENDINGS[tool]}")
    assert main(["predict", *words.split(), "--emit", f"{tool}={file}", "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)
    assert wanted["emitted"]["text"] == Path(file).read_text()
    assert wanted["emitted"]["lost"] == []
    cluster = words.split()[2]
    assert main(["predict", "--config", file, "--cluster", cluster, *wanted["emitted"]["remaining"], "--json"]) == 0
    read = json.loads(capsys.readouterr().out)
    assert [read[name] for name in SAME] == [wanted[name] for name in SAME]
    assert not read["config"]["unknown"]
    if tool == "megatron":
        parse_script(Path(file).read_text())
    if "--optimizer" in words:
        assert "--optimizer" not in wanted["emitted"]["remaining"]


def test_the_winner_of_a_search_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "best.sh")
    words = ["llama-3.2-1b", "--cluster", "dgx-h100", "--gpus", "4", "--global-batch", "8", "--fix", "cp=1"]
    assert main(["search", *words, "--emit", f"megatron={file}", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)
    assert main(["predict", "--config", file, "--cluster", "dgx-h100", *best["emitted"]["remaining"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step_s"] == best["rows"][0]["step_s"]


def test_without_a_file_the_configuration_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "llama-3.1-8b",
        "--cluster",
        "dgx-h100",
        "--gpus",
        "8",
        "--framework",
        "torchtitan",
        "--vpp",
        "4",
        "--pp",
        "2",
        "--emit",
        "torchtitan",
    ]
    assert main(["predict", *words]) == 0
    captured = capsys.readouterr()
    assert 'flavor = "8B"' in captured.out
    assert "predict --config needs --vpp 4 too" in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--emit torchtitan", "use --framework torchtitan"),
        ("--framework torchtitan --optimizer adamw:8bit --emit torchtitan", "torchtitan has no adamw:8bit optimizer"),
        ("--optimizer adafactor --emit megatron", "Megatron has no adafactor"),
        ("--optimizer adamw:8bit --emit megatron", "Megatron has no adamw:8bit optimizer"),
        ("--optimizer muon:bf16 --emit megatron", "Megatron has no muon:bf16 optimizer"),
        ("--optimizer muon --sharding zero-3 --emit megatron", "Megatron has no muon optimizer with --sharding zero-3"),
        ("--optimizer adamw:bf16 --sharding none --emit megatron", "no adamw:bf16 optimizer with --sharding none"),
        ("--optimizer muon --framework nemo --emit nemo", "NeMo's YAML has no muon optimizer"),
        ("--framework torchtitan --optimizer muon --emit torchtitan", "torchtitan's TOML has no Muon"),
        ("--emit jax", "expected one of megatron, torchtitan, nemo, deepspeed, accelerate"),
        ("--framework deepspeed-transformers --sharding fsdp --emit deepspeed", "--sharding zero-3"),
    ],
)
def test_what_cannot_be_written_says_why(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "llama-3.1-8b", "--cluster", "dgx-h100", "--gpus", "8", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_accelerate_refuses_pipelines(capsys: pytest.CaptureFixture[str]) -> None:
    words = "llama-3.1-8b --cluster dgx-h100 --gpus 8 --pp 2 --emit accelerate"
    assert main(["predict", *words.split()]) == 2
    assert "accelerate has no pipelines" in capsys.readouterr().err
